"""Bringing a cache of the engine's file system tier into a store, chunk by chunk.

What is stored is what :mod:`kvstore.plugins.vllm.tier` stores and finds. What is in the store
already is left as it is, so an import that was interrupted goes on where it was.
"""

from __future__ import annotations

import errno
import os
import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import InvalidArgument, KVStoreError, StorageError
from kvstore.keys import KeyScheme
from kvstore.namespace import Namespace
from kvstore.parallel import ParallelConfig
from kvstore.plugins.vllm.checkpoint import AttentionSizes
from kvstore.plugins.vllm.fs_cache import FsCache, FsChunk, check_size, chunks_of
from kvstore.plugins.vllm.offload import offload_groups, offload_identity
from kvstore.plugins.vllm.rows import RowLayout, content_bytes
from kvstore.plugins.vllm.tier_moves import GROUP_BYTES, Mover
from kvstore.plugins.vllm.tier_plan import TierPlan
from kvstore.store import Store

Tick = Callable[[int], None]
"""Called with the number of chunks that are done."""

_AHEAD = 4
"""Chunks a thread that may be waiting for it."""


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What a cache does not say of itself.

    Attributes:
        scheme: of the engine's block hashes.
        sizes: of the cache.
        revision: of the weights, or
        weights_digest: a digest of them.
        model: the model's name in the store; empty: the engine's.
        split: whether pages hold all keys before all values, instead of next to each other.
        variants: see :class:`kvstore.plugins.vllm.tier_settings.TierSettings`.
        threads: chunks that are moved at a time.
    """

    scheme: KeyScheme
    sizes: AttentionSizes
    revision: str | None = None
    weights_digest: str | None = None
    model: str = ""
    split: bool = False
    variants: Mapping[str, str] = field(default_factory=dict)
    threads: int = 4


@dataclass(slots=True)
class ImportReport:
    """What has come of an import.

    Attributes:
        namespace: directory name of the namespace.
        imported: chunks stored.
        present: chunks that were there already.
        nbytes: bytes of content of those stored.
        refused: files that were not taken, and why.
    """

    namespace: str
    imported: int = 0
    present: int = 0
    nbytes: int = 0
    refused: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        """Files looked at."""
        return self.imported + self.present + len(self.refused)


def plan_import(cache: FsCache, options: ImportOptions) -> TierPlan:
    """What a cache becomes in a store.

    Raises:
        NotCertified, InvalidArgument: it cannot be certain what its bytes mean.
    """
    groups = offload_groups(cache.groups, options.sizes, cache.dtype)
    kind = "latent" if options.sizes.latent else "split" if options.split else "packed"
    identity = offload_identity(
        options.model or cache.model,
        groups,
        options.scheme,
        dtype=cache.dtype,
        revision=options.revision,
        weights_digest=options.weights_digest,
        variants=options.variants,
    )
    by_number = {g.number: g for g in cache.groups}
    layout = RowLayout(cache.family, kind)
    return TierPlan(identity, layout, "", by_number, groups, ParallelConfig())


def import_cache(
    cache: FsCache, store: Store, options: ImportOptions, *, tick: Tick = lambda _done: None
) -> ImportReport:
    """Import all chunks of a cache.

    Args:
        cache: the cache.
        store: where to.
        options: what the cache does not say.
        tick: called as chunks are done.

    Raises:
        NotCertified, InvalidArgument: see :func:`plan_import`; nothing was imported.
        StorageError: the store's medium is full or cannot be written; what was imported stays.
    """
    plan = plan_import(cache, options)
    namespace = store.namespace(plan.identity)
    report = ImportReport(namespace.name)
    mover = _FileMover(plan, namespace, options.threads)
    try:
        with ThreadPoolExecutor(options.threads, thread_name_prefix="kvstore-import") as pool:
            for chunk, outcome in _outcomes(pool, chunks_of(cache), mover, options.threads):
                if isinstance(outcome, str):
                    report.refused.append((chunk, outcome))
                elif outcome:
                    report.imported += 1
                    report.nbytes += outcome
                else:
                    report.present += 1
                tick(report.chunks)
    finally:
        mover.release()
    return report


def _outcomes(
    pool: ThreadPoolExecutor,
    chunks: Iterator[FsChunk | tuple[Path, str]],
    mover: _FileMover,
    threads: int,
) -> Iterator[tuple[Path, int | str]]:
    """Each file, and the bytes stored, or why not; a few files ahead of the threads."""
    waiting: dict[Future[int | str], Path] = {}
    try:
        for chunk in chunks:
            if isinstance(chunk, tuple):
                yield chunk
                continue
            waiting[pool.submit(mover.move, chunk)] = chunk.path
            while len(waiting) >= threads * _AHEAD:
                yield from _done(waiting)
        while waiting:
            yield from _done(waiting)
    finally:
        for future in waiting:
            future.cancel()


def _done(waiting: dict[Future[int | str], Path]) -> Iterator[tuple[Path, int | str]]:
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        yield waiting.pop(future), future.result()


class _FileMover:
    """Moves files into the store, through as many rows of memory as there are threads."""

    def __init__(self, plan: TierPlan, namespace: Namespace, threads: int) -> None:
        import torch

        self._plan = plan
        self._row_bytes = -(-plan.content_bytes // 64) * 64
        memory = torch.zeros(threads * self._row_bytes, dtype=torch.uint8)
        self._mover = Mover(plan, namespace, memory, self._row_bytes)
        self._memory = memory.numpy().data
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for row in range(threads):
            self._free.put(row)

    def move(self, chunk: FsChunk) -> int | str:
        """Bytes stored, 0 where it was there, or why it was not taken.

        Raises:
            StorageError: the store cannot be written.
        """
        key = chunk.block_hash + chunk.group.to_bytes(GROUP_BYTES, "big")
        row = self._free.get()
        try:
            if self._mover.stored(key):
                return 0
            self._read(chunk, row)
            return self._mover.store(key, row)
        except StorageError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
                raise
            return str(error)
        except KVStoreError as error:
            return str(error)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"
        finally:
            self._free.put(row)

    def _read(self, chunk: FsChunk, row: int) -> None:
        size = content_bytes(self._plan.groups[chunk.group])
        target = self._memory[row * self._row_bytes : row * self._row_bytes + size]
        with chunk.path.open("rb", buffering=0) as file:
            check_size(os.fstat(file.fileno()).st_size, size)
            done = 0
            while done < size:
                count = file.readinto(target[done:])
                if not count:
                    raise InvalidArgument(f"it ended after {done} bytes, while it was read")
                done += count

    def release(self) -> None:
        """Let go of the memory."""
        self._mover.release()
