"""A bounded set of reusable, page-aligned buffers that reads land in.

Fresh anonymous memory costs a page fault for every 4 KiB, about as much as reading a cached file
into it; so buffers go round. Page alignment is what ``O_DIRECT`` asks of memory.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading

from kvstore.errors import InvalidArgument, StorageError

SMALLEST = 64 << 10
HUGE_PAGE = 2 << 20


def rounded(nbytes: int, smallest: int = SMALLEST) -> int:
    """The size of buffer used for a request: the next of 2^k and 3 * 2^(k-1), or the smallest.

    Few sizes, so that buffers get reused, with at most half of one wasted.
    """
    if nbytes <= smallest:
        return smallest
    power = 1 << (nbytes - 1).bit_length()
    return power // 4 * 3 if nbytes <= power // 4 * 3 else power


class Staging:
    """Hands out buffers, of which no more than ``max_bytes`` exist at any time.

    A request for more than that is served too, when no other buffer is in use, and others wait
    until it is given back: what has to be in memory in one piece can be as large as memory is.

    Safe between threads. Requests are served in the order they came in, so a large one is not
    starved by small ones. A thread must hold no buffer while it asks for one: this is what makes
    waiting safe.
    """

    def __init__(self, max_bytes: int, users: int = 1) -> None:
        """Make an empty pool.

        Args:
            max_bytes: the bound.
            users: threads that should all get a buffer at the same time. If the bound lets them
                have a huge page each (2 MiB), no buffer is smaller.

        Raises:
            InvalidArgument: less than the smallest buffer, 64 KiB.
        """
        if max_bytes < SMALLEST:
            raise InvalidArgument(
                f"max_staging_bytes is {max_bytes}; the smallest buffer takes {SMALLEST}"
            )
        self.max_bytes = max_bytes
        self._smallest = HUGE_PAGE if max_bytes >= users * HUGE_PAGE else SMALLEST
        self._allocated = 0
        self._free: list[memoryview] = []
        self._changed = threading.Condition(threading.Lock())
        self._last_ticket = 0
        self._queue: list[int] = []

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers that exist now, in use or waiting for use."""
        return self._allocated

    def acquire(self, nbytes: int, timeout: float | None = None) -> memoryview:
        """A page-aligned buffer of at least ``nbytes``; give it back with :meth:`release`.

        Of more than ``max_bytes``, only once all others have been given back.

        Args:
            nbytes: bytes needed.
            timeout: seconds to wait for others to give theirs back; None: for ever.

        Raises:
            StorageError: the time passed, or there is not as much memory.
        """
        size = min(rounded(nbytes, self._smallest), self.max_bytes)
        if nbytes > size:
            size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._changed:
            self._last_ticket += 1
            ticket = self._last_ticket
            self._queue.append(ticket)
            try:
                found: list[memoryview] = []
                if not self._changed.wait_for(lambda: self._serve(ticket, size, found), timeout):
                    raise StorageError(
                        f"no staging buffer came free in {timeout} s: earlier reads still hold "
                        f"{self._allocated} bytes; is the medium stuck?"
                    )
                return found[0]
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def release(self, buffer: memoryview) -> None:
        """Take back a buffer that :meth:`acquire` gave; its bytes may change from here on."""
        with self._changed:
            if len(buffer) > self.max_bytes:
                self._drop(buffer)  # too large to be kept
            else:
                self._free.append(buffer)
            if self._queue:
                self._changed.notify_all()

    def close(self) -> None:
        """Free the buffers that nobody uses. Buffers in use are freed with their last user."""
        with self._changed:
            while self._free:
                self._drop(self._free.pop())

    def _serve(self, ticket: int, size: int, found: list[memoryview]) -> bool:
        """Try to serve a request, if it is the oldest one; the lock is held."""
        if self._queue[0] != ticket:
            return False
        fitting = [b for b in self._free if size <= len(b) <= 2 * size]
        if fitting:
            best = min(fitting, key=len)
            # By identity: comparing memoryviews compares their bytes.
            self._free = [b for b in self._free if b is not best]
            found.append(best)
            return True
        while self._allocated + size > self.max_bytes and self._free:
            self._drop(self._free.pop())
        if self._allocated and self._allocated + size > self.max_bytes:
            return False
        memory = _memory(size)
        if size >= HUGE_PAGE:
            # A direct read into huge pages takes half the processor time, and fewer, longer
            # requests to the device. Kernels without them say EINVAL.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._allocated += size
        found.append(memoryview(memory))
        return True

    def _drop(self, buffer: memoryview) -> None:
        memory = buffer.obj
        self._allocated -= len(buffer)
        # A consumer that kept a view keeps the memory; it is freed when that view goes.
        with contextlib.suppress(BufferError):
            buffer.release()
            if isinstance(memory, mmap.mmap):
                memory.close()


def _memory(size: int) -> mmap.mmap:
    try:
        # Private: the default, shared, would let a forked child write into its parent's buffers.
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise StorageError(
            errno.ENOMEM,
            f"there is no memory for a piece of {size} bytes ({error}); free some, or make a layer "
            f"group with a smaller shard_layers, shard_heads or extent_blocks",
        ) from error
