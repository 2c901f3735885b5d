"""Commit: complete in-flight extents become visible, each whole and at once.

Any process may commit, any number of times, at the same time as others. Shards that several ranks
filled are sealed (checksums, index) and given their final names; the record is written; then one
rename publishes the folder. The file system refuses that rename when the extent is there already,
so of several writers of one extent all succeed and one copy stays.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from kvstore.election import elected_ranks
from kvstore.errors import Corrupt, FormatError, NotFound, StorageError
from kvstore.extent import (
    CommitRecord,
    Writer,
    encode_extent,
    shard_layout,
    shard_sizes,
)
from kvstore.geometry import LayerGroup
from kvstore.io.failpoints import reach
from kvstore.io.protocol import Engine
from kvstore.jobs import run_all
from kvstore.keys import BlockKeys
from kvstore.lookup import Lookup
from kvstore.marks import MAX_MARK_BYTES, Contributor, RunningSums, decode_mark
from kvstore.parallel import ParallelConfig
from kvstore.paths import PART_SUFFIX, RECORD, GroupPath, InflightPath, parse_done, writer_id
from kvstore.plan import shard_parts
from kvstore.records import encode_plain_group
from kvstore.report import CommitReport, Missing
from kvstore.seal import seal_shard
from kvstore.share import all_shares
from kvstore.write import Span, extent_spans

log = logging.getLogger("kvstore.commit")

Contributors = dict[str, list[Contributor]]
"""Shard -> those that fill it."""

Marks = dict[str, dict[str, int]]
"""Rank as ``pp-pcp-tp`` -> shard -> checksum of what it says it wrote there."""


class _Unsealed(Exception):
    """Bytes of a shard are not what its ranks' marks say."""

    def __init__(self, shard: str, ranks: set[str]) -> None:
        super().__init__(shard, ranks)
        self.shard = shard
        self.ranks = ranks


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
        pool: gives the threads that commit extents; others after a fork.
    """

    def __init__(
        self,
        engine: Engine,
        lookup: Lookup,
        group: LayerGroup,
        names: GroupPath,
        software: str,
        pool: Callable[[], Executor],
    ) -> None:
        self._engine = engine
        self._lookup = lookup
        self._group = group
        self._names = names
        self._software = software
        self._pool = pool
        self._fanouts: set[str] = set()
        self._settled: set[str] = set()

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
        writer = writer_id(session, str(config))
        by_election: dict[tuple[str, ...], Contributors] = {}
        report = CommitReport()
        spans, jobs = [], []
        for span in extent_spans(self._group, keys, tail=tail):
            if self._lookup.holds(span.key):
                self._engine.discard(self._names.inflight(span.key.hex(), writer).folder)
                report.already.append(span.key.hex())
                continue
            wanted = self._contributors(config, model_layers, span.key, by_election)
            record = self._record(keys, span, config, session)
            spans.append(span)
            jobs.append(partial(self._commit, record, writer, wanted))
        # At once, because almost all of the time is waiting for the medium to have things for good.
        for span, outcome in zip(spans, run_all(self._pool, jobs), strict=True):
            key = span.key.hex()
            if isinstance(outcome, Missing) and not self._lookup.holds(span.key):
                report.missing.append(outcome)
            elif outcome is True:
                report.committed.append(key)
            else:
                report.already.append(key)  # another process published it
        return report

    def _commit(
        self, record: CommitRecord, writer: str, wanted: Contributors
    ) -> Missing | Literal[True] | None:
        """Publish one extent if it is complete. None: another process did."""
        key = record.key.hex()
        inflight = self._names.inflight(key, writer)
        marks = self._marks(inflight)
        missing = self._missing(key, inflight, wanted, marks)
        if missing is not None:
            return missing
        try:
            return True if self._publish(inflight, record, wanted, marks) else None
        except NotFound:
            # The in-flight folder went while this went on: published, or cleaned up after.
            everyone = {c.rank for ranks in wanted.values() for c in ranks}
            return _awaited(key, wanted, everyone)
        except _Unsealed as error:
            self._forget(inflight, error.ranks)
            return _awaited(key, [error.shard], error.ranks)

    def abandon(self, keys: BlockKeys, config: ParallelConfig, session: str, *, tail: bool) -> int:
        """Discard what a session has in flight of the extents of ``keys``; returns how many."""
        writer = writer_id(session, str(config))
        spans = extent_spans(self._group, keys, tail=tail)
        folders = [self._names.inflight(span.key.hex(), writer).folder for span in spans]
        return sum(self._engine.discard(folder) for folder in folders)

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
                    who = Contributor(name, share.lattice, part)
                    found.setdefault(part.name, []).append(who)
            known[names] = found
        return known[names]

    def _marks(self, inflight: InflightPath) -> Marks:
        """What ranks say they wrote; one that cannot be read says nothing."""
        marks: Marks = {}
        for name in self._engine.list_dir(inflight.done_folder):
            rank = parse_done(name)
            if rank is not None:
                path = inflight.done(rank)
                try:
                    marks[name] = decode_mark(self._engine.get(path, MAX_MARK_BYTES), path)
                except (NotFound, FormatError):
                    marks[name] = {}
        return marks

    def _missing(
        self, key: str, inflight: InflightPath, wanted: Contributors, marks: Marks
    ) -> Missing | None:
        there = set(self._engine.list_dir(inflight.array))
        shards, ranks = [], set()
        for name, contributors in wanted.items():
            if name in there:
                continue
            filled = name + PART_SUFFIX in there
            late = {
                c.rank
                for c in contributors
                if c.part.whole or not filled or name not in marks.get(c.rank, {})
            }
            if late:
                shards.append(name)
                ranks |= late
        if not shards:
            return None
        self._forget(inflight, ranks & marks.keys())
        return _awaited(key, shards, ranks)

    def _forget(self, inflight: InflightPath, ranks: Iterable[str]) -> None:
        """Remove marks that do not hold, so that their ranks write again."""
        for rank in ranks:
            self._engine.discard(f"{inflight.done_folder}/{rank}")

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

    def _publish(
        self, inflight: InflightPath, record: CommitRecord, wanted: Contributors, marks: Marks
    ) -> bool:
        """Seal, record and publish one complete extent. False: another process was first.

        Raises:
            NotFound: the in-flight folder is gone. _Unsealed: a rank's bytes are not there.
        """
        key = record.key.hex()
        final = self._names.extent(key)
        self._seal(inflight, record, wanted, marks)
        data = encode_extent(self._group, record)
        reach("commit.before_record")
        # Names in the folder become durable when it is published, all at once.
        self._engine.write(f"{inflight.array}/{RECORD}", [data], settle=False)
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

    def _seal(
        self, inflight: InflightPath, record: CommitRecord, wanted: Contributors, marks: Marks
    ) -> None:
        layout = shard_layout(self._group, len(record.blocks))
        n = self._group.page_tokens
        start, stop = record.start_block * n, (record.start_block + len(record.blocks)) * n
        there = set(self._engine.list_dir(inflight.array))
        for name in record.shards:
            if name not in there:
                reach("commit.before_seal")
                running = RunningSums(wanted[name], start, stop, self._group.token_bytes)
                claims = {c.rank: marks.get(c.rank, {}).get(name) for c in wanted[name]}
                wrong = seal_shard(self._engine, inflight, name, layout, running, claims)
                if wrong:
                    raise _Unsealed(name, wrong)
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
        """Make the folder that the extent's goes into, and its name durable, whoever made it."""
        folder = self._names.fanout(key)
        if folder in self._fanouts:
            return
        path = f"{folder}/{RECORD}"
        if not self._engine.exists(path):
            self._engine.create(path, encode_plain_group(), settle=False)
        if folder not in self._settled:
            parent = self._names.folder
            there = [f"{parent}/{name}" for name in self._engine.list_dir(parent)]
            self._engine.sync([parent])
            self._settled.update(there)
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
