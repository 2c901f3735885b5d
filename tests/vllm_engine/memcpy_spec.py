"""The engine's tiered offloading on its CPU backend, which it refuses there: copies in memory."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyTieringSpec(TieringOffloadingSpec):
    """TieringOffloadingSpec whose workers copy at once, on the calling thread."""

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            self._worker = MemcpyWorker(self, kv_caches)
        return self._worker


class MemcpyWorker(OffloadingWorker):
    """One rank's copies between its caches and its slots of the primary tier, as they are."""

    def __init__(self, spec: Any, kv_caches: Any) -> None:
        self._region = SharedOffloadRegion(
            spec.config.engine_id,
            spec.num_chunks,
            spec.config.parallel.rank,
            spec.kv_bytes_per_chunk,
            spec.cpu_page_size_per_worker,
        )
        self._blocks = spec.blocks_per_chunk
        self._pairs = [
            (t.tensor, self._region.create_next_worker_view(t.page_size_bytes * self._blocks))
            for t in kv_caches.tensors
        ]
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, engine: Any, tier: Any, *, store: bool) -> bool:
        (first,) = engine.block_indices
        for place, block in enumerate(engine.block_ids):
            chunk, within = divmod(first % self._blocks + place, self._blocks)
            for cache, rows in self._pairs:
                page = cache.shape[1]
                row = rows[int(tier.block_ids[chunk]), within * page : (within + 1) * page]
                if store:
                    row.copy_(cache[int(block)])
                else:
                    cache[int(block)].copy_(row)
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Copies are done when they are submitted."""

    def shutdown(self) -> None:
        self._pairs = []
        self._region.cleanup()
