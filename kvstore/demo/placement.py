"""Where an engine's ranks would hold a KV cache, and in which page layout.

Written from what engines do, on purpose without the store's own mapping: were the two one code, a
mistake in it would undo itself and the demonstration would prove nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.demo.bits import Bits
from kvstore.errors import InvalidArgument
from kvstore.parallel import ParallelConfig, Rank

POISON = 0xA5
"""What fills memory that nothing has been loaded into, byte for byte."""


@dataclass(frozen=True, slots=True)
class PageStyle:
    """How a rank arranges one page: one block of one layer.

    Attributes:
        order: ``hnd`` goes through the heads first, ``nhd`` through the tokens first.
        parts: ``packed`` keeps a token's key and value side by side; ``split`` has a plane of keys
            and then a plane of values.
        block_tokens: tokens of one block, as the rank counts its own.

    Raises:
        InvalidArgument: ``order`` or ``parts`` is unknown.
    """

    order: str = "hnd"
    parts: str = "packed"
    block_tokens: int = 16

    def __post_init__(self) -> None:
        if self.order not in ("hnd", "nhd") or self.parts not in ("packed", "split"):
            raise InvalidArgument(
                f"page layout {self}: use hnd-packed, nhd-packed, hnd-split or nhd-split"
            )

    def __str__(self) -> str:
        return f"{self.order}-{self.parts}"

    def shape(self, heads: int, head_size: int) -> tuple[int, ...]:
        """Shape of one page in memory order."""
        middle = (heads, self.block_tokens) if self.order == "hnd" else (self.block_tokens, heads)
        return (*middle, 2, head_size) if self.parts == "packed" else (2, *middle, head_size)

    def page_view(self, pool: Bits) -> Bits:
        """``[layer, block, *shape]`` seen as ``[layer, block, head, token, part, element]``."""
        if self.parts == "split":
            pool = np.moveaxis(pool, 2, 4)
        return pool if self.order == "hnd" else np.swapaxes(pool, 2, 3)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of a cache: ``layers`` x ``heads`` x ``tokens`` (ascending)."""

    layers: range
    heads: range
    tokens: npt.NDArray[np.int64]

    def blocks(self, style: PageStyle) -> int:
        """Blocks that the tokens take."""
        return -(-len(self.tokens) // style.block_tokens)


def holding(config: ParallelConfig, rank: Rank, layers: int, heads: int, tokens: int) -> Holding:
    """What one rank of an engine holds, of a cache with so many layers, KV heads and tokens."""
    stages = config.pp_layers or (layers // config.pp,) * config.pp
    first = sum(stages[: rank.pp])
    if config.tp <= heads:
        each = heads // config.tp
        own = range(rank.tp * each, (rank.tp + 1) * each)
    else:
        head = rank.tp // (config.tp // heads)
        own = range(head, head + 1)
    turn = rank.tp % config.dcp
    turns = config.dcp
    if config.pcp_kv == "sharded":
        turn += rank.pcp * config.dcp
        turns *= config.pcp
    all_tokens = np.arange(tokens)
    mine = all_tokens[all_tokens // config.interleave % turns == turn]
    return Holding(range(first, first + stages[rank.pp]), own, mine)


def new_pool(cache: Bits, held: Holding, style: PageStyle) -> Bits:
    """A rank's paged memory, all poison: ``[layer, block, *page]``, with a few blocks to spare."""
    blocks = held.blocks(style)
    shape = style.shape(len(held.heads), cache.shape[-1])
    pool = np.empty((len(held.layers), blocks + blocks // 8 + 2, *shape), dtype=cache.dtype)
    pool.view(np.uint8).fill(POISON)
    return pool


def shuffled_blocks(pool: Bits, held: Holding, style: PageStyle, seed: int) -> list[int]:
    """The pool's blocks that hold the tokens, in token order: as scattered as an engine's are."""
    order = np.random.default_rng(seed).permutation(pool.shape[1])
    return [int(block) for block in order[: held.blocks(style)]]


def place(cache: Bits, held: Holding, pool: Bits, style: PageStyle, blocks: list[int]) -> None:
    """Copy a rank's part of the cache into its pool."""
    pages, block, slot = _addresses(held, pool, style, blocks)
    part = cache[held.layers.start : held.layers.stop, held.heads.start : held.heads.stop]
    # Indexed axes come first, so the token axis does on both sides.
    pages[:, block, :, slot] = np.moveaxis(part[:, :, held.tokens], 2, 0)


def gather(cache: Bits, held: Holding, pool: Bits, style: PageStyle, blocks: list[int]) -> None:
    """Copy a rank's part of the cache out of its pool; the inverse of :func:`place`."""
    pages, block, slot = _addresses(held, pool, style, blocks)
    part = cache[held.layers.start : held.layers.stop, held.heads.start : held.heads.stop]
    part[:, :, held.tokens] = np.moveaxis(pages[:, block, :, slot], 0, 2)


def _addresses(
    held: Holding, pool: Bits, style: PageStyle, blocks: list[int]
) -> tuple[Bits, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    local = np.arange(len(held.tokens))
    block = np.asarray(blocks, dtype=np.int64)[local // style.block_tokens]
    return style.page_view(pool), block, local % style.block_tokens
