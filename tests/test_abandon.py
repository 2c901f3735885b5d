"""Abandoning: what a session has in flight goes, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.world import ONE, World, files_below, make_world, seats

from kvstore import LayerGroup, ParallelConfig
from kvstore.errors import InvalidArgument, NotFound, StorageError
from kvstore.io.failpoints import armed, disarm

SHARED = ParallelConfig(tp=8, dcp=2, interleave=2)


def _in_flight(world: World) -> list[Path]:
    return [p for p in files_below(world.root / "__kvstore__") if "inflight" in p.parts]


def _store(world: World, config: ParallelConfig, session: str = "s", *, tail: bool = True) -> None:
    for one in seats(world.namespace, config, total=23, session=session):
        one.fill(world.truth)
        one.worker.store(world.keys, one.table, tail=tail)


@pytest.mark.parametrize("config", [ONE, SHARED], ids=["whole", "shared"])
def test_all_that_was_stored_and_not_committed_goes(tmp_path: Path, config: ParallelConfig) -> None:
    world = make_world(tmp_path)
    _store(world, config)
    assert _in_flight(world)
    assert world.namespace.abandon(world.keys, config, session="s") == 3
    assert not _in_flight(world)
    assert world.namespace.abandon(world.keys, config, session="s") == 0
    # Nobody's mark says that something is there: the commit waits for all of it again.
    report = world.namespace.commit(world.keys, config, session="s")
    assert [missing.key for missing in report.missing] == [world.keys[i].hex() for i in (1, 3, 4)]
    assert not report.committed
    world.store_all(config)
    world.load_all(config)


def test_what_one_rank_of_several_left_goes(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    one = seats(world.namespace, SHARED, total=23)[0]
    one.fill(world.truth)
    stored = one.worker.store(world.keys, one.table)
    assert world.namespace.abandon(world.keys, SHARED, session="s") == stored.extents > 0
    assert not _in_flight(world)


def test_other_sessions_other_configs_and_other_keys_stay(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    _store(world, ONE, "mine")
    _store(world, ONE, "other")
    _store(world, SHARED, "mine")
    assert world.namespace.abandon(world.keys[:2], ONE, session="mine") == 1
    assert world.namespace.abandon(world.keys[2:], ONE, session="mine", tail=False) == 1
    assert world.namespace.commit(world.keys, SHARED, session="mine").complete
    other = world.reopen()
    assert {p.parts[-3].rpartition("-")[0] for p in _in_flight(other)} == {
        world.keys[i].hex() for i in (1, 3, 4)
    }
    world.load_all()


def test_what_is_committed_stays(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.store_all()
    assert world.namespace.abandon(world.keys, ONE, session="s") == 0
    world.load_all()


def test_a_commit_that_failed_in_the_middle_leaves_what_is_published(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    _store(world, ONE)
    with (
        armed("commit.before_publish", StorageError("the medium failed"), skip=1),
        pytest.raises(StorageError, match="failed"),
    ):
        world.namespace.commit(world.keys, ONE, session="s")
    published = len(list(world.namespace.extents()))
    assert published == 1
    assert world.namespace.abandon(world.keys, ONE, session="s") == 2
    assert not _in_flight(world)
    assert len(list(world.namespace.extents())) == 1
    assert list(world.namespace.verify()) == []


def test_one_layer_group_of_several(tmp_path: Path) -> None:
    whole = LayerGroup.attention_kv(name="a", layers=2, heads=2, head_size=8, block_tokens=4)
    other = LayerGroup.attention_kv(name="b", layers=(2, 3), heads=2, head_size=8, block_tokens=4)
    world = make_world(tmp_path, whole, model_layers=4)
    identity = type(world.namespace.identity)("m", 4, (whole, other), revision="r")
    namespace = world.store.namespace(identity)
    for group in (whole, other):
        for one in seats(namespace, ONE, total=23, group=group):
            one.worker.store(world.keys, one.table)
    with pytest.raises(InvalidArgument):
        namespace.abandon(world.keys, ONE, session="s")
    assert namespace.abandon(world.keys, ONE, session="s", group="a") == 1
    assert namespace.commit(world.keys, ONE, session="s", group="b").complete
    assert not namespace.commit(world.keys, ONE, session="s", group="a").complete


def test_a_store_opened_read_only_abandons_nothing(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    _store(world, ONE)
    reader = world.reopen(read_only=True)
    with pytest.raises(InvalidArgument, match="read-only"):
        reader.namespace.abandon(world.keys, ONE, session="s")
    assert _in_flight(world)


@pytest.mark.parametrize("config", [ONE, SHARED], ids=["whole", "shared"])
@pytest.mark.parametrize("times", [1, 3, 100])
def test_what_vanishes_while_it_is_written_is_written_again(
    tmp_path: Path, config: ParallelConfig, times: int
) -> None:
    world = make_world(tmp_path)
    left = [times]

    def vanish() -> None:
        if left[0]:
            left[0] -= 1
            raise NotFound("the in-flight folder went")

    with armed("store.before_shard", vanish):
        if times == 100:
            with pytest.raises(NotFound, match="went"):
                _store(world, config)
            return
        _store(world, config)
    assert world.namespace.commit(world.keys, config, session="s").complete
    world.load_all(config)


def test_what_another_process_published_meanwhile_is_present(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    one = seats(world.namespace, ONE, total=23, session="late")[0]
    one.fill(world.truth)
    turns = iter([True])

    def first() -> None:
        disarm("store.before_shard")
        if not next(turns, False):
            return  # another thread was here first, and is the one that fails
        world.store_all(session="first")
        raise NotFound("the in-flight folder went")

    with armed("store.before_shard", first):
        report = one.worker.store(world.keys, one.table)
    assert (report.present, report.extents) == (1, 2)
    world.load_all()
