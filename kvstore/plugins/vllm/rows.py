"""Rows: the memory, or the file, of one chunk as the engine's offloading lays it out.

A row holds the pages of a cache group's layers one after the other, and of each layer the pages of
the chunk's engine blocks. What is inside a page is said by its *family*, ``nhd`` or ``hnd``, and by
its *kind*: ``packed``, a token's key and value next to each other; ``split``, all keys before all
values; ``latent``, one cell a token. The row may end in padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.buffers import PagedBuffers
from kvstore.errors import InvalidArgument
from kvstore.geometry import LayerGroup
from kvstore.plugins.vllm.offload import CacheGroup

if TYPE_CHECKING:
    import torch

FAMILIES = ("nhd", "hnd")
KINDS = ("packed", "split", "latent")


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where a canonical row has what.

    Attributes:
        family: order of heads and tokens in a page.
        kind: order of keys and values in it.
    """

    family: str
    kind: str

    def __post_init__(self) -> None:
        for what, value, known in (("family", self.family, FAMILIES), ("kind", self.kind, KINDS)):
            if value not in known:
                raise InvalidArgument(f"page {what} {value!r} is not one of {', '.join(known)}")

    def buffers(
        self, memory: torch.Tensor, row_bytes: int, cache: CacheGroup, group: LayerGroup
    ) -> PagedBuffers:
        """Rows in memory as paged buffers whose blocks are the rows.

        Args:
            memory: uint8, 1-D, contiguous: whole rows.
            row_bytes: bytes from a row to the next.
            cache: the cache group whose chunks the rows hold.
            group: the store's layer group for it.

        Raises:
            InvalidArgument: a row is smaller than what it is to hold.
        """
        if content_bytes(group) > row_bytes or memory.numel() % row_bytes:
            raise InvalidArgument(
                f"{memory.numel()} bytes in rows of {row_bytes} cannot hold chunks of "
                f"{content_bytes(group)} bytes"
            )
        position = {index: place for place, index in enumerate(cache.indices)}
        page = content_bytes(group) // (group.num_layers * cache.chunk_blocks)
        layers = []
        for index in group.layers:
            start = position[index] * page * cache.chunk_blocks
            layers.append(self._parts(memory, row_bytes, start, page, cache, group))
        return PagedBuffers(group, layers)

    def _parts(
        self,
        memory: torch.Tensor,
        row_bytes: int,
        start: int,
        page: int,
        cache: CacheGroup,
        group: LayerGroup,
    ) -> Mapping[str, torch.Tensor]:
        """Views of one layer's parts, ``[row, head, token, element]``, or tiled by engine block."""
        rows = memory.numel() // row_bytes
        heads, tokens, blocks = group.heads, cache.block_tokens, cache.chunk_blocks
        views, offset = {}, 0
        for part in group.parts:
            cell = part.nbytes if self.kind == "split" else group.token_bytes
            size = part.element.itemsize
            head, token = (tokens * cell, cell) if self.family == "hnd" else (cell, heads * cell)
            typed = memory.view(part.element.torch_dtype())
            if blocks == 1 or page == tokens * token:
                # The blocks' tokens go on at the same step.
                shape: tuple[int, ...] = (rows, heads, blocks * tokens, part.count)
                steps: tuple[int, ...] = (row_bytes, head, token, size)
            else:
                shape = (rows, heads, blocks, tokens, 1, part.count)
                steps = (row_bytes, head, page, token, part.nbytes, size)
            views[part.name] = typed.as_strided(
                shape, [step // size for step in steps], (start + offset) // size
            )
            offset += heads * tokens * part.nbytes if self.kind == "split" else part.nbytes
        return views


def content_bytes(group: LayerGroup) -> int:
    """Bytes of a chunk's content, all layers of the group."""
    return group.num_layers * group.page_bytes


def opaque_buffers(memory: torch.Tensor, row_bytes: int, group: LayerGroup) -> PagedBuffers:
    """Rows that are kept as they are, as paged buffers: each layer of the group one slice of a row.

    Args:
        memory: uint8, 1-D, contiguous: whole rows.
        row_bytes: bytes from a row to the next.
        group: an opaque layer group.
    """
    rows, size = memory.numel() // row_bytes, group.page_bytes
    return PagedBuffers(
        group,
        [
            {"page": memory.as_strided((rows, 1, 1, size), (row_bytes, size, size, 1), i * size)}
            for i in range(group.num_layers)
        ],
    )
