"""Things put where they do not belong: copies, links, folders, pipes, holes."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.pools import Bytes
from support.world import ONE, World, make_world, seat, small_group, store_all

import kvstore
from kvstore import BlockKeys, Identity
from kvstore.errors import StorageError
from kvstore.paths import QUARANTINE

SHARD = "c.0.0.0.0.0"


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two full extents and a short one, stored."""
    made = make_world(tmp_path / "store")
    made.store_all()
    return made


def _missing(world: World, *, blocks: list[int], reason: str) -> None:
    """Those blocks are misses for that reason; after it they can be stored and loaded again."""
    one = world.seat()
    before = one.pool.snapshot()
    result = one.worker.load(world.keys, one.table)
    assert sorted(result.misses) == blocks
    assert reason in result.misses[blocks[0]], result.misses[blocks[0]]
    if blocks == list(range(5)):
        assert one.pool.snapshot() == before
    _, report = world.store_all(session="again")
    assert report.complete
    world.load_all()


# -- copies --------------------------------------------------------------------------------------


def test_an_extent_under_another_key(world: World) -> None:
    shutil.rmtree(world.folder(1))
    shutil.copytree(world.folder(3), world.folder(1))
    _missing(world, blocks=[0, 1], reason="it was copied or renamed")


def test_an_extent_of_another_model(world: World) -> None:
    """Same geometry, same tokens, so the same keys; other weights, so other content."""
    store = world.store
    other = store.namespace(Identity("Proof/Model", 4, (world.group,), revision="r2"))
    _, truth = world.sequence(9, 5)
    store_all(other, ONE, world.keys, truth)
    shutil.rmtree(world.folder(1))
    shutil.copytree(world.root / other.path(world.keys[1]), world.folder(1))
    _missing(world, blocks=[0, 1], reason="record says namespace")


def test_an_extent_of_another_group(tmp_path: Path) -> None:
    groups = (small_group(name="a"), small_group(name="b"))
    namespace = kvstore.open(tmp_path, durable=False).namespace(
        Identity("m", 4, groups, revision="r")
    )
    world = make_world(tmp_path / "w", groups[0])
    keys = namespace.keys(world.tokens, group="a")
    for group in groups:
        store_all(namespace, ONE, keys, world.sequence(len(group.name), 5)[1], group=group)
    a, b = (tmp_path / namespace.path(keys[1], group=g.name) for g in groups)
    shutil.rmtree(a)
    shutil.copytree(b, a)
    one = seat(namespace, ONE, next(ONE.ranks()), total=20, group=groups[0])
    result = one.worker.load(keys, one.table)
    assert "record says group 'b'" in result.misses[0]


def test_the_store_copied_whole_is_the_same_store(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.root, tmp_path / "copy")
    copy = World(**{**world.__dict__, "root": tmp_path / "copy"}).reopen()
    copy.load_all()
    assert copy.namespace.match_prefix(world.keys[:3]).blocks == 3


def test_what_is_known_not_to_be_found(world: World) -> None:
    """A shard of another extent in this one's place: checksums bind bytes, not places.

    The rationale of the specification says so. If this test fails, say there that it is found.
    """
    shutil.copy(world.folder(3) / SHARD, world.folder(1) / SHARD)
    one = world.seat()
    assert one.worker.load(world.keys, one.table).blocks == 5


# -- things that are no plain files ----------------------------------------------------------------


def _plant(path: Path, kind: str, other: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if kind == "folder":
        path.mkdir()
        (path / "x").write_text("x")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "dangling":
        path.symlink_to(other.parent / "nowhere")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "file":
        path.write_text("x")
    else:
        assert kind == "nothing"


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "dangling", "loop", "nothing"])
@pytest.mark.parametrize("which", [SHARD, "c.1.0.1.0.0", "zarr.json"])
def test_in_a_files_place(world: World, which: str, kind: str) -> None:
    _plant(world.folder(1) / which, kind, world.folder(3) / which)
    gone = which == "zarr.json" and kind in ("dangling", "loop", "nothing")
    one = world.seat()
    result = one.worker.load(world.keys, one.table)
    assert sorted(result.misses) == ([0, 1, 2, 3, 4] if gone else [0, 1])
    if gone:
        assert result.misses[0] == "not stored"
    else:
        assert len(list((world.root / QUARANTINE).glob("*/*/*/reason.json"))) == 1
        assert not os.path.lexists(world.folder(1))
    assert (world.folder(3) / which).stat().st_nlink >= 1
    _, report = world.store_all(session="again")
    assert report.complete
    assert world.keys[1].hex() in report.committed
    world.load_all()


