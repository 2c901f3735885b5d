"""Power failures: only what was synced survives; that is enough, and nothing half-done is in it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from support.power import Disk, PowerCut, cutting
from support.world import ONE, World, make_world, seats
from test_failing_writes import ONLY_SHARED, POINTS, SHARED

from kvstore import ParallelConfig
from kvstore.io.failpoints import armed

CASES = [(ONE, p) for p in POINTS if p not in ONLY_SHARED] + [(SHARED, p) for p in POINTS]


def _work(world: World, config: ParallelConfig) -> None:
    everyone = seats(world.namespace, config, total=23)
    for one in everyone:
        one.fill(world.truth)
        one.worker.store(world.keys, one.table)
    assert everyone[0].worker.commit(world.keys).complete


def _after(disk: Disk, world: World, target: Path) -> World:
    disk.rebuild(target)
    return World(**{**world.__dict__, "root": target}).reopen()


@pytest.mark.parametrize("skip", [0, 2, 9])
@pytest.mark.parametrize(("config", "point"), CASES)
def test_power_goes_at_a_named_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: ParallelConfig, point: str, skip: int
) -> None:
    world = make_world(tmp_path / "before", durable=True)
    disk = Disk(world.root)
    with monkeypatch.context() as patch:
        disk.attach(patch)
        with armed(point, cutting(disk), skip=skip) as where:
            with contextlib.suppress(PowerCut):
                _work(world, config)
            assert where.reached or skip
        published = [e.key for e in world.namespace.extents()]
        after = _after(disk, world, tmp_path / "after")
    listed = [e.key for e in after.namespace.extents()]
    assert set(listed) <= set(published)
    assert not [f for f in after.namespace.verify() if not f.is_note]
    for i in world.ends():
        if world.keys[i].hex() in listed:
            first = i - i % 2
            one = after.seat()
            assert one.worker.load(world.keys[first : i + 1], one.table).blocks == i + 1 - first
            one.expect(world.truth, 4 * first, 4 * i + 4)
    # The same session goes on with what it finds.
    _work(after, config)
    after.load_all()
    assert not (after.root / "__kvstore__" / "quarantine").exists()


@pytest.mark.parametrize("config", [ONE, SHARED], ids=["whole", "shared"])
def test_what_a_commit_reported_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: ParallelConfig
) -> None:
    world = make_world(tmp_path / "before", durable=True)
    disk = Disk(world.root)
    with monkeypatch.context() as patch:
        disk.attach(patch)
        _work(world, config)
        after = _after(disk, world, tmp_path / "after")
    assert disk.syncs > 10
    after.load_all()
    assert len(list(after.namespace.extents())) == 3


def test_without_durability_a_power_failure_would_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: it is the syncs that keep it, not the model of the disk."""
    world = make_world(tmp_path / "before")
    disk = Disk(world.root)
    with monkeypatch.context() as patch:
        disk.attach(patch)
        _work(world, ONE)
        after = _after(disk, world, tmp_path / "after")
    assert disk.syncs == 0
    assert not list(after.namespace.extents())
