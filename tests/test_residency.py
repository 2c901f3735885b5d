from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.io import residency
from kvstore.io.residency import ResidencyProbe

MIB = 1 << 20


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file of 8 MiB that is on the disk and not in the cache."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * MIB))
    found = os.open(path, os.O_RDWR)
    os.fsync(found)
    if ResidencyProbe().mostly_resident(found, 0, 1) is None:
        os.close(found)
        pytest.skip("this kernel does not tell")
    forget(found)
    yield found
    os.close(found)


def forget(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def test_a_cold_range_is_not_resident(fd: int):
    assert ResidencyProbe().mostly_resident(fd, 0, 8 * MIB) is False
    assert ResidencyProbe().mostly_resident(fd, 4097, 1) is False


def test_a_range_that_was_read_is(fd: int):
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no more than asked is read
    os.pread(fd, MIB, 2 * MIB)
    probe = ResidencyProbe()
    assert probe.mostly_resident(fd, 2 * MIB, MIB)
    assert probe.mostly_resident(fd, 2 * MIB + 5, 100)
    assert probe.mostly_resident(fd, MIB, 2 * MIB), "half of it is enough"
    assert probe.mostly_resident(fd, 3 * MIB - 65536, 2 * 65536), "half of it is enough"
    assert probe.mostly_resident(fd, 3 * MIB - 65536, 3 * 65536) is False
    assert probe.mostly_resident(fd, 0, 8 * MIB) is False
    assert probe.mostly_resident(fd, 4 * MIB, MIB) is False


def test_a_range_with_changes_not_yet_on_the_disk_is(fd: int):
    os.pwrite(fd, b"changed", 5 * MIB)
    assert ResidencyProbe().mostly_resident(fd, 5 * MIB - 200_000, 210_000)
    assert ResidencyProbe().mostly_resident(fd, MIB, 4 * MIB + 1), "at the end of a long range"
    os.fsync(fd)
    forget(fd)
    assert ResidencyProbe().mostly_resident(fd, MIB, 4 * MIB + 1) is False


def test_of_a_long_range_ends_and_middle_count(fd: int):
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    probe = ResidencyProbe()
    os.pread(fd, MIB, 0)
    assert probe.mostly_resident(fd, 0, 8 * MIB) is False
    os.pread(fd, MIB, 7 * MIB)
    assert probe.mostly_resident(fd, 0, 8 * MIB)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP])
def test_a_kernel_that_does_not_tell(code: int, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []

    def refuse(*_: object) -> int:
        calls.append(1)
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(residency, "_syscall", refuse)
    probe = ResidencyProbe()
    assert probe.mostly_resident(0, 0, 1) is None
    assert probe.mostly_resident(0, 0, 1) is None
    # A kernel without the call gets it no more; a refusal may hold for that one file.
    assert len(calls) == (1 if code == errno.ENOSYS else 2)


def test_a_bad_file_is_not_known():
    assert ResidencyProbe().mostly_resident(-1, 0, 1) is None
