"""Raw limits: what this machine's disk, page cache and memory allow, with nothing in between.

They move the same number of bytes as the store does, in large pieces and threads, and do nothing
else. How near a store comes to them is a measure that survives a change of machine.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.scratch import DIRECT_ALIGNMENT

Bytes = NDArray[np.uint8]

DIRECT_PIECE = 8 << 20
DIRECT_THREADS = 4
HOT_PIECE = 512 << 10
"""Of 64 KiB to 8 MiB the fastest for a read from the page cache, alone and with a copy."""


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(thread number)`` in so many threads and wait; raises what one of them raised."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as problem:  # noqa: BLE001 - carried to the caller
            failures.append(problem)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def aligned_buffer(nbytes: int, *, huge: bool = False) -> Bytes:
    """Page-aligned private memory, touched, as direct I/O needs it.

    Args:
        nbytes: its size.
        huge: in huge pages where the kernel has them, which is quicker to read into.
    """
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, dtype=np.uint8)
    memory[:: mmap.PAGESIZE] = 1
    return memory


def make_raw_file(path: Path, content: Bytes) -> int:
    """Write a file for the read limits; its size is cut to whole :data:`DIRECT_ALIGNMENT` units.

    Returns:
        Its size in bytes.
    """
    size = content.size // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    with path.open("wb", buffering=0) as stream:
        view = content[:size].data
        while view.nbytes:
            view = view[stream.write(view[: 1 << 30]) :]
        os.fsync(stream.fileno())
    return size


class RawFile:
    """One file, read and written as fast as threads of ``preadv`` and ``pwritev`` go.

    Args:
        path: the file.
        size: its bytes, a multiple of :data:`DIRECT_ALIGNMENT`.
        threads: threads of the page cache limits.
    """

    def __init__(self, path: Path, size: int, threads: int) -> None:
        self.path = path
        self.size = size
        self.threads = threads
        count = max(threads, DIRECT_THREADS)
        self._staging = [aligned_buffer(DIRECT_PIECE, huge=True) for _ in range(count)]

    def _pieces(self, number: int, threads: int, piece: int) -> range:
        """Offsets of one thread's pieces; the threads walk side by side."""
        return range(number * piece, self.size, threads * piece)

    def read_hot(self, target: Bytes | None = None) -> int:
        """Read it all from the page cache into small staging memory, and copy it on once if asked.

        Args:
            target: where to copy to, as large as the file, so outside the processor's caches.
        """
        fd = os.open(self.path, os.O_RDONLY)

        def work(number: int) -> None:
            staging = self._staging[number]
            view = staging.data
            for offset in self._pieces(number, self.threads, HOT_PIECE):
                length = min(HOT_PIECE, self.size - offset)
                _read_exactly(fd, view[:length], offset)
                if target is not None:
                    np.copyto(target[offset : offset + length], staging[:length])

        try:
            in_threads(self.threads, work)
        finally:
            os.close(fd)
        return self.size

    def write(self, source: Bytes, *, flag: int, durable: bool) -> int:
        """Write a file of that size anew from ``source``.

        Args:
            source: at least :attr:`size` bytes.
            flag: ``O_DIRECT`` (with 8 MiB pieces in 4 threads), or 0 for the page cache.
            durable: wait until it is on the medium.
        """
        threads = DIRECT_THREADS if flag else self.threads
        piece = DIRECT_PIECE if flag else HOT_PIECE
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | flag, 0o644)

        def work(number: int) -> None:
            staging = self._staging[number]
            for offset in self._pieces(number, threads, piece):
                length = min(piece, self.size - offset)
                chunk = source[offset : offset + length]
                if flag and chunk.ctypes.data % DIRECT_ALIGNMENT:
                    np.copyto(staging[:length], chunk)
                    chunk = staging[:length]
                _write_exactly(fd, chunk.data, offset)

        try:
            in_threads(threads, work)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        return self.size


class DirectFiles:
    """Files read whole, past the page cache: pieces of up to 8 MiB, in 4 threads.

    The files are the store's own shards. A virtual disk may have a cache of its own, which knows
    files that are read often: a limit from another file, read once a round, would not be one.

    Args:
        paths: the files.
        flag: ``O_DIRECT``, or 0 where the file system refuses it.
    """

    def __init__(self, paths: Sequence[Path], flag: int) -> None:
        self._flag = os.O_RDONLY | flag
        self._pieces = [
            (path, offset, min(DIRECT_PIECE, path.stat().st_size - offset))
            for path in paths
            for offset in range(0, path.stat().st_size, DIRECT_PIECE)
        ]
        self._staging = [aligned_buffer(DIRECT_PIECE, huge=True) for _ in range(DIRECT_THREADS)]

    def read(self) -> int:
        """Read them all; returns their bytes, whatever these are for."""
        following = itertools.count()

        def work(number: int) -> None:
            staging = self._staging[number].data
            while (turn := next(following)) < len(self._pieces):
                path, offset, length = self._pieces[turn]
                fd = os.open(path, self._flag)
                try:
                    # Whole units, also at the end of a file, where fewer bytes come.
                    whole = -(-length // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
                    got = os.preadv(fd, [staging[:whole]], offset)
                finally:
                    os.close(fd)
                if got != length:
                    raise OSError(f"{path} gave {got} of {length} bytes at {offset}")

        in_threads(DIRECT_THREADS, work)
        return sum(length for _, _, length in self._pieces)


def _read_exactly(fd: int, view: memoryview, offset: int) -> None:
    got = os.preadv(fd, [view], offset)
    if got != view.nbytes:
        raise OSError(f"the raw limit's file gave {got} of {view.nbytes} bytes at {offset}")


def _write_exactly(fd: int, view: memoryview, offset: int) -> None:
    put = os.pwritev(fd, [view], offset)
    if put != view.nbytes:
        raise OSError(f"the raw limit's file took {put} of {view.nbytes} bytes at {offset}")
