"""Processes that die at any moment: nothing half-done is visible, and those who live go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.processes import start, store_and_commit
from support.world import ONE, World, make_world, seats
from test_failing_writes import AFTER, ONLY_SHARED, POINTS, SHARED

from kvstore import ParallelConfig, Rank
from kvstore.io.failpoints import KILLED

REPLICAS = ParallelConfig(tp=8)
"""Two ranks hold each head: either may stand in for the other."""


def _dies(
    world: World, config: ParallelConfig, ranks: Sequence[Rank], session: str, failpoint: str
) -> bool:
    """Run ranks in a process that is to die at a failpoint. False: it never came there."""
    process = start(store_and_commit, str(world.root), config, ranks, session, failpoint)
    process.join(60)
    assert process.exitcode in (KILLED, 0)
    return process.exitcode == KILLED


def _visible_is_right(world: World) -> int:
    """What is there is whole: its number of blocks."""
    listed = [e.key for e in world.namespace.extents()]
    assert set(listed) <= {world.keys[i].hex() for i in world.ends()}
    for i in world.ends():
        if world.keys[i].hex() in listed:
            first = i - i % world.group.extent_blocks
            one = world.seat()
            keys = world.keys[first : i + 1]
            assert one.worker.load(keys, one.table).blocks == len(keys)
            one.expect(world.truth, 4 * first, 4 * (i + 1))
    assert not [f for f in world.namespace.verify() if not f.is_note]
    return world.namespace.match_prefix(world.keys).blocks


def _goes_on(world: World, config: ParallelConfig, session: str) -> None:
    """All ranks store and commit; everything is there and right afterwards."""
    everyone = seats(world.namespace, config, total=23, session=session)
    for one in everyone:
        one.fill(world.truth)
        one.worker.store(world.keys, one.table)
    assert everyone[-1].worker.commit(world.keys).complete
    world.load_all()
    assert _visible_is_right(world) == 5


@pytest.mark.parametrize("skip", [1, 4])
@pytest.mark.parametrize(
    ("kind", "point"),
    [("whole", p) for p in POINTS if p not in ONLY_SHARED] + [("shared", p) for p in POINTS],
)
def test_killed_at_a_named_point(tmp_path: Path, point: str, kind: str, skip: int) -> None:
    config = ONE if kind == "whole" else SHARED
    world = make_world(tmp_path)
    ranks = list(config.ranks())
    died = _dies(world, config, ranks, "s", f"{point}=kill@{skip}")
    assert died or skip > 1
    blocks = _visible_is_right(world)
    if skip == 1 and not point.startswith(AFTER):
        assert blocks == 0
    if skip == 1:  # dies once more, at the same place, when it tries again
        _dies(world, config, ranks, "s", f"{point}=kill@{skip}")
        _visible_is_right(world)
    # Then the same session goes on, or another one takes over.
    if POINTS.index(point) % 2 == (skip > 1):
        _goes_on(world, config, "s")
    else:
        _goes_on(world, ParallelConfig(tp=2), "another")


@pytest.mark.parametrize(
    "point", ["store.before_shard", "store.after_shard", "posix.write_into.before_write"]
)
def test_a_replica_stands_in_for_a_rank_that_died(tmp_path: Path, point: str) -> None:
    world = make_world(tmp_path)
    dead = Rank(tp=5)
    assert _dies(world, REPLICAS, [dead], "s", f"{point}=kill@2")
    everyone = seats(world.namespace, REPLICAS, total=23)
    for one in everyone:
        one.fill(world.truth)
        if one.rank != dead:
            one.worker.store(world.keys, one.table)
    report = everyone[0].worker.commit(world.keys)
    assert report.missing
    assert {r for m in report.missing for r in m.ranks} == {"0.0.5"}
    assert len(report.committed) + len(report.missing) == 3
    _visible_is_right(world)
    twin = next(one for one in everyone if one.rank == Rank(tp=4))
    twin.worker.store(world.keys, twin.table, stand_in_for=dead)
    assert everyone[1].worker.commit(world.keys).complete
    assert _visible_is_right(world) == 5


def test_ranks_that_never_come_keep_an_extent_invisible(tmp_path: Path) -> None:
    """In-flight leavings of one session do nothing for, and nothing to, another."""
    world = make_world(tmp_path)
    for config, session in ((SHARED, "a"), (SHARED, "b"), (ParallelConfig(tp=2), "a")):
        ranks = list(config.ranks())[:-1]
        start(store_and_commit, str(tmp_path), config, ranks, session).join(60)
        assert _visible_is_right(world) == 0
    folders = {p.name for p in (tmp_path / "__kvstore__" / "inflight").glob("*/*/*")}
    assert len(folders) == 9
    _goes_on(world, ONE, "a")
    # Their next commit finds the extents there and clears their own leavings.
    for config, session in ((SHARED, "a"), (SHARED, "b"), (ParallelConfig(tp=2), "a")):
        report = world.namespace.commit(world.keys, config, session=session)
        assert len(report.already) == 3
    assert not list((tmp_path / "__kvstore__" / "inflight").glob("*/*/*"))


def _store_for_ever(root: str, config: ParallelConfig, seeds: Sequence[int]) -> None:
    for seed in seeds:
        store_and_commit(root, config, list(config.ranks()), "s", seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("config", [ONE, SHARED], ids=["whole", "shared"])
def test_killed_at_a_random_moment(tmp_path: Path, config: ParallelConfig) -> None:
    random = np.random.default_rng(config.tp)
    seeds = list(range(40))
    worlds = [make_world(tmp_path, seed=seed) for seed in seeds]
    for _ in range(6):
        process = start(_store_for_ever, str(tmp_path), config, seeds)
        time.sleep(0.08 + float(random.random()) * 0.4)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        keys = {w.keys[i].hex() for w in worlds for i in w.ends()}
        assert {e.key for e in worlds[0].namespace.extents()} <= keys
        for world in worlds:
            blocks = world.namespace.match_prefix(world.keys).blocks
            one = world.seat()
            assert one.worker.load(world.keys, one.table).blocks == blocks
            one.expect(world.truth, 0, 4 * blocks)
        if blocks == 5:
            break
    last = worlds[-1]
    last.store_all(config, session="s")
    last.load_all()
    assert not [f for f in last.namespace.verify() if not f.is_note]
