"""What an I/O engine is: the one boundary between the store and a medium.

An engine is opened on a root. Every path given to it is relative to that root, uses ``/``, and was
built by :mod:`kvstore.paths`, so an engine never sees a name that came from outside. All engines
pass the suite in ``tests/conformance``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Buffer = Any
"""Something with the buffer protocol (bytes, memoryview, NumPy array of bytes)."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A run of bytes to read from one stored object.

    Attributes:
        path: the object.
        offset: first byte.
        length: number of bytes, all of which must exist.
        piece: the engine hands the range over whole, or in consecutive pieces whose lengths are
            multiples of this (the last may be shorter). 0: only whole.
    """

    path: str
    offset: int
    length: int
    piece: int = 0


Consume = Callable[[int, int, "memoryview"], None]
"""``consume(range index, offset within the range, bytes)``, called in an I/O thread.

The memory belongs to the engine and is reused after the call returns. It is writable-free: consumers
copy out of it. Pieces of one range come in order, from one thread; different ranges come at once.
"""


class Engine(Protocol):
    """Reads, writes and publishes the objects of one store.

    Errors, for every call: ``kvstore.errors.StorageError`` when the medium fails,
    ``kvstore.errors.NotFound`` when an object is absent where the call needs it.
    """

    @property
    def name(self) -> str:
        """Short name, for reports: ``posix``, ``gds`` ..."""

    @property
    def location(self) -> str:
        """The root, as a person would write it."""

    @property
    def read_only(self) -> bool:
        """True when every writing call is refused."""

    # -- names ------------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """Whether an object of that name is there. Cheap: it is the lookup path."""

    def size(self, path: str) -> int:
        """Bytes of an object."""

    def list_dir(self, path: str) -> list[str]:
        """Names directly below a folder, sorted; empty when there is no such folder."""

    # -- small objects ----------------------------------------------------------------------------

    def get(self, path: str, limit: int) -> bytes:
        """A whole small object.

        Raises:
            Corrupt: it has more than ``limit`` bytes.
        """

    def create(self, path: str, data: bytes) -> bool:
        """Create an object whole and at once, only if absent (parents are made).

        Returns:
            True when this call created it, False when one was there already.
        """

    # -- bulk -------------------------------------------------------------------------------------

    def read(
        self, ranges: Sequence[ByteRange], consume: Consume
    ) -> list[Exception | None]:
        """Read many ranges at once, each handed to ``consume`` as it arrives.

        Ranges are started in order. One range's failure does not touch another's.

        Returns:
            For each range None, or what went wrong: :class:`~kvstore.errors.NotFound` (no such
            object), :class:`~kvstore.errors.Corrupt` (shorter than asked),
            :class:`~kvstore.errors.StorageError`, or what ``consume`` raised.
        """

    def write(self, path: str, pieces: Sequence[Buffer]) -> None:
        """Write an object whole: nobody sees it before all of it is there. Replaces one of that name."""

    def write_into(self, path: str, size: int, pieces: Sequence[tuple[int, Buffer]]) -> None:
        """Write byte runs into an object that several writers fill, made with ``size`` bytes if absent.

        Runs of different writers do not overlap; the store sees to that.

        Raises:
            Corrupt: the object is there with another size.
        """

    def sync(self, paths: Sequence[str]) -> None:
        """Make objects (or folders' entries) durable before this returns, where the engine is durable."""

    # -- publication ------------------------------------------------------------------------------

    def rename(self, source: str, target: str) -> None:
        """Give a finished object its final name, at once; replaces an object of that name."""

    def publish(self, source: str, target: str) -> bool:
        """Make a finished folder visible under its final name, whole and at once.

        Returns:
            True when this call did it, False when a folder was there already (``source`` is left).

        Raises:
            NotFound: ``source`` is not there (another process published or discarded it).
        """

    def discard(self, path: str) -> bool:
        """Remove an object or a whole folder: it vanishes at once, its bytes are freed after.

        Returns:
            False when nothing was there.
        """

    def close(self) -> None:
        """Release threads and staging memory. Calls after this raise ``StorageError``."""
