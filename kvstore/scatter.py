"""Scatter and gather: chunks of canonical bytes into and out of a rank's paged buffers.

On the host this is one call of :mod:`kvstore.rowcopy`. Where that was not built, it is NumPy fancy
indexing over views whose items are whole runs of bytes (NumPy's void type). Both copy with the
interpreter lock released.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.buffers import PagedBuffers
from kvstore.errors import InvalidArgument
from kvstore.native import Sink
from kvstore.placement import Placement
from kvstore.rowcopy import Part, Parts, functions
from kvstore.segments import Segment
from kvstore.sums import first_mismatch, put_sums
from kvstore.tiles import TiledParts

Slots = Sequence[tuple[int, int]]

_ITEM_BYTES = 64
_MIN_CUT_BYTES = 512


@dataclass(frozen=True, slots=True)
class _Run:
    """How one unit of one segment moves: ``count`` items, evenly spaced on both sides.

    NumPy copies with the interpreter lock released only where an index picks rows of several items,
    or some 500 rows; so a long run of bytes is cut into items, and two threads copy at once. The
    sizes are measured.
    """

    count: int
    nbytes: int
    page_step: int
    chunk_step: int
    row_step: int
    content_offset: int

    @classmethod
    def of(cls, segment: Segment, unit: int, token_bytes: int) -> _Run:
        row_step, offset = unit * segment.token_stride, segment.content_offset
        if unit > 1 and not segment.nbytes == token_bytes == segment.token_stride:
            step = segment.token_stride
            return cls(unit, segment.nbytes, step, token_bytes, row_step, offset)
        whole = unit * segment.nbytes
        item = math.gcd(whole, _ITEM_BYTES)
        if whole < _MIN_CUT_BYTES or item < _ITEM_BYTES:
            return cls(1, whole, whole, whole, row_step, offset)
        return cls(whole // item, item, item, item, row_step, offset)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Chunks of a piece, in one segment, that move alike: one NumPy call moves them all.

    Attributes:
        run: how a unit of them moves.
        places: their places in the piece; None: all of it.
        starts: row of the pages at which each one's block 0 starts.
        block_rows: rows from an engine block to the next.
        unit_rows: rows from a unit of an engine block to the next.
    """

    run: _Run
    places: list[int] | None
    starts: NDArray[np.int64]
    block_rows: int
    unit_rows: int


_MAX_BATCHES = 1 << 16


