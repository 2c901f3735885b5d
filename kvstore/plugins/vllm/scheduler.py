"""The scheduler's side: what to load, what to store, and what became of it."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import InvalidArgument, NotFound
from kvstore.namespace import Namespace
from kvstore.parallel import ParallelConfig
from kvstore.plugins.vllm.commits import Commits, Stored
from kvstore.plugins.vllm.events import Events
from kvstore.plugins.vllm.held import HeldBlocks
from kvstore.plugins.vllm.keys import request_keys
from kvstore.plugins.vllm.layers import LayerFacts, by_group
from kvstore.plugins.vllm.logs import log
from kvstore.plugins.vllm.messages import (
    LoadJob,
    Opening,
    RankFacts,
    StepMetadata,
    StoreJob,
    WorkerReport,
)
from kvstore.plugins.vllm.model import identity_of, parallel_config, stage_layers
from kvstore.plugins.vllm.prefixes import Prefix, Prefixes
from kvstore.plugins.vllm.settings import Settings
from kvstore.plugins.vllm.stats import StoreStats
from kvstore.store import Store, open_store

NULL_BLOCK = 0
"""The engine's block id for tokens that a layer no longer needs."""


@dataclass(slots=True)
class _Tracked:
    """A request that the scheduler runs.

    Attributes:
        request: the engine's.
        stored: blocks from the sequence's first on that need no storing any more; None: not known.
        offered: what was found of it at the last lookup, and the tokens that the engine had itself.
        failed: whether a load for it failed: nothing more is loaded for it.
    """

    request: Any
    stored: int | None = None
    offered: tuple[Prefix, int] | None = None
    failed: bool = False


@dataclass
class _Open:
    """The store as opened for this engine."""

    store: Store
    namespace: Namespace
    config: ParallelConfig
    cache_groups: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Layer group -> the engine's cache group, tokens that one of its blocks spans."""

    @property
    def alignment(self) -> int:
        """Tokens that hits are a multiple of."""
        return math.lcm(*(span for _, span in self.cache_groups.values()))


