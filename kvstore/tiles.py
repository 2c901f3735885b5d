"""Tiled pages: parts whose tokens or elements lie in tiles, or across each other, inside a page.

The same as :mod:`kvstore.scatter` does for plain pages, with rows that are boxes of tokens and
elements instead of runs of bytes: NumPy picks boxes by index and walks both sides' steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.buffers import PagedBuffers
from kvstore.placement import Placement
from kvstore.segments import Segment, Tiling

if TYPE_CHECKING:
    import torch

Slots = Sequence[tuple[int, int]]


_LONG = 32
"""Items of NumPy's innermost loop that make up for its start; what is longer gains no more."""


class _Axis(NamedTuple):
    """One axis of a box: items along it, and bytes from one to the next on both sides."""

    items: int
    page_step: int
    chunk_step: int


@dataclass(frozen=True, slots=True)
class _Box:
    """What moves as one: the part of some consecutive tokens.

    Attributes:
        tokens: how many; a unit is one or more boxes.
        item: bytes of an item.
        axes: of its items, in the order in which they are walked.
    """

    tokens: int
    item: int
    axes: tuple[_Axis, ...]

    @classmethod
    def of(cls, tiling: Tiling, unit: int, token_bytes: int) -> _Box:
        """The largest box in a unit of which all have the same shape."""
        inner = math.gcd(unit, tiling.tile_tokens)
        # Tiles are a level of a box where a unit is made of whole ones.
        outer = unit // inner if inner == tiling.tile_tokens else 1
        tile = tiling.tile_items * tiling.item
        axes = (
            _Axis(outer, tiling.tile_stride, inner * token_bytes),
            _Axis(inner, tiling.token_stride, token_bytes),
            _Axis(tiling.items // tiling.tile_items, tiling.outer_stride, tile),
            _Axis(tiling.tile_items, tiling.inner_stride, tiling.item),
        )
        return cls(outer * inner, tiling.item, tuple(sorted(axes, key=_walked)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Items along each axis."""
        return tuple(axis.items for axis in self.axes)

    @property
    def reach(self) -> int:
        """Bytes of the pages from the start of a box to the end of its last item."""
        return sum((axis.items - 1) * axis.page_step for axis in self.axes) + self.item


def _walked(axis: _Axis) -> tuple[int, int]:
    """Sorts axes: long ones innermost, and of those the one whose step in the pages is shortest.

    NumPy keeps to this order where the two sides do not agree on another. It was measured.
    """
    return min(axis.items, _LONG), -axis.page_step


@dataclass(frozen=True, slots=True)
class _Batch:
    """Chunks of a piece whose boxes move alike.

    Attributes:
        box: how they move.
        content_offset: bytes into a token's canonical content.
        places: their places in the piece; None: all of it.
        starts: row of the pages at which each one's block 0 starts.
        block_rows: rows from an engine block to the next.
        box_rows: for each box of an engine block, rows from the block's start.
    """

    box: _Box
    content_offset: int
    places: list[int] | None
    starts: NDArray[np.int64]
    block_rows: int
    box_rows: NDArray[np.int64]


_MAX_BATCHES = 1 << 16


class TiledParts:
    """The tiled parts of a rank's pages in host memory.

    Args:
        buffers: the pages.
        memory: all of their memory, from the lowest byte to the highest.
        base: address of its first byte.
        grain: bytes from a row to the next; divides all steps.
    """

    def __init__(self, buffers: PagedBuffers, memory: memoryview, base: int, grain: int) -> None:
        self._buffers = buffers
        self._token_bytes = buffers.group.token_bytes
        self._memory = memory
        self._base = base
        self._grain = grain
        self._known: dict[tuple[tuple[tuple[int, int], ...], int], tuple[_Batch, ...]] = {}

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """Copy the tiled parts of chunks into the pages."""
        for batch in self._batches(slots, where.unit):
            columns, used, rows = self._columns(batch, where)
            chunks = self._chunks(batch, data, len(slots), used, stride)
            if columns is not None:
                chunks = chunks[:, columns]
            if batch.places is not None:
                chunks = chunks[batch.places]
            self._rows(batch.box)[batch.starts[:, None] + rows] = chunks

    def gather(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """Copy the tiled parts out of the pages into chunks."""
        for batch in self._batches(slots, where.unit):
            columns, used, rows = self._columns(batch, where)
            chunks = self._chunks(batch, data, len(slots), used, stride)
            pages, chosen = self._rows(batch.box), slice(None) if columns is None else columns
            places = range(len(slots)) if batch.places is None else batch.places
            # One chunk at a time: what NumPy picks, it copies twice, and a chunk fits the cache.
            for place, start in zip(places, batch.starts, strict=True):
                chunks[place, chosen] = pages[start + rows]

    def _columns(
        self, batch: _Batch, where: Placement
    ) -> tuple[NDArray[np.int64] | None, int, NDArray[np.int64]]:
        """Boxes of a chunk that move (None: all), how many it is seen to have, and their rows.

        Rows are counted from the start of a head's block 0.
        """
        ratio = where.unit // batch.box.tokens
        step = np.arange(ratio, dtype=np.int64)
        slot = (where.slot[:, None] * ratio + step).ravel()
        rows = np.repeat(where.block, ratio) * batch.block_rows + batch.box_rows[slot]
        if where.source is None:
            return None, len(rows), rows
        columns = (where.source[:, None] * ratio + step).ravel()
        return columns, int(columns[-1]) + 1, rows

    def _chunks(
        self, batch: _Batch, data: memoryview, count: int, boxes: int, stride: int
    ) -> NDArray[Any]:
        """The piece as ``[chunk, box, axes of a box]``."""
        box = batch.box
        steps = (stride, box.tokens * self._token_bytes, *(a.chunk_step for a in box.axes))
        shape = (count, boxes, *box.shape)
        return np.ndarray(shape, f"V{box.item}", data, batch.content_offset, steps)

    def _rows(self, box: _Box) -> NDArray[Any]:
        """The pages as rows of one box each, ``[row, axes of a box]``; rows overlap."""
        rows = (len(self._memory) - box.reach) // self._grain + 1
        steps = (self._grain, *(a.page_step for a in box.axes))
        return np.ndarray((rows, *box.shape), f"V{box.item}", self._memory, 0, steps)

    def _batches(self, slots: Slots, unit: int) -> tuple[_Batch, ...]:
        """How the chunks of such a piece move; the same pieces come again with every extent."""
        key = (tuple(slots), unit)
        found = self._known.get(key)
        if found is None:
            found = tuple(self._plan(slots, unit))
            if len(self._known) >= _MAX_BATCHES:
                self._known.clear()
            self._known[key] = found
        return found

    def _plan(self, slots: Slots, unit: int) -> Iterator[_Batch]:
        alike: dict[tuple[Tiling, int, int, int], list[tuple[int, int]]] = {}
        for place, (layer, head) in enumerate(slots):
            for s in self._buffers.layers[layer]:
                if s.tiling is not None:
                    start = s.start + head * s.head_stride - self._base
                    kind = (s.tiling, s.content_offset, s.block_stride, s.tokens)
                    alike.setdefault(kind, []).append((place, start // self._grain))
        for (tiling, offset, block_stride, tokens), members in alike.items():
            box = _Box.of(tiling, unit, self._token_bytes)
            first = np.arange(0, tokens, box.tokens, dtype=np.int64)
            tile, within = np.divmod(first, tiling.tile_tokens)
            from_start = tile * tiling.tile_stride + within * tiling.token_stride
            yield _Batch(
                box,
                offset,
                None if len(members) == len(slots) else [place for place, _ in members],
                np.array([start for _, start in members], dtype=np.int64),
                block_stride // self._grain,
                from_start // self._grain,
            )


def tiled_view(s: Segment, head: int) -> torch.Tensor:
    """Bytes of one head of a tiled segment, on any device.

    ``[block, token tile, token in tile, item tile, item in tile, byte]``.
    """
    import torch

    if s.tiling is None:
        raise TypeError("the segment is not tiled")
    flat = torch.empty(0, dtype=torch.uint8, device=s.tensor.device)
    flat.set_(s.tensor.untyped_storage())
    axes = s.tiling.axes(s.tokens)
    return flat.as_strided(
        (s.blocks, *(count for _, count in axes), s.tiling.item),
        (s.block_stride, *(step for step, _ in axes), 1),
        s.address + head * s.head_stride,
    )
