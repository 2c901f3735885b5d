"""Load: a rank's share of stored blocks, into its paged buffers.

Names are looked up, records read and checked, and the chunks of the share planned as large ranges.
The I/O engine reads them; its threads verify each chunk's checksum and scatter it into the pages
while other ranges are still being read. An extent of which anything fails is a miss, whole: the
reason is reported, damage is quarantined, and nothing of it counts as loaded.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.deliver import Delivery, Piece
from kvstore.errors import (
    Corrupt,
    FormatError,
    KVStoreError,
    NotFound,
    StorageError,
    UnsupportedVersion,
)
from kvstore.extent import CommitRecord
from kvstore.geometry import LayerGroup
from kvstore.io.protocol import ByteRange, Engine
from kvstore.keys import BlockKeys, require_keys
from kvstore.lookup import Hit, Lookup
from kvstore.pages import Pages
from kvstore.paths import GroupPath
from kvstore.placement import Ints, Placement, place, unit_tokens
from kvstore.plan import ChunkRun, ShardPart, planned_layout, shard_parts, split_run
from kvstore.report import LoadResult
from kvstore.shard import CRC_BYTES, decode_index
from kvstore.share import Share

log = logging.getLogger("kvstore.load")

RANGE_BYTES = 8 << 20
"""Largest range asked of an engine at once; engines cut it further as suits them."""

Quarantine = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class _Extent:
    """One extent of a load: what is wanted of it, and where that goes."""

    hit: Hit
    record: CommitRecord
    where: Placement


class Loader:
    """Loads for one rank.

    Args:
        engine: the I/O engine.
        lookup: of the rank's layer group.
        group: the layer group.
        names: its paths.
        share: the rank's share.
        pages: mover of chunks into the rank's buffers.
        local_block_tokens: local tokens of an engine block.
        quarantine: called with key and reason for every damaged extent.
        verify: check every chunk's checksum.
    """

    def __init__(
        self,
        engine: Engine,
        lookup: Lookup,
        group: LayerGroup,
        names: GroupPath,
        share: Share,
        pages: Pages,
        local_block_tokens: int,
        quarantine: Quarantine,
        *,
        verify: bool,
    ) -> None:
        self._engine = engine
        self._lookup = lookup
        self._group = group
        self._names = names
        self._share = share
        self._pages = pages
        self._local_block_tokens = max(local_block_tokens, 1)
        self._unit = unit_tokens(share.lattice, group.page_tokens, self._local_block_tokens)
        self._quarantine = quarantine
        self._verify = verify
        self._planned: dict[range | None, list[ShardPart]] = {}

    def prepare(self, keys: BlockKeys, table: Ints) -> Loading:
        """Look up and check the extents of a request; nothing is read of their content yet.

        Raises:
            InvalidArgument: the block table does not cover the blocks that are there.
        """
        require_keys(keys)
        loading = Loading(self, keys, time.perf_counter())
        hits = self._lookup.extents(keys)
        reached = hits[-1].stop if hits else keys.start
        for index in range(reached - keys.start, len(keys)):
            loading.misses[index] = "not stored"
        for hit in hits:
            try:
                record = self._checked_record(hit, keys)
            except KVStoreError as error:
                loading.fail(hit, error)
                continue
            loading.extents.append(_Extent(hit, record, self._place(hit, record, table)))
        return loading

    def _checked_record(self, hit: Hit, keys: BlockKeys) -> CommitRecord:
        record = self._lookup.record(hit.key)
        skip = hit.first - record.start_block
        wanted = tuple(keys[i - keys.start] for i in range(hit.first, hit.stop))
        before = keys.parent_of(hit.first - keys.start)
        chain = (record.parent, *record.blocks)
        if skip < 0 or chain[skip : skip + len(wanted) + 1] != (before, *wanted):
            raise Corrupt(
                f"extent {hit.key}: its record holds other blocks than its name stands for"
            )
        return record

    def _place(self, hit: Hit, record: CommitRecord, table: Ints) -> Placement:
        if self._share.empty:
            nothing = np.empty(0, dtype=np.int64)
            return Placement(self._unit, None, nothing, nothing)
        n = self._group.page_tokens
        return place(
            self._share.lattice,
            self._unit,
            self._local_block_tokens,
            table,
            record.start_block * n,
            hit.first * n,
            hit.stop * n,
        )

    def read(self, loading: Loading, layers: range | None) -> None:
        """Read, verify and place what is wanted of every extent that has not failed yet."""
        ranges: list[ByteRange] = []
        pieces: list[Piece] = []
        for extent in loading.extents:
            if extent.hit.key in loading.failed or not len(extent.where.block):
                continue
            try:
                self._plan(extent, layers, ranges, pieces)
            except KVStoreError as error:
                loading.fail(extent.hit, error)
        if not ranges:
            return

        delivery = Delivery(self._group, self._share, self._pages, pieces, verify=self._verify)
        outcomes = self._engine.read(ranges, delivery.consume, delivery.sink)
        hits = {extent.hit.key: extent.hit for extent in loading.extents}
        for piece, span, outcome in zip(pieces, ranges, outcomes, strict=True):
            if outcome is None:
                loading.bytes_read += span.length
                tokens = len(piece.where.block) * piece.where.unit
                loading.bytes_placed += len(piece.slots) * tokens * self._group.token_bytes
            elif isinstance(outcome, KVStoreError):
                loading.fail(hits[piece.key], outcome)
            else:
                raise outcome  # a fault of ours, not of the storage

    def _plan(
        self,
        extent: _Extent,
        layers: range | None,
        ranges: list[ByteRange],
        pieces: list[Piece],
    ) -> None:
        record, key, where = extent.record, extent.hit.key, extent.where
        layout = planned_layout(self._group, len(record.blocks), record.chunk_stride)
        chunk = layout.chunk_bytes
        per_range = max(1, RANGE_BYTES // layout.stride)
        for part in self._parts(layers):
            path = self._names.shard(key, part.name)
            if record.chunk_stride is None:
                offsets = self._offsets(extent, part.name)
                size = chunk + CRC_BYTES
                for run in part.runs:
                    for i, slot in enumerate(run.slots):
                        ranges.append(ByteRange(path, offsets[run.first + i], size))
                        pieces.append(Piece(key, (slot,), where, chunk, size))
                continue
            for whole in part.runs:
                for run in split_run(whole, per_range):
                    ranges.append(_range(path, run, layout.stride))
                    pieces.append(Piece(key, run.slots, where, chunk, layout.stride))

    def _parts(self, layers: range | None) -> list[ShardPart]:
        """What of an extent's shards is the rank's: the same for every extent."""
        found = self._planned.get(layers)
        if found is None:
            found = self._planned[layers] = shard_parts(self._group, self._share, layers)
        return found

    def _offsets(self, extent: _Extent, shard: str) -> list[int]:
        """Chunk offsets out of a shard's index, where the record does not give a stride."""
        path = self._names.shard(extent.hit.key, shard)
        size = extent.record.shards[shard]
        layout = planned_layout(self._group, len(extent.record.blocks), None)
        tail = layout.index_bytes
        data = read_bytes(self._engine, ByteRange(path, size - tail, tail))
        found = decode_index(data, layout.chunks, layout.chunk_bytes, size, f"shard {path}")
        offsets: list[int] = found.tolist()
        return offsets

    def report_damage(self, key: str, error: KVStoreError) -> None:
        """Quarantine an extent if its bytes are at fault, not the medium or this release."""
        if isinstance(error, NotFound):
            # Removed as a whole while it was read: nothing is wrong. A part of it gone: it is.
            damaged = self._engine.exists(self._names.record(key))
        elif isinstance(error, StorageError):
            # No plain file stands where one of the extent belongs: a link, a folder, a pipe.
            damaged = error.errno in (errno.ELOOP, errno.EISDIR, errno.ESPIPE)
        else:
            damaged = isinstance(error, FormatError) and not isinstance(error, UnsupportedVersion)
        if damaged:
            self._quarantine(key, str(error))

    @property
    def layers(self) -> int:
        """Layers that the rank holds of the group."""
        return len(self._share.layers)

    @property
    def engine_name(self) -> str:
        """Name of the I/O engine."""
        return self._engine.name


