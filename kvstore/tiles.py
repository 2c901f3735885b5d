"""Tiled pages: parts whose tokens or elements lie in tiles, or across each other, inside a page.

The same as :mod:`kvstore.scatter` does for plain pages, with rows that are boxes ``[token, element
tile, element]`` instead of runs of bytes: NumPy picks boxes by index and walks both sides' steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvstore.buffers import PagedBuffers
from kvstore.placement import Placement
from kvstore.segments import Segment, Tiling

if TYPE_CHECKING:
    import torch

Slots = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Chunks of a piece whose boxes move alike.

    Attributes:
        tiling: of the pages.
        content_offset: bytes into a token's canonical content.
        places: their places in the piece.
        starts: row of the pages at which each one's block 0 starts.
        block_rows: rows from an engine block to the next.
        tokens: of a box.
        token_rows: for each box of an engine block, rows from the block's start.
    """

    tiling: Tiling
    content_offset: int
    places: NDArray[np.int64]
    starts: NDArray[np.int64]
    block_rows: int
    tokens: int
    token_rows: NDArray[np.int64]


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
        self._known: dict[tuple[tuple[tuple[int, int], ...], int], tuple[_Boxes, ...]] = {}

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """Copy the tiled parts of chunks into the pages."""
        for boxes in self._boxes(slots, where.unit):
            chunks, columns, index = self._sides(boxes, where, data, len(slots), stride)
            whole = len(boxes.places) == len(slots)
            chosen = chunks if whole else chunks[boxes.places]
            self._rows(boxes)[index] = chosen if columns is None else chosen[:, columns]

    def gather(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """Copy the tiled parts out of the pages into chunks."""
        for boxes in self._boxes(slots, where.unit):
            chunks, columns, index = self._sides(boxes, where, data, len(slots), stride)
            found = self._rows(boxes)[index]
            for place, box in zip(boxes.places, found, strict=True):
                if columns is None:
                    chunks[place] = box
                else:
                    chunks[place, columns] = box

    def _sides(
        self, boxes: _Boxes, where: Placement, data: memoryview, count: int, stride: int
    ) -> tuple[NDArray[Any], NDArray[np.int64] | None, NDArray[np.int64]]:
        """Boxes of the piece, those of them that are meant, and the row of each in the pages."""
        ratio = where.unit // boxes.tokens
        step = np.arange(ratio, dtype=np.int64)
        slot = (where.slot[:, None] * ratio + step).ravel()
        rows = np.repeat(where.block, ratio) * boxes.block_rows + boxes.token_rows[slot]
        columns, used = None, len(rows)
        if where.source is not None:
            columns = (where.source[:, None] * ratio + step).ravel()
            used = int(columns[-1]) + 1
        t = boxes.tiling
        inner = t.tile_items * t.item
        chunks: NDArray[Any] = np.ndarray(
            (count, used, boxes.tokens, t.items // t.tile_items, t.tile_items),
            f"V{t.item}",
            data,
            boxes.content_offset,
            (stride, boxes.tokens * self._token_bytes, self._token_bytes, inner, t.item),
        )
        return chunks, columns, boxes.starts[:, None] + rows

    def _rows(self, boxes: _Boxes) -> NDArray[Any]:
        """The pages as rows of one box each; rows overlap."""
        t = boxes.tiling
        shape = (boxes.tokens, t.items // t.tile_items, t.tile_items)
        steps = (t.token_stride, t.outer_stride, t.inner_stride)
        reach = sum((n - 1) * s for n, s in zip(shape, steps, strict=True)) + t.item
        rows = (len(self._memory) - reach) // self._grain + 1
        return np.ndarray((rows, *shape), f"V{t.item}", self._memory, 0, (self._grain, *steps))

    def _boxes(self, slots: Slots, unit: int) -> tuple[_Boxes, ...]:
        key = (tuple(slots), unit)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = tuple(self._plan(slots, unit))
        return found

    def _plan(self, slots: Slots, unit: int) -> Iterator[_Boxes]:
        alike: dict[tuple[Tiling, int, int, int], list[tuple[int, int]]] = {}
        for place, (layer, head) in enumerate(slots):
            for s in self._buffers.layers[layer]:
                if s.tiling is not None:
                    start = s.start + head * s.head_stride - self._base
                    kind = (s.tiling, s.content_offset, s.block_stride, s.tokens)
                    alike.setdefault(kind, []).append((place, start // self._grain))
        for (tiling, offset, block_stride, tokens), members in alike.items():
            # A box holds tokens at one step from each other: none reaches into the next tile.
            size = math.gcd(unit, tiling.tile_tokens)
            first = np.arange(0, tokens, size, dtype=np.int64)
            tile, within = np.divmod(first, tiling.tile_tokens)
            from_start = tile * tiling.tile_stride + within * tiling.token_stride
            yield _Boxes(
                tiling,
                offset,
                np.array([place for place, _ in members], dtype=np.int64),
                np.array([start for _, start in members], dtype=np.int64),
                block_stride // self._grain,
                size,
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
