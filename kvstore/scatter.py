"""Scatter and gather: chunks of canonical bytes into and out of a rank's paged buffers.

On the host this is NumPy fancy indexing over views whose items are whole runs of bytes (NumPy's
void type), which copies at about the speed of memcpy and with the interpreter lock released. On
other devices a chunk is copied there once and spread by torch indexing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.buffers import PagedBuffers, Segment
from kvstore.placement import Placement

if TYPE_CHECKING:
    import torch

Slots = Sequence[tuple[int, int]]
"""(layer of the rank, head of the rank) of consecutive chunks."""


class Pages(Protocol):
    """Moves chunks between canonical bytes and paged buffers."""

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """Copy chunks out of ``data``, one every ``stride`` bytes, into the pages."""

    def gather(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """Copy from the pages into chunks in ``data``, one every ``stride`` bytes."""


def pages_of(buffers: PagedBuffers) -> Pages:
    """The mover for the device that the buffers are on."""
    if buffers.device is None or buffers.device.type == "cpu":
        return HostPages(buffers)
    return DevicePages(buffers)


_Move = tuple[list[NDArray[Any]], list[NDArray[Any]], Any, Any]


@dataclass(frozen=True, slots=True)
class _Run:
    """How one segment moves: items of ``unit`` tokens if its tokens are contiguous, else of one."""

    whole: bool
    nbytes: int
    step: int
    content_offset: int

    @classmethod
    def of(cls, segment: Segment, unit: int, token_bytes: int) -> _Run:
        whole = segment.nbytes == token_bytes == segment.token_stride
        count = unit if whole else 1
        return cls(
            whole, count * segment.nbytes, count * segment.token_stride, segment.content_offset
        )


class HostPages:
    """Pages in host memory."""

    def __init__(self, buffers: PagedBuffers) -> None:
        self._buffers = buffers
        self._token_bytes = buffers.group.token_bytes
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self._targets: dict[tuple[int, int, int], list[tuple[_Run, int, NDArray[Any]]]] = {}

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """See :class:`Pages`."""
        for sources, targets, index, select in self._moves(slots, where, data, stride):
            for target, source in zip(targets, sources, strict=True):
                target[index] = source if select is None else source[select]

    def gather(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """See :class:`Pages`."""
        for sources, targets, index, select in self._moves(slots, where, data, stride):
            for target, source in zip(targets, sources, strict=True):
                if select is None:
                    source[...] = target[index]
                else:
                    source[select] = target[index]

    def _moves(
        self, slots: Slots, where: Placement, data: memoryview, stride: int
    ) -> Iterator[_Move]:
        """For each segment: items of the chunks, target views, and the two index arrays."""
        if not len(where.block):
            return
        targets = [self._target(layer, head, where.unit) for layer, head in slots]
        single = where.split()
        for s in range(len(targets[0])):
            # Layers may differ in memory order, so the slots are grouped by how they move.
            kinds = {(t[s][0], t[s][1]) for t in targets}
            for run, factor in kinds:
                rows = [i for i, t in enumerate(targets) if (t[s][0], t[s][1]) == (run, factor)]
                w = where if run.whole else single
                count = len(w.block) if w.source is None else int(w.source[-1]) + 1
                item = w.unit * self._token_bytes
                shape = (len(slots), count)
                chunks: NDArray[Any] = np.ndarray(
                    shape, f"V{run.nbytes}", data, run.content_offset, (stride, item)
                )
                index: Any = w.block * factor + w.slot if factor else (w.block, w.slot)
                yield (
                    [chunks[i] for i in rows],
                    [targets[i][s][2] for i in rows],
                    index,
                    w.source,
                )

    def _target(self, layer: int, head: int, unit: int) -> list[tuple[_Run, int, NDArray[Any]]]:
        key = (layer, head, unit)
        found = self._targets.get(key)
        if found is None:
            found = [self._view(s, head, unit) for s in self._buffers.layers[layer]]
            self._targets[key] = found
        return found

    def _view(self, s: Segment, head: int, unit: int) -> tuple[_Run, int, NDArray[Any]]:
        """Items of one head: 1-D with a block factor where strides allow, else [block, slot]."""
        run = _Run.of(s, unit, self._token_bytes)
        slots = s.tokens // unit if run.whole else s.tokens
        memory = self._storage(s.tensor)
        start = s.address + head * s.head_stride
        dtype = f"V{run.nbytes}"
        if s.block_stride % run.step == 0 and s.block_stride:
            factor = s.block_stride // run.step
            length = (s.blocks - 1) * factor + slots
            view: NDArray[Any] = np.ndarray((length,), dtype, memory.data, start, (run.step,))
            return run, factor, view
        view = np.ndarray((s.blocks, slots), dtype, memory.data, start, (s.block_stride, run.step))
        return run, 0, view

    def _storage(self, tensor: torch.Tensor) -> NDArray[np.uint8]:
        """The whole memory that a tensor is a view of, as bytes."""
        import torch

        storage = tensor.untyped_storage()
        found = self._memory.get(storage.data_ptr())
        if found is None:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            found = flat.numpy()
            self._memory[storage.data_ptr()] = found
        return found


class DevicePages:
    """Pages on any device that torch knows."""

    def __init__(self, buffers: PagedBuffers) -> None:
        self._buffers = buffers
        self._token_bytes = buffers.group.token_bytes

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """See :class:`Pages`."""
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
                self._view(segment, head)[block, slot] = part

    def gather(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """See :class:`Pages`."""
        tokens = where.split()
        if not len(tokens.block):
            return
        block, slot, _ = self._index(tokens)
        count = len(tokens.block) if tokens.source is None else int(tokens.source[-1]) + 1
        host = self._chunks(data, len(slots), count, stride)
        for i, (layer, head) in enumerate(slots):
            for segment in self._buffers.layers[layer]:
                part = self._view(segment, head)[block, slot].cpu().numpy()
                columns = slice(segment.content_offset, segment.content_offset + segment.nbytes)
                rows = slice(None) if tokens.source is None else tokens.source
                host[i][rows, columns] = part

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
