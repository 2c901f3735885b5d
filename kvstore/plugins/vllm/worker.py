"""A rank's side: loads into and stores from the KV blocks that the engine registered.

Both run on threads of their own. The step's own thread only hands jobs over, and, where the engine
waits layer by layer, waits for the layers of this step's loads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.plugins.vllm.jobs import LoadOutcome, RankStore
from kvstore.plugins.vllm.layers import by_group
from kvstore.plugins.vllm.logs import log
from kvstore.plugins.vllm.messages import (
    LoadJob,
    Opening,
    RankFacts,
    StepMetadata,
    StoreJob,
    WorkerReport,
)
from kvstore.plugins.vllm.model import parallel_config, rank_of
from kvstore.plugins.vllm.pages import RegisteredPages
from kvstore.plugins.vllm.settings import Settings
from kvstore.plugins.vllm.specs import describe_layers
from kvstore.plugins.vllm.stats import StoreStats


class StoreWorker:
    """Loads and stores for one rank. Runs in the engine's worker process."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self._vllm_config = vllm_config
        self._settings = settings
        self._blocks = int(kv_cache_config.num_blocks)
        self._layers = describe_layers(vllm_config, kv_cache_config)
        self._several_groups = len(kv_cache_config.kv_cache_groups) > 1
        self._pages: RegisteredPages | None = None
        self.store: RankStore | None = None
        self._loads: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[tuple[StoreJob, Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._report = WorkerReport()
        self._loaded: set[str] = set()
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self._waits: list[_LayerWait] = []
        self.stats = StoreStats()

    # Start-up

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Find out how the engine keeps its caches.

        Raises:
            NotCertified: they cannot be mapped; the engine must not run with this store.
        """
        modules = self._vllm_config.compilation_config.static_forward_context
        self._pages = RegisteredPages(modules, self._layers, caches, self._blocks)
        names = {layer.name: layer.group_name for layer in self._layers}
        log.info(
            "pages on %s: %s",
            self._pages.device,
            ", ".join(sorted({f"{g} {self._pages.describe(n)}" for n, g in names.items()})),
        )

    @property
    def _registered(self) -> RegisteredPages:
        if self._pages is None:
            raise InvalidArgument("the engine has not registered its KV blocks yet")
        return self._pages

    @property
    def facts(self) -> RankFacts:
        """What this rank registered."""
        return RankFacts(self._layers)

    def _open(self, opening: Opening) -> None:
        config = parallel_config(self._vllm_config, self._settings.pcp_kv, opening.pp_layers)
        try:
            self.store = RankStore(
                self._settings,
                opening,
                config,
                rank_of(self._vllm_config),
                by_group(self._layers),
                self._registered,
            )
        except Exception:  # noqa: BLE001 - whatever it is, the engine goes on without it
            # The engine runs; nothing is loaded or stored by this rank, and that is reported.
            log.exception("this rank cannot use the store at %s", self._settings.root)
        for name, target in (("load", self._run_loads), ("store", self._run_stores)):
            thread = threading.Thread(target=target, name=f"kvstore-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    # A step

    def start_loads(self, metadata: StepMetadata) -> None:
        """Hand over the step's loads."""
        if metadata.opening is not None and not self._threads:
            self._open(metadata.opening)
        for job in metadata.loads:
            if job.waits:
                self._waits.append(_LayerWait(self, job))
            else:
                self._loads.put(job)

    def wait_for_layer(self, name: str) -> None:
        """Wait until a layer of all loads that this step waits for is in place."""
        for wait in self._waits:
            wait.reach(name)

    def start_stores(self, metadata: StepMetadata) -> None:
        """Hand over the step's stores, whose blocks the forward has just filled."""
        for wait in self._waits:
            wait.finish()
        self._waits.clear()
        if metadata.stores:
            ready = self._mark()
            for job in metadata.stores:
                self._stores.put((job, ready))

    def _mark(self) -> Any:
        """A point in the device's queue of work: what was computed up to now."""
        device = self._registered.device
        if device.type == "cpu":
            return None
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        return event

    # What came of it

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended, and those of them that must be computed from the start."""
        with self._lock:
            loaded, self._loaded = self._loaded, set()
            failed, self._failed = self._failed, set()
        return loaded, failed

    def take_invalid(self) -> set[int]:
        """Engine blocks that could not be loaded."""
        with self._lock:
            invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> WorkerReport | None:
        """News for the scheduler's side; None when there are none."""
        with self._lock:
            report, self._report = self._report, WorkerReport()
        return None if report.empty else report

    def take_stats(self) -> StoreStats | None:
        """Counts since the last call."""
        with self._lock:
            return self.stats.take()

    def note_load(self, job: LoadJob, outcome: LoadOutcome) -> None:
        """A load ended."""
        with self._lock:
            self.stats.add("load_bytes", outcome.nbytes)
            self.stats.add("load_seconds", outcome.seconds)
            self.stats.add("load_failed_blocks", len(outcome.invalid))
            self._report.loaded[job.request] = 1
            if outcome.failed:
                self._report.unloaded.add(job.request)
                if self._several_groups:
                    self._failed.add(job.request)
                else:
                    self._invalid |= outcome.invalid
            if not job.waits:
                self._loaded.add(job.request)

    def close(self) -> None:
        """Finish the stores under way and stop."""
        self._loads.put(None)
        self._stores.put(None)
        deadline = time.monotonic() + self._settings.shutdown_wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.store is not None and not any(t.is_alive() for t in self._threads):
            self.store.close()

    # Threads

    def _run_loads(self) -> None:
        while (job := self._loads.get()) is not None:
            self.note_load(job, self.load(job))

    def load(self, job: LoadJob) -> LoadOutcome:
        """Load all layers of a job; whatever goes wrong, its blocks are reported."""
        if self.store is None:
            return LoadOutcome.nothing(job, self.span)
        try:
            outcome = self.store.load(job)
        except Exception:  # noqa: BLE001 - whatever it is, the engine goes on without it
            log.exception("request %s was not loaded", job.request)
            return LoadOutcome.nothing(job, self.span)
        self.finish_copies()
        return outcome

    def finish_copies(self) -> None:
        """Wait for copies to the device that this thread's loads started."""
        if self._registered.device.type != "cpu":
            torch.accelerator.synchronize(self._registered.device)

    def _run_stores(self) -> None:
        while (item := self._stores.get()) is not None:
            job, ready = item
            reason, nbytes, started = None, 0, time.perf_counter()
            try:
                if ready is not None:
                    ready.synchronize()
                if self.store is None:
                    reason = "this rank could not open the store"
                else:
                    nbytes = self.store.store(job)
            except KVStoreError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001 - reported, and the engine goes on
                log.exception("a store failed")
                reason = repr(error)
            with self._lock:
                self.stats.add("store_bytes", nbytes)
                self.stats.add("store_seconds", time.perf_counter() - started)
                self._report.stored[job.number] = 1
                if reason is not None:
                    self._report.failed[job.number] = reason

    def span(self, group: str) -> int:
        """Tokens of the sequence that one engine block of a group stands for."""
        config = self._vllm_config.parallel_config
        shards: int = config.decode_context_parallel_size
        if self._settings.pcp_kv == "sharded":
            shards *= config.prefill_context_parallel_size
        return next(x.block_tokens for x in self._layers if x.group_name == group) * shards


class _LayerWait:
    """A load that this step's forward waits for, layer by layer."""

    def __init__(self, worker: StoreWorker, job: LoadJob) -> None:
        self._worker = worker
        self._job = job
        self._reached = threading.Condition()
        self._ready: set[str] = set()
        self._over = False
        self._outcome = LoadOutcome.nothing(job, worker.span)
        self._thread = threading.Thread(target=self._run, name="kvstore-layers", daemon=True)
        self._thread.start()

    def reach(self, layer: str) -> None:
        """Wait until a layer is in place, or known not to be."""
        with self._reached:
            self._reached.wait_for(lambda: self._over or layer in self._ready)

    def finish(self) -> None:
        """Wait for the end, and tell what came of it."""
        self._thread.join()
        self._worker.note_load(self._job, self._outcome)

    def _run(self) -> None:
        store = self._worker.store
        try:
            if store is not None:
                for layer, outcome in store.load_layers(self._job):
                    self._worker.finish_copies()
                    with self._reached:
                        self._outcome = outcome
                        self._ready.add(layer)
                        self._reached.notify_all()
        except Exception:  # noqa: BLE001 - whatever it is, the engine goes on without it
            log.exception("request %s was not loaded", self._job.request)
            self._outcome = LoadOutcome.nothing(self._job, self._worker.span)
        finally:
            with self._reached:
                self._over = True
                self._reached.notify_all()
