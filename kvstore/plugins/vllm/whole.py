"""Storing one chunk whole, or leaving nothing of it."""

from __future__ import annotations

import contextlib

from kvstore.errors import KVStoreError, StorageError
from kvstore.keys import BlockKeys
from kvstore.namespace import Namespace
from kvstore.worker import Worker


def store_whole(
    namespace: Namespace, worker: Worker, keys: BlockKeys, block_ids: list[int]
) -> None:
    """Store and commit blocks that one worker alone writes.

    Raises:
        StorageError: they could not be stored; nothing of them is left.
    """
    try:
        worker.store(keys, block_ids)
        report = worker.commit(keys)
        if report.missing:
            raise StorageError(0, f"not committed: {report.missing[0]}; try again")
    except KVStoreError:
        # The medium that failed is the one to clear up on: there may be no doing it.
        with contextlib.suppress(KVStoreError):
            namespace.abandon(
                keys,
                worker.config,
                session=str(worker.session),
                group=worker.buffers.group.name,
            )
        raise
