"""Import of a cache of vLLM's file system tier: each file becomes one extent of the store.

Which bytes are whose is taken from what the cache says of its pages and from the sizes given.
Files that contradict these sizes are refused. What was imported before is skipped.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.errors import NotCertified
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.namespace import Namespace
from kvstore.parallel import ParallelConfig, Rank
from kvstore.plugins.vllm.checkpoint import AttentionSizes
from kvstore.plugins.vllm.fs_layout import BlockFile, FsCache
from kvstore.plugins.vllm.offload import CacheGroup, chunk_keys, offload_groups
from kvstore.plugins.vllm.rows import RowLayout, content_bytes
from kvstore.plugins.vllm.whole import store_whole
from kvstore.store import Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvstore.worker import Worker

ROW_ALIGNMENT = 4096
MOST_REFUSALS = 1000
"""Refused files that a report names; the others are counted."""

_AHEAD = 4

Progress = Callable[[int, int], None]


class Refused(Exception):
    """One file that is not imported, and why. Never leaves this module."""


@dataclass(slots=True)
class ImportReport:
    """Outcome of an import.

    Attributes:
        imported: files that are extents of the store now.
        present: files whose extent was there already.
        bytes: content bytes imported.
        reasons: why files were refused, and how many for each reason.
        refused: the first refused files, as path and reason.
    """

    imported: int = 0
    present: int = 0
    bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[str, str]] = field(default_factory=list)

    @property
    def refusals(self) -> int:
        """How many files were refused."""
        return sum(self.reasons.values())

    def refuse(self, path: str, reason: str) -> None:
        """Count a refused file."""
        self.reasons[reason] += 1
        if len(self.refused) < MOST_REFUSALS:
            self.refused.append((path, reason))


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """What a cache becomes.

    Attributes:
        cache: the cache.
        layout: of its rows.
        groups: the store's layer groups, by number of the engine's cache group.
    """

    cache: FsCache
    layout: RowLayout
    groups: Mapping[int, LayerGroup]

    @classmethod
    def of(cls, cache: FsCache, sizes: AttentionSizes, pages: str) -> ImportPlan:
        """Plan an import.

        Args:
            cache: the cache.
            sizes: of the model's cache.
            pages: ``packed`` or ``split``; of no meaning for latent attention.

        Raises:
            NotCertified: data type or layer names are not understood. InvalidArgument: the sizes
                are not known.
        """
        kind = "latent" if sizes.latent else pages
        groups = offload_groups(cache.groups, sizes, cache.dtype)
        return cls(cache, RowLayout(cache.family, kind), groups)


def survey(plan: ImportPlan) -> int:
    """Number of files.

    Raises:
        NotCertified: they belong to other cache groups than the cache tells of.
    """
    numbers: set[int] = set()
    count = 0
    for file in plan.cache.files():
        count += 1
        if not file.stray:
            numbers.add(file.group)
    if numbers and (not numbers <= set(plan.groups) or 0 not in numbers):
        raise NotCertified(
            f"the files of {plan.cache.folder.name!r} are of cache groups "
            f"{', '.join(map(str, sorted(numbers)))}, but its configuration lists "
            f"{len(plan.groups)}: which layers they hold is not known",
            reason="cache groups and files do not match",
        )
    return count


def import_cache(
    plan: ImportPlan,
    store: Store | None,
    identity: Identity,
    *,
    threads: int = 4,
    progress: Progress = lambda _done, _total: None,
) -> ImportReport:
    """Import every file that is not in the store yet.

    Args:
        plan: what becomes what.
        store: where to; None: only check the files.
        identity: of the namespace; its layer groups are the plan's.
        threads: that many files at once.
        progress: called with files done and files in all.

    Raises:
        NotCertified: as :func:`survey`. StorageError: the store cannot be written; what was
            imported stays, and another call goes on from there.
    """
    total = survey(plan)
    namespace = None if store is None else store.namespace(identity)
    own = threading.local()

    def convert(file: BlockFile) -> int | None:
        mover: _Mover | None = getattr(own, "mover", None)
        if mover is None:
            mover = own.mover = _Mover(plan, namespace, identity)
        return mover.convert(file)

    report = ImportReport()
    with ThreadPoolExecutor(threads, thread_name_prefix="kvstore-convert") as pool:
        waiting: dict[Future[int | None], BlockFile] = {}
        try:
            for done, (file, future) in enumerate(
                _completed(pool, convert, plan.cache.files(), waiting, _AHEAD * threads), 1
            ):
                _count(report, file, future)
                progress(done, total)
        finally:
            for future in waiting:
                future.cancel()
    return report


def _completed(
    pool: ThreadPoolExecutor,
    convert: Callable[[BlockFile], int | None],
    files: Iterator[BlockFile],
    waiting: dict[Future[int | None], BlockFile],
    most: int,
) -> Iterator[tuple[BlockFile, Future[int | None]]]:
    """Files as they are done, a bounded number of them under way."""
    for file in files:
        waiting[pool.submit(convert, file)] = file
        while len(waiting) >= most:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future
    while waiting:
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            yield waiting.pop(future), future


def _count(report: ImportReport, file: BlockFile, future: Future[int | None]) -> None:
    try:
        nbytes = future.result()
    except Refused as refused:
        report.refuse(file.path, str(refused))
        return
    if nbytes is None:
        report.present += 1
    else:
        report.imported += 1
        report.bytes += nbytes


class _Mover:
    """One thread's row of memory and its workers."""

    def __init__(self, plan: ImportPlan, namespace: Namespace | None, identity: Identity) -> None:
        import torch

        self._plan = plan
        self._namespace = namespace
        self._scheme = identity.key_scheme
        self._rows: dict[int, tuple[NDArray[np.uint8], Worker | None]] = {}
        for number, group in plan.groups.items():
            size = content_bytes(group)
            memory = torch.zeros(size, dtype=torch.uint8)
            buffers = plan.layout.buffers(memory, size, _numbered(plan.cache, number), group)
            one = ParallelConfig()
            worker = None if namespace is None else namespace.worker(one, Rank(), buffers)
            self._rows[number] = (memory.numpy(), worker)

    def convert(self, file: BlockFile) -> int | None:
        """Import one file.

        Returns:
            Bytes of its content; None where it is stored already.

        Raises:
            Refused: it is not one. StorageError: the store cannot be written.
        """
        if file.stray:
            raise Refused(file.stray)
        if len(file.block_hash) != self._scheme.key_bytes:
            raise Refused(
                f"its name is a hash of {len(file.block_hash)} bytes, but those of "
                f"{self._scheme.algorithm} have {self._scheme.key_bytes}"
            )
        row, worker = self._rows[file.group]
        keys = chunk_keys(file.block_hash, self._scheme)
        group = self._plan.groups[file.group]
        if self._namespace is not None:
            match = self._namespace.match_prefix(keys, group=group.name)
            if match.blocks:
                return None
        read_row(file.path, row, group)
        if worker is not None and self._namespace is not None:
            store_whole(self._namespace, worker, keys, [0])
        return len(row)


