"""Delivery: chunks that an I/O engine reads, verified, into the pages of a load.

A piece is in the engine's memory, still in the processor's cache; there its chunks are checked, and
copied on. To have the kernel copy each run of bytes straight to its place would save that copy, and
is slower: it waits for the pages' lines to come from memory, where the copy writes past the caches.
It was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import Corrupt
from kvstore.geometry import LayerGroup
from kvstore.native import Sink
from kvstore.pages import Mover, Pages
from kvstore.placement import Placement
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
        self._movers: list[Mover | None] = [None] * len(pieces)

    def consume(self, number: int, offset: int, data: memoryview) -> None:
        """Check and scatter a staged piece; see :data:`kvstore.io.protocol.Consume`.

        Raises:
            Corrupt: a chunk does not match its checksum; neither it nor what follows is placed.
        """
        piece = self._pieces[number]
        first, count = offset // piece.stride, -(-len(data) // piece.stride)
        mover = self._mover(number)
        wrong = mover.scatter(data, first, count, verify=self._verify)
        if wrong is not None:
            raise self._damage(piece, piece.slots[wrong])

    def sink(self, number: int) -> Sink | None:
        """A C function that does the same; see :data:`kvstore.io.protocol.SinkOf`."""
        return self._mover(number).sink(verify=self._verify)

    def _mover(self, number: int) -> Mover:
        mover = self._movers[number]
        if mover is None:
            piece = self._pieces[number]
            mover = self._pages.mover(piece.slots, piece.where, piece.chunk_bytes, piece.stride)
            self._movers[number] = mover
        return mover

    def _damage(self, piece: Piece, slot: tuple[int, int]) -> Corrupt:
        layer = self._group.layers[self._share.layers.start + slot[0]]
        head = self._share.heads.start + slot[1]
        return Corrupt(
            f"extent {piece.key}: layer {layer}, head {head}: the chunk does not match its checksum"
        )
