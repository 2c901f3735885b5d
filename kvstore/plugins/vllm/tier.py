"""A tier for the engine's tiered offloading: what falls out of CPU memory, and comes back, is here.

The engine's scheduler process owns the tier and moves chunks between its GPU workers and the CPU
memory that this tier reads and writes. Chunks are stored in the store's canonical form wherever the
engine's rows are canonical; a restart with another parallel config finds them again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.version import __version__ as vllm_version

from kvstore.errors import InvalidArgument
from kvstore.keys import KeyScheme
from kvstore.plugins.vllm.logs import log
from kvstore.plugins.vllm.roots import key_scheme, seed_of
from kvstore.plugins.vllm.tier_lookup import Lookups
from kvstore.plugins.vllm.tier_moves import Mover
from kvstore.plugins.vllm.tier_plan import describe, plan_tier
from kvstore.plugins.vllm.tier_pool import Job, Move, MovePool
from kvstore.plugins.vllm.tier_settings import tier_settings
from kvstore.plugins.vllm.versions import require_supported
from kvstore.store import Store, open_store

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]  # the engine is not typed here
    """Secondary tier that keeps chunks in a store.

    Args:
        offloading_spec: the engine's offloading.
        primary_kv_view: memory of the primary tier, ``[row, byte]``.
        tier_type: name of the tier in the engine's metrics.
        backpressure_detector: the engine's own, or None.
        given: the rest of the tier's configuration, see
            :class:`kvstore.plugins.vllm.tier_settings.TierSettings`.

    Raises:
        KVStoreError: it cannot work as configured; the message says why and what to do.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        require_supported(vllm_version)
        settings = self._settings = tier_settings(given)
        self.locality = None if settings.locality is None else Locality(settings.locality)
        self._scheme = _scheme(settings.hash_algorithm)
        self._root_checked = False
        row_bytes = self._block_size_bytes
        plan = plan_tier(
            offloading_spec.config,
            settings,
            self._scheme,
            platform=str(current_platform.device_type)
            if not current_platform.is_rocm()
            else "rocm",
            row_bytes=row_bytes,
        )
        events = settings.enable_kv_events
        if events and not offloading_spec.kv_events_config.enable_kv_cache_events:
            log.warning("enable_kv_events of tier %s has no effect: KV events are off", tier_type)
            events = False
        self._events: list[Any] | None = [] if events else None
        self._store: Store = open_store(
            settings.root,
            create=not settings.read_only,
            read_only=settings.read_only,
            verify=settings.verify,
            **({} if settings.read_only else {"durable": settings.durable}),
        )
        try:
            namespace = self._store.namespace(plan.identity)
            # A view of its own, so that the engine may release the one that it gave.
            memory = torch.frombuffer(primary_kv_view.cast("B"), dtype=torch.uint8)
            self._mover: Mover = Mover(plan, namespace, memory, row_bytes)
        except BaseException:
            self._store.close()
            raise
        self._lookups = Lookups(self._mover.stored)
        self._pool = MovePool(settings.threads, settings.max_queued)
        self._closed = False
        level = log.warning if plan.layout is None else log.info
        level("kvstore tier: namespace %s in %s; %s", namespace.name, settings.root, describe(plan))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request begins: chunks are stored as they come."""
        del req_context
        if not self._root_checked:
            self._check_root()
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk is stored; RETRY as long as that is being found out."""
        found = self._lookups.ask(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store rows of the primary tier."""
        if self._settings.read_only:
            keys = list(job_metadata.keys)
            self._pool.submit(Job(job_metadata.job_id, is_load=False, keys=keys), [])
            return
        self._submit(job_metadata, self._mover.store, is_load=False)

    def submit_load(self, job_metadata: TransferJob, expedited: bool = False) -> None:
        """Load chunks into rows of the primary tier; expedited ones before all others."""
        self._submit(job_metadata, self._mover.load, is_load=True, urgent=expedited)

    def _submit(
        self, given: TransferJob, move: Any, *, is_load: bool, urgent: bool = False
    ) -> None:
        keys = list(given.keys)
        moves: list[Move] = [
            _bound(move, key, int(row)) for key, row in zip(keys, given.chunk_ids, strict=True)
        ]
        job = Job(given.job_id, is_load, keys)
        if not self._pool.submit(job, moves, urgent=urgent) and keys:
            log.warning(
                "kvstore tier: a %s of %d chunks was dropped, as %d may wait at most (max_queued)",
                "load" if is_load else "store",
                len(keys),
                self._settings.max_queued,
            )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Outcomes of jobs that have finished since the last call."""
        out = []
        for job in self._pool.finished():
            failed = [key for key in job.keys if key not in job.done]
            if job.is_load and failed:
                self._lookups.miss(failed)
            if not job.is_load and job.done and self._events is not None:
                stored = [OffloadKey(key) for key in job.keys if key in job.done]
                event = OffloadingEvent(stored, self.medium, removed=False, locality=self.locality)
                self._events.append(event)
            partly = job.is_load and failed and job.done
            out.append(
                JobResult(
                    job_id=job.number,
                    success=not failed,
                    successful_keys=tuple(k for k in job.keys if k in job.done) if partly else None,
                    transfer_time=job.seconds,
                    transfer_bytes=job.nbytes,
                )
            )
        return out

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the last call."""
        if not self._events:
            return ()
        out, self._events = self._events, []
        return out

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nothing: the store does not evict."""

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Start the lookups of this step."""
        del context
        self._lookups.send()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what only this request asked for."""
        self._lookups.finished(req_context.req_id)

    def drain_jobs(self) -> None:
        """Wait until no job touches the primary tier's memory."""
        self._pool.wait_idle()

    def shutdown(self) -> None:
        """Cancel what waits, finish what runs, let go of threads, memory and store."""
        if self._closed:
            return
        self._closed = True
        self._lookups.close()
        self._pool.close()
        self._mover.release()
        self._primary_kv_view = memoryview(b"")
        self._store.close()

    def _check_root(self) -> None:
        """Hold the engine's root, which it makes after its tiers, against the namespace's.

        Raises:
            InvalidArgument: the engine hashes blocks in another way than the tier was told.
        """
        root = getattr(kv_cache_utils, "NONE_HASH", None)
        if root is None:
            return
        self._root_checked = True
        found, wanted = bytes(root).hex()[:16], self._scheme.root.hex()[:16]
        if bytes(root) != self._scheme.root:
            raise InvalidArgument(
                f"the engine's block hashes hang from another root ({found}) than those of "
                f"{self._scheme.algorithm} do ({wanted}); set hash_algorithm "
                "in the tier's configuration to the engine's --prefix-caching-hash-algo"
            )


def _scheme(algorithm: str) -> KeyScheme:
    seed = seed_of(algorithm, os.environ)
    return key_scheme(algorithm, bytes(get_hash_fn_by_name(algorithm)(seed)))


def _bound(move: Any, key: bytes, row: int) -> Move:
    def moved() -> int:
        nbytes: int = move(key, row)
        return nbytes

    return moved
