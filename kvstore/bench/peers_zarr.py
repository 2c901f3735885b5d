"""Zarr libraries reading the very extents that the store wrote, whole, into arrays.

They stop at an array: putting its bytes into paged buffers is not charged to them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.timing import Contender
from kvstore.bench.workload import Workload

SLOW_EVERY = 3
PIPELINE = "codec_pipeline.path"
BATCHED = "zarr.core.codec_pipeline.BatchedCodecPipeline"
RUST = "zarrs.ZarrsCodecPipeline"

Read = Callable[[Path], Any]


class _Reader:
    """Reads all extents of a workload one after the other, and remembers arrays when asked to."""

    def __init__(self, workload: Workload, extents: Sequence[Path], read: Read) -> None:
        self._workload = workload
        self._extents = extents
        self._read = read

    def run(self) -> int:
        for path in self._extents:
            self._read(path)
        return self._workload.nbytes

    def correct(self) -> bool:
        return all(
            self._workload.extent_correct(number, np.asarray(self._read(path)))
            for number, path in enumerate(self._extents)
        )


def _read_zarr(pipeline: str) -> Read:
    import zarr

    def read(path: Path) -> Any:
        with zarr.config.set({PIPELINE: pipeline}):
            return zarr.open_array(store=path, mode="r")[:]

    return read


def _read_tensorstore(workload: Workload) -> Read:
    import tensorstore as ts

    shape = workload.group.shape(workload.group.extent_blocks)
    target = np.empty(shape, dtype=np.uint16)
    context = ts.Context()

    def read(path: Path) -> Any:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
        array = ts.open(spec, open=True, context=context).result()
        ts.array(target).write(array).result()
        return target

    return read


def zarr_peers(
    workload: Workload, extents: Sequence[Path], prefix: str, before: Callable[[], None]
) -> tuple[list[Contender], dict[str, str]]:
    """Contenders for the Zarr libraries that are installed.

    Args:
        workload: what the extents hold.
        extents: their folders, in sequence order.
        prefix: of the row keys.
        before: untimed step before each run.

    Returns:
        The contenders, and key -> title of those that are not installed.
    """
    known: list[tuple[str, str, str, Callable[[], Read]]] = [
        ("zarr", "zarr-python, into an array", "zarr", lambda: _read_zarr(BATCHED)),
        (
            "tensorstore",
            "tensorstore, into an array",
            "tensorstore",
            lambda: _read_tensorstore(workload),
        ),
        ("zarrs", "zarrs, into an array", "zarrs", lambda: _read_zarr(RUST)),
    ]
    contenders: list[Contender] = []
    absent: dict[str, str] = {}
    for name, title, package, make in known:
        key = f"{prefix}.{name}"
        if importlib.util.find_spec(package) is None:
            absent[key] = title
            continue
        if package == "zarrs":
            import zarrs  # noqa: F401 - registers its pipeline
        reader = _Reader(workload, extents, make())
        contenders.append(
            Contender(
                key,
                title,
                reader.run,
                before=before,
                correct=reader.correct,
                every=SLOW_EVERY,
            )
        )
    return contenders, absent
