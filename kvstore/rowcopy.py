"""Moving chunks between canonical bytes and pages, by ``native/rowcopy.c``.

Where that was not built, :mod:`kvstore.scatter` does the same with NumPy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.native import Sink, library

Offsets = NDArray[np.int64]


class _Part(ctypes.Structure):
    """``part_t`` of the C source."""

    _fields_ = (
        ("starts", ctypes.c_void_p),
        ("page_units", ctypes.c_void_p),
        ("data_units", ctypes.c_void_p),
        ("units", ctypes.c_int64),
        ("content", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
        ("page_step", ctypes.c_int64),
        ("data_step", ctypes.c_int64),
    )


class _Pages(ctypes.Structure):
    """``pages_t`` of the C source."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
        ("parts", ctypes.c_void_p),
        ("number", ctypes.c_int64),
        ("chunks", ctypes.c_int64),
        ("chunk_bytes", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("crc", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Functions:
    """The C functions, and the checksum that they are given.

    Attributes:
        move: ``kvstore_move`` of the C source.
        sinks: addresses of ``kvstore_sink`` and ``kvstore_sink_checked``.
        crc: address of libcrc32c's ``crc32c_extend``.
    """

    move: Any
    sinks: tuple[int, int]
    crc: int


@cache
def functions() -> Functions | None:
    """The C functions; None where they were not built, or are not wanted."""
    found, crc = library(), _libcrc32c()
    if found is None or crc is None:
        return None
    move, number = found.kvstore_move, ctypes.c_int64
    move.restype = number
    move.argtypes = (
        *(ctypes.c_void_p, ctypes.c_void_p, number, number, number),
        *(ctypes.c_int, ctypes.c_int),
    )
    sinks = (_address(found.kvstore_sink), _address(found.kvstore_sink_checked))
    return Functions(move, sinks, crc)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _libcrc32c() -> int | None:
    """Address of ``crc32c_extend``, in the library of google-crc32c, which zarr requires."""
    try:
        from google_crc32c import _crc32c

        function = ctypes.CDLL(_crc32c.__file__).crc32c_extend
    except (ImportError, OSError, AttributeError, TypeError):
        return None  # installed without its C part
    return _address(function)


@dataclass(frozen=True, slots=True)
class Part:
    """How the rows of one part of the content lie in pages and chunks; all in bytes.

    Attributes:
        starts: offset in the pages of each chunk, negative for one that has no such part.
        page_units: offset in the pages of each unit, from its chunk's start.
        data_units: offset in the chunk of each unit.
        content: offset of the part in a unit.
        count: items of a unit, each of ``nbytes``.
        nbytes: bytes of an item.
        page_step: from one item to the next, in the pages.
        data_step: the same in the chunk.
    """

    starts: Offsets
    page_units: Offsets
    data_units: Offsets
    content: int
    count: int
    nbytes: int
    page_step: int
    data_step: int


class Parts:
    """All parts of some chunks, ready to be moved piece by piece; a :class:`kvstore.pages.Mover`.

    What a call then costs under the interpreter lock is little more than the call. That matters:
    while one thread has the lock, no other starts its next read.

    Args:
        found: what :func:`functions` gave.
        pages: address and bytes of the memory that the pages lie in.
        parts: the parts.
        chunk_bytes: bytes of a chunk.
        stride: bytes from one to the next.

    Raises:
        IndexError: the parts speak of different numbers of chunks, or of units.
    """

    __slots__ = ("_chunks", "_functions", "_held", "_pages", "_parts")

    def __init__(
        self,
        found: Functions,
        pages: tuple[int, int],
        parts: Sequence[Part],
        chunk_bytes: int,
        stride: int,
    ) -> None:
        self._functions = found
        self._chunks = min((len(part.starts) for part in parts), default=0)
        self._held: list[Offsets] = []
        self._parts = (_Part * len(parts))(*map(self._packed, parts))
        self._pages = _Pages(
            *pages,
            ctypes.addressof(self._parts),
            *(len(parts), self._chunks, chunk_bytes, stride),
            found.crc,
        )

    def _packed(self, part: Part) -> _Part:
        if len(part.starts) != self._chunks or len(part.page_units) != len(part.data_units):
            raise IndexError("parts of different numbers of chunks, or of units")
        given = (part.starts, part.page_units, part.data_units)
        arrays = [np.ascontiguousarray(each, dtype=np.int64) for each in given]
        self._held += arrays
        return _Part(
            *(each.ctypes.data for each in arrays),
            *(len(part.page_units), part.content, part.count, part.nbytes),
            *(part.page_step, part.data_step),
        )

    def scatter(self, data: memoryview, first: int, count: int, *, verify: bool) -> int | None:
        """See :class:`kvstore.pages.Mover`."""
        return self.move(data, first, count, to_pages=True, sums=verify)

    def gather(self, data: memoryview, first: int, count: int, *, sums: bool) -> None:
        """See :class:`kvstore.pages.Mover`."""
        self.move(data, first, count, to_pages=False, sums=sums)

    def move(
        self, data: memoryview, first: int, count: int, *, to_pages: bool, sums: bool
    ) -> int | None:
        """Move chunks ``first`` to ``first + count - 1``; ``data`` starts with the first of them.

        Args:
            data: memory of chunks.
            first: the first chunk.
            count: how many.
            to_pages: the direction.
            sums: a checksum follows each chunk: compare it, or put it there.

        Returns:
            The first chunk that does not match its checksum; what is before it was moved. None: all
            were moved.

        Raises:
            IndexError: an offset leads out of either memory; nothing was touched.
        """
        memory = np.frombuffer(data, np.uint8)
        moved: int = self._functions.move(
            ctypes.addressof(self._pages),
            memory.__array_interface__["data"][0],
            memory.nbytes,
            first,
            count,
            to_pages,
            sums,
        )
        if moved < 0:
            raise IndexError("rows lie outside of the memory that was given")
        return None if moved == count else first + moved

    def sink(self, *, verify: bool) -> Sink:
        """See :class:`kvstore.pages.Mover`."""
        return Sink(self._functions.sinks[verify], ctypes.addressof(self._pages), self)
