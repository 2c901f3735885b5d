"""What a rank holds, worked out token by token: the tests' own words, none of the library's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.geometry import LayerGroup
from kvstore.parallel import ParallelConfig, Rank
from support.pools import Bytes, Pool


@dataclass(frozen=True)
class Held:
    """Layers, heads and the token rule of one rank."""

    layers: range
    heads: range
    interleave: int
    cp: int
    index: int

    def tokens(self, start: int, stop: int) -> NDArray[np.int64]:
        """Own tokens from ``start`` to ``stop - 1``."""
        t = np.arange(start, stop, dtype=np.int64)
        return t[(t // self.interleave) % self.cp == self.index]

    def local(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Their numbers among the rank's own, by counting."""
        if not len(tokens):
            return tokens
        own = self.tokens(0, int(tokens[-1]) + 1)
        return np.searchsorted(own, tokens)

    def local_blocks(self, total: int, tokens: int) -> int:
        """Engine blocks of ``tokens`` local tokens that ``total`` tokens of the sequence need."""
        return max(1, -(-len(self.tokens(0, total)) // tokens))


def held(group: LayerGroup, config: ParallelConfig, rank: Rank, model_layers: int) -> Held:
    """What a rank holds under a config that the library certifies."""
    sizes = config.pp_layers or (model_layers // config.pp,) * config.pp
    first = sum(sizes[: rank.pp])
    stage = range(first, first + sizes[rank.pp])
    at = [i for i, layer in enumerate(group.layers) if layer in stage]
    layers = range(at[0], at[-1] + 1) if at else range(0)
    if config.tp >= group.heads:
        head = rank.tp // (config.tp // group.heads)
        heads = range(head, head + 1)
    else:
        size = group.heads // config.tp
        heads = range(rank.tp * size, rank.tp * size + size)
    index, cp = rank.tp % config.dcp, config.dcp
    if config.pcp_kv == "sharded":
        index, cp = rank.pcp * config.dcp + index, config.dcp * config.pcp
    return Held(layers, heads, config.interleave, cp, index)


def truth_of(group: LayerGroup, tokens: int, seed: int = 0) -> Bytes:
    """Content ``[layer, head, token, byte]`` of a sequence; no byte is zero."""
    shape = (group.num_layers, group.heads, tokens, group.token_bytes)
    return np.random.default_rng(1000 + seed).integers(1, 256, shape, dtype=np.uint8)


def put(
    pool: Pool,
    group: LayerGroup,
    mine: Held,
    truth: Bytes,
    table: NDArray[np.int64],
    start: int = 0,
    stop: int | None = None,
    layers: range | None = None,
) -> None:
    """Put a rank's tokens of a sequence into its pool, as its engine would."""
    end = truth.shape[2] if stop is None else stop
    tokens = mine.tokens(start, end)
    local = mine.local(tokens)
    block, slot = table[local // pool.tokens], local % pool.tokens
    for i, layer in enumerate(mine.layers):
        if layers is not None and i not in layers:
            continue
        at = 0
        for part in group.parts:
            here = truth[layer, mine.heads.start : mine.heads.stop, :, at : at + part.nbytes]
            pool.views[i][part.name][block, :, slot] = here[:, tokens].swapaxes(0, 1)
            at += part.nbytes
