"""Delivery: chunks that an I/O engine reads, verified, into the pages of a load.

Two ways, chosen for each piece. *Staged*: the piece is in the engine's memory; its chunks are
checked there, all with one pass, and scattered. *Landed*, for loads that do not check: the kernel
copies each run of bytes to where it belongs in the pages, and the staging copy is saved. That needs
pages whose runs are long enough, and a chunk that is wanted whole. Checking the runs where they
landed takes a call each, which costs more than the copy that it saves: it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from crc32c import crc32c

from kvstore.errors import Corrupt
from kvstore.geometry import LayerGroup
from kvstore.io.protocol import Landing
from kvstore.io.vectors import IoVectors
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
        if self._verify and not _all_match(data, len(slots), piece.chunk_bytes, piece.stride):
            self._find_damage(piece, slots, data)
        self._pages.scatter(slots, piece.where, data, piece.stride)

    def _find_damage(self, piece: Piece, slots: Slots, data: memoryview) -> None:
        size, stride = piece.chunk_bytes, piece.stride
        stored = np.ndarray((len(slots),), "<u4", data, size, (stride,)).tolist()
        for i, slot in enumerate(slots):
            if crc32c(data[i * stride : i * stride + size]) != stored[i]:
                raise self._damage(piece, slot)

    def into(self, number: int, offset: int, length: int) -> Landing | None:
        """Where a piece's runs belong; see :data:`kvstore.io.protocol.Into`."""
        if self._verify:
            return None
        piece = self._pieces[number]
        slots = _cut(piece, offset, length)
        runs = self._pages.runs(slots, piece.where, piece.chunk_bytes)
        if runs is None:
            return None
        addresses, nbytes = runs
        # The checksum and the gap behind a chunk go where nobody looks.
        rest = np.empty(piece.stride - piece.chunk_bytes, dtype=np.uint8)
        table = np.empty((len(slots), addresses.shape[1] + 1, 2), dtype=np.uint64)
        table[:, :-1, 0] = addresses
        table[:, :-1, 1] = nbytes
        table[:, -1] = (rest.ctypes.data, rest.nbytes)
        return IoVectors(table, (rest, self._pages)), _nothing

    def _damage(self, piece: Piece, slot: tuple[int, int]) -> Corrupt:
        layer = self._group.layers[self._share.layers.start + slot[0]]
        head = self._share.heads.start + slot[1]
        return Corrupt(
            f"extent {piece.key}: layer {layer}, head {head}: the chunk does not match its checksum"
        )


def _nothing() -> None:
    """What is left to do when bytes have landed."""


def _all_match(data: memoryview, chunks: int, chunk_bytes: int, stride: int) -> bool:
    """Whether all chunks of a piece match their checksums, told by one checksum of the whole piece.

    CRC is linear: a chunk followed by its own CRC takes the register from any state to one that
    does not depend on the chunk. So the checksum of a piece in which all match, with zeros between,
    is one constant; any one chunk that does not match changes it, several together escape with a
    chance of 2^-32. One call for a piece keeps threads from queueing for the interpreter's lock.
    False may also mean that the gaps are not zero, which is allowed.
    """
    return crc32c(data) == _piece_sum(chunks, chunk_bytes, stride)


@lru_cache(maxsize=256)
def _piece_sum(chunks: int, chunk_bytes: int, stride: int) -> int:
    slot = bytearray(stride)
    own = crc32c(memoryview(slot)[:chunk_bytes])
    slot[chunk_bytes : chunk_bytes + CRC_BYTES] = own.to_bytes(CRC_BYTES, "little")
    total = 0
    for _ in range(chunks):
        total = crc32c(slot, total)
    return total


def _cut(piece: Piece, offset: int, length: int) -> Slots:
    """The chunks of a part of a piece."""
    first = offset // piece.stride
    return piece.slots[first : first - (-length // piece.stride)]
