"""A mark speaks of bytes, not of a name: one left over from a folder that went is no mark."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.world import ONE, World, make_world, small_group

from kvstore import ParallelConfig, Rank
from kvstore.io.failpoints import armed

STAGES = ParallelConfig(pp=2)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """One extent, of one shard that both pipeline stages fill."""
    group = small_group(shard_layers=4, shard_heads=4)
    return make_world(tmp_path, group, blocks=2, extra_tokens=0)


def test_the_folder_goes_while_a_rank_writes(world: World) -> None:
    """Cleared as another engine was first, removed there, then begun anew without this rank."""
    first, second = (world.seat(STAGES, Rank(pp=pp), session="slow") for pp in (0, 1))
    first.fill(world.truth)
    second.fill(world.truth)
    first.worker.store(world.keys, first.table)
    rounds = 0

    def meanwhile() -> None:
        nonlocal rounds
        rounds += 1
        if rounds > 1:
            return
        world.store_all(session="fast")
        assert first.worker.commit(world.keys).already
        assert world.namespace.remove(world.keys[1])
        assert first.worker.store(world.keys, first.table).extents == 1

    with armed("store.before_mark", meanwhile):
        second.worker.store(world.keys, second.table)
    assert rounds
    for _ in range(3):
        if first.worker.commit(world.keys).complete:
            break
        second.worker.store(world.keys, second.table)
        first.worker.store(world.keys, first.table)
    world.load_all()


@pytest.mark.parametrize("gone", ["part", "zeros", "half"])
def test_bytes_go_and_marks_stay(world: World, gone: str) -> None:
    """What a mark speaks of was lost: its rank is awaited again, and nothing is made up."""
    both = [world.seat(STAGES, Rank(pp=pp), session="s") for pp in (0, 1)]
    for one in both:
        one.fill(world.truth)
        one.worker.store(world.keys, one.table)
    (part,) = (world.root / "__kvstore__" / "inflight").rglob("*.part")
    data = part.read_bytes()
    if gone == "part":
        part.unlink()
    elif gone == "zeros":
        part.write_bytes(bytes(len(data)))
    else:
        part.write_bytes(bytes(100) + data[100:])
    report = both[0].worker.commit(world.keys)
    assert not report.committed
    assert report.missing[0].ranks == (("0.0.0",) if gone == "half" else ("0.0.0", "1.0.0"))
    assert world.namespace.match_prefix(world.keys).blocks == 0
    for one in both:
        one.worker.store(world.keys, one.table)
    assert both[1].worker.commit(world.keys).complete
    world.load_all()


def test_a_store_whose_folder_was_cleared_is_no_error(world: World) -> None:
    """Another engine was first, and a rank of ours has cleared up already."""
    first, second = (world.seat(STAGES, Rank(pp=pp), session="slow") for pp in (0, 1))
    first.fill(world.truth)
    second.fill(world.truth)
    first.worker.store(world.keys, first.table)
    world.store_all(ONE, session="fast")

    def clear() -> None:
        world.namespace.commit(world.keys, STAGES, session="slow")

    world.namespace.remove(world.keys[1])
    with armed("store.after_shard", clear):
        world.store_all(ONE, session="faster", commit=False)
    with armed("posix.write_into.after_write", lambda: _publish(world)):
        report = second.worker.store(world.keys, second.table)
    assert report.present + report.extents == 1
    assert world.namespace.commit(world.keys, STAGES, session="slow").complete
    world.load_all()


def _publish(world: World) -> None:
    """The other engine publishes, and our own other rank clears the in-flight folder."""
    if not world.namespace.match_prefix(world.keys).blocks:
        world.namespace.commit(world.keys, ONE, session="faster")
    world.namespace.commit(world.keys, STAGES, session="slow")