@pytest.mark.parametrize("kind", ["link", "dangling", "loop", "file", "nothing"])
def test_in_an_extents_place(world: World, kind: str) -> None:
    _plant(world.folder(1), kind, world.folder(3))
    one = world.seat()
    result = one.worker.load(world.keys, one.table)
    assert 0 in result.misses
    assert world.folder(3).is_dir()
    if kind in ("file", "dangling", "loop"):
        # Nothing was lost by clearing it, but it is not the store's to clear: say so.
        with pytest.raises(StorageError, match="move it away"):
            world.store_all(session="again")
        world.folder(1).unlink()
    world.store_all(session="again")
    world.load_all()


def test_an_empty_folder_in_an_extents_place(world: World) -> None:
    shutil.rmtree(world.folder(1))
    world.folder(1).mkdir()
    _missing(world, blocks=[0, 1, 2, 3, 4], reason="not stored")


def test_a_vanished_record_loses_no_room_for_ever(world: World) -> None:
    (world.folder(1) / "zarr.json").unlink()
    _missing(world, blocks=[0, 1, 2, 3, 4], reason="not stored")


@pytest.mark.parametrize("kind", ["folder", "link", "dangling", "pipe"])
def test_in_an_in_flight_shards_place(world: World, kind: str) -> None:
    """Nothing wrong is published; the reason is clear; without the thing, all is well."""
    keys, truth = world.sequence(5, 2)
    store_all(world.namespace, ONE, keys, truth, commit=False)
    (folder,) = (world.root / "__kvstore__" / "inflight").glob("*/*/*/array")
    shard = folder / SHARD
    _plant(shard, kind, folder / "c.1.0.0.0.0")
    one = world.seat()
    one.fill(truth)
    with_error = None
    try:
        one.worker.store(keys, one.table[:2])
        report = one.worker.commit(keys)
        assert not report.committed or kind == "dangling"
    except kvstore.KVStoreError as error:
        with_error = error
    if with_error is not None:
        assert str(shard) in str(with_error)
    if world.namespace.match_prefix(keys).blocks:
        _check(world, keys, truth)
        return
    shutil.rmtree(folder.parent)
    store_all(world.namespace, ONE, keys, truth)
    _check(world, keys, truth)


def _check(world: World, keys: BlockKeys, truth: Bytes) -> None:
    one = world.seat()
    assert one.worker.load(keys, one.table).blocks == 2
    one.expect(truth, 0, 8)


# -- a medium that fails -------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["EIO", "EACCES", "ESTALE"])
@pytest.mark.parametrize("call", ["preadv", "open"])
def test_a_medium_that_fails_is_a_miss_and_no_verdict(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str, code: str
) -> None:
    number = getattr(errno, code)
    real = getattr(os, call)

    def fail(*args: Any, **options: Any) -> Any:
        if call == "preadv" or str(args[0]).endswith(SHARD):
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    one = world.seat()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        if call == "preadv":
            # What the pump says of a medium that fails: it took nothing.
            patch.setattr("kvstore.io.local_read.pumped", lambda *_: 0)
        result = one.worker.load(world.keys, one.table)
    assert sorted(result.misses) == [0, 1, 2, 3, 4]
    assert os.strerror(number) in result.misses[0]
    assert not (world.root / QUARANTINE).exists()
    assert one.worker.load(world.keys, one.table).blocks == 5
    one.expect(world.truth, 0, 20)