class Loading:
    """One load under way, and what has come of it so far."""

    def __init__(self, loader: Loader, keys: BlockKeys, started: float) -> None:
        self._loader = loader
        self._keys = keys
        self._started = started
        self.extents: list[_Extent] = []
        self.failed: set[str] = set()
        self.misses: dict[int, str] = {}
        self.bytes_read = 0
        self.bytes_placed = 0

    def fail(self, hit: Hit, error: KVStoreError) -> None:
        """Count an extent as a miss; the first reason is kept."""
        if hit.key in self.failed:
            return
        self.failed.add(hit.key)
        reason = f"vanished: {error}" if isinstance(error, NotFound) else str(error)
        log.warning("not loaded: %s", reason)
        for block in range(hit.first, hit.stop):
            self.misses[block - self._keys.start] = reason
        self._loader.report_damage(hit.key, error)

    def run(self, layers: range | None = None) -> LoadResult:
        """Read some layers (None: all) and report on everything so far."""
        self._loader.read(self, layers)
        return LoadResult(
            blocks=min(self.misses, default=len(self._keys)),
            requested=len(self._keys),
            misses=dict(self.misses),
            bytes_read=self.bytes_read,
            bytes_placed=self.bytes_placed,
            seconds=time.perf_counter() - self._started,
            engine=self._loader.engine_name,
        )


def read_bytes(engine: Engine, span: ByteRange) -> bytes:
    """One range, as bytes.

    Raises:
        NotFound, Corrupt, StorageError: as the engine reports them.
    """
    parts: list[bytes] = []
    outcome = engine.read([span], lambda _n, _o, data: parts.append(bytes(data)))[0]
    if outcome is not None:
        raise outcome
    return b"".join(parts)


def _range(path: str, run: ChunkRun, stride: int) -> ByteRange:
    return ByteRange(path, run.first * stride, len(run.slots) * stride, stride)
