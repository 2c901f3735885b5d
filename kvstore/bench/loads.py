"""This library's loads: same config, another config, another layout; verified and not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.bench.timing import Contender
from kvstore.bench.workload import Workload
from kvstore.paths import GroupPath

if TYPE_CHECKING:
    from kvstore.keys import BlockKeys
    from kvstore.namespace import Namespace
    from kvstore.worker import Worker

SESSION = "bench"


@dataclass(frozen=True, slots=True)
class Stored:
    """A workload in a store.

    Attributes:
        root: the store's folder.
        namespace: opened, with checksums verified.
        unverified: the same, opened without.
        keys: block keys of the one sequence.
        extents: the extents' folders, in sequence order.
    """

    root: Path
    namespace: Namespace
    unverified: Namespace
    keys: BlockKeys
    extents: list[Path]


def store_workload(workload: Workload, root: Path, *, durable: bool = False) -> Stored:
    """Write a workload as one TP=1 rank and commit it.

    Raises:
        RuntimeError: not all of it was committed.
    """
    import kvstore

    namespace = kvstore.open(root, durable=durable).namespace(workload.identity)
    keys = namespace.keys(workload.tokens)
    config = kvstore.ParallelConfig()
    source_worker(workload, namespace).store(keys, workload.in_order)
    report = namespace.commit(keys, config, session=SESSION)
    if report.missing:
        raise RuntimeError(f"the benchmark's extents were not committed: {report}")
    unverified = kvstore.open(root, verify=False).namespace(workload.identity)
    names = GroupPath(workload.identity.namespace, workload.group.name)
    step = workload.group.extent_blocks
    return Stored(
        root,
        namespace,
        unverified,
        keys,
        [root / names.extent(keys[i].hex()) for i in range(step - 1, workload.blocks, step)],
    )


def source_worker(workload: Workload, namespace: Namespace) -> Worker:
    """The writing worker: TP=1, its pages are the workload's source."""
    import kvstore

    config, rank = kvstore.ParallelConfig(), kvstore.Rank()
    buffers = kvstore.PagedBuffers.packed(workload.group, workload.source_tensors(), order="hnd")
    return namespace.worker(config, rank, buffers, session=SESSION)


class _Load:
    """Ranks' workers, each loading its share of the whole sequence, one after the other.

    One after the other, because they stand for processes that do not share this machine's cores.
    """

    def __init__(self, workload: Workload, keys: BlockKeys, workers: Sequence[Worker]) -> None:
        self._workload = workload
        self._keys = keys
        self._workers = workers

    def run(self) -> int:
        for worker in self._workers:
            result = worker.load(self._keys, self._workload.block_ids)
            if result.blocks != self._workload.blocks:
                raise RuntimeError(
                    f"{result.blocks} of {self._workload.blocks} blocks loaded: {result.misses}"
                )
        return self._workload.nbytes


def load_contenders(
    workload: Workload, stored: Stored, prefix: str, before: Callable[[], None]
) -> list[Contender]:
    """This library's load rows.

    Args:
        workload: what is loaded.
        stored: where it lies, written at TP=1.
        prefix: of the row keys.
        before: untimed step before each run.
    """
    import kvstore

    group, tp = workload.group, workload.model.other_tp
    one, many = kvstore.ParallelConfig(), kvstore.ParallelConfig(tp=tp)
    rank = kvstore.Rank()

    packed = kvstore.PagedBuffers.packed(group, workload.packed_tensors(1)[0], order="hnd")
    split = kvstore.PagedBuffers.split(group, workload.split_tensors(), order="nhd")
    namespace = stored.namespace
    others = [
        namespace.worker(
            many, kvstore.Rank(tp=number), kvstore.PagedBuffers.packed(group, tensors, order="hnd")
        )
        for number, tensors in enumerate(workload.packed_tensors(tp))
    ]
    rows: list[tuple[str, str, list[Worker], Callable[[], bool]]] = [
        (
            "same",
            "kvstore, same config",
            [namespace.worker(one, rank, packed)],
            workload.packed_correct,
        ),
        (
            "same_unverified",
            "kvstore, same config, unverified",
            [stored.unverified.worker(one, rank, packed)],
            workload.packed_correct,
        ),
        (
            "other_config",
            f"kvstore, TP=1 read by TP={tp}",
            others,
            lambda: workload.packed_correct(tp),
        ),
        (
            "other_layout",
            "kvstore, HND packed to NHD split",
            [namespace.worker(one, rank, split)],
            workload.split_correct,
        ),
    ]
    return [
        Contender(
            f"{prefix}.{name}",
            title,
            _Load(workload, stored.keys, workers).run,
            before=before,
            poison=workload.poison,
            correct=correct,
        )
        for name, title, workers, correct in rows
    ]