class StoreScheduler:
    """Elects loads and stores. Runs in the engine's scheduler, on its thread."""

    def __init__(self, vllm_config: Any, settings: Settings) -> None:
        self._vllm_config = vllm_config
        self._settings = settings
        self._session = f"vllm-{uuid.uuid4()}"
        self._open: _Open | None = None
        self._opening: Opening | None = None
        self._requests: dict[str, _Tracked] = {}
        self._prefixes = Prefixes(self._maybe_namespace, settings.salt)
        self._loads: list[LoadJob] = []
        self._unsure: dict[str, tuple[set[int], int]] = {}
        # Request -> blocks that this step's forward loads, ranks that have not said how it went.
        self._stores: list[StoreJob] = []
        self._jobs: dict[int, int] = {}  # job -> ranks that are not done with it
        self._numbers = 0
        self._held = HeldBlocks(settings.max_pending_fraction)
        self._commits = Commits(self._session)
        self.events = Events(vllm_config)
        self.stats = StoreStats()

    # Start-up

    def open(self, ranks: Mapping[tuple[int, int], RankFacts]) -> None:
        """Open the store for what the ranks registered.

        Raises:
            NotCertified, InvalidArgument, StorageError: the engine must not run with this store.
        """
        started = time.perf_counter()
        layers: tuple[LayerFacts, ...] = tuple(f for r in ranks.values() for f in r.layers)
        pp_layers = stage_layers(self._vllm_config, layers)
        config = parallel_config(self._vllm_config, self._settings.pcp_kv, pp_layers)
        identity = identity_of(self._vllm_config, self._settings, layers, sum(pp_layers))
        creates = self._settings.save != "none"
        try:
            store = open_store(
                self._settings.root,
                verify=self._settings.verify,
                durable=self._settings.durable,
                create=creates,
            )
            namespace = store.namespace(identity, create=creates)
        except NotFound as error:
            log.warning("nothing is loaded from the store until a restart: %s", error)
            return
        groups = {
            name: (members[0].cache_group, members[0].block_tokens * config.cp)
            for name, members in by_group(layers).items()
        }
        self._open = _Open(store, namespace, config, groups)
        self._opening = Opening(identity, self._session, pp_layers)
        self._commits.open(namespace, config)
        log.info(
            "namespace %s in %s, %s, blocks of %d tokens, extents of %d; stored bytes are "
            "portable across TP, PP, DCP and PCP sizes, attention backends and engine block sizes "
            "(%.2f s)",
            namespace.name,
            store.location,
            "; ".join(
                f"{g.name}: {g.num_layers} layers x {g.heads} heads" for g in identity.groups
            ),
            identity.groups[0].block_tokens,
            identity.groups[0].block_tokens * identity.groups[0].extent_blocks,
            time.perf_counter() - started,
        )

    def bind(self, block_pool: Any) -> None:
        """Use the scheduler's block pool."""
        self._held.bind(block_pool)

    # Loads

    def on_new_request(self, request: Any) -> None:
        """Start to look up a request's prefix."""
        if self._open is not None:
            self._requests[request.request_id] = _Tracked(request)
            self.stats.add("lookups")
            self._prefixes.start(request)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has; None: not known yet."""
        tracked = self._requests.get(request.request_id)
        if self._open is None or tracked is None or tracked.failed:
            return 0, False
        done, prefix = self._prefixes.get(request, self._settings.lookup_wait_ms / 1000)
        if not done:
            return None, False
        tracked.offered = None
        if prefix is None:
            return 0, False
        align = self._open.alignment
        hit = min(prefix.tokens, request.num_tokens - 1) // align * align
        new = hit - computed
        if new <= 0:
            return 0, False
        if new < self._settings.min_load_tokens:
            self.stats.add("loads_declined")
            return 0, False
        tracked.offered = (prefix, computed)
        return new, self._settings.load == "async"

    def allocated(self, request: Any, block_ids: Sequence[list[int]], external: int) -> None:
        """Blocks were given to a request; load into them what it was promised."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.offered is None or self._open is None:
            return
        prefix, computed = tracked.offered
        tracked.offered = None
        if external <= 0:
            return
        size = self._open.namespace.groups[0].block_tokens
        stop = (computed + external) // size
        tables = self._tables(block_ids)
        first = {name: self._usable(name, tables, computed // size, stop) for name in tables}
        waits = self._settings.load == "layerwise"
        if waits:
            blocks = {block for table in tables.values() for block in table}
            self._unsure[request.request_id] = (
                blocks - {NULL_BLOCK},
                self._opened.config.world_size,
            )
        self._loads.append(
            LoadJob(request.request_id, prefix.keys[:stop], first, size, tables, waits)
        )
        self.stats.add("lookup_hit_tokens", prefix.tokens)
        self.stats.add("load_requests")
        self.stats.add("load_tokens", external)

    # Stores

    def step(self, output: Any, block_ids: Any) -> StepMetadata:
        """All that this step asks of the ranks.

        Args:
            output: the scheduler's output.
            block_ids: gives a request's block ids by cache group.
        """
        metadata = StepMetadata(self._opening, self._loads, self._stores)
        self._opening, self._loads, self._stores = None, [], []
        if self._open is None or self._settings.save == "none":
            return metadata
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None and request_id in computed:
                after = computed[request_id] + scheduled
                job = self._elect(tracked, after, block_ids(request_id))
                if job is not None:
                    metadata.stores.append(job)
        return metadata

    def _elect(
        self, tracked: _Tracked, computed: int, block_ids: Sequence[list[int]]
    ) -> StoreJob | None:
        """The extents of a prompt that this step completes, if there are any."""
        if any(
            not unsure.isdisjoint(ids) for unsure, _ in self._unsure.values() for ids in block_ids
        ):
            return None  # computed from pages that may turn out not to have been loaded
        prompt = int(tracked.request.num_prompt_tokens)
        namespace = self._namespace
        size, span = namespace.groups[0].block_tokens, namespace.groups[0].extent_blocks
        ended = computed >= prompt
        stop = min(computed, prompt) // size
        if not ended:
            stop -= stop % span
        if tracked.stored is not None and tracked.stored >= stop:
            return None
        done, prefix = self._prefixes.get(tracked.request, 0)
        if not done or prefix is None:
            return None
        if tracked.stored is None:
            held = prefix.tokens // size
            tracked.stored = held if held >= prompt // size else held - held % span
            if tracked.stored >= stop:
                return None
        first = tracked.stored - tracked.stored % span
        job = self._job(prefix.keys[first:stop], block_ids, tail=ended)
        if job is not None:
            tracked.stored = stop
            self.events.prepare(job.number, tracked.request, first * size, stop * size)
        return job

    def _job(self, keys: Any, block_ids: Sequence[list[int]], *, tail: bool) -> StoreJob | None:
        """A job for blocks that are or will be computed; holds them. None: no room just now."""
        tables = self._tables(block_ids)
        size = self._namespace.groups[0].block_tokens
        span = self._namespace.groups[0].extent_blocks
        stop = keys.start + len(keys)
        firsts, held = {}, set[int]()
        for name, table in tables.items():
            usable = self._usable(name, tables, keys.start, stop)
            first = -(-usable // span) * span
            if first >= stop:
                continue
            firsts[name] = first
            _, tokens = self._opened.cache_groups[name]
            held |= set(table[first * size // tokens : -(-stop * size // tokens)])
        if not firsts:
            return None
        if not self._held.room(len(held)):
            self.stats.add("store_deferred")
            return None
        self._numbers += 1
        job = StoreJob(self._numbers, keys, firsts, tables, tail)
        self._held.hold(job.number, held)
        self._jobs[job.number] = self._opened.config.world_size
        self._commits.expect(job)
        self.stats.add("store_jobs")
        self.stats.now("held_blocks", self._held.count)
        return job

    def finished(self, request: Any, block_ids: Sequence[list[int]]) -> None:
        """A request ended; its blocks are about to be freed."""
        tracked = self._requests.pop(request.request_id, None)
        self._loads = [job for job in self._loads if job.request != request.request_id]
        if tracked is not None and self._settings.save == "all":
            self._store_rest(tracked, block_ids)
        self._prefixes.forget(request.request_id)

    def _store_rest(self, tracked: _Tracked, block_ids: Sequence[list[int]]) -> None:
        """Store what was generated, up to the last block whose tokens are all computed."""
        request = tracked.request
        size = self._namespace.groups[0].block_tokens
        span = self._namespace.groups[0].extent_blocks
        sure = int(request.num_computed_tokens) - int(getattr(request, "num_in_flight_tokens", 0))
        tokens = min(sure, int(request.num_tokens) - 1)
        if tokens <= request.num_prompt_tokens or tokens // size <= (tracked.stored or 0):
            return
        root = self._namespace.identity.key_scheme.root
        keys = request_keys(request, tokens, size, root, self._settings.salt)
        first = (tracked.stored or 0) // span * span
        job = self._job(keys[first:], block_ids, tail=True)
        if job is not None:
            self._stores.append(job)

    # What came of it

    def report(self, report: WorkerReport) -> None:
        """Take in what the ranks are done with."""
        for number, ranks in report.stored.items():
            left = self._jobs.get(number, 0) - ranks
            self._jobs[number] = left
            if number in report.failed:
                self.stats.add("store_failed")
                log.warning("a store failed: %s", report.failed[number])
            if left <= 0:
                del self._jobs[number]
                self._held.release(number)
                self.stats.now("held_blocks", self._held.count)
                self._commits.start(number)
        for request_id, ranks in report.loaded.items():
            blocks, left = self._unsure.pop(request_id, (set[int](), 0))
            if left > ranks:
                self._unsure[request_id] = (blocks, left - ranks)
        for request_id in report.unloaded:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                # Not tried again for it; what was damaged is out of the way and is stored anew.
                tracked.failed, tracked.stored = True, 0

    def settle(self) -> None:
        """Count and announce commits that are done."""
        for done in self._commits.done():
            self._announce(done)

    def _announce(self, done: Stored) -> None:
        self.stats.add("extents_committed", done.extents)
        self.events.publish(done.job, complete=done.complete)

    @property
    def pending(self) -> bool:
        """Whether stores are under way that the engine should keep stepping for."""
        return bool(self._jobs or self._stores)

    def close(self) -> None:
        """Publish what the ranks have written, and leave nothing else behind."""
        self._prefixes.close()
        for number in list(self._jobs):
            self._held.release(number)
            self._commits.start(number)
        self._jobs.clear()
        self._commits.close(self._settings.shutdown_wait_s)
        self.settle()
        if self._open is not None:
            self._open.store.close()
            self._open = None

    # Helpers

    @property
    def _opened(self) -> _Open:
        if self._open is None:
            raise InvalidArgument("the store is not open: no rank has registered its KV blocks")
        return self._open

    def _maybe_namespace(self) -> Namespace | None:
        return None if self._open is None else self._open.namespace

    @property
    def _namespace(self) -> Namespace:
        return self._opened.namespace

    def _tables(self, block_ids: Sequence[list[int]]) -> dict[str, list[int]]:
        return {
            name: list(block_ids[group]) for name, (group, _) in self._opened.cache_groups.items()
        }

    def _usable(self, name: str, tables: Mapping[str, list[int]], first: int, stop: int) -> int:
        """First of blocks ``first`` to ``stop - 1`` from which on the engine has all of them."""
        size = self._namespace.groups[0].block_tokens
        span = self._opened.cache_groups[name][1]
        table = tables[name]
        low, high = first * size // span, -(-stop * size // span)
        if high > len(table):
            return stop
        for index in range(high - 1, low - 1, -1):
            if table[index] == NULL_BLOCK:
                return min(stop, (index + 1) * span // size)
        return first
