"""What moves chunks between canonical bytes and a rank's paged buffers."""

from __future__ import annotations

from typing import Protocol

from kvstore.buffers import PagedBuffers
from kvstore.device_scatter import DevicePages
from kvstore.native import Sink
from kvstore.placement import Placement
from kvstore.scatter import HostPages, Slots


class Mover(Protocol):
    """Moves some consecutive chunks, of which it is known where their tokens go."""

    def scatter(self, data: memoryview, first: int, count: int, *, verify: bool) -> int | None:
        """Copy chunks ``first`` to ``first + count - 1`` out of ``data``, which starts with them.

        Returns:
            With ``verify``, the first chunk that does not match the checksum that follows it, which
            was not copied, nor was any after it. None: all were copied.
        """

    def gather(self, data: memoryview, first: int, count: int, *, sums: bool) -> None:
        """Copy them from the pages to ``data``; with ``sums``, each followed by its checksum."""

    def sink(self, *, verify: bool) -> Sink | None:
        """A C function that scatters all chunks, in order, as they are read; None: there is none.

        With ``verify`` it refuses a chunk that does not match its checksum.
        """


class Pages(Protocol):
    """Moves chunks between canonical bytes and paged buffers. Safe between threads."""

    def mover(self, slots: Slots, where: Placement, chunk_bytes: int, stride: int) -> Mover:
        """Prepare to move chunks of ``chunk_bytes`` that lie one every ``stride`` bytes."""

    def require_unmoved(self) -> None:
        """Check that the buffers are still where they were; raises InvalidArgument."""


def pages_of(buffers: PagedBuffers) -> Pages:
    """The mover for the device that the buffers are on."""
    if buffers.device is None or buffers.device.type == "cpu":
        return HostPages(buffers)
    return DevicePages(buffers)
