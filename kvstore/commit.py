"""Commit: complete in-flight extents become visible, each whole and at once.

Any process may commit, any number of times, at the same time as others. Shards that several ranks
filled are sealed (checksums, index) and given their final names; the record is written; then one
rename publishes the folder. The file system refuses that rename when the extent is there already,
so of several writers of one extent all succeed and one copy stays.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime

import numpy as np
from crc32c import crc32c

from kvstore.election import elected_ranks
from kvstore.errors import Corrupt, NotFound, StorageError
from kvstore.extent import (
    CommitRecord,
    Writer,
    encode_extent,
    shard_layout,
    shard_sizes,
)
from kvstore.geometry import LayerGroup
from kvstore.io.failpoints import reach
from kvstore.io.protocol import ByteRange, Engine
from kvstore.keys import BlockKeys
from kvstore.lookup import Lookup
from kvstore.parallel import ParallelConfig
from kvstore.paths import PART_SUFFIX, RECORD, GroupPath, InflightPath, parse_done, writer_id
from kvstore.plan import shard_parts
from kvstore.records import encode_plain_group
from kvstore.report import CommitReport, Missing
from kvstore.shard import ShardLayout
from kvstore.share import all_shares
from kvstore.write import Span, extent_spans

log = logging.getLogger("kvstore.commit")

Contributors = dict[str, list[tuple[str, bool]]]
"""Shard -> (rank as ``pp-pcp-tp``, whether it owns the shard whole) of those that fill it."""


def now() -> str:
    """The time as records write it: UTC, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Committer:
    """Commits extents of one layer group.

    Args:
        engine: the I/O engine.
        lookup: of the layer group.
        group: the layer group.
        names: its paths.
        software: name and version for the records.
    """

    def __init__(
        self, engine: Engine, lookup: Lookup, group: LayerGroup, names: GroupPath, software: str
    ) -> None:
        self._engine = engine
        self._lookup = lookup
        self._group = group
        self._names = names
        self._software = software
        self._fanouts: set[str] = set()

    def commit(
        self,
        keys: BlockKeys,
        config: ParallelConfig,
        session: str,
        model_layers: int,
        *,
        tail: bool,
    ) -> CommitReport:
        """Publish every complete extent of ``keys`` and say what the others wait for.

        Raises:
            NotCertified: the config cannot be mapped. StorageError: as named; call again.
        """
        report = CommitReport()
        writer = writer_id(session, str(config))
        by_election: dict[tuple[str, ...], Contributors] = {}
        for span in extent_spans(self._group, keys, tail=tail):
            key = span.key.hex()
            inflight = self._names.inflight(key, writer)
            if self._lookup.holds(span.key):
                self._engine.discard(inflight.folder)
                report.already.append(key)
                continue
            wanted = self._contributors(config, model_layers, span.key, by_election)
            missing = self._missing(key, inflight, wanted)
            published = False
            if missing is None:
                try:
                    published = self._publish(inflight, self._record(keys, span, config, session))
                except NotFound:
                    # The in-flight folder went while this went on: published, or cleaned up after.
                    everyone = {rank for ranks in wanted.values() for rank, _ in ranks}
                    missing = self._missing(key, inflight, wanted) or _awaited(
                        key, wanted, everyone
                    )
            if published:
                report.committed.append(key)
            elif missing is None or self._lookup.holds(span.key):
                report.already.append(key)  # another process published it
            else:
                report.missing.append(missing)
        return report

    def _contributors(
        self,
        config: ParallelConfig,
        model_layers: int,
        key: bytes,
        known: dict[tuple[str, ...], Contributors],
    ) -> Contributors:
        """Who fills which shard of the extent of that key."""
        ranks = elected_ranks(all_shares(self._group, config, model_layers), key)
        names = tuple(f"{r.pp}-{r.pcp}-{r.tp}" for r, _ in ranks)
        if names not in known:
            found: Contributors = {}
            for name, (_, share) in zip(names, ranks, strict=True):
                for part in shard_parts(self._group, share):
                    found.setdefault(part.name, []).append((name, part.whole))
            known[names] = found
        return known[names]

    def _missing(self, key: str, inflight: InflightPath, wanted: Contributors) -> Missing | None:
        there = set(self._engine.list_dir(inflight.array))
        done = {n for n in self._engine.list_dir(inflight.done_folder) if parse_done(n)}
        shards, ranks = [], set()
        for name, contributors in wanted.items():
            if name in there:
                continue
            late = {
                rank
                for rank, whole in contributors
                if whole or rank not in done or name + PART_SUFFIX not in there
            }
            if late:
                shards.append(name)
                ranks |= late
        if not shards:
            return None
        return _awaited(key, shards, ranks)

    def _record(
        self, keys: BlockKeys, span: Span, config: ParallelConfig, session: str
    ) -> CommitRecord:
        blocks = span.stop - span.first
        return CommitRecord(
            namespace=self._names.namespace,
            group=self._group.name,
            blocks=tuple(keys[span.first - keys.start : span.stop - keys.start]),
            parent=keys.parent_of(span.first - keys.start),
            start_block=span.first,
            chunk_stride=shard_layout(self._group, blocks).stride,
            shards=shard_sizes(self._group, blocks),
            parallel_invariant=self._group.attention != "opaque",
            writer=Writer(self._software, str(config), session),
            write_id=secrets.token_hex(16),
            created=now(),
        )

    def _publish(self, inflight: InflightPath, record: CommitRecord) -> bool:
        """Seal, record and publish one complete extent. False: another process was first.

        Raises:
            NotFound: the in-flight folder is gone.
        """
        key = record.key.hex()
        final = self._names.extent(key)
        self._seal(inflight, record, shard_layout(self._group, len(record.blocks)))
        data = encode_extent(self._group, record)
        reach("commit.before_record")
        self._engine.write(f"{inflight.array}/{RECORD}", [data])
        self._require_shards(inflight, record)
        self._make_fanout(key)
        reach("commit.before_publish")
        published = self._engine.publish(inflight.array, final)
        if not published and not self._engine.exists(self._names.record(key)):
            # Something without a record has the name: no extent, but it would keep this one out.
            self._engine.discard(final)
            published = self._engine.publish(inflight.array, final)
        reach("commit.after_publish")
        if published:
            self._refer(record)
        self._engine.discard(inflight.folder)
        return published

    def _seal(self, inflight: InflightPath, record: CommitRecord, layout: ShardLayout) -> None:
        there = set(self._engine.list_dir(inflight.array))
        for name in record.shards:
            if name not in there:
                reach("commit.before_seal")
                seal_shard(self._engine, inflight, name, layout)
                reach("commit.after_seal")
            size = self._engine.size(inflight.shard(name))
            if size != layout.shard_bytes:
                raise Corrupt(
                    f"in-flight shard {inflight.shard(name)} has {size} bytes, not "
                    f"{layout.shard_bytes}; remove the folder {inflight.folder} and store again"
                )
        for name in sorted(there - record.shards.keys() - {RECORD}):
            self._engine.discard(f"{inflight.array}/{name}")

    def _require_shards(self, inflight: InflightPath, record: CommitRecord) -> None:
        """Writing the record makes its folder, even after another process published the shards."""
        there = set(self._engine.list_dir(inflight.array))
        gone = [name for name in record.shards if name not in there]
        if gone:
            self._engine.discard(f"{inflight.array}/{RECORD}")
            raise NotFound(f"in-flight shard {inflight.shard(gone[0])} is gone; store again")

    def _make_fanout(self, key: str) -> None:
        folder = self._names.fanout(key)
        if folder not in self._fanouts:
            path = f"{folder}/{RECORD}"
            if not self._engine.exists(path):
                self._engine.create(path, encode_plain_group())
            self._fanouts.add(folder)

    def _refer(self, record: CommitRecord) -> None:
        """Leave hints for the extent's inner blocks; without them, lookups only miss more.

        A shorter extent that ended at such a block holds nothing that this one does not: a growing
        conversation would leave one behind with every turn. It goes once the hint is there.
        """
        source = self._names.record(record.key.hex())
        # Backwards: once a shorter extent has gone, hints that name it are seen to be stale.
        for block in reversed(record.blocks[:-1]):
            name = block.hex()
            try:
                ref = self._names.ref(name)
                leads = self._engine.link(source, ref)
                if not leads and self._lookup.referred(name) is None:
                    self._engine.discard(ref)  # it named an extent that is gone
                    leads = self._engine.link(source, ref)
                if leads and self._engine.exists(self._names.record(name)):
                    self._engine.discard(self._names.extent(name))
            except (NotFound, StorageError) as error:
                log.debug("no hint for block %s: %s", name[:16], error)
                return


