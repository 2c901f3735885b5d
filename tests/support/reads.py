"""What the tests of reading with the posix engine share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.io.posix import PosixEngine
from kvstore.io.protocol import ByteRange
from kvstore.io.residency import ResidencyProbe

KIB, MIB = 1 << 10, 1 << 20
SIZE = 20 * MIB + 1234
CONTENT = np.random.default_rng(7).bytes(SIZE)

Open = Callable[..., PosixEngine]


def nothing(_index: int, _offset: int, _data: memoryview) -> None:
    """Consume and forget."""


def forget(path: Path) -> None:
    """Take a file out of the page cache; skips where that cannot be told."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    resident = ResidencyProbe().mostly_resident(descriptor, 0, SIZE)
    os.close(descriptor)
    if resident is not False:
        pytest.skip("this kernel does not tell what is cached, or keeps it")


class Calls:
    """Records every preadv: whether direct, where, how much, into which memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[bool, int, int, int]] = []
        real = os.preadv

        def preadv(fd: int, buffers: Sequence[memoryview], offset: int, *more: int) -> int:
            memory = np.frombuffer(buffers[0], np.uint8).__array_interface__["data"][0]
            is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            self.seen.append((is_direct, offset, len(buffers[0]), memory))
            return real(fd, buffers, offset, *more)

        monkeypatch.setattr(os, "preadv", preadv)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def read_all(engine: PosixEngine, ranges: Sequence[ByteRange]) -> list[bytes]:
    parts: list[bytearray] = [bytearray() for _ in ranges]
    results = engine.read(ranges, lambda i, _offset, data: parts[i].extend(data))
    assert results == [None] * len(ranges)
    return [bytes(part) for part in parts]
