"""One rank's jobs against the open store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvstore.parallel import ParallelConfig, Rank
from kvstore.plugins.vllm.layers import LayerFacts
from kvstore.plugins.vllm.messages import LoadJob, Opening, StoreJob
from kvstore.plugins.vllm.pages import RegisteredPages
from kvstore.plugins.vllm.settings import Settings
from kvstore.report import LoadResult
from kvstore.store import open_store
from kvstore.worker import Worker


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """What came of a load on one rank.

    Attributes:
        invalid: engine blocks whose pages are not what was asked.
        nbytes: bytes placed.
        seconds: wall time.
    """

    invalid: frozenset[int] = frozenset()
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether anything is missing."""
        return bool(self.invalid)

    @classmethod
    def nothing(cls, job: LoadJob, span: Callable[[str], int]) -> LoadOutcome:
        """None of a job's blocks was loaded."""
        invalid: set[int] = set()
        stop = job.keys.start + len(job.keys)
        for group, first in job.first.items():
            invalid |= _engine_blocks(job, group, range(first, stop), span(group))
        return cls(frozenset(invalid))


class RankStore:
    """The store as one rank uses it.

    Args:
        settings: the connector's.
        opening: from the scheduler's side.
        config, rank: who this is.
        members: the rank's layers by layer group.
        pages: what the engine registered.

    Raises:
        KVStoreError: the store cannot be opened, or does not fit what was registered.
    """

    def __init__(
        self,
        settings: Settings,
        opening: Opening,
        config: ParallelConfig,
        rank: Rank,
        members: Mapping[str, Sequence[LayerFacts]],
        pages: RegisteredPages,
    ) -> None:
        self._pages = pages
        self._members = members
        self._store = open_store(
            settings.root, create=False, verify=settings.verify, durable=settings.durable
        )
        namespace = self._store.namespace(opening.identity, create=False)
        self._groups = {g.name: g for g in namespace.groups}
        self._block_tokens = namespace.groups[0].block_tokens
        self._spans = {n: m[0].block_tokens * config.cp for n, m in members.items()}
        self._namespace, self._config, self._rank = namespace, config, rank
        self._session = opening.session
        # A worker is for one thread: stores have theirs, and each load under way takes one.
        self._savers = self._workers()
        self._idle = [self._workers()]

    def _workers(self) -> dict[str, Worker]:
        return {
            name: self._namespace.worker(
                self._config,
                self._rank,
                self._pages.buffers(self._groups[name], layers),
                session=self._session,
            )
            for name, layers in self._members.items()
        }

    @contextlib.contextmanager
    def _loaders(self) -> Iterator[dict[str, Worker]]:
        """Workers for one load, whichever thread it runs on."""
        try:
            workers = self._idle.pop()
        except IndexError:
            workers = self._workers()
        try:
            yield workers
        finally:
            self._idle.append(workers)

    def load(self, job: LoadJob) -> LoadOutcome:
        """Load all layers.

        Raises:
            InvalidArgument: the block ids are not the engine's.
        """
        outcome = LoadOutcome()
        with self._loaders() as workers:
            for group, first in job.first.items():
                if group in workers and first < len(job.keys):
                    table = self._pages.table(self._groups[group], job.tables[group])
                    result = workers[group].load(job.keys[first:], table)
                    outcome = self._add(outcome, job, group, first, result)
        return outcome

    def load_layers(self, job: LoadJob) -> Iterator[tuple[str, LoadOutcome]]:
        """Load in the order in which the model computes; yields each layer's name."""
        with self._loaders() as workers:
            yield from self._by_layer(job, workers)

    def _by_layer(
        self, job: LoadJob, workers: Mapping[str, Worker]
    ) -> Iterator[tuple[str, LoadOutcome]]:
        under_way = {}
        for group, first in job.first.items():
            if group in workers and first < len(job.keys):
                table = self._pages.table(self._groups[group], job.tables[group])
                under_way[group] = workers[group].load_layers(job.keys[first:], table)
        order = sorted((m.index, g, m.name) for g in under_way for m in self._members[g])
        results: dict[str, LoadResult] = {}
        try:
            for _, group, name in order:
                _, results[group] = next(under_way[group])
                outcome = LoadOutcome()
                for done, result in results.items():
                    outcome = self._add(outcome, job, done, job.first[done], result)
                yield name, outcome
        finally:
            for iterator in under_way.values():
                iterator.close()  # type: ignore[attr-defined]  # these are generators

    def _add(
        self, outcome: LoadOutcome, job: LoadJob, group: str, first: int, result: LoadResult
    ) -> LoadOutcome:
        blocks = [first + index for index in result.misses]
        invalid = _engine_blocks(job, group, blocks, self._spans[group])
        if invalid:
            # The engine computes from the first of them on, so what lies behind is of no use.
            rest = range(min(blocks), len(job.keys))
            invalid = _engine_blocks(job, group, rest, self._spans[group])
        return LoadOutcome(
            outcome.invalid | invalid,
            outcome.nbytes + result.bytes_placed,
            outcome.seconds + result.seconds,
        )

    def store(self, job: StoreJob) -> int:
        """Write this rank's part of a job's extents; returns the bytes written.

        Raises:
            StorageError: the medium failed.
        """
        written = 0
        for group, first in job.first.items():
            if group in self._savers:
                keys = job.keys[first - job.keys.start :]
                table = self._pages.table(self._groups[group], job.tables[group])
                written += self._savers[group].store(keys, table, tail=job.tail).bytes_written
        return written

    def close(self) -> None:
        """Release threads and memory."""
        self._store.close()


def _engine_blocks(job: LoadJob, group: str, blocks: Sequence[int], span: int) -> frozenset[int]:
    """Engine blocks that hold blocks of the sequence."""
    table = job.tables[group]
    size = job.block_tokens
    return frozenset(table[block * size // span] for block in blocks)
