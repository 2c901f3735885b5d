"""Storing: this library against a raw write of the same bytes with the same durability."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.limits import RawFile
from kvstore.bench.loads import SESSION, source_worker
from kvstore.bench.timing import Contender
from kvstore.bench.workload import Workload
from kvstore.paths import GroupPath


class _StoreJob:
    """Stores a workload into a store of its own, made anew before each run."""

    def __init__(self, workload: Workload, root: Path, *, durable: bool) -> None:
        self._workload = workload
        self._root = root
        self._durable = durable
        self._namespace: Any = None
        self._worker: Any = None
        self._keys: Any = None

    def before(self) -> None:
        """Untimed: an empty store, with the namespace made and the worker certified."""
        import kvstore

        if self._root.exists():
            shutil.rmtree(self._root)
        store = kvstore.open(self._root, durable=self._durable)
        self._namespace = store.namespace(self._workload.identity)
        self._keys = self._namespace.keys(self._workload.tokens)
        self._worker = source_worker(self._workload, self._namespace)

    def run(self) -> int:
        """Timed: store every block and commit."""
        import kvstore

        self._worker.store(self._keys, self._workload.in_order)
        report = self._namespace.commit(self._keys, kvstore.ParallelConfig(), session=SESSION)
        if report.missing:
            raise RuntimeError(f"the stored extents were not committed: {report}")
        return self._workload.nbytes

    def correct(self) -> bool:
        """Whether zarr-python reads the source back out of every extent."""
        import zarr

        names = GroupPath(self._workload.identity.namespace, self._workload.group.name)
        step = self._workload.group.extent_blocks
        for number in range(self._workload.extents):
            key = self._keys[(number + 1) * step - 1].hex()
            array = zarr.open_array(store=self._root / names.extent(key), mode="r")[:]
            if not self._workload.extent_correct(number, np.asarray(array)):
                return False
        return True


def store_contenders(
    workload: Workload, raw: RawFile, folder: Path, prefix: str, flag: int
) -> list[Contender]:
    """Raw write limits and this library's stores, durable and not.

    Args:
        workload: what is stored.
        raw: the raw limit's file, written anew each time.
        folder: scratch folder.
        prefix: of the row keys.
        flag: ``O_DIRECT``, or 0 where the file system refuses it.
    """
    lasting = _StoreJob(workload, folder / "store-durable", durable=True)
    quick = _StoreJob(workload, folder / "store-buffered", durable=False)
    source = workload.source_bytes

    def remove_raw() -> None:
        raw.path.unlink(missing_ok=True)

    return [
        Contender(
            f"{prefix}.limit_durable",
            "limit: O_DIRECT write 8 MiB x 4 threads, fsync",
            lambda: raw.write(source, flag=flag, durable=True),
            before=remove_raw,
        ),
        Contender(
            f"{prefix}.durable",
            "kvstore store and commit, durable",
            lasting.run,
            before=lasting.before,
            correct=lasting.correct,
        ),
        Contender(
            f"{prefix}.limit",
            "limit: write into the page cache",
            lambda: raw.write(source, flag=0, durable=False),
            before=remove_raw,
        ),
        Contender(
            f"{prefix}.not_durable",
            "kvstore store and commit, not durable",
            quick.run,
            before=quick.before,
            correct=quick.correct,
        ),
    ]
