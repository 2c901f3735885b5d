"""Marks: what a rank has put into shards that several ranks fill, as a checksum of its own bytes.

A mark speaks of bytes, not of a file. In-flight folders come and go: another engine is first and
this one's folder is cleared, a power failure takes a file and leaves its mark, two ranks that stand
in for each other differ in their last bits. So whoever seals a shard checks that the bytes which
its ranks claim are the bytes that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c

from kvstore.jsonform import Fields, compact, parse
from kvstore.plan import ShardPart
from kvstore.share import TokenLattice

MAX_MARK_BYTES = 8 << 20
_MAX_SUM = 0xFFFF_FFFF

ByteRuns = Sequence[tuple[int, int]]
"""(offset, length) within a chunk."""


@dataclass(frozen=True, slots=True)
class Contributor:
    """A rank that was elected to fill a shard, or a part of it.

    Attributes:
        rank: as marks are named, ``pp-pcp-tp``.
        lattice: tokens of each of its chunks that it owns.
        part: its chunks of the shard.
    """

    rank: str
    lattice: TokenLattice
    part: ShardPart


def encode_mark(sums: Mapping[str, int]) -> bytes:
    """A mark's bytes: shard name -> CRC-32C of the rank's bytes in it, in order of offset."""
    return compact(dict(sums))


def decode_mark(data: bytes, what: str) -> dict[str, int]:
    """Checksums by shard name.

    Raises:
        FormatError: it is not a mark of this format.
    """
    fields = Fields(parse(data, what), what)
    return {name: fields.integer(name, 0, _MAX_SUM) for name in fields.names()}


def owned_runs(lattice: TokenLattice, start: int, stop: int, token_bytes: int) -> ByteRuns:
    """Bytes of a chunk of tokens ``start`` to ``stop - 1`` that belong to a lattice, ascending."""
    if lattice.whole:
        return [(0, (stop - start) * token_bytes)]
    own = lattice.owned(start, stop) - start
    if not len(own):
        return []
    breaks = np.flatnonzero(np.diff(own) != 1) + 1
    firsts = own[np.concatenate(([0], breaks))]
    ends = own[np.concatenate((breaks - 1, [len(own) - 1]))] + 1
    lengths = (ends - firsts) * token_bytes
    return list(zip((firsts * token_bytes).tolist(), lengths.tolist(), strict=True))


class RunningSums:
    """The checksums that a shard's ranks should have claimed, out of its chunks in order.

    Args:
        contributors: all who fill the shard.
        start: first token of the extent.
        stop: one past its last.
        token_bytes: bytes a token of one head.
    """

    def __init__(
        self, contributors: Sequence[Contributor], start: int, stop: int, token_bytes: int
    ) -> None:
        self.sums = {c.rank: 0 for c in contributors}
        self._by_chunk: dict[int, list[tuple[str, ByteRuns]]] = {}
        for c in contributors:
            runs = owned_runs(c.lattice, start, stop, token_bytes)
            for run in c.part.runs:
                for chunk in range(run.first, run.first + len(run.slots)):
                    self._by_chunk.setdefault(chunk, []).append((c.rank, runs))

    def add(self, chunk: int, data: memoryview) -> None:
        """Take a chunk's bytes in."""
        for rank, runs in self._by_chunk.get(chunk, ()):
            total = self.sums[rank]
            for offset, length in runs:
                total = crc32c(data[offset : offset + length], total)
            self.sums[rank] = total

    def contradicting(self, claims: Mapping[str, int | None]) -> set[str]:
        """Ranks whose claim is not what is there."""
        return {rank for rank, total in self.sums.items() if claims.get(rank) != total}
