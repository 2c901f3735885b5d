"""Vectors of memory for the kernel to read into, as numbers rather than as Python objects.

A load of cached bytes ends in tens of thousands of short runs of memory. A memoryview for each
would be built, and passed to ``os.preadv``, with the interpreter lock held; an array of addresses
and lengths is one object, and the call through ctypes lets the lock go.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_VECTORS = 1024
"""IOV_MAX of Linux."""

_preadv = ctypes.CDLL(None, use_errno=True).preadv
_preadv.restype = ctypes.c_ssize_t
_preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)


def preadv(fd: int, vectors: NDArray[np.uint64], position: int) -> int:
    """Read once into at most :data:`MOST_VECTORS` vectors ``[n, 2]``; returns the bytes read.

    Raises:
        OSError: as the system call says. An interrupted call is repeated.
    """
    while True:
        got: int = _preadv(fd, vectors.ctypes.data, len(vectors), position)
        if got >= 0:
            return got
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class IoVectors:
    """Memory in pieces, in the order in which bytes go there.

    Args:
        array: ``[n, 2]``, address and length of each piece, none of them empty.
        owner: what keeps the memory alive.
    """

    __slots__ = ("_array", "_owner", "nbytes")

    def __init__(self, array: NDArray[np.uint64], owner: object) -> None:
        self._array = np.ascontiguousarray(array, dtype=np.uint64).reshape(-1, 2)
        self._owner = owner
        self.nbytes = int(self._array[:, 1].sum())

    @classmethod
    def of(cls, views: Sequence[memoryview]) -> IoVectors:
        """The same out of writable views, which are held."""
        arrays = [np.frombuffer(view, np.uint8) for view in views if len(view)]
        table = [(a.ctypes.data, a.nbytes) for a in arrays]
        return cls(np.array(table, dtype=np.uint64).reshape(-1, 2), (arrays, views))

    def fill(self, fd: int, position: int) -> int:
        """Read bytes from ``position`` on until all memory is full; returns how many there were.

        Raises:
            OSError: as the system call says.
        """
        array, done = self._array, 0
        while len(array):
            got = preadv(fd, array[:MOST_VECTORS], position + done)
            if got == 0:
                break
            done += got
            array = _rest(array, got)
        return done


def _rest(array: NDArray[np.uint64], done: int) -> NDArray[np.uint64]:
    """What of the vectors lies after their first ``done`` bytes."""
    ends = np.cumsum(array[:MOST_VECTORS, 1])
    full = int(np.searchsorted(ends, done, side="right"))
    rest = array[full:]
    within = done - (int(ends[full - 1]) if full else 0)
    if within:
        rest = rest.copy()
        rest[0, 0] += np.uint64(within)
        rest[0, 1] -= np.uint64(within)
    return rest