def _awaited(key: str, shards: Iterable[str], ranks: Iterable[str]) -> Missing:
    return Missing(key, tuple(shards), tuple(r.replace("-", ".") for r in sorted(ranks)))


def seal_shard(engine: Engine, inflight: InflightPath, name: str, layout: ShardLayout) -> None:
    """Finish a shard that several ranks filled: checksums and index, then its final name.

    Several processes may do this at once: they write the same bytes into the same file, and none
    makes a new one.
    """
    part = inflight.part(name)
    sums = np.zeros(layout.chunks, dtype="<u4")

    def consume(_number: int, offset: int, data: memoryview) -> None:
        first = offset // layout.stride
        for i in range(-(-len(data) // layout.stride)):
            at = i * layout.stride
            sums[first + i] = crc32c(data[at : at + layout.chunk_bytes])

    outcome = engine.read([ByteRange(part, 0, layout.index_offset, layout.stride)], consume)[0]
    try:
        if outcome is not None:
            raise outcome
        pieces = [
            (layout.offset(i) + layout.chunk_bytes, sums[i : i + 1].tobytes())
            for i in range(layout.chunks)
        ]
        pieces.append((layout.index_offset, layout.encode_index()))
        engine.write_into(part, layout.shard_bytes, pieces, create=False)
        engine.rename(part, inflight.shard(name))
    except NotFound:
        if not engine.exists(inflight.shard(name)):
            raise
