"""Paged pools of every page layout, each with a plain view that owes nothing to the library.

A :class:`Pool` holds the buffers under test and, made apart from them, NumPy views of the same
memory by layer and content part, ``[block, head, token, byte]``. Tests write and read through the
views. Memory starts as a fixed pattern, so that a stray write shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.buffers import PagedBuffers
from kvstore.geometry import LayerGroup
from support.tiled import lines_up, tiled

Bytes = NDArray[np.uint8]


@dataclass
class Pool:
    """One rank's paged memory.

    Attributes:
        buffers: what the library sees.
        views: for each layer, content part -> ``[block, head, token, byte]``.
        memory: all of the memory, to compare byte by byte.
        tokens: tokens of one engine block.
        blocks: engine blocks.
    """

    buffers: PagedBuffers
    views: list[dict[str, Bytes]]
    memory: list[Bytes]
    tokens: int
    blocks: int

    def snapshot(self) -> list[bytes]:
        """Copies of all memory."""
        return [m.tobytes() for m in self.memory]


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Memory as a pool starts with it: never zero, never the same for a run of bytes."""
    block = np.random.default_rng(77 + seed).integers(1, 256, 4099, dtype=np.uint8)
    return np.resize(block, nbytes)


def _tensor(shape: tuple[int, ...], group: LayerGroup, seed: int) -> tuple[torch.Tensor, Bytes]:
    """A tensor of the group's type (uint8 when mixed) and its bytes; last axis in elements."""
    kinds = {p.element for p in group.parts}
    dtype = kinds.pop().torch_dtype() if len(kinds) == 1 else torch.uint8
    size = torch.empty(0, dtype=dtype).element_size()
    memory = pattern(int(np.prod(shape)) * size, seed)
    return torch.from_numpy(memory).view(dtype).view(shape), memory


def _content(group: LayerGroup) -> int:
    kinds = {p.element for p in group.parts}
    return group.token_bytes // (kinds.pop().itemsize if len(kinds) == 1 else 1)


def _bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a strided tensor whose last axis is contiguous, as a view."""
    out: Bytes = tensor.view(torch.uint8).numpy()
    return out


def _by_part(group: LayerGroup, hnd: Bytes) -> dict[str, Bytes]:
    """Parts of a view ``[block, head, token, token bytes]``."""
    out, at = {}, 0
    for part in group.parts:
        out[part.name] = hnd[..., at : at + part.nbytes]
        at += part.nbytes
    return out


Make = Callable[[LayerGroup, int, int, int, int], Pool]
"""(group, layers, heads, blocks, tokens of an engine block) -> pool."""


def packed_hnd(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
    made = [_tensor((blocks, heads, tokens, _content(group)), group, i) for i in range(layers)]
    buffers = PagedBuffers.packed(group, [t for t, _ in made], order="hnd")
    views = [_by_part(group, _bytes(t)) for t, _ in made]
    return Pool(buffers, views, [m for _, m in made], tokens, blocks)


def packed_nhd(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
    made = [_tensor((blocks, tokens, heads, _content(group)), group, i) for i in range(layers)]
    buffers = PagedBuffers.packed(group, [t for t, _ in made], order="nhd")
    views = [_by_part(group, _bytes(t).swapaxes(1, 2)) for t, _ in made]
    return Pool(buffers, views, [m for _, m in made], tokens, blocks)


def packed_padded(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
    """Padding after each token, each head and each block, and before the first."""
    c = _content(group)
    made = [_tensor((blocks + 1, heads + 1, tokens + 3, c + 5), group, i) for i in range(layers)]
    cut = [t[1:, :heads, 2 : 2 + tokens, 1 : 1 + c] for t, _ in made]
    buffers = PagedBuffers.packed(group, cut, order="hnd")
    views = [_by_part(group, _bytes(t)) for t in cut]
    return Pool(buffers, views, [m for _, m in made], tokens, blocks)


def packed_permuted(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
    """Memory order token, head, block."""
    made = [_tensor((tokens, heads, blocks, _content(group)), group, i) for i in range(layers)]
    cut = [t.permute(2, 1, 0, 3) for t, _ in made]
    buffers = PagedBuffers.packed(group, cut, order="hnd")
    views = [_by_part(group, _bytes(t)) for t in cut]
    return Pool(buffers, views, [m for _, m in made], tokens, blocks)


def packed_sliced(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
    """Every other block and some heads of one larger pool for all layers."""
    shape = (layers, 2 * blocks, tokens, heads + 2, _content(group))
    tensor, memory = _tensor(shape, group, 0)
    cut = [tensor[i, 1::2, :, 1 : 1 + heads] for i in range(layers)]
    buffers = PagedBuffers.packed(group, cut, order="nhd")
    views = [_by_part(group, _bytes(t).swapaxes(1, 2)) for t in cut]
    return Pool(buffers, views, [memory], tokens, blocks)


def _split(axis: int, order: str) -> Make:
    def make(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
        inner = (heads, tokens) if order == "hnd" else (tokens, heads)
        outer = (2, blocks) if axis == 0 else (blocks, 2)
        shape = (*outer, *inner, _content(group) // 2)
        made = [_tensor(shape, group, i) for i in range(layers)]
        buffers = PagedBuffers.split(group, [t for t, _ in made], order=order)
        views = []
        for tensor, _ in made:
            planes = np.moveaxis(_bytes(tensor), axis, 0)
            hnd = planes if order == "hnd" else planes.swapaxes(2, 3)
            views.append({p.name: hnd[i] for i, p in enumerate(group.parts)})
        return Pool(buffers, views, [m for _, m in made], tokens, blocks)

    return make


def latent(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
    assert heads == 1
    made = [_tensor((blocks, tokens, _content(group)), group, i) for i in range(layers)]
    buffers = PagedBuffers.latent(group, [t for t, _ in made])
    views = [_by_part(group, _bytes(t)[:, None]) for t, _ in made]
    return Pool(buffers, views, [m for _, m in made], tokens, blocks)


def _block_outermost(order: str) -> Make:
    def make(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
        inner = (heads, tokens) if order == "hnd" else (tokens, heads)
        pool, memory = _tensor((blocks, layers, *inner, _content(group)), group, 0)
        buffers = PagedBuffers.block_outermost(group, pool, order=order)
        raw = _bytes(pool)
        hnd = raw if order == "hnd" else raw.swapaxes(2, 3)
        views = [_by_part(group, hnd[:, i]) for i in range(layers)]
        return Pool(buffers, views, [memory], tokens, blocks)

    return make


def _own(group: LayerGroup, name: str, shape: tuple[int, ...], seed: int) -> Any:
    """A tensor of one part's own type, and its bytes."""
    part = next(p for p in group.parts if p.name == name)
    memory = pattern(int(np.prod(shape)) * part.nbytes, seed)
    tensor = torch.from_numpy(memory).view(part.element.torch_dtype())
    return tensor.view(*shape, part.count), memory


