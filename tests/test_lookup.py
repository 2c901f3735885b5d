"""Lookup: the longest stored prefix, block by block, with hints or without them."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.world import World, make_world, seat, small_group

from kvstore.lookup import Match
from kvstore.paths import REFS


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Extents of four blocks; a sequence of ten."""
    return make_world(tmp_path, small_group(extent_blocks=4), blocks=10)


def _spans(match: Match) -> list[tuple[int, int]]:
    return [(hit.first, hit.stop) for hit in match.extents]


def test_every_prefix_is_found_whole(world: World) -> None:
    world.store_all()
    for count in range(len(world.keys) + 1):
        match = world.namespace.match_prefix(world.keys[:count])
        assert (match.blocks, match.tokens) == (count, 4 * count)
        assert [stop for _, stop in _spans(match)] == [
            min(at + 4, count) for at in range(0, count, 4)
        ]


def test_every_slice_in_the_middle_is_found(world: World) -> None:
    world.store_all()
    for first, stop in itertools.combinations(range(len(world.keys) + 1), 2):
        match = world.namespace.match_prefix(world.keys[first:stop])
        assert match.blocks == stop - first
        assert match.extents[0].first == first


def test_without_hints_whole_extents_are_found_still(world: World) -> None:
    world.store_all()
    shutil.rmtree(world.root / REFS)
    found = [world.namespace.match_prefix(world.keys[:n]).blocks for n in range(11)]
    assert found == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 10]


def test_a_gap_ends_the_prefix(world: World) -> None:
    world.store_all()
    world.namespace.remove(world.keys[7])
    assert world.namespace.match_prefix(world.keys).blocks == 4
    assert world.namespace.match_prefix(world.keys[4:]).blocks == 0
    assert world.namespace.match_prefix(world.keys[8:]).blocks == 2


def test_a_sequence_that_parts_ways_is_found_up_to_there(world: World) -> None:
    world.store_all()
    for common in range(10):
        keys, _ = world.sequence(5, 10, common)
        assert world.namespace.match_prefix(keys).blocks == common


def test_a_longer_extent_takes_a_shorter_ones_place(world: World) -> None:
    one = world.seat()
    one.fill(world.truth)
    for count in (1, 2, 3, 4, 6):
        assert one.worker.store(world.keys[:count], one.table).extents == 1
        assert len(one.worker.commit(world.keys[:count]).committed) == 1
        for n in range(count + 1):
            assert world.namespace.match_prefix(world.keys[:n]).blocks == n
    assert [e.key for e in world.namespace.extents()] == sorted(world.keys[i].hex() for i in (3, 5))
    assert one.worker.store(world.keys[:3], one.table).present == 1


def test_hints_of_an_extent_that_went_are_renewed(world: World) -> None:
    """Two sequences share two blocks of an extent. The first goes; the second is found by them."""
    world.store_all()
    world.namespace.quarantine(world.keys[3], "a test")
    keys, truth = world.sequence(6, 4, 2)
    other = seat(world.namespace, world.seat().worker.config, world.seat().rank, total=16)
    other.fill(truth)
    other.worker.store(keys, other.table)
    other.worker.commit(keys)
    assert world.namespace.match_prefix(world.keys).blocks == 2


@pytest.mark.parametrize("damage", ["empty", "text", "folder", "link", "foreign", "cut", "loop"])
def test_a_broken_hint_is_a_miss_at_worst(world: World, damage: str) -> None:
    world.store_all()
    hint = world.root / REFS / world.namespace.path(world.keys[1])
    good = hint.read_bytes()
    hint.unlink()
    if damage == "folder":
        hint.mkdir()
    elif damage == "link":
        hint.symlink_to(world.folder(3) / "zarr.json")
    elif damage == "loop":
        hint.symlink_to(hint)
    else:
        other = (world.root / REFS / world.namespace.path(world.keys[5])).read_bytes()
        hint.write_bytes({"empty": b"", "text": b"{", "foreign": other, "cut": good[:-9]}[damage])
    assert world.namespace.match_prefix(world.keys[:2]).blocks == 1
    assert world.namespace.match_prefix(world.keys).blocks == 10
    one = world.seat()
    one.fill(world.truth)
    one.worker.store(world.keys[:2], one.table)
    report = one.worker.commit(world.keys[:2])
    assert report.complete
    assert world.namespace.match_prefix(world.keys[:2]).blocks == 2


def test_a_hint_to_another_extent_is_not_believed(world: World) -> None:
    """A valid record of this very group, under the name of a block that it does not hold."""
    world.store_all()
    keys, _ = world.sequence(7, 4)
    hint = world.root / REFS / world.namespace.path(keys[1])
    hint.parent.mkdir(parents=True, exist_ok=True)
    os.link(world.folder(3) / "zarr.json", hint)
    assert world.namespace.match_prefix(keys[:2]).blocks == 0


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_history_of_stores_and_removals(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """What is found always lies in extents that exist; a full extent is never missed."""
    world = make_world(
        tmp_path_factory.mktemp("w"), small_group(layers=1, shard_layers=1, extent_blocks=3)
    )
    chains = {0: (world.keys, world.truth)}
    for seed in (1, 2):
        chains[seed] = world.sequence(seed, 5, data.draw(st.integers(0, 4), label="common"))
    one = world.seat(total=32)
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        keys, truth = chains[data.draw(st.integers(0, 2), label="chain")]
        count = data.draw(st.integers(1, 5), label="blocks")
        if data.draw(st.booleans(), label="store"):
            one.fill(truth)
            one.worker.store(keys[:count], one.table)
            assert one.worker.commit(keys[:count]).complete
            assert world.namespace.match_prefix(keys[:3]).blocks >= min(count, 3)
        else:
            world.namespace.remove(keys[count - 1])
    there = {e.key for e in world.namespace.extents()}
    for keys, truth in chains.values():
        match = world.namespace.match_prefix(keys)
        assert all(hit.key in there for hit in match.extents)
        if keys[2].hex() in there:
            assert match.blocks >= 3
        fresh = world.seat(total=32, layout="by-part")
        result = fresh.worker.load(keys[: match.blocks], fresh.table)
        assert result.blocks == match.blocks
        fresh.expect(truth, 0, 4 * match.blocks)
