"""KV cache events: which of the engine's blocks the store holds, for those who route by it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

MEDIUM = "KVSTORE"


class Events:
    """Events of blocks that became visible in the store; none where the engine publishes none."""

    def __init__(self, vllm_config: Any) -> None:
        config = vllm_config.kv_events_config
        self._on = bool(config is not None and config.enable_kv_cache_events)
        self._prepared: dict[int, BlockStored] = {}
        self._ready: list[KVCacheEvent] = []
        self._hash_tokens = 0

    def hash_tokens(self, tokens: int) -> None:
        """Tokens that one of the engine's block hashes stands for."""
        self._hash_tokens = tokens

    def prepare(self, job: int, request: Any, start: int, stop: int) -> None:
        """Note what a store job's event will say: tokens ``start`` to ``stop - 1`` of a request."""
        size = self._hash_tokens
        if not self._on or not size:
            return
        first, last = -(-start // size), min(stop // size, len(request.block_hashes))
        if first >= last:
            return
        hashes = [maybe_convert_block_hash(h) for h in request.block_hashes[first:last]]
        parent = maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None
        lora = request.lora_request
        self._prepared[job] = BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=list(request.all_token_ids[first * size : last * size]),
            block_size=size,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=MEDIUM,
            lora_name=lora.lora_name if lora is not None else None,
        )

    def publish(self, job: int, *, complete: bool) -> None:
        """A job is done: its event is due, if all of it is there."""
        event = self._prepared.pop(job, None)
        if event is not None and complete:
            self._ready.append(event)

    def take(self) -> list[KVCacheEvent]:
        """Events that are due."""
        ready, self._ready = self._ready, []
        return ready
