"""What the posix engine leaves behind: order of syncs, failing calls, and processes that die."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidArgument, NotFound, StorageError
from kvstore.io import failpoints, fallocate, local_write
from kvstore.io.posix import PosixEngine

TEMPORARY = ".tmp-?"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PosixEngine]:
    """A durable engine on ``tmp_path``."""
    opened = PosixEngine(tmp_path, durable=True)
    yield opened
    opened.close()


def everything(root: Path) -> list[str]:
    """All files and folders below, hidden ones too."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


class Log:
    """Records the calls that matter to a power cut, by the names below the root."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.root = root
        for name in ("fsync", "pwritev", "rename", "link", "unlink", "mkdir"):
            monkeypatch.setattr(os, name, self._logged(name, getattr(os, name)))

    def _logged(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            names = args[:1] if name in ("fsync", "pwritev", "unlink", "mkdir") else args[:2]
            if all(self.short(one) is not None for one in names):
                self.calls.append(" ".join([name, *(str(self.short(one)) for one in names)]))
            return real(*args, **kwargs)

        return call

    def short(self, path: str | int) -> str | None:
        full = os.fspath(f"/proc/self/fd/{path}" if isinstance(path, int) else path)
        if isinstance(path, int):
            full = str(Path(full).readlink())
        if Path(full) == self.root:
            return "/"
        if not full.startswith(f"{self.root}/"):
            return None
        parts = full[len(str(self.root)) + 1 :].rstrip("/").split("/")
        parts = [TEMPORARY if part.startswith(".tmp-") else part for part in parts]
        if parts[:2] == ["__kvstore__", "trash"] and len(parts) > 2:
            parts[2] = "?"
        return "/".join(parts)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(tmp_path, monkeypatch)


# -- order ----------------------------------------------------------------------------------------


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


def test_publish_syncs_what_is_in_the_folder_then_both_parents(
    engine: PosixEngine, log: Log, tmp_path: Path
):
    (tmp_path / "in" / "array").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    log.calls.clear()
    assert engine.publish("in/array", "out/key")
    assert log.calls == ["fsync in/array", "rename in/array out/key", "fsync out", "fsync in"]


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


# -- failing calls --------------------------------------------------------------------------------

WRITES: dict[str, Callable[[PosixEngine], object]] = {
    "write": lambda engine: engine.write("a/x", [b"1" * 100]),
    "create": lambda engine: engine.create("a/x", b"1" * 100),
    "write_into": lambda engine: engine.write_into("a/x", 100, [(0, b"1" * 100)]),
}


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
    assert engine.sweep() == 1
    assert everything(tmp_path) == ["__kvstore__", "__kvstore__/trash"]


def test_the_trash_cannot_be_discarded_into_itself(engine: PosixEngine):
    engine.create("folder/x", b"")
    engine.discard("folder")
    with pytest.raises(InvalidArgument, match="trash"):
        engine.discard("__kvstore__")


def test_a_sweep_spares_what_is_being_written(engine: PosixEngine, tmp_path: Path):
    found: list[int] = []
    with failpoints.armed("posix.write.before_rename", lambda: found.append(engine.sweep())):
        engine.write("a/x", [b"1"])
    assert found == [0]
    with failpoints.armed(
        "posix.write.before_rename", lambda: found.append(engine.sweep("a", older_than=-60))
    ) as point:
        with pytest.raises(NotFound):
            engine.write("a/y", [b"1"])
        assert point.reached == 1
    assert found == [0, 1]
    assert everything(tmp_path) == ["a", "a/x"]


# -- processes that die ---------------------------------------------------------------------------

SCRIPT = """
import sys
from kvstore.io.select import open_engine
engine = open_engine(sys.argv[1])
engine.{call}
"""

DEATHS = [
    # point, call, what is visible afterwards
    ("posix.write.before_sync", "write('a/x', [b'new'])", "old"),
    ("posix.write.before_rename", "write('a/x', [b'new'])", "old"),
    ("posix.write.after_rename", "write('a/x', [b'new'])", "new"),
    ("posix.write.before_sync", "create('a/y', b'new')", None),
    ("posix.create.before_link", "create('a/y', b'new')", None),
    ("posix.create.after_link", "create('a/y', b'new')", "new"),
    ("posix.rename.before_rename", "rename('part', 'a/x')", "old"),
    ("posix.rename.after_rename", "rename('part', 'a/x')", "new"),
    ("posix.publish.before_rename", "publish('in', 'a/z')", None),
    ("posix.publish.after_rename", "publish('in', 'a/z')", "new"),
    ("posix.discard.before_rename", "discard('full')", "old"),
    ("posix.discard.after_rename", "discard('full')", None),
    ("posix.write_into.before_write", "write_into('a/w', 3, [(0, b'new')])", "\0\0\0"),
    ("posix.write_into.after_write", "write_into('a/w', 3, [(0, b'new')])", "new"),
]
WHERE = {
    "write(": "a/x",
    "create(": "a/y",
    "rename(": "a/x",
    "publish(": "a/z/x",
    "discard(": "full/x",
    "write_into(": "a/w",
}


@pytest.mark.parametrize(("point", "call", "visible"), DEATHS, ids=lambda value: str(value)[:30])
def test_a_process_that_dies_leaves_all_or_nothing(
    engine: PosixEngine, tmp_path: Path, point: str, call: str, visible: str | None
):
    engine.write("a/x", [b"old"])
    engine.write("full/x", [b"old"])
    engine.write("part", [b"new"])
    engine.write("in/x", [b"new"])
    before = everything(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(call=call), str(tmp_path)],
        env={**os.environ, failpoints.ENVIRONMENT: f"{point}=kill"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == failpoints.KILLED, done.stderr
    path = next(path for name, path in WHERE.items() if call.startswith(name))
    if visible is None:
        assert not engine.exists(path)
    else:
        assert engine.get(path, 10).decode() == visible
    for folder in ("", "a"):
        assert not any(name.startswith(".tmp-") for name in engine.list_dir(folder))
    # The same call can be made again, and a sweep leaves nothing that nobody asked for.
    engine.sweep(older_than=-60)
    left = set(everything(tmp_path)) - set(before)
    assert left <= {"a/y", "a/z", "a/z/x", "a/w", "__kvstore__", "__kvstore__/trash"}
    again = SCRIPT.format(call=call).replace("sys.argv[1]", repr(str(tmp_path)))
    if visible != "new" or "write" in call:
        exec(again, {})  # noqa: S102 - the same lines that the child ran


def test_writers_notice_an_injected_error(engine: PosixEngine, tmp_path: Path):
    for point, call in (
        ("posix.write.before_rename", WRITES["write"]),
        ("posix.create.before_link", WRITES["create"]),
    ):
        with failpoints.armed(point, "error") as armed:
            with pytest.raises(StorageError, match=point):
                call(engine)
            assert armed.reached == 1
        assert everything(tmp_path) == ["a"]


def test_iov_max_is_the_systems():
    assert os.sysconf("SC_IOV_MAX") == local_write._MOST_VECTORS
