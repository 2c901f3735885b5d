"""Moving chunks between the engine's primary tier and the store."""

from __future__ import annotations

import threading
import uuid
from typing import Any

from kvstore.buffers import PagedBuffers
from kvstore.errors import InvalidArgument, StorageError
from kvstore.namespace import Namespace
from kvstore.parallel import Rank
from kvstore.plugins.vllm.offload import chunk_keys
from kvstore.plugins.vllm.rows import content_bytes
from kvstore.plugins.vllm.tier_plan import TierPlan
from kvstore.plugins.vllm.whole import store_whole
from kvstore.worker import Worker

GROUP_BYTES = 4
"""Bytes at the end of the engine's offload keys that are the number of a cache group."""


def split_key(key: bytes) -> tuple[bytes, int]:
    """Block hash, and number of the cache group, out of an offload key."""
    return key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big")


class Mover:
    """Loads chunks into rows, stores rows, and knows what is stored. For any number of threads.

    Args:
        plan: what is stored.
        namespace: where.
        memory: uint8 tensor, 1-D: the rows.
        row_bytes: bytes from a row to the next.
    """

    def __init__(self, plan: TierPlan, namespace: Namespace, memory: Any, row_bytes: int) -> None:
        self._plan = plan
        self._namespace = namespace
        self._scheme = plan.identity.key_scheme
        self._buffers: dict[int, PagedBuffers] = {
            n: plan.buffers(n, memory, row_bytes) for n in plan.groups
        }
        self._own = threading.local()
        # One at once proves that all of them can be made.
        for number in plan.groups:
            self._worker(number)

    def stored(self, key: bytes) -> bool:
        """Whether a chunk is stored."""
        block_hash, number = split_key(key)
        group = self._plan.groups.get(number)
        if group is None:
            return False
        keys = chunk_keys(block_hash, self._scheme)
        return self._namespace.match_prefix(keys, group=group.name).blocks == 1

    def load(self, key: bytes, row: int) -> int:
        """Load a chunk into a row.

        Returns:
            Bytes of its content.

        Raises:
            StorageError: it is not there, or not whole; what is in the row is of no use.
        """
        block_hash, number = split_key(key)
        worker = self._worker(number)
        result = worker.load(chunk_keys(block_hash, self._scheme), [row])
        if result.misses:
            raise StorageError(0, "; ".join(result.misses.values()))
        return content_bytes(worker.buffers.group)

    def store(self, key: bytes, row: int) -> int:
        """Store a row's chunk, unless it is there.

        Returns:
            Bytes of its content.

        Raises:
            StorageError: it could not be stored; nothing of it is left.
        """
        block_hash, number = split_key(key)
        worker = self._worker(number)
        keys = chunk_keys(block_hash, self._scheme)
        group = worker.buffers.group
        store_whole(self._namespace, worker, keys, [row])
        return content_bytes(group)

    def release(self) -> None:
        """Let go of the engine's memory. No thread may move anything any more."""
        self._buffers.clear()
        self._own = threading.local()

    def _worker(self, number: int) -> Worker:
        """This thread's worker for a cache group."""
        workers: dict[int, Worker] | None = getattr(self._own, "workers", None)
        if workers is None:
            workers = self._own.workers = {}
        if number not in workers:
            if number not in self._buffers:
                known = ", ".join(map(str, self._buffers)) or "none: the tier is shut down"
                raise InvalidArgument(f"cache group {number} is not one of the tier's: {known}")
            workers[number] = self._namespace.worker(
                self._plan.config, Rank(), self._buffers[number], session=uuid.uuid4().hex
            )
        return workers[number]
