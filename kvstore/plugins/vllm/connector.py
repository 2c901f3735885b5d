"""The connector: the engine's interface on one side, the scheduler's or a rank's part on the other.

The interface is ``KVConnectorBase_V1`` of vLLM 0.32 and 0.33. The engine makes one connector in its
scheduler and one in each worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.errors import InvalidArgument
from kvstore.plugins.vllm.messages import RankFacts, StepMetadata, WorkerReport
from kvstore.plugins.vllm.scheduler import StoreScheduler
from kvstore.plugins.vllm.settings import settings
from kvstore.plugins.vllm.stats import StorePromMetrics, StoreStats
from kvstore.plugins.vllm.versions import require_supported
from kvstore.plugins.vllm.worker import StoreWorker


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # untyped bases
    """Keeps the engine's prefix cache in a kvstore.

    Raises:
        InvalidArgument: an unsupported engine, or a setting that is wrong.
        NotCertified: the model's cache cannot be stored; at start-up, with the reason.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        require_supported(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        chosen = settings(transfer.kv_connector_extra_config or {})
        if transfer.kv_load_failure_policy != "recompute":
            raise InvalidArgument(
                "kv_load_failure_policy is 'fail', with which one damaged extent would fail its "
                'requests; set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
            )
        if transfer.kv_role == "kv_consumer":
            chosen = replace(chosen, save="none")
        self._side: StoreScheduler | StoreWorker = (
            StoreScheduler(vllm_config, chosen)
            if role == KVConnectorRole.SCHEDULER
            else StoreWorker(vllm_config, kv_cache_config, chosen)
        )
        self._metadata = StepMetadata()

    @property
    def _scheduler(self) -> StoreScheduler:
        if not isinstance(self._side, StoreScheduler):
            raise InvalidArgument("a connector of a worker was asked for what the scheduler's does")
        return self._side

    @property
    def _worker(self) -> StoreWorker:
        if not isinstance(self._side, StoreWorker):
            raise InvalidArgument("a connector of the scheduler was asked for what a worker's does")
        return self._side

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not stored is a miss later, no more."""
        return False

    # Start-up and end

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The rank's KV blocks."""
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> RankFacts | None:
        """What this rank registered, for the scheduler's side."""
        return self._side.facts if isinstance(self._side, StoreWorker) else None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], RankFacts]
    ) -> None:
        """What all ranks registered: the store can be opened."""
        self._scheduler.open(metadata)
        self._scheduler.events.hash_tokens(int(self._kv_cache_config.hash_block_size or 0))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The scheduler's block pool."""
        self._scheduler.bind(gpu_block_pool)

    def shutdown(self) -> None:
        """Finish what is under way, and stop."""
        self._side.close()

    # The scheduler's side

    def on_new_request(self, request: Any) -> None:
        """A request arrived."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that the store has beyond the engine's own."""
        started = time.perf_counter()
        found = self._scheduler.matched_tokens(request, num_computed_tokens)
        self._scheduler.stats.took(time.perf_counter() - started)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were allocated for a request."""
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the ranks are to do in this step."""
        started = time.perf_counter()
        metadata = self._scheduler.step(scheduler_output, self._kv_cache_manager.get_block_ids)
        self._scheduler.stats.took(time.perf_counter() - started)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        """What the ranks have done."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._scheduler.report(report)
        self._scheduler.settle()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """A request ended, with one cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """A request ended. Blocks that are still read have references of their own."""
        self._scheduler.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether the engine should go on stepping until stores are done."""
        return self._scheduler.pending

    def take_events(self) -> Iterable[Any]:
        """KV cache events of what became visible in the store."""
        return self._scheduler.events.take()

    def reset_cache(self) -> bool | None:
        """The store stays: it is keyed by the weights, so nothing in it can be stale."""
        return True

    # A rank's side

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """What to do in this step."""
        super().bind_connector_metadata(connector_metadata)
        self._metadata = connector_metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads."""
        del forward_context, kwargs
        with _Timed(self._worker.stats):
            self._worker.start_loads(self._metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for one layer of the loads that this step needs."""
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are stored when the step is over."""

    def wait_for_save(self) -> None:
        """Start this step's stores; their blocks are held until they are done."""
        with _Timed(self._worker.stats):
            self._worker.start_stores(self._metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended since the last step."""
        del finished_req_ids
        loaded, failed = self._worker.take_results()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded."""
        return self._worker.take_invalid()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """News for the scheduler's side."""
        return self._worker.take_report()

    # Metrics and modes

    def get_kv_connector_stats(self) -> StoreStats | None:
        """Counts of this side since the last call."""
        if isinstance(self._side, StoreWorker):
            return self._side.take_stats()
        return self._side.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats:
        """Counts as another process sent them."""
        return StoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> StorePromMetrics:
        """The connector's Prometheus metrics."""
        return StorePromMetrics(*args)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers that wait for their pages must run in Python between graphs."""
        return extra_config.get("load") == "layerwise"


class _Timed:
    """Counts the time that a block of code takes from an engine step."""

    def __init__(self, stats: StoreStats) -> None:
        self._stats = stats

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._stats.took(time.perf_counter() - self._started)
