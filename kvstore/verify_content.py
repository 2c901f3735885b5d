"""Verification of one extent's bytes: sizes, indexes, and every chunk against its checksum.

Bytes are followed as they stream past, however an engine cuts them, so the memory needed does not
grow with a chunk, a shard or an extent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstore.errors import Corrupt, KVStoreError, NotFound
from kvstore.extent import CommitRecord
from kvstore.faults import Fault
from kvstore.geometry import LayerGroup
from kvstore.io.protocol import ByteRange, Engine
from kvstore.load import read_bytes
from kvstore.paths import GroupPath, parse_shard_name
from kvstore.plan import planned_layout
from kvstore.shard import CRC_BYTES, ShardLayout, checksum, decode_index

RANGE_BYTES = 8 << 20
"""Whole slots are asked of the engine in ranges of about this size."""

BATCH_BYTES = 64 << 20
"""Ranges of one call to the engine; progress is told after each."""


class ContentCheck:
    """Checks the shards of one extent.

    Args:
        engine: the I/O engine.
        group: the extent's layer group.
        names: the layer group's paths.
        record: the extent's record, checked.
        advance: called with the bytes of each batch that was dealt with.
    """

    def __init__(
        self,
        engine: Engine,
        group: LayerGroup,
        names: GroupPath,
        record: CommitRecord,
        advance: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._group = group
        self._record = record
        self._advance = advance
        self._layout = planned_layout(group, len(record.blocks), record.chunk_stride)
        key = record.key.hex()
        self._paths = {name: names.shard(key, name) for name in record.shards}

    def faults(self) -> Iterator[Fault]:
        """Every fault, shard by shard."""
        for shard, path in self._paths.items():
            wanted = self._record.shards[shard]
            try:
                size = self._engine.size(path)
            except KVStoreError as error:
                yield failure(path, error)
                continue
            if size != wanted:
                yield Fault(path, "size", f"{size} bytes; its extent's record says {wanted}")
                self._advance(size)
                continue
            yield from self._shard(shard, path)

    def _shard(self, shard: str, path: str) -> Iterator[Fault]:
        layout = self._layout
        size, tail = self._record.shards[shard], layout.index_bytes
        offsets: list[int] | None = None
        try:
            index = read_bytes(self._engine, ByteRange(path, size - tail, tail))
            offsets = decode_index(index, layout.chunks, layout.chunk_bytes, size, "").tolist()
        except Corrupt as error:
            yield Fault(path, "index", str(error).lstrip(": "))
        except KVStoreError as error:
            yield failure(path, error)
        self._advance(tail)
        slots: list[range]
        if self._record.chunk_stride is None:
            if offsets is None:
                return  # only the index says where chunks are
            slots = [range(i, i + 1) for i in range(layout.chunks)]
        else:
            yield from _against_stride(path, offsets, layout)
            offsets = [layout.offset(i) for i in range(layout.chunks)]
            step = max(1, RANGE_BYTES // layout.stride)
            slots = [range(i, min(i + step, layout.chunks)) for i in range(0, layout.chunks, step)]
        yield from self._chunks(shard, path, slots, offsets)

    def _chunks(
        self, shard: str, path: str, runs: list[range], offsets: list[int]
    ) -> Iterator[Fault]:
        size, used = self._record.shards[shard], self._layout.chunk_bytes + CRC_BYTES
        stride = used if self._record.chunk_stride is None else self._layout.stride
        per_call = max(1, BATCH_BYTES // (len(runs[0]) * stride))
        for at in range(0, len(runs), per_call):
            batch = runs[at : at + per_call]
            streams = [_SlotStream(self._layout.chunk_bytes, stride, run) for run in batch]
            ranges = [ByteRange(path, offsets[r.start], len(r) * stride, 1) for r in batch]
            for stream, outcome in zip(streams, self._feed(ranges, streams), strict=True):
                if outcome is not None:
                    yield failure(path, outcome)
                for slot, kind, what in stream.found:
                    yield Fault(path, kind, f"{self._place(shard, slot)}: {what}")
            self._advance(sum(r.length for r in ranges))
        if self._record.chunk_stride is None:
            self._advance(size - self._layout.index_bytes - self._layout.chunks * used)

    def _feed(self, ranges: list[ByteRange], streams: list[_SlotStream]) -> list[Exception | None]:
        def consume(number: int, _offset: int, data: memoryview) -> None:
            streams[number].feed(data)

        return self._engine.read(ranges, consume)

    def _place(self, shard: str, slot: int) -> str:
        row, column = parse_shard_name(shard)
        group = self._group
        layer = group.layers[row * group.shard_layers + slot // group.shard_heads]
        return f"layer {layer}, head {column * group.shard_heads + slot % group.shard_heads}"


def failure(path: str, error: Exception) -> Fault:
    """The fault that a failed call of an engine amounts to.

    Raises:
        Exception: ``error`` itself, when it is no fault of the storage.
    """
    if isinstance(error, NotFound):
        return Fault(path, "missing", "there is no such file, or it is no plain file")
    if isinstance(error, Corrupt):
        return Fault(path, "size", str(error))
    if isinstance(error, KVStoreError):
        return Fault(path, "unreadable", str(error))
    raise error


def _against_stride(path: str, offsets: list[int] | None, layout: ShardLayout) -> Iterator[Fault]:
    wrong = [i for i, at in enumerate(offsets or ()) if at != layout.offset(i)]
    if wrong and offsets is not None:
        first = wrong[0]
        yield Fault(
            path,
            "index",
            f"{len(wrong)} of {layout.chunks} chunks are not where the record's stride of "
            f"{layout.stride} puts them; the first is chunk {first}: {offsets[first]}, not "
            f"{layout.offset(first)}",
        )


class _SlotStream:
    """Follows the bytes of consecutive slots and collects what is wrong with them."""

    def __init__(self, chunk_bytes: int, stride: int, slots: range) -> None:
        self.found: list[tuple[int, str, str]] = []
        self._chunk_bytes = chunk_bytes
        self._stride = stride
        self._slots = slots
        self._slot = slots.start
        self._at = 0
        self._sum = 0
        self._stored = b""
        self._clean = True

    def feed(self, data: memoryview) -> None:
        """Take the bytes that come next."""
        chunk, used = self._chunk_bytes, self._chunk_bytes + CRC_BYTES
        while len(data):
            at = self._at
            end = chunk if at < chunk else used if at < used else self._stride
            part = data[: end - at]
            if at < chunk:
                self._sum = checksum(part, self._sum)
            elif at < used:
                self._stored += bytes(part)
            elif self._clean:
                self._clean = bytes(part).count(0) == len(part)
            self._at += len(part)
            data = data[len(part) :]
            if self._at == self._stride:
                self._finish()

    def _finish(self) -> None:
        stored = int.from_bytes(self._stored, "little")
        if stored != self._sum:
            what = f"the chunk's checksum is {stored:08x}, its bytes give {self._sum:08x}"
            self.found.append((self._slot, "checksum", what))
        if not self._clean:
            what = "bytes after the chunk are not zero; the chunk itself is whole"
            if stored != self._sum:
                what = "bytes after the chunk are not zero"
            self.found.append((self._slot, "padding", what))
        self._slot += 1
        self._at, self._sum, self._stored, self._clean = 0, 0, b"", True
