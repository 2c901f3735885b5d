"""Processes that die in the middle of a write leave all or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.syncs import WRITES, everything

from kvstore.errors import StorageError
from kvstore.io import failpoints, local_write
from kvstore.io.posix import PosixEngine

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
    # The same call can be made again, and a collection leaves nothing that nobody asked for.
    for path in engine.leavings(-60):
        engine.discard(path)
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
