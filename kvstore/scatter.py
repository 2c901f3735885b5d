"""Scatter and gather: chunks of canonical bytes into and out of a rank's paged buffers.

On the host this is NumPy fancy indexing over views whose items are whole runs of bytes (NumPy's
void type), which copies at about the speed of memcpy and with the interpreter lock released. On
other devices a chunk is copied there once and spread by torch indexing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.buffers import PagedBuffers
from kvstore.placement import Placement
from kvstore.segments import Segment

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

    def runs(
        self, slots: Slots, where: Placement, chunk_bytes: int
    ) -> list[list[memoryview]] | None:
        """The memory of each whole chunk as a few long runs, in order; None where it is not so."""


def pages_of(buffers: PagedBuffers) -> Pages:
    """The mover for the device that the buffers are on."""
    if buffers.device is None or buffers.device.type == "cpu":
        return HostPages(buffers)
    return DevicePages(buffers)


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


@dataclass(frozen=True, slots=True)
class _Target:
    """Items of one head of one segment: 1-D, ``factor`` items a block; or [block, slot] if 0."""

    run: _Run
    factor: int
    view: NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Chunks of a piece that move alike: their places in the piece, and where each goes."""

    run: _Run
    factor: int
    moves: tuple[tuple[int, NDArray[Any]], ...]


_MAX_BATCHES = 1 << 16

MIN_RUN_BYTES = 2048
"""Shorter runs cost more to hand to the kernel one by one than to copy."""


class HostPages:
    """Pages in host memory."""

    def __init__(self, buffers: PagedBuffers) -> None:
        self._buffers = buffers
        self._token_bytes = buffers.group.token_bytes
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self._views: dict[int, memoryview] = {}
        self._targets: dict[tuple[int, int, int], list[_Target]] = {}
        self._batches: dict[tuple[tuple[tuple[int, int], ...], int], tuple[_Batch, ...]] = {}

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """See :class:`Pages`."""
        if not len(where.block):
            return
        for batch in self._batches_of(slots, where.unit):
            chunks, index, select = self._items(batch, where, data, len(slots), stride)
            if select is None:
                for i, view in batch.moves:
                    view[index] = chunks[i]
            else:
                for i, view in batch.moves:
                    view[index] = chunks[i][select]

    def gather(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        """See :class:`Pages`."""
        if not len(where.block):
            return
        for batch in self._batches_of(slots, where.unit):
            chunks, index, select = self._items(batch, where, data, len(slots), stride)
            columns: Any = slice(None) if select is None else select
            for i, view in batch.moves:
                chunks[i, columns] = view[index]

    def runs(
        self, slots: Slots, where: Placement, chunk_bytes: int
    ) -> list[list[memoryview]] | None:
        """See :class:`Pages`."""
        nbytes = where.unit * self._token_bytes
        if where.source is not None or len(where.block) * nbytes != chunk_bytes:
            return None  # not the whole chunk is wanted here, so its checksum must be had elsewhere
        if nbytes < MIN_RUN_BYTES:
            return None
        out: list[list[memoryview]] = []
        offsets: dict[int, list[int]] = {}
        for layer, head in slots:
            segments = self._buffers.layers[layer]
            s = segments[0]
            if len(segments) > 1 or not s.nbytes == self._token_bytes == s.token_stride:
                return None
            within = offsets.get(s.block_stride)
            if within is None:
                places = where.block * s.block_stride + where.slot * nbytes
                within = offsets[s.block_stride] = places.tolist()
            memory = self._bytes(s.tensor)
            start = s.address + head * s.head_stride
            out.append([memory[start + at : start + at + nbytes] for at in within])
        return out

    def _bytes(self, tensor: torch.Tensor) -> memoryview:
        """The same as :meth:`_storage`, to be cut."""
        found = self._views.get(id(tensor))
        if found is None:
            found = self._views[id(tensor)] = self._storage(tensor).data
        return found

    def _items(
        self, batch: _Batch, where: Placement, data: memoryview, count: int, stride: int
    ) -> tuple[NDArray[Any], Any, Any]:
        """Items ``[chunk, unit]`` of the piece, index into the targets, units of a chunk used."""
        w = where if batch.run.whole else where.split()
        used = len(w.block) if w.source is None else int(w.source[-1]) + 1
        chunks: NDArray[Any] = np.ndarray(
            (count, used),
            f"V{batch.run.nbytes}",
            data,
            batch.run.content_offset,
            (stride, w.unit * self._token_bytes),
        )
        index: Any = w.block * batch.factor + w.slot if batch.factor else (w.block, w.slot)
        return chunks, index, w.source

    def _batches_of(self, slots: Slots, unit: int) -> tuple[_Batch, ...]:
        """How the chunks of such a piece move; the same pieces come again with every extent."""
        key = (tuple(slots), unit)
        found = self._batches.get(key)
        if found is None:
            groups: dict[tuple[int, _Run, int], list[tuple[int, NDArray[Any]]]] = {}
            for i, (layer, head) in enumerate(slots):
                for s, target in enumerate(self._targets_of(layer, head, unit)):
                    alike = groups.setdefault((s, target.run, target.factor), [])
                    alike.append((i, target.view))
            found = tuple(_Batch(run, f, tuple(moves)) for (_, run, f), moves in groups.items())
            if len(self._batches) >= _MAX_BATCHES:
                self._batches.clear()
            self._batches[key] = found
        return found

    def _targets_of(self, layer: int, head: int, unit: int) -> list[_Target]:
        key = (layer, head, unit)
        found = self._targets.get(key)
        if found is None:
            found = [self._target(s, head, unit) for s in self._buffers.layers[layer]]
            self._targets[key] = found
        return found

    def _target(self, s: Segment, head: int, unit: int) -> _Target:
        run = _Run.of(s, unit, self._token_bytes)
        slots = s.tokens // unit if run.whole else s.tokens
        memory = self._storage(s.tensor)
        start = s.address + head * s.head_stride
        dtype = f"V{run.nbytes}"
        if run.step and s.block_stride and s.block_stride % run.step == 0:
            factor = s.block_stride // run.step
            length = (s.blocks - 1) * factor + slots
            flat: NDArray[Any] = np.ndarray((length,), dtype, memory.data, start, (run.step,))
            return _Target(run, factor, flat)
        shape, strides = (s.blocks, slots), (s.block_stride, run.step)
        return _Target(run, 0, np.ndarray(shape, dtype, memory.data, start, strides))

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

    def runs(
        self, slots: Slots, where: Placement, chunk_bytes: int
    ) -> list[list[memoryview]] | None:
        """Never: the kernel reads into host memory only."""
        del slots, where, chunk_bytes
        return None

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