def token_pools(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
    """A pool of tokens for each part, in the part's own type."""
    pools: list[list[torch.Tensor]] = []
    views, memories = [], []
    for i in range(layers):
        pools.append([])
        views.append({})
        for j, part in enumerate(group.parts):
            tensor, memory = _own(group, part.name, (blocks * tokens, heads), 16 * i + j)
            pools[-1].append(tensor)
            memories.append(memory)
            shaped = memory.reshape(blocks, tokens, heads, part.nbytes)
            views[-1][part.name] = shaped.swapaxes(1, 2)
    buffers = PagedBuffers.token_pools(group, pools, block_tokens=tokens)
    return Pool(buffers, views, memories, tokens, blocks)


def by_part(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
    """A tensor for each part, memory orders that differ from part to part."""
    given, views, memories = [], [], []
    for i in range(layers):
        named, raw = {}, {}
        for j, part in enumerate(group.parts):
            nhd = (i + j) % 2 == 1
            shape = (blocks, tokens, heads) if nhd else (blocks, heads, tokens)
            tensor, memory = _own(group, part.name, shape, 16 * i + j)
            shaped = memory.reshape(*shape, part.nbytes)
            named[part.name] = tensor.transpose(1, 2) if nhd else tensor
            raw[part.name] = shaped.swapaxes(1, 2) if nhd else shaped
            memories.append(memory)
        given.append(named)
        views.append(raw)
    return Pool(PagedBuffers(group, given), views, memories, tokens, blocks)


def contiguous(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
    """A batch of whole sequences: ``[batch, head, token, element]`` by part."""
    pools: list[list[torch.Tensor]] = []
    views, memories = [], []
    for i in range(layers):
        pools.append([])
        views.append({})
        for j, part in enumerate(group.parts):
            tensor, memory = _own(group, part.name, (blocks, heads, tokens), 16 * i + j)
            pools[-1].append(tensor)
            memories.append(memory)
            views[-1][part.name] = memory.reshape(blocks, heads, tokens, part.nbytes)
    return Pool(PagedBuffers.contiguous(group, pools), views, memories, tokens, blocks)


def _tiled(kind: str) -> Make:
    def make(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
        buffers, views, memory = tiled(kind)(group, layers, heads, blocks, tokens, pattern)
        return Pool(buffers, views, memory, tokens, blocks)

    return make


LAYOUTS: dict[str, Make] = {
    "packed-hnd": packed_hnd,
    "packed-nhd": packed_nhd,
    "packed-padded": packed_padded,
    "packed-permuted": packed_permuted,
    "packed-sliced": packed_sliced,
    "split-2b-hnd": _split(0, "hnd"),
    "split-2b-nhd": _split(0, "nhd"),
    "split-b2-hnd": _split(1, "hnd"),
    "split-b2-nhd": _split(1, "nhd"),
    "latent": latent,
    "blhnc": _block_outermost("hnd"),
    "blnhc": _block_outermost("nhd"),
    "token-pools": token_pools,
    "by-part": by_part,
    "contiguous": contiguous,
    "turned": _tiled("turned"),
    "tiles": _tiled("tiles"),
    "rows": _tiled("rows"),
}
TILED = ("turned", "tiles", "rows")


def suits(name: str, group: LayerGroup, heads: int) -> bool:
    """Whether a layout can hold a group's pages."""
    if name == "latent":
        return heads == 1
    if name in TILED:
        return lines_up(group, 1)  # with any number of tokens, then
    if name.startswith("split"):
        return len(group.parts) == 2 and len({(p.element, p.count) for p in group.parts}) == 1
    return True


def layouts_for(group: LayerGroup, heads: int) -> list[str]:
    """Layouts that can hold a group's pages, without ``contiguous``, which has one block."""
    return [n for n in LAYOUTS if n != "contiguous" and suits(n, group, heads)]