class IndexedPages(Protocol):
    """Pages whose chunks are moved by indexing, worked out anew for each move."""

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """Copy chunks out of ``data``, one every ``stride`` bytes, into the pages."""

    def gather(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """Copy from the pages into chunks in ``data``, one every ``stride`` bytes."""


class Whole:
    """Chunks on their way to or from such pages; see :class:`kvstore.pages.Mover`."""

    def __init__(
        self, pages: IndexedPages, slots: Slots, where: Placement, chunk_bytes: int, stride: int
    ) -> None:
        self._pages = pages
        self._slots = slots
        self._where = where
        self._chunk_bytes = chunk_bytes
        self._stride = stride

    def scatter(self, data: memoryview, first: int, count: int, *, verify: bool) -> int | None:
        """See :class:`kvstore.pages.Mover`."""
        if verify:
            wrong = first_mismatch(data, count, self._chunk_bytes, self._stride)
            if wrong is not None:
                return first + wrong
        slots = self._slots[first : first + count]
        self._pages.scatter(slots, self._where, data, self._stride)
        return None

    def gather(self, data: memoryview, first: int, count: int, *, sums: bool) -> None:
        """See :class:`kvstore.pages.Mover`."""
        slots = self._slots[first : first + count]
        self._pages.gather(slots, self._where, data, self._stride)
        if sums:
            put_sums(data, count, self._chunk_bytes, self._stride)

    def sink(self, *, verify: bool) -> Sink | None:
        """Never."""
        del verify
        return None


class HostPages:
    """Pages in host memory.

    All layers' tensors are looked at as one array: rows that start every few bytes, from the lowest
    byte of any of them to the highest. What lies between the tensors is never touched, as rows are
    picked by index. So all chunks of a piece move in one call, whichever layer they belong to.

    Args:
        buffers: the paged buffers.
        fast: use the C function, where it was built.
    """

    def __init__(self, buffers: PagedBuffers, *, fast: bool = True) -> None:
        self._functions = functions() if fast else None
        self._buffers = buffers
        self._token_bytes = buffers.group.token_bytes
        self._batches: dict[tuple[tuple[tuple[int, int], ...], int], tuple[_Batch, ...]] = {}
        self._pages: dict[_Run, NDArray[Any]] = {}
        segments = [s for layer in buffers.layers for s in layer]
        starts = [s.start for s in segments]
        self._segments, self._starts = segments, starts
        self._base = min(starts, default=0)
        end = max((a + s.reach for a, s in zip(starts, segments, strict=True)), default=0)
        memory = (ctypes.c_char * (end - self._base)).from_address(self._base)
        self._memory = memoryview(memory).cast("B")
        steps = {step for s in segments for step, _ in s.axes}
        self._grain = math.gcd(*steps, *(a - self._base for a in starts)) or 1
        self._tiles: TiledParts | None = None
        if any(s.tiling is not None for s in segments):
            self._tiles = TiledParts(buffers, self._memory, self._base, self._grain)

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """See :class:`IndexedPages`."""
        if not len(where.block):
            return
        where = self._countable(where)
        for batch in self._batches_of(slots, where.unit):
            chunks, index = self._sides(batch, where, data, len(slots), stride)
            if where.source is not None:
                chunks = chunks[:, where.source]
            self._rows(batch.run)[index] = chunks if batch.places is None else chunks[batch.places]
        if self._tiles is not None:
            self._tiles.scatter(slots, where, data, stride)

    def gather(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """See :class:`IndexedPages`."""
        if not len(where.block):
            return
        where = self._countable(where)
        for batch in self._batches_of(slots, where.unit):
            chunks, index = self._sides(batch, where, data, len(slots), stride)
            columns: Any = slice(None) if where.source is None else where.source
            found = self._rows(batch.run)[index]
            if batch.places is None:
                chunks[:, columns] = found
            else:
                for place, rows in zip(batch.places, found, strict=True):
                    chunks[place, columns] = rows
        if self._tiles is not None:
            self._tiles.gather(slots, where, data, stride)

    def require_unmoved(self) -> None:
        """See :class:`kvstore.pages.Pages`."""
        if [s.start for s in self._segments] != self._starts:
            raise InvalidArgument(
                "the memory of the paged buffers is elsewhere than when the worker was made "
                "(resize_ and share_memory_ move it); make new buffers and a new worker"
            )

    def mover(self, slots: Slots, where: Placement, chunk_bytes: int, stride: int) -> Parts | Whole:
        """See :class:`kvstore.pages.Pages`."""
        if self._tiles is not None or self._functions is None or not len(where.block):
            return Whole(self, slots, where, chunk_bytes, stride)
        source = np.arange(len(where.block)) if where.source is None else where.source
        parts = []
        for batch in self._batches_of(slots, where.unit):
            run = batch.run
            starts = batch.starts * self._grain
            if batch.places is not None:
                starts = np.full(len(slots), -1, dtype=np.int64)
                starts[batch.places] = batch.starts * self._grain
            rows = where.block * batch.block_rows + where.slot * batch.unit_rows
            parts.append(
                Part(
                    starts,
                    rows * self._grain,
                    source * (where.unit * self._token_bytes),
                    run.content_offset,
                    run.count,
                    run.nbytes,
                    run.page_step,
                    run.chunk_step,
                )
            )
        memory = self._base, len(self._memory)
        return Parts(self._functions, memory, parts, chunk_bytes, stride)

    def _countable(self, where: Placement) -> Placement:
        """Placement in tokens if rows of whole units, which overlap, are too many bytes for NumPy.

        So it is with long units in tensors that lie far apart and at addresses of no common step.
        """
        rows = len(self._memory) // self._grain + 1
        return where if rows * where.unit * self._token_bytes < 1 << 63 else where.split()

    def _sides(
        self, batch: _Batch, where: Placement, data: memoryview, count: int, stride: int
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Units ``[chunk, unit, item]`` of the piece, and the row of each in the pages."""
        run = batch.run
        used = len(where.block) if where.source is None else int(where.source[-1]) + 1
        chunks: NDArray[Any] = np.ndarray(
            (count, used, run.count),
            f"V{run.nbytes}",
            data,
            run.content_offset,
            (stride, where.unit * self._token_bytes, run.chunk_step),
        )
        rows = where.block * batch.block_rows + where.slot * batch.unit_rows
        return chunks, batch.starts[:, None] + rows

    def _rows(self, run: _Run) -> NDArray[Any]:
        """The pages as rows of one unit each, ``[row, item]``; rows overlap."""
        found = self._pages.get(run)
        if found is None:
            reach = (run.count - 1) * run.page_step + run.nbytes
            rows = (len(self._memory) - reach) // self._grain + 1
            steps = (self._grain, run.page_step)
            dtype = f"V{run.nbytes}"
            found = np.ndarray((rows, run.count), dtype, self._memory, 0, steps)
            self._pages[run] = found
        return found

    def _batches_of(self, slots: Slots, unit: int) -> tuple[_Batch, ...]:
        """How the chunks of such a piece move; the same pieces come again with every extent."""
        key = (tuple(slots), unit)
        found = self._batches.get(key)
        if found is None:
            found = tuple(self._plan(slots, unit))
            if len(self._batches) >= _MAX_BATCHES:
                self._batches.clear()
            self._batches[key] = found
        return found

    def _plan(self, slots: Slots, unit: int) -> Iterator[_Batch]:
        groups: dict[tuple[int, _Run, int], list[tuple[int, int]]] = {}
        for i, (layer, head) in enumerate(slots):
            for n, s in enumerate(self._buffers.layers[layer]):
                if s.tiling is not None:
                    continue
                run = _Run.of(s, unit, self._token_bytes)
                start = s.start + head * s.head_stride - self._base
                alike = groups.setdefault((n, run, s.block_stride), [])
                alike.append((i, start // self._grain))
        for (_, run, block_stride), members in groups.items():
            yield _Batch(
                run,
                None if len(members) == len(slots) else [i for i, _ in members],
                np.array([start for _, start in members], dtype=np.int64),
                block_stride // self._grain,
                run.row_step // self._grain,
            )
