"""Scatter and gather: chunks of canonical bytes into and out of a rank's paged buffers.

On the host this is NumPy fancy indexing over views whose items are whole runs of bytes (NumPy's
void type), which copies at about the speed of memcpy and with the interpreter lock released. On
other devices a chunk is copied there once and spread by torch indexing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.buffers import PagedBuffers
from kvstore.errors import InvalidArgument
from kvstore.placement import Placement
from kvstore.segments import Segment
from kvstore.tiles import TiledParts, tiled_view

if TYPE_CHECKING:
    import torch

Slots = Sequence[tuple[int, int]]
"""(layer of the rank, head of the rank) of consecutive chunks."""


class Pages(Protocol):
    """Moves chunks between canonical bytes and paged buffers."""

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """Copy chunks out of ``data``, one every ``stride`` bytes, into the pages."""

    def gather(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """Copy from the pages into chunks in ``data``, one every ``stride`` bytes."""

    def runs(
        self, slots: Slots, where: Placement, chunk_bytes: int
    ) -> tuple[NDArray[np.int64], int] | None:
        """The memory of whole chunks as long runs of one length; None where it is not so.

        Returns:
            Addresses ``[chunk, run]`` and the bytes of each run.
        """

    def require_unmoved(self) -> None:
        """Check that the buffers are still where they were; raises InvalidArgument."""


def pages_of(buffers: PagedBuffers) -> Pages:
    """The mover for the device that the buffers are on."""
    if buffers.device is None or buffers.device.type == "cpu":
        return HostPages(buffers)
    return DevicePages(buffers)


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

MIN_RUN_BYTES = 2048
"""Shorter runs cost more to hand to the kernel one by one than to copy."""


class HostPages:
    """Pages in host memory.

    All layers' tensors are looked at as one array: rows that start every few bytes, from the lowest
    byte of any of them to the highest. What lies between the tensors is never touched, as rows are
    picked by index. So all chunks of a piece move in one call, whichever layer they belong to.
    """

    def __init__(self, buffers: PagedBuffers) -> None:
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
        """See :class:`Pages`."""
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
        """See :class:`Pages`."""
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

    def runs(
        self, slots: Slots, where: Placement, chunk_bytes: int
    ) -> tuple[NDArray[np.int64], int] | None:
        """See :class:`Pages`."""
        nbytes = where.unit * self._token_bytes
        if where.source is not None or len(where.block) * nbytes != chunk_bytes:
            return None  # not the whole chunk is wanted here
        if self._tiles is not None:
            return None
        batches = self._batches_of(slots, where.unit)
        run = batches[0].run
        whole = run.count * run.nbytes == nbytes and run.page_step == run.nbytes
        if nbytes < MIN_RUN_BYTES or not whole or len(batches) > 1:
            return None
        rows = where.block * batches[0].block_rows + where.slot * batches[0].unit_rows
        return self._base + (batches[0].starts[:, None] + rows) * self._grain, nbytes

    def require_unmoved(self) -> None:
        """See :class:`Pages`."""
        if [s.start for s in self._segments] != self._starts:
            raise InvalidArgument(
                "the memory of the paged buffers is elsewhere than when the worker was made "
                "(resize_ and share_memory_ move it); make new buffers and a new worker"
            )

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


class DevicePages:
    """Pages on any device that torch knows."""

    def __init__(self, buffers: PagedBuffers) -> None:
        self._buffers = buffers
        self._token_bytes = buffers.group.token_bytes

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """See :class:`Pages`."""
        import torch

        tokens = where.split()
        if not len(tokens.block):
            return
        block, slot, source = self._index(tokens)
        count = len(tokens.block) if tokens.source is None else int(tokens.source[-1]) + 1
        host = self._chunks(data, len(slots), count, stride)
        device = torch.from_numpy(host.copy()).to(self._buffers.device)
        for i, (layer, head) in enumerate(slots):
            chunk = device[i] if source is None else device[i][source]
            for segment in self._buffers.layers[layer]:
                part = chunk[:, segment.content_offset : segment.content_offset + segment.nbytes]
                if segment.tiling is None:
                    self._view(segment, head)[block, slot] = part
                else:
                    tile = segment.tiling.tile_tokens
                    view = tiled_view(segment, head)
                    items = part.reshape(len(part), *view.shape[3:])
                    view[block, slot // tile, slot % tile] = items

    def gather(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """See :class:`Pages`."""
        tokens = where.split()
        if not len(tokens.block):
            return
        block, slot, _ = self._index(tokens)
        count = len(tokens.block) if tokens.source is None else int(tokens.source[-1]) + 1
        host = self._chunks(data, len(slots), count, stride)
        for i, (layer, head) in enumerate(slots):
            for segment in self._buffers.layers[layer]:
                if segment.tiling is None:
                    found = self._view(segment, head)[block, slot]
                else:
                    tile = segment.tiling.tile_tokens
                    found = tiled_view(segment, head)[block, slot // tile, slot % tile]
                part = found.reshape(len(found), -1).cpu().numpy()
                columns = slice(segment.content_offset, segment.content_offset + segment.nbytes)
                rows = slice(None) if tokens.source is None else tokens.source
                host[i][rows, columns] = part

    def runs(
        self, slots: Slots, where: Placement, chunk_bytes: int
    ) -> tuple[NDArray[np.int64], int] | None:
        """Never: the kernel reads into host memory only."""
        del slots, where, chunk_bytes
        return None

    def require_unmoved(self) -> None:
        """See :class:`Pages`: a tensor's address is asked for anew at each move."""

    def _index(self, tokens: Placement) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        import torch

        device = self._buffers.device
        block = torch.from_numpy(tokens.block).to(device)
        slot = torch.from_numpy(tokens.slot).to(device)
        if tokens.source is None:
            return block, slot, None
        return block, slot, torch.from_numpy(tokens.source).to(device)

    def _chunks(self, data: memoryview, chunks: int, tokens: int, stride: int) -> NDArray[np.uint8]:
        shape = (chunks, tokens, self._token_bytes)
        return np.ndarray(shape, np.uint8, data, 0, (stride, self._token_bytes, 1))

    def _view(self, s: Segment, head: int) -> torch.Tensor:
        """Bytes ``[block, token, nbytes]`` of one head of one segment."""
        import torch

        flat = torch.empty(0, dtype=torch.uint8, device=s.tensor.device)
        flat.set_(s.tensor.untyped_storage())
        return flat.as_strided(
            (s.blocks, s.tokens, s.nbytes),
            (s.block_stride, s.token_stride, 1),
            s.address + head * s.head_stride,
        )
