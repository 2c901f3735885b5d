"""Short reads, failing media, and things planted where files belong."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.reads import (
    CONTENT,
    MIB,
    SIZE,
    Open,
    nothing,
    read_all,
)

from kvstore.errors import Corrupt, NotFound, StorageError
from kvstore.io import direct
from kvstore.io.protocol import ByteRange


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("most", [4096, 5000, 65536])
def test_short_reads_are_continued(
    opened: Open, file: Path, mode: direct.DirectMode, most: int, monkeypatch: Any
):
    assert file.exists()
    engine = opened(direct=mode)
    real = os.preadv
    count = 0

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal count
        count += 1
        return min(real(fd, buffers, offset), most)

    monkeypatch.setattr(os, "preadv", preadv)
    ranges = [ByteRange("file", 4096 * 3 + 5, MIB), ByteRange("file", SIZE - 300_000, 300_000)]
    assert read_all(engine, ranges) == [CONTENT[r.offset : r.offset + r.length] for r in ranges]
    assert count > MIB // most
    assert engine.traffic.direct == (0 if mode == "never" else MIB + 300_000)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_an_object_cut_while_it_is_read_is_corrupt(
    opened: Open, file: Path, mode: direct.DirectMode
):
    engine = opened(direct=mode)

    def consume(_index: int, offset: int, _data: memoryview) -> None:
        if offset == 0:
            os.truncate(file, 10 * MIB + 5)

    (result,) = engine.read([ByteRange("file", 0, SIZE, 100_000)], consume)
    assert isinstance(result, Corrupt)
    assert str(10 * MIB + 5) in str(result)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_failing_medium_is_a_storage_error_of_that_range(
    opened: Open, file: Path, code: int, monkeypatch: Any
):
    assert file.exists()
    engine = opened(direct="never")
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 3 * MIB:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    results = engine.read([ByteRange("file", at * MIB, MIB) for at in range(8)], nothing)
    assert [result is None for result in results] == [at != 3 for at in range(8)]
    error = results[3]
    assert isinstance(error, StorageError)
    assert error.errno == code
    assert str(file) in str(error)


def test_a_planted_link_or_pipe_is_not_followed(opened: Open, file: Path, tmp_path: Path):
    engine = opened()
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    secret.write_bytes(b"secret")
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    before = engine.direct_io
    ranges = [ByteRange(name, 0, 6) for name in ("link", "pipe", "folder")]
    results = engine.read(ranges, nothing)
    assert [type(result) for result in results] == [StorageError, NotFound, NotFound]
    assert "symbolic link" in str(results[0])
    assert engine.direct_io == before, "a folder says nothing about the file system"
    with pytest.raises(StorageError, match="symbolic link"):
        engine.get("link", 100)
    for name in ("link", "pipe"):
        with pytest.raises(NotFound):
            engine.size(name)
    with pytest.raises(NotFound):
        engine.get("pipe", 100)
    with pytest.raises(StorageError, match="symbolic link"):
        engine.write_into("link", 6, [(0, b"redone")])
    assert not engine.create("link", b"redone")
    engine.write("link", [b"mine"])
    assert secret.read_bytes() == b"secret"
    assert engine.get("link", 4) == b"mine"
    assert file.exists()


def test_discarding_a_link_leaves_what_it_points_to(opened: Open, tmp_path: Path):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(outside)
    (tmp_path / "link").symlink_to(outside)
    engine = opened()
    assert engine.discard("link")
    assert engine.discard("folder")
    assert (outside / "kept").exists()


@pytest.mark.parametrize("size", [0, 50, 99, 101, 10_000])
def test_a_small_object_that_changes_while_it_is_read_is_corrupt(
    opened: Open, tmp_path: Path, size: int, monkeypatch: Any
):
    path = tmp_path / "record"
    path.write_bytes(b"x" * 100)
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        status = real(fd)
        path.write_bytes(b"y" * size)
        return status

    engine = opened()
    assert engine.get("record", 1000) == b"x" * 100
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        with pytest.raises(Corrupt, match="100 bytes"):
            engine.get("record", 1000)
