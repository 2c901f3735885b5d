"""Delivery: chunks that an I/O engine reads, verified, into the pages of a load.

Two ways, chosen by the engine for each piece. *Staged*: the piece is in the engine's memory; its
chunks are checked there and scattered. *Landed*: the kernel copies each run of bytes to where it
belongs in the pages, and chunks are checked there, run by run; the staging copy is saved. That
needs pages whose runs are long enough, and a chunk that is wanted whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c

from kvstore.errors import Corrupt
from kvstore.geometry import LayerGroup
from kvstore.io.protocol import Landing
from kvstore.placement import Placement
from kvstore.scatter import Pages
from kvstore.shard import CRC_BYTES
from kvstore.share import Share

Slots = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one range holds.

    Attributes:
        key: hex of the extent's key.
        slots: (layer, head), as the rank counts its own, of each chunk.
        where: where the chunks' tokens go.
        chunk_bytes: bytes of a chunk, without its checksum.
        stride: bytes from one chunk to the next.
    """

    key: str
    slots: Slots
    where: Placement
    chunk_bytes: int
    stride: int


class Delivery:
    """Takes the pieces of one read."""

    def __init__(
        self,
        group: LayerGroup,
        share: Share,
        pages: Pages,
        pieces: Sequence[Piece],
        *,
        verify: bool,
    ) -> None:
        self._group = group
        self._share = share
        self._pages = pages
        self._pieces = pieces
        self._verify = verify

    def consume(self, number: int, offset: int, data: memoryview) -> None:
        """Check and scatter a staged piece; see :data:`kvstore.io.protocol.Consume`.

        Raises:
            Corrupt: a chunk does not match its checksum; nothing of the piece is placed.
        """
        piece = self._pieces[number]
        slots = _cut(piece, offset, len(data))
        if self._verify:
            size, stride = piece.chunk_bytes, piece.stride
            stored = np.ndarray((len(slots),), "<u4", data, size, (stride,)).tolist()
            for i, slot in enumerate(slots):
                if crc32c(data[i * stride : i * stride + size]) != stored[i]:
                    raise self._damage(piece, slot)
        self._pages.scatter(slots, piece.where, data, piece.stride)

    def into(self, number: int, offset: int, length: int) -> Landing | None:
        """Where a piece's runs belong; see :data:`kvstore.io.protocol.Into`."""
        piece = self._pieces[number]
        slots = _cut(piece, offset, length)
        runs = self._pages.runs(slots, piece.where, piece.chunk_bytes)
        if runs is None:
            return None
        # The checksum and the gap behind each chunk land next to each other.
        gap = piece.stride - piece.chunk_bytes
        tails = memoryview(bytearray(gap * len(slots)))
        targets: list[memoryview] = []
        for i, run in enumerate(runs):
            targets += run
            targets.append(tails[i * gap : (i + 1) * gap])

        def landed() -> None:
            if not self._verify:
                return
            for i, run in enumerate(runs):
                found = 0
                for part in run:
                    found = crc32c(part, found)
                stored = tails[i * gap : i * gap + CRC_BYTES]
                if found != int.from_bytes(stored, "little"):
                    raise self._damage(piece, slots[i])

        return targets, landed

    def _damage(self, piece: Piece, slot: tuple[int, int]) -> Corrupt:
        layer = self._group.layers[self._share.layers.start + slot[0]]
        head = self._share.heads.start + slot[1]
        return Corrupt(
            f"extent {piece.key}: layer {layer}, head {head}: the chunk does not match its checksum"
        )


def _cut(piece: Piece, offset: int, length: int) -> Slots:
    """The chunks of a part of a piece."""
    first = offset // piece.stride
    return piece.slots[first : first - (-length // piece.stride)]