def _numbered(cache: FsCache, number: int) -> CacheGroup:
    return next(g for g in cache.groups if g.number == number)


def read_row(path: str, row: NDArray[np.uint8], group: LayerGroup) -> None:
    """Read a file's content, checked against the size that it is to have.

    A row is page-aligned, and longer than its content where its writer's ranks held more than one
    copy of it. Nothing was ever written there; content there, or none in the last layer, says that
    the sizes are not those of the cache.

    Args:
        path: of the file.
        row: where the content goes; as long as it.
        group: the store's layer group, for its sizes.

    Raises:
        Refused: the file cannot be read, or contradicts the sizes.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(f"cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Refused("is not a file")
        if status.st_size < len(row) or status.st_size % ROW_ALIGNMENT:
            raise Refused(f"has {status.st_size} bytes, not {len(row)} and padding to a page")
        _read_whole(handle, row.data)
        rest = status.st_size - len(row)
        while rest:
            data = os.read(handle, min(rest, 1 << 20))
            if not data:
                raise Refused("ends early")
            if data.strip(b"\0"):
                raise Refused("holds more than the sizes given account for")
            rest -= len(data)
    except OSError as error:
        raise Refused(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(handle)
    if not row[-(len(row) // group.num_layers) :].any():
        raise Refused("holds nothing in its last layer: the sizes given are too large for it")


def _read_whole(handle: int, view: memoryview) -> None:
    while view:
        count = os.readv(handle, [view])
        if not count:
            raise Refused("ends early")
        view = view[count:]
