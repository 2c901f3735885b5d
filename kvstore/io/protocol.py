"""What an I/O engine is: the one boundary between the store and a medium.

An engine is opened on a root. Every path given to it is relative to that root, uses ``/``, and was
built by :mod:`kvstore.paths`, so an engine never sees a name that came from outside; it refuses all
the same what could leave the root (``InvalidArgument``). All engines pass the suite in
``tests/conformance``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.native import Sink

Buffer = Any
"""Something C-contiguous with the buffer protocol (bytes, memoryview, NumPy array of bytes)."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A run of bytes to read from one stored object.

    Attributes:
        path: the object.
        offset: first byte.
        length: number of bytes, all of which must exist. A range of no bytes only asks whether the
            object is there: ``consume`` is not called for it.
        piece: the engine hands the range over whole, or in consecutive pieces whose lengths are
            multiples of this (the last may be shorter). 0: only whole, in one call, which takes
            staging memory of that size.
    """

    path: str
    offset: int
    length: int
    piece: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an object, or a folder with all in it, takes, and how long it has been left alone.

    Attributes:
        nbytes: bytes of its objects.
        age: seconds since anything in it changed; negative where a clock runs ahead.
    """

    nbytes: int
    age: float


Consume = Callable[[int, int, "memoryview"], None]
"""``consume(range index, offset within the range, bytes)``, called in an I/O thread.

The memory belongs to the engine and is reused after the call returns: a consumer copies out of it
and keeps no view. (It is writable, and may be used as scratch until then.) Pieces of one range come
in order, from one thread; different ranges come at once. ``consume`` is never called after ``read``
has returned or raised. A small batch is read by the calling thread itself. A consumer must not call
``read``; other calls are fine.
"""


SinkOf = Callable[[int], Sink | None]
"""``sink_of(range index)``, called in an I/O thread before a range is read.

An answer lets the engine hand bytes over with no interpreter in between; what the sink refuses, and
all after it, goes to ``consume``. None: all of it goes there. An engine is free never to ask.
"""


class Engine(Protocol):
    """Reads, writes and publishes the objects of one store. Safe between threads and processes.

    Durability: when a writing call returns, what it did outlives a power failure. With ``settle``
    off this holds for an object's bytes alone, not yet for its name, nor for folders made for it:
    these become durable when the folder that they are in is given to :meth:`sync`, or published.
    For what is being written, this saves most of the waiting for the medium.

    Errors, for every call: ``kvstore.errors.StorageError`` when the medium fails,
    ``kvstore.errors.NotFound`` when an object is absent where the call needs it,
    ``kvstore.errors.InvalidArgument`` for a path that could leave the root, or a writing call on an
    engine that was opened read-only.
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
        """Names directly below a folder ("": the root), sorted; empty when there is no such folder.

        Objects that :meth:`write` and :meth:`create` are still writing have no name yet.
        """

    # -- small objects ----------------------------------------------------------------------------

    def get(self, path: str, limit: int) -> bytes:
        """A whole small object.

        Raises:
            Corrupt: it has more than ``limit`` bytes.
        """

    def create(self, path: str, data: bytes, *, settle: bool = True) -> bool:
        """Create an object whole and at once, only if absent (parents are made).

        Returns:
            True when this call created it, False when one was there already.
        """

    # -- bulk -------------------------------------------------------------------------------------

    def read(
        self, ranges: Sequence[ByteRange], consume: Consume, sink_of: SinkOf | None = None
    ) -> list[Exception | None]:
        """Read many ranges at once, each handed to ``consume`` as it arrives.

        An engine may ask ``sink_of`` for any of them, or never.

        Ranges are started in order. One range's failure does not touch another's; what of a failed
        range was handed over before the failure must not be used.

        Returns:
            For each range None, or what went wrong: :class:`~kvstore.errors.NotFound` (no such
            object), :class:`~kvstore.errors.Corrupt` (shorter than asked),
            :class:`~kvstore.errors.StorageError` (also: no memory for a piece),
            :class:`~kvstore.errors.InvalidArgument` (a negative number), or what ``consume``
            raised.
        """

    def write(self, path: str, pieces: Sequence[Buffer], *, settle: bool = True) -> None:
        """Write an object whole, from pieces that follow one another (parents are made).

        Nobody sees it before all of it is there. It replaces one of that name.
        """

    def write_into(
        self,
        path: str,
        size: int,
        pieces: Sequence[tuple[int, Buffer]],
        *,
        create: bool = True,
    ) -> None:
        """Write byte runs, as (offset, bytes), into an object that several writers fill.

        The first writer makes it, and its parents, with ``size`` bytes that read as zero. Runs of
        different writers do not overlap; the store sees to that. Not durable before :meth:`sync`.
        With ``create`` off it is never made, so that a late writer cannot bring one back.

        Raises:
            NotFound: the object is absent and ``create`` is off.
            Corrupt: the object is there with another size.
            InvalidArgument: a run outside the object.
        """

    def sync(self, paths: Sequence[str]) -> None:
        """Make objects (or folders' entries) durable before this returns.

        Needed after :meth:`write_into`, and for names after a call with ``settle`` off. Does
        nothing where the engine was opened without durability.
        """

    # -- publication ------------------------------------------------------------------------------

    def rename(self, source: str, target: str, *, settle: bool = True) -> None:
        """Give a finished object its final name, at once; replaces an object of that name.

        The object's bytes are made durable first (parents of ``target`` are made).
        """

    def link(self, source: str, target: str) -> bool:
        """Give an object a second name, only if that is not taken (parents are made).

        For hints: it is not durable, and an engine without links may copy. The second name outlives
        the first.

        Returns:
            True when this call did it, False when an object of that name was there.

        Raises:
            NotFound: ``source`` is not there.
        """

    def publish(self, source: str, target: str) -> bool:
        """Make a finished folder visible under its final name, whole and at once.

        The store has made the bytes of the objects in it durable; this makes their names durable,
        and then the folder's. Parents of ``target`` are made. After a power failure the folder may
        have its old name too.

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

    # -- what dead processes left -----------------------------------------------------------------

    def leavings(self, older_than: float) -> list[str]:
        """Objects whose writing was cut off, and discarded folders whose bytes were not freed.

        :meth:`discard` frees each.

        Args:
            older_than: seconds for which an unfinished object must not have been written to.
        """

    def footprint(self, path: str) -> Footprint:
        """Bytes and age of an object, or of a folder with all in it.

        Raises:
            NotFound: nothing is there.
        """

    def close(self) -> None:
        """Release threads and staging memory. Calls after this raise ``StorageError``."""
