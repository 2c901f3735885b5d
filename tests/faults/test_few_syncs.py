"""A commit waits for the medium as often as a power failure asks for, and no more."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.power import Disk
from support.syncs import Log
from support.world import ONE, World, make_world, seats, small_group

from kvstore import ParallelConfig
from kvstore.io.failpoints import armed
from kvstore.paths import RECORD

SHARED = ParallelConfig(tp=8, dcp=2, interleave=2)


def _one_extent(root: Path) -> World:
    return make_world(root, small_group(shard_layers=4, shard_heads=4), blocks=2, durable=True)


def _store(world: World, config: ParallelConfig, total: int = 11) -> None:
    for one in seats(world.namespace, config, total=total):
        one.fill(world.truth)
        one.worker.store(world.keys, one.table)


def _syncs(log: Log) -> list[str]:
    calls = [call for call in log.calls if call.startswith("fsync")]
    log.calls.clear()
    return calls


def test_syncs_of_an_extent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = _one_extent(tmp_path)
    key = world.keys[1].hex()
    group = f"{world.namespace.name}/{world.group.name}"
    log = Log(tmp_path, monkeypatch)
    for again in (False, True):
        _store(world, ONE)
        (shard,) = _syncs(log)
        assert shard.endswith("/array/.tmp-?")
        assert world.namespace.commit(world.keys, ONE, session="s").committed == [key]
        array = shard.removeprefix("fsync ").removesuffix("/.tmp-?")
        fanout = [] if again else [f"fsync {group}/{key[:2]}/.tmp-?", f"fsync {group}"]
        assert _syncs(log) == [shard, *fanout, f"fsync {array}", f"fsync {group}/{key[:2]}"]
        world.namespace.remove(key)
        log.calls.clear()


def test_syncs_of_a_shared_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = _one_extent(tmp_path)
    log = Log(tmp_path, monkeypatch)
    everyone = seats(world.namespace, SHARED, total=11)
    for one in everyone:
        one.worker.store(world.keys, one.table)
        synced = [call.rpartition("/")[2] for call in _syncs(log)]
        folder = f"{world.keys[1].hex()}-"
        assert [s[: len(folder)] if s.startswith(folder) else s for s in synced] in (
            [],  # not elected
            ["c.0.0.0.0.0.part", "array", folder, ".tmp-?"],
        )
    everyone[0].worker.commit(world.keys)
    synced = [call.rpartition("/")[2] for call in _syncs(log)]
    xx = world.keys[1].hex()[:2]
    assert synced == ["c.0.0.0.0.0.part", ".tmp-?", ".tmp-?", world.group.name, "array", xx]


@pytest.mark.parametrize("known", [False, True])
def test_a_fan_out_that_another_process_has_just_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """It may not have come to syncing it: who publishes into it sees to that."""
    world = _one_extent(tmp_path / "before")
    disk = Disk(world.root)
    with monkeypatch.context() as patch:
        disk.attach(patch)
        _store(world, ONE)
        fanout = world.folder(1).parent
        fanout.mkdir()
        if known:
            (fanout / RECORD).write_bytes(b"{}")
        assert world.namespace.commit(world.keys, ONE, session="s").complete
        disk.rebuild(tmp_path / "after")
    after = World(**{**world.__dict__, "root": tmp_path / "after"}).reopen()
    assert [e.key for e in after.namespace.extents()] == [world.keys[1].hex()]
    after.load_all()


def test_extents_of_one_commit_wait_together(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    _store(world, ONE, total=23)
    all_here = threading.Barrier(3, timeout=20)

    def act() -> None:
        all_here.wait()

    with armed("commit.before_publish", act):
        report = world.namespace.commit(world.keys, ONE, session="s")
    assert report.committed == [world.keys[i].hex() for i in world.ends()]
    world.load_all()
