"""Scatter and gather on devices: a chunk is copied there once and spread by torch indexing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.buffers import PagedBuffers
from kvstore.placement import Placement
from kvstore.scatter import Slots, Whole
from kvstore.segments import Segment
from kvstore.tiles import tiled_view

if TYPE_CHECKING:
    import torch


class DevicePages:
    """Pages on any device that torch knows."""

    def __init__(self, buffers: PagedBuffers) -> None:
        self._buffers = buffers
        self._token_bytes = buffers.group.token_bytes

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """See :class:`kvstore.scatter.IndexedPages`."""
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
        """See :class:`kvstore.scatter.IndexedPages`."""
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

    def mover(self, slots: Slots, where: Placement, chunk_bytes: int, stride: int) -> Whole:
        """See :class:`kvstore.pages.Pages`."""
        return Whole(self, slots, where, chunk_bytes, stride)

    def require_unmoved(self) -> None:
        """See :class:`kvstore.pages.Pages`: a tensor's address is asked for anew at each move."""

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
