"""Pools whose pages are tiled inside, as matrix units and some CPU backends want them.

Where each byte is, is worked out element by element and written down as a table: the library's
strides have no part in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.buffers import PagedBuffers
from kvstore.geometry import LayerGroup

Bytes = NDArray[np.uint8]


class Places:
    """Bytes of a memory in an order of the test's own; indexed like an array.

    ``places[block, head, token, byte]`` is where that byte is in ``memory``.
    """

    def __init__(self, memory: Bytes, places: NDArray[np.int64]) -> None:
        self.memory = memory
        self.places = places

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            index = (Ellipsis, index)
        return Places(self.memory, self.places[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.memory[self.places[index]] = value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Bytes:
        return self.memory[self.places].astype(dtype or np.uint8)


def _halves(count: int, tile: int) -> int:
    """The tile size, or the largest smaller one that divides."""
    return next(t for t in range(min(tile, count), 0, -1) if count % t == 0)


def axes_of(kind: str, part: int, tokens: int, count: int) -> tuple[list[int], list[int], Any]:
    """Sizes ``[tt, t, et, e]``, the order of these axes in memory, and what the library is given.

    ``turned``: keys ``[element, token]``, values as usual. ``tiles``: what AMX wants of keys and of
    values, in the smallest tiles; ``amx``: in its own. ``rows``: elements in tiles that are in a
    row, ``[element tile, token, element]``. ``rocm``: that for keys, and values turned.
    """
    if kind == "turned":
        order = [2, 3, 0, 1] if part % 2 == 0 else [0, 1, 2, 3]
        return [1, tokens, 1, count], order, 4
    if kind == "rocm" and part % 2:
        return [1, tokens, 1, count], [2, 3, 0, 1], 4
    if kind in ("rows", "rocm"):
        x = _halves(count, 4 if kind == "rows" else 8)
        return [1, tokens, count // x, x], [0, 2, 1, 3], 6
    t, e = _halves(tokens, 2), _halves(count, 2)
    if kind == "amx":
        t, e = (16, 2) if part % 2 == 0 else (2, 16)
    if part % 2 == 0:
        return [tokens // t, t, count // e, e], [0, 2, 1, 3], 6
    return [tokens // t, t, count // e, e], [2, 0, 3, 1], 6


def tiled(kind: str) -> Any:
    """Maker of pools: ``(group, layers, heads, blocks, tokens) -> parts of a pool``."""

    def make(
        group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int, pattern: Any
    ) -> tuple[PagedBuffers, list[dict[str, Any]], list[Bytes]]:
        given, views, memories = [], [], []
        page = sum(p.nbytes for p in group.parts) * tokens
        for layer in range(layers):
            memory = pattern(blocks * heads * page, layer)
            named, seen, at = {}, {}, 0
            for index, part in enumerate(group.parts):
                size = part.element.itemsize
                sizes, order, wanted = axes_of(kind, index, tokens, part.count)
                steps = [0] * 4
                step = 1
                for axis in reversed(order):
                    steps[axis] = step
                    step *= sizes[axis]
                shape = (blocks, heads, *sizes)
                strides = (heads * page // size, page // size, *steps)
                whole = torch.from_numpy(memory).view(part.element.torch_dtype())
                if (heads * page) % size or page % size or at % size:
                    raise ValueError("the parts' types do not line up in one page")
                view = whole.as_strided(shape, strides, at // size)
                named[part.name] = view if wanted == 6 else view[:, :, 0, :, 0]
                tt, t = np.divmod(np.arange(tokens), sizes[1])
                et, e = np.divmod(np.arange(part.count), sizes[3])
                token = (tt * steps[0] + t * steps[1])[:, None, None] * size
                element = (et * steps[2] + e * steps[3])[None, :, None] * size
                inner = (token + element + np.arange(size)).reshape(tokens, part.nbytes)
                start = np.arange(blocks)[:, None] * heads + np.arange(heads)
                places = (start * page)[:, :, None, None] + at + inner
                seen[part.name] = Places(memory, places)
                at += part.nbytes * tokens
            given.append(named)
            views.append(seen)
            memories.append(memory)
        return PagedBuffers(group, given), views, memories

    return make


def lines_up(group: LayerGroup, tokens: int) -> bool:
    """Whether every part of such a page starts at a multiple of its element's size."""
    sizes = [p.element.itemsize for p in group.parts]
    starts = np.cumsum([0, *(p.nbytes * tokens for p in group.parts)])
    return all(starts[i] % s == 0 and starts[-1] % s == 0 for i, s in enumerate(sizes))
