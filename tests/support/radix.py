"""Pools of any mixed radix: tokens and elements in two levels each, in any order in memory.

Where each byte is, is added up axis by axis and written down as a table, as in ``support.tiled``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.buffers import PagedBuffers
from kvstore.geometry import LayerGroup
from support.pools import Pool, pattern
from support.tiled import Places

AXES = "bhTtEe"
"""Block, head, token tile, token in tile, element tile, element in tile; ``p``: the part."""


@dataclass(frozen=True)
class Radix:
    """How one part lies in memory.

    Attributes:
        inner: sizes of the inner level of tokens, and of elements.
        order: axes, outermost first; with ``p``, all parts are in one memory.
        gaps: elements left free after each of these axes.
    """

    inner: tuple[int, int]
    order: tuple[str, ...]
    gaps: tuple[int, ...]

    def sizes(self, parts: int, blocks: int, heads: int, tokens: int, count: int) -> dict[str, int]:
        """Axis -> size."""
        t, e = self.inner
        named = {"T": tokens // t, "t": t, "E": count // e, "e": e}
        return {"p": parts, "b": blocks, "h": heads, **named}

    def steps(self, sizes: dict[str, int]) -> tuple[dict[str, int], int]:
        """Axis -> step in elements; and elements of the whole memory."""
        out, step = {}, 1
        for axis, gap in zip(reversed(self.order), self.gaps, strict=False):
            out[axis] = step
            step = step * sizes[axis] + gap
        return out, step


def _pool_of_part(
    memory: Any, radix: Radix, sizes: dict[str, int], steps: dict[str, int], at: int, element: Any
) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """What the library is given of a part, and the place of each byte."""
    dtype, size = element.torch_dtype(), element.itemsize
    view = (
        torch.from_numpy(memory)
        .view(dtype)
        .as_strided([sizes[a] for a in AXES], [steps[a] for a in AXES], at)
    )
    t, e = radix.inner
    token, item = np.arange(sizes["T"] * t), np.arange(sizes["E"] * e)
    place = (
        at
        + (np.arange(sizes["b"]) * steps["b"])[:, None, None, None]
        + (np.arange(sizes["h"]) * steps["h"])[:, None, None]
        + (token // t * steps["T"] + token % t * steps["t"])[:, None]
        + (item // e * steps["E"] + item % e * steps["e"])
    )
    places = (place[..., None] * size + np.arange(size)).reshape(*place.shape[:3], -1)
    return view, places


def radix_pool(
    group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int, radices: list[Radix]
) -> Pool:
    """A pool of one radix a part; all parts in one memory where the radix has an axis for them."""
    given, views, memories = [], [], []
    for layer in range(layers):
        named, seen = {}, {}
        for i, (part, radix) in enumerate(zip(group.parts, radices, strict=True)):
            sizes = radix.sizes(len(group.parts), blocks, heads, tokens, part.count)
            steps, total = radix.steps(sizes)
            woven = "p" in radix.order
            if not woven or i == 0:
                memories.append(pattern(total * part.element.itemsize, 16 * layer + i))
            at = i * steps["p"] if woven else 0
            view, places = _pool_of_part(memories[-1], radix, sizes, steps, at, part.element)
            if sizes["T"] == sizes["E"] == 1:
                view = view[:, :, 0, :, 0]
            named[part.name], seen[part.name] = view, Places(memories[-1], places)
        given.append(named)
        views.append(seen)
    return Pool(PagedBuffers(group, given), views, memories, tokens, blocks)  # type: ignore[arg-type]  # Places are indexed as arrays are


@st.composite
def radices(draw: st.DrawFn, group: LayerGroup, tokens: int) -> list[Radix]:
    """A radix for each part; sometimes one for all, which are woven into each other."""
    same = len({(p.element, p.count) for p in group.parts}) == 1
    woven = same and draw(st.booleans())

    def one(count: int) -> Radix:
        t = draw(st.sampled_from([n for n in range(1, tokens + 1) if tokens % n == 0]))
        e = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
        order = draw(st.permutations(AXES + "p" * woven))
        gaps = draw(st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=7, max_size=7))
        return Radix((t, e), tuple(order), tuple(gaps))

    if woven:
        return [one(group.parts[0].count)] * len(group.parts)
    return [one(p.count) for p in group.parts]
