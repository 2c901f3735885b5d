"""A connector that is wrong on purpose: what it loads has two heads in each other's place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvstore.plugins.vllm.connector import KVStoreConnector
from kvstore.plugins.vllm.worker import StoreWorker


class SwappedHeads(KVStoreConnector):
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert isinstance(self._side, StoreWorker)
        load = self._side.load

        def swapped(job: Any) -> Any:
            outcome = load(job)
            (ids,) = job.tables.values()
            first = next(iter(job.first.values())) * job.block_tokens
            for cache in kv_caches.values():
                blocks = ids[
                    first // cache.shape[2] : len(job.keys) * job.block_tokens // cache.shape[2]
                ]
                cache[blocks] = cache[blocks][:, [1, 0, 2]]
            return outcome

        self._side.load = swapped  # type: ignore[method-assign]
