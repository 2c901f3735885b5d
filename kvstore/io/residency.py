"""Is a range of a file in the page cache?

Asked of the kernel with ``cachestat`` (Linux 6.5 and later; system call 451 on every architecture).
It takes about 2 microseconds and touches no data. Where the kernel has no such call, or forbids it
(later kernels want the file's owner or write permission), the answer is "not known".
"""

from __future__ import annotations

import ctypes
import errno
import mmap

_CACHESTAT = 451
_PAGE = mmap.PAGESIZE
_SAMPLE = 64 << 10

# PyDLL keeps the interpreter lock: the call never waits for a disk, and giving the lock away for
# two microseconds costs more than that when other threads want it.
_syscall = ctypes.PyDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint,
]


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


class ResidencyProbe:
    """Asks about ranges of files. Holds its own memory for the answers: one a thread."""

    __slots__ = ("_counts", "_counts_at", "_range", "_range_at", "_supported")

    def __init__(self) -> None:
        self._range = _Range()
        self._counts = _Counts()
        self._range_at = ctypes.addressof(self._range)
        self._counts_at = ctypes.addressof(self._counts)
        self._supported = True

    def mostly_resident(self, fd: int, offset: int, length: int) -> bool | None:
        """Whether a buffered read of the range is the quicker one.

        True when at least half of its pages are cached, or when any is dirty or being written back
        (a direct read would first wait for these to reach the disk). Of a long range only the two
        ends and the middle are looked at: the kernel counts page by page, which for 4 MiB takes as
        long as reading a tenth of it.

        Args:
            fd: an open file.
            offset: first byte.
            length: bytes, at least 1.

        Returns:
            None when the kernel does not tell.
        """
        if not self._supported:
            return None
        if length <= 4 * _SAMPLE:
            samples: tuple[tuple[int, int], ...] = ((offset, length),)
        else:
            middle = offset + (length - _SAMPLE) // 2
            last = offset + length - _SAMPLE
            samples = (offset, _SAMPLE), (middle, _SAMPLE), (last, _SAMPLE)
        counts = self._counts
        cached = pages = 0
        for first, size in samples:
            self._range.offset = first
            self._range.length = size
            if _syscall(_CACHESTAT, fd, self._range_at, self._counts_at, 0):
                if ctypes.get_errno() == errno.ENOSYS:
                    self._supported = False
                return None
            if counts.dirty or counts.writeback:
                return True
            cached += counts.cached
            pages += (first + size - 1) // _PAGE - first // _PAGE + 1
        return 2 * cached >= pages
