"""The posix engine reads directly or through the cache, in the right sizes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.reads import (
    CONTENT,
    MIB,
    SIZE,
    Calls,
    Open,
    forget,
    read_all,
)

from kvstore.errors import InvalidArgument
from kvstore.io import direct, local_read
from kvstore.io.posix import COLD_BYTES, HOT_BYTES
from kvstore.io.protocol import ByteRange


def test_what_is_cached_is_read_buffered_and_what_is_not_directly(opened: Open, file: Path):
    engine = opened()
    if not engine.direct_io:
        pytest.skip("no O_DIRECT here")
    forget(file)
    assert read_all(engine, [ByteRange("file", 0, SIZE, MIB)]) == [CONTENT]
    assert (engine.traffic.direct, engine.traffic.buffered) == (SIZE, 0)
    assert read_all(engine, [ByteRange("file", 0, SIZE, MIB)]) == [CONTENT]
    assert engine.traffic.buffered == 0, "a direct read filled the cache"
    file.read_bytes()
    assert read_all(engine, [ByteRange("file", 0, SIZE, MIB)]) == [CONTENT]
    assert (engine.traffic.direct, engine.traffic.buffered) == (2 * SIZE, SIZE)


def test_ranges_of_one_open_file_may_differ(opened: Open, file: Path):
    engine = opened()
    forget(file)
    with file.open("rb", buffering=0) as half:
        os.posix_fadvise(half.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        half.read(10 * MIB)
    ranges = [ByteRange("file", at * MIB, MIB) for at in (0, 15, 1, 16, 2, 17)]
    assert read_all(engine, ranges) == [CONTENT[r.offset : r.offset + MIB] for r in ranges]
    assert (engine.traffic.direct, engine.traffic.buffered) == (3 * MIB, 3 * MIB)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_the_mode_can_be_fixed(opened: Open, file: Path, mode: direct.DirectMode):
    engine = opened(direct=mode)
    file.read_bytes()
    read_all(engine, [ByteRange("file", 0, SIZE, MIB)])
    forget(file)
    read_all(engine, [ByteRange("file", 0, SIZE, MIB)])
    expected = (2 * SIZE, 0) if mode == "always" else (0, 2 * SIZE)
    assert (engine.traffic.direct, engine.traffic.buffered) == expected


def test_where_the_kernel_does_not_tell_reads_are_buffered(
    opened: Open, file: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = opened()
    forget(file)
    monkeypatch.setattr(local_read.ResidencyProbe, "mostly_resident", lambda *_: None)
    assert read_all(engine, [ByteRange("file", 0, SIZE, MIB)]) == [CONTENT]
    assert engine.traffic.buffered == SIZE


def test_direct_reads_are_aligned_in_every_way(
    opened: Open, file: Path, monkeypatch: pytest.MonkeyPatch
):
    assert file.exists()
    engine = opened(direct="always")
    calls = Calls(monkeypatch)
    offsets = [0, 1, 4095, 4096, 5000, SIZE - 4096, SIZE - 5000, SIZE - 1]
    ranges = [
        ByteRange("file", at, min(length, SIZE - at), piece)
        for at in offsets
        for length in (1, 4096, 300_001)
        for piece in (0, 1000, 4096)
    ]
    assert read_all(engine, ranges) == [CONTENT[r.offset : r.offset + r.length] for r in ranges]
    assert all(is_direct for is_direct, *_ in calls.seen)
    for _, offset, length, memory in calls.seen:
        assert offset % 4096 == length % 4096 == memory % 4096 == 0


def test_read_sizes(opened: Open, file: Path, monkeypatch: pytest.MonkeyPatch):
    engine = opened()
    if not engine.direct_io:
        pytest.skip("no O_DIRECT here")
    calls = Calls(monkeypatch)
    piece = 100_000
    file.read_bytes()
    read_all(engine, [ByteRange("file", 0, SIZE, piece)])
    lengths = {length for _, _, length, _ in calls.seen[:-1]}
    assert lengths == {HOT_BYTES // piece * piece}
    calls.seen.clear()
    forget(file)
    read_all(engine, [ByteRange("file", 0, SIZE, piece)])
    assert len(calls.seen) == -(-SIZE // (COLD_BYTES // piece * piece))
    assert all(is_direct for is_direct, *_ in calls.seen)


def refuse_direct(monkeypatch: pytest.MonkeyPatch, *, at: str) -> list[str]:
    """Behave like a file system that refuses O_DIRECT when a file is opened, set, or read."""
    asked: list[str] = []
    real_open, real_fcntl, real_preadv = os.open, fcntl.fcntl, os.preadv

    def refuse() -> OSError:
        asked.append(at)
        return OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def open_(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise refuse()
        return real_open(path, flags, *args, **kwargs)

    def fcntl_(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise refuse()
        return real_fcntl(fd, command, argument)

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int, *more: int) -> int:
        if real_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise refuse()
        return real_preadv(fd, buffers, offset, *more)

    patches: dict[str, tuple[Any, str, Any]] = {
        "open": (os, "open", open_),
        "set": (fcntl, "fcntl", fcntl_),
        "read": (os, "preadv", preadv),
    }
    monkeypatch.setattr(*patches[at])
    return asked


@pytest.mark.parametrize("at", ["open", "read"])
def test_the_probe_finds_out(opened: Open, tmp_path: Path, at: str, monkeypatch: Any):
    refuse_direct(monkeypatch, at=at)
    assert not opened().direct_io
    with pytest.raises(InvalidArgument, match="O_DIRECT"):
        opened(direct="always")
    assert list(tmp_path.iterdir()) == [], "the probe left something behind"


def test_the_probe_is_a_real_transfer(opened: Open, tmp_path: Path, monkeypatch: Any):
    calls = Calls(monkeypatch)
    assert opened().direct_io == any(is_direct for is_direct, *_ in calls.seen)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_probe_writes_nothing(opened: Open, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(os, "pwritev", None)
    assert opened(read_only=True).direct_io
    (tmp_path / "zarr.json").write_bytes(b"{}")
    assert opened(read_only=True).direct_io
    refuse_direct(monkeypatch, at="open")
    assert not opened(read_only=True).direct_io


@pytest.mark.parametrize("at", ["set", "read"])
def test_a_refused_direct_read_falls_back_once_and_for_all(
    opened: Open, file: Path, at: str, monkeypatch: Any
):
    engine = opened(threads=1)
    if not engine.direct_io:
        pytest.skip("no O_DIRECT here")
    forget(file)
    monkeypatch.setattr(local_read.ResidencyProbe, "mostly_resident", lambda *_: False)
    asked = refuse_direct(monkeypatch, at=at)
    ranges = [ByteRange("file", at * MIB + 1, MIB) for at in range(10)]
    for _ in range(2):
        assert read_all(engine, ranges) == [CONTENT[r.offset : r.offset + MIB] for r in ranges]
    assert len(asked) == 1
    assert not engine.direct_io
    assert engine.traffic.direct == 0
