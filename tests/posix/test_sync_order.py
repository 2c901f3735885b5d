"""The order of syncs and names that a power failure needs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from support.syncs import TEMPORARY, Log, everything

from kvstore.errors import NotFound
from kvstore.io.posix import PosixEngine


def test_write_syncs_bytes_before_the_name_and_the_name_before_it_returns(
    engine: PosixEngine, log: Log
):
    engine.write("x", [b"1", b"2"])
    assert log.calls == [
        f"pwritev {TEMPORARY}",
        f"fsync {TEMPORARY}",
        f"rename {TEMPORARY} x",
        "fsync /",
    ]


def test_new_folders_are_synced_into_their_parents(engine: PosixEngine, log: Log):
    engine.write("a/b/x", [b"1"])
    assert log.calls == [
        "mkdir a/b",
        "mkdir a",
        "fsync /",
        "mkdir a/b",
        "fsync a",
        f"pwritev a/b/{TEMPORARY}",
        f"fsync a/b/{TEMPORARY}",
        f"rename a/b/{TEMPORARY} a/b/x",
        "fsync a/b",
    ]


def test_create_syncs_bytes_before_the_name(engine: PosixEngine, log: Log):
    assert engine.create("x", b"1")
    assert log.calls == [
        f"pwritev {TEMPORARY}",
        f"fsync {TEMPORARY}",
        f"link {TEMPORARY} x",
        f"unlink {TEMPORARY}",
        "fsync /",
    ]
    log.calls.clear()
    assert not engine.create("x", b"2")
    assert log.calls == []


def test_write_into_is_synced_by_sync_and_by_rename(engine: PosixEngine, log: Log, tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    log.calls.clear()
    engine.write_into("in/p", 10, [(0, b"1")])
    assert log.calls == ["pwritev in/p"]
    log.calls.clear()
    engine.sync(["in/p", "in", ""])
    assert log.calls == ["fsync in/p", "fsync in", "fsync /"]
    log.calls.clear()
    engine.rename("in/p", "out/q")
    assert log.calls == ["fsync in/p", "rename in/p out/q", "fsync out", "fsync in"]


def test_publish_syncs_what_is_in_the_folder_then_its_new_name(
    engine: PosixEngine, log: Log, tmp_path: Path
):
    (tmp_path / "in" / "array").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    log.calls.clear()
    assert engine.publish("in/array", "out/key")
    assert log.calls == ["fsync in/array", "rename in/array out/key", "fsync out"]


def test_unsettled_names_cost_no_sync_and_publish_settles_them(engine: PosixEngine, log: Log):
    engine.write("in/array/x", [b"1"], settle=False)
    engine.write_into("in/array/p", 10, [(0, b"1")])
    engine.rename("in/array/p", "in/array/q", settle=False)
    assert engine.create("in/array/y", b"1", settle=False)
    synced = [call for call in log.calls if call.startswith("fsync")]
    temporary = f"fsync in/array/{TEMPORARY}"
    assert synced == [temporary, "fsync in/array/p", temporary]
    log.calls.clear()
    assert engine.publish("in/array", "out")
    assert log.calls == ["fsync in/array", "rename in/array out", "fsync /"]


def test_discard_hides_before_it_frees(engine: PosixEngine, log: Log, tmp_path: Path):
    for name in ("1", "2"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(b"")
    (tmp_path / "__kvstore__" / "trash").mkdir(parents=True)
    log.calls.clear()
    assert engine.discard("folder")
    # rmtree works by descriptors: its calls do not name the root, and come after the rename.
    assert log.calls == ["unlink folder", "rename folder __kvstore__/trash/?"]
    assert everything(tmp_path) == ["__kvstore__", "__kvstore__/trash"]


def test_without_durability_nothing_is_synced(tmp_path: Path, log: Log):
    engine = PosixEngine(tmp_path, durable=False)
    engine.write("a/x", [b"1"])
    engine.create("a/y", b"1")
    engine.write_into("a/z", 1, [(0, b"1")])
    engine.sync(["a/z", "a"])
    engine.rename("a/z", "a/zz")
    engine.publish("a", "b")
    engine.discard("b")
    engine.close()
    assert not [call for call in log.calls if call.startswith("fsync")]


def test_sync_of_nothing_is_not_found(engine: PosixEngine, tmp_path: Path):
    with pytest.raises(NotFound, match="absent"):
        engine.sync(["absent"])
    quick = PosixEngine(tmp_path, durable=False)
    with pytest.raises(NotFound, match="absent"):
        quick.sync(["absent"])
    quick.close()


def test_a_folder_that_cannot_be_synced_is_no_failure(engine: PosixEngine, monkeypatch: Any):
    real = os.fsync

    def fsync(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    engine.write("a/b/x", [b"1"])
    assert engine.get("a/b/x", 1) == b"1"
