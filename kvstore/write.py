"""Store: one rank's elected bytes of a sequence's extents, into the in-flight folders.

A shard that the rank owns whole is built in memory and written at once. A shard that several ranks
fill is written in place, each rank its own runs, and the rank leaves a mark when all of its bytes
are there; ``commit`` seals such shards. Nothing written here is visible to any reader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from crc32c import crc32c

from kvstore.election import is_writer
from kvstore.errors import NotFound
from kvstore.extent import shard_layout
from kvstore.geometry import LayerGroup
from kvstore.io.failpoints import reach
from kvstore.io.protocol import Buffer, Engine
from kvstore.io.staging import Staging
from kvstore.jobs import settle, start
from kvstore.keys import BlockKeys, require_keys
from kvstore.lookup import Lookup
from kvstore.marks import ByteRuns, encode_mark, owned_runs
from kvstore.pages import Pages
from kvstore.parallel import Rank
from kvstore.paths import GroupPath, InflightPath
from kvstore.placement import Ints, Placement, place, unit_tokens
from kvstore.plan import ShardPart, shard_parts, split_run
from kvstore.report import StoreReport
from kvstore.shard import CRC_BYTES, ShardLayout
from kvstore.share import Share

RUN_BYTES = 32 << 20
"""Of a shard that several ranks fill, this much is gathered at a time."""

_ATTEMPTS = 4
"""Times that an extent's shards are written when what is in flight of it vanishes meanwhile."""


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks ``first`` to ``stop - 1`` of a sequence, which make one extent."""

    first: int
    stop: int
    key: bytes


@dataclass(frozen=True, slots=True)
class _Job:
    """One extent being written: its shards, and for each what writes it."""

    span: Span
    inflight: InflightPath
    parts: list[ShardPart]
    futures: list[Future[tuple[int, int]]]


def extent_spans(group: LayerGroup, keys: BlockKeys, *, tail: bool = True) -> Iterator[Span]:
    """The extents that consecutive blocks make: full ones, and a shorter last one if ``tail``.

    Blocks before the first extent boundary are skipped: they belong to an extent whose first blocks
    are not at hand.
    """
    require_keys(keys)
    size = group.extent_blocks
    first, end = -(-keys.start // size) * size, keys.start + len(keys)
    while first < end:
        stop = min(first + size, end)
        if stop - first == size or tail:
            yield Span(first, stop, keys[stop - 1 - keys.start])
        first = stop


class Saver:
    """Stores for one rank.

    Args:
        engine: the I/O engine.
        lookup: of the rank's layer group.
        group: the layer group.
        names: its paths.
        writer: writer id of the engine's ranks, see :func:`kvstore.paths.writer_id`.
        pages: mover of chunks out of the rank's buffers.
        local_block_tokens: local tokens of an engine block.
        staging: memory that shards are built in.
        pool: gives the threads that build and write shards; others after a fork.
    """

    def __init__(
        self,
        engine: Engine,
        lookup: Lookup,
        group: LayerGroup,
        names: GroupPath,
        writer: str,
        pages: Pages,
        local_block_tokens: int,
        staging: Staging,
        pool: Callable[[], Executor],
    ) -> None:
        self._engine = engine
        self._lookup = lookup
        self._group = group
        self._names = names
        self._writer = writer
        self._pages = pages
        self._local_block_tokens = max(local_block_tokens, 1)
        self._staging = staging
        self._pool = pool

    def store(
        self, keys: BlockKeys, table: Ints, share: Share, rank: Rank, *, tail: bool
    ) -> StoreReport:
        """Write what the rank was elected to write.

        Raises:
            InvalidArgument: the block table does not cover the blocks. StorageError: as named;
                what was written stays, and the same call goes on from there.
        """
        started = time.perf_counter()
        present = not_elected = covered = written = extents = 0
        jobs: list[_Job] = []
        marks: list[tuple[_Job, Future[None]]] = []
        try:
            for span in extent_spans(self._group, keys, tail=tail):
                covered += span.stop - span.first
                if self._lookup.holds(span.key):
                    present += 1
                elif not is_writer(share, span.key):
                    not_elected += 1
                elif not share.empty:
                    jobs.append(self._submit(span, table, share, rank))
            for job in jobs:
                results = self._results(job, partial(self._submit, job.span, table, share, rank))
                if results is None:
                    present += 1
                    continue
                marks.append((job, start(self._pool, partial(self._mark, job, results, rank))))
                written += sum(nbytes for nbytes, _ in results)
            for job, mark in marks:
                try:
                    mark.result()
                    extents += 1
                except NotFound:
                    # The in-flight folder went meanwhile: another engine was first with the extent,
                    # and another rank of this one has cleared up. If it was not: see the commit.
                    present += self._lookup.holds(job.span.key)
        finally:
            settle(mark for _, mark in marks)
            settle(f for job in jobs for f in job.futures)
        return StoreReport(
            extents=extents,
            present=present,
            not_elected=not_elected,
            unstored_blocks=len(keys) - covered,
            bytes_written=written,
            seconds=time.perf_counter() - started,
        )

    def _results(self, job: _Job, again: Callable[[], _Job]) -> list[tuple[int, int]] | None:
        """What came of an extent's shards; None: the extent is there, by another writer.

        The in-flight folder may go while a shard is written into it: another process of the session
        has published the extent, or cleared up after one that did. If it is not there all the same,
        because it was removed since or a collection took the folder, the shards are written again.

        Raises:
            NotFound: it goes each time, or the root is gone.
        """
        for left in reversed(range(_ATTEMPTS)):
            try:
                return [future.result() for future in job.futures]
            except NotFound:
                settle(job.futures)
                if self._lookup.holds(job.span.key):
                    return None
                if not left:
                    raise
                job = again()
            except BaseException:
                settle(job.futures)
                raise
        raise AssertionError("unreachable")

    def _mark(self, job: _Job, results: list[tuple[int, int]], rank: Rank) -> None:
        """Leave the rank's mark, now that all it writes of an extent's shards is written."""
        sums = {
            part.name: total
            for part, (_, total) in zip(job.parts, results, strict=True)
            if not part.whole
        }
        if sums:
            # The mark may survive a power failure only if the bytes it speaks of do, and the names
            # of the files that hold them.
            inflight = job.inflight
            self._engine.sync([*map(inflight.part, sums), inflight.array, inflight.folder])
            reach("store.before_mark")
            mark = inflight.done((rank.pp, rank.pcp, rank.tp))
            self._engine.create(mark, encode_mark(sums), settle=False)

    def _submit(self, span: Span, table: Ints, share: Share, rank: Rank) -> _Job:
        """Start writing one extent's shards."""
        inflight = self._names.inflight(span.key.hex(), self._writer)
        n = self._group.page_tokens
        unit = unit_tokens(share.lattice, n, self._local_block_tokens)
        start, stop = span.first * n, span.stop * n
        where = place(share.lattice, unit, self._local_block_tokens, table, start, start, stop)
        parts = shard_parts(self._group, share)
        shared = not all(part.whole for part in parts)
        if shared and self._engine.exists(inflight.done((rank.pp, rank.pcp, rank.tp))):
            return _Job(span, inflight, [], [])
        layout = shard_layout(self._group, span.stop - span.first)
        owned = owned_runs(share.lattice, start, stop, self._group.token_bytes)
        submit = self._pool().submit
        futures = [submit(self._write, inflight, p, where, layout, owned) for p in parts]
        return _Job(span, inflight, parts, futures)

    def _write(
        self,
        inflight: InflightPath,
        part: ShardPart,
        where: Placement,
        layout: ShardLayout,
        owned: ByteRuns,
    ) -> tuple[int, int]:
        """Content bytes written; for a shared shard also their checksum, for the mark."""
        reach("store.before_shard")
        if part.whole:
            result = self._write_whole(inflight, part, where, layout), 0
        else:
            result = self._write_runs(inflight, part, where, layout, owned)
        reach("store.after_shard")
        return result

    def _write_whole(
        self, inflight: InflightPath, part: ShardPart, where: Placement, layout: ShardLayout
    ) -> int:
        path = inflight.shard(part.name)
        if self._engine.exists(path):
            return 0  # an earlier call of this writer got that far
        buffer = self._staging.acquire(layout.shard_bytes)
        try:
            shard = buffer[: layout.shard_bytes]
            for run in part.runs:
                begin = layout.offset(run.first)
                end = layout.offset(run.first + len(run.slots))
                mover = self._pages.mover(run.slots, where, layout.chunk_bytes, layout.stride)
                mover.gather(shard[begin:end], 0, len(run.slots), sums=True)
            finish_shard(shard, layout)
            # Its name becomes durable with the commit: lost before that, it is written again.
            self._engine.write(path, [shard], settle=False)
        finally:
            self._staging.release(buffer)
        return layout.chunks * layout.chunk_bytes

    def _write_runs(
        self,
        inflight: InflightPath,
        part: ShardPart,
        where: Placement,
        layout: ShardLayout,
        owned: ByteRuns,
    ) -> tuple[int, int]:
        size = layout.chunk_bytes
        written = total = 0
        most = max(1, RUN_BYTES // size)
        for run in (piece for whole in part.runs for piece in split_run(whole, most)):
            nbytes = len(run.slots) * size
            buffer = self._staging.acquire(nbytes)
            try:
                data = buffer[:nbytes]
                mover = self._pages.mover(run.slots, where, size, size)
                mover.gather(data, 0, len(run.slots), sums=False)
                pieces: list[tuple[int, Buffer]] = []
                for i in range(len(run.slots)):
                    place_in_shard = layout.offset(run.first + i)
                    for start, length in owned:
                        piece = data[i * size + start : i * size + start + length]
                        pieces.append((place_in_shard + start, piece))
                        total = crc32c(piece, total)
                        written += length
                self._engine.write_into(inflight.part(part.name), layout.shard_bytes, pieces)
            finally:
                self._staging.release(buffer)
        return written, total


def finish_shard(shard: memoryview, layout: ShardLayout) -> None:
    """Put zeroed gaps and the index around the chunks and checksums that are in place.

    Args:
        shard: ``layout.shard_bytes`` bytes, chunks at their offsets.
        layout: of the shard.
    """
    used = layout.chunk_bytes + CRC_BYTES
    if layout.stride > used:
        gaps = np.ndarray(
            (layout.chunks, layout.stride - used), np.uint8, shard, used, (layout.stride, 1)
        )
        gaps[...] = 0
    shard[layout.index_offset :] = layout.encode_index()
