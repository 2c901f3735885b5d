"""Writing calls that fail: what they say, and what they leave."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.syncs import WRITES, everything

from kvstore.errors import InvalidArgument, NotFound, StorageError
from kvstore.io import failpoints, fallocate
from kvstore.io.posix import PosixEngine


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", WRITES)
def test_a_failed_write_names_the_thing_the_cause_and_the_remedy(
    engine: PosixEngine, tmp_path: Path, call: str, code: int, monkeypatch: Any
):
    def pwritev(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(StorageError) as caught:
        WRITES[call](engine)
    error = caught.value
    assert error.errno == code
    assert error.filename == f"{tmp_path}/a/x"
    assert str(tmp_path / "a" / "x") in str(error)
    assert os.strerror(code) in str(error)
    assert {errno.EIO: "kernel log", errno.EDQUOT: "quota"}.get(code, "free space") in str(error)
    assert everything(tmp_path) == (["a", "a/x"] if call == "write_into" else ["a"])


@pytest.mark.parametrize("call", ["write", "create"])
@pytest.mark.parametrize("step", ["fsync", "rename/link"])
def test_a_failure_before_the_name_leaves_no_name(
    engine: PosixEngine, tmp_path: Path, call: str, step: str, monkeypatch: Any
):
    (tmp_path / "a").mkdir()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in step.split("/"):
        monkeypatch.setattr(os, name, fail)
    with pytest.raises(StorageError, match="kernel log"):
        WRITES[call](engine)
    assert everything(tmp_path) == ["a"]


def test_a_full_disk_is_known_when_an_object_is_made(engine: PosixEngine, monkeypatch: Any):
    if fallocate._fallocate is None:
        pytest.skip("no fallocate here")

    def full(*_: object) -> int:
        import ctypes

        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(fallocate, "_fallocate", full)
    with pytest.raises(StorageError, match="free space") as caught:
        engine.write_into("a/x", 100, [])
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_reserve_space_is_fine(
    engine: PosixEngine, code: int, monkeypatch: Any
):
    def refuse(*_: object) -> int:
        import ctypes

        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(fallocate, "_fallocate", refuse)
    engine.write_into("a/x", 100, [(0, b"1")])
    assert engine.get("a/x", 100) == b"1" + bytes(99)


def test_space_is_reserved_for_an_object_that_is_filled(engine: PosixEngine, tmp_path: Path):
    engine.write_into("x", 1 << 20, [])
    if (tmp_path / "x").stat().st_blocks == 0:
        pytest.skip("this file system does not reserve")
    assert (tmp_path / "x").stat().st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_short_writes_are_continued(engine: PosixEngine, most: int, monkeypatch: Any):
    real = os.pwritev

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        joined = b"".join(views)
        return real(fd, [memoryview(joined)[:most]], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    pieces = [bytes([i]) * i for i in range(60)]
    engine.write("x", pieces)
    assert engine.get("x", 10_000) == b"".join(pieces)
    engine.write_into("y", 2000, [(100, pieces[50]), (150, pieces[51]), (1000, pieces[9])])
    expected = bytes(100) + pieces[50] + pieces[51]
    assert engine.get("y", 10_000)[:201] == expected


def test_few_system_calls_for_many_pieces(engine: PosixEngine, monkeypatch: Any):
    calls: list[int] = []
    real = os.pwritev

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append(len(views))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    engine.write("x", [b"12"] * 3000)
    assert calls == [1024, 1024, 952]
    calls.clear()
    # Neighbours in any order are one run.
    engine.write_into("y", 1000, [(20, b"1" * 10), (0, b"2" * 10), (10, b"3" * 10), (40, b"4")])
    assert calls == [3, 1]


def test_without_links_create_still_never_replaces(
    engine: PosixEngine, tmp_path: Path, monkeypatch: Any
):
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    assert engine.create("a/x", b"first")
    # As if another made it after this process looked.
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    assert not engine.create("a/x", b"second")
    assert engine.get("a/x", 10) == b"first"
    assert everything(tmp_path) == ["a", "a/x"]


def test_a_link_whose_reply_was_lost_is_a_success(engine: PosixEngine, monkeypatch: Any):
    real = os.link

    def link(source: str, target: str, **options: Any) -> None:
        real(source, target, **options)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", link)
    assert engine.create("x", b"mine")
    monkeypatch.setattr(os, "link", real)
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    assert not engine.create("x", b"other")
    assert engine.get("x", 10) == b"mine"


def test_an_unmounted_root_is_not_made_anew(engine: PosixEngine, tmp_path: Path):
    shutil.rmtree(tmp_path)
    for call in WRITES.values():
        with pytest.raises(NotFound, match="mount"):
            call(engine)
    assert not tmp_path.exists()
    tmp_path.mkdir()


def test_a_file_in_the_way_of_a_folder_is_named(engine: PosixEngine, tmp_path: Path):
    engine.create("a", b"")
    with pytest.raises(StorageError, match="move it away"):
        engine.write("a/x", [b""])
    engine.create("folder/x", b"")
    with pytest.raises(StorageError, match="move it away"):
        engine.publish("folder", "a")
    with pytest.raises(StorageError, match="move it away"):
        engine.publish("a", "b")
    assert not engine.create("folder", b"")
    assert everything(tmp_path) == ["a", "folder", "folder/x"]


def test_what_cannot_be_freed_has_vanished_all_the_same(
    engine: PosixEngine, tmp_path: Path, monkeypatch: Any
):
    engine.create("folder/x", b"")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    assert engine.discard("folder")
    assert not engine.exists("folder")
    monkeypatch.undo()
    assert len(list((tmp_path / "__kvstore__" / "trash").iterdir())) == 1
    (left,) = engine.leavings(3600)
    assert engine.discard(left)
    assert engine.leavings(0) == []
    assert everything(tmp_path) == ["__kvstore__", "__kvstore__/trash"]


def test_the_trash_cannot_be_discarded_into_itself(engine: PosixEngine):
    engine.create("folder/x", b"")
    engine.discard("folder")
    with pytest.raises(InvalidArgument, match="trash"):
        engine.discard("__kvstore__")


def test_a_collection_spares_what_is_being_written(engine: PosixEngine, tmp_path: Path):
    found: list[int] = []

    def sweep(older_than: float) -> int:
        return sum(engine.discard(left) for left in engine.leavings(older_than))

    with failpoints.armed("posix.write.before_rename", lambda: found.append(sweep(3600))):
        engine.write("a/x", [b"1"])
    assert found == [0]
    with failpoints.armed("posix.write.before_rename", lambda: found.append(sweep(-60))) as point:
        with pytest.raises(NotFound):
            engine.write("a/y", [b"1"])
        assert point.reached == 1
    assert found == [0, 1]
    assert everything(tmp_path) == ["a", "a/x"]
