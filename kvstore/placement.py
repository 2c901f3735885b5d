"""Placement: which tokens of a chunk go to which engine block and slot. Pure numbers.

A chunk holds consecutive canonical tokens of one head of one layer. A rank owns some of them (its
token lattice); each has a local number, and the engine's block table says where that number lives.
The smallest piece that moves as one is a *unit* of ``u`` tokens, chosen as large as blocks and
interleave allow, so that a copy is a few large items rather than many small ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument
from kvstore.share import TokenLattice

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the tokens of a chunk go, in units.

    Attributes:
        unit: tokens of a unit.
        source: units of the chunk that the rank owns and that were asked for; None: all, in order.
        block: engine block of each.
        slot: unit within the engine block of each.
    """

    unit: int
    source: Ints | None
    block: Ints
    slot: Ints

    def split(self) -> Placement:
        """The same in units of one token."""
        if self.unit == 1:
            return self
        step = np.arange(self.unit, dtype=np.int64)
        source = None if self.source is None else _expand(self.source, step)
        block = np.repeat(self.block, self.unit)
        return Placement(1, source, block, _expand(self.slot, step))


def _expand(units: Ints, step: Ints) -> Ints:
    out: Ints = (units[:, None] * len(step) + step).ravel()
    return out


def unit_tokens(lattice: TokenLattice, block_tokens: int, local_block_tokens: int) -> int:
    """Tokens of a unit, for a group's block size and an engine's local block size."""
    if lattice.whole:
        return math.gcd(block_tokens, local_block_tokens)
    return math.gcd(lattice.interleave, block_tokens, local_block_tokens)


def block_table(block_ids: Sequence[int] | Any, blocks: int) -> Ints:
    """Engine block ids as an array, with ids that no engine block has marked.

    Raises:
        InvalidArgument: not a 1-D sequence of whole numbers.
    """
    try:
        ids = np.asarray(block_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(
            f"block_ids must be a 1-D sequence of whole numbers: {error}"
        ) from None
    if ids.size == 0:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgument(
            f"block_ids must be a 1-D sequence of whole numbers, not {ids.dtype} {ids.shape}"
        )
    table = ids.astype(np.int64)
    table[(table < 0) | (table >= blocks)] = -1
    return table


def place(
    lattice: TokenLattice,
    unit: int,
    local_block_tokens: int,
    table: Ints,
    chunk_start: int,
    start: int,
    stop: int,
) -> Placement:
    """Placement of canonical tokens ``start`` to ``stop - 1`` of a chunk that starts earlier.

    Args:
        lattice: the rank's tokens.
        unit: tokens of a unit; divides every other number of tokens given.
        local_block_tokens: local tokens of an engine block.
        table: engine block of each of the rank's local blocks, from token 0 of the sequence.
        chunk_start: canonical token at which the chunk starts.
        start: first canonical token wanted.
        stop: one past the last.

    Raises:
        InvalidArgument: the block table is too short, or has no valid id where one is needed.
    """
    if lattice.whole:
        local = np.arange(start, stop, unit, dtype=np.int64)
        # From the chunk's start on, the placement's length alone says how much of it is used.
        source = None if start == chunk_start else (local - chunk_start) // unit
    else:
        owned = lattice.owned(start, stop)[::unit]
        local = lattice.local(owned)
        source = (owned - chunk_start) // unit
    index = local // local_block_tokens
    if len(index) and int(index[-1]) >= len(table):
        raise InvalidArgument(
            f"block_ids has {len(table)} entries; tokens up to {stop} need {int(index[-1]) + 1} of "
            f"{local_block_tokens} local tokens each, counted from token 0 of the sequence"
        )
    block = table[index]
    if (block < 0).any():
        bad = int(index[int((block < 0).argmax())])
        raise InvalidArgument(
            f"block_ids[{bad}] is not an engine block of these buffers, but its tokens are wanted"
        )
    return Placement(unit, source, block, (local % local_block_tokens) // unit)
