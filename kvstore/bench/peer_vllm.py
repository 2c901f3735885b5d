"""vLLM's own file system tier: its C++ batch reader, ``vllm.fs_io_C``, on one file a block.

Found as an installed ``vllm``, or as the bare extension file (``--vllm-fs-io PATH``), which needs
only torch in the process. vLLM reads with O_DIRECT into a CPU staging buffer, one job a request and
one thread a job, and moves pages to the device from there; so there are two rows, one that stops in
the staging buffer and one that also copies into paged buffers, as the store does. Jobs run in 4
threads, as if 4 requests came at once, which is more than one request gets there. Hot rows read
through the page cache, which vLLM does only where O_DIRECT does not work.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.bench.limits import aligned_buffer, in_threads
from kvstore.bench.timing import Contender
from kvstore.bench.workload import Workload

MODULE = "fs_io_C"
JOBS = 4
BATCH = 8
"""Blocks a call where pages are copied: few enough that staging is still in cache."""

ROWS = {
    "vllm": "vLLM fs_io_C, into its staging only",
    "vllm_pages": "vLLM fs_io_C, and copied into pages",
}
STORE_ROW = {"vllm": "vLLM fs_io_C, out of its staging, not durable"}


def find_fs_io(path: Path | None) -> Any | None:
    """The extension module of vLLM, or None where it is not to be had.

    Args:
        path: the extension file; None to look for an installed vllm.

    Raises:
        ImportError: ``path`` was given and does not load.
    """
    if path is None:
        if importlib.util.find_spec("vllm") is None:
            return None
        try:
            return importlib.import_module(f"vllm.{MODULE}")
        except ImportError:
            return None
    import torch  # noqa: F401 - the extension links to libraries that torch loads

    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is not an extension module of this Python")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def vllm_peers(
    fs_io: Any,
    workload: Workload,
    paths: Sequence[Path],
    prefix: str,
    before: Callable[[], None],
    *,
    direct: bool,
) -> list[Contender]:
    """Two contenders: into vLLM's staging buffer, and on into pages.

    Args:
        fs_io: the extension module.
        workload: what is loaded.
        paths: one file a block, in block order.
        prefix: of the row keys.
        before: untimed step before each run.
        direct: read with O_DIRECT (vLLM's way wherever it works), else through the page cache.
    """
    layers = workload.model.layers
    staging = aligned_buffer(workload.nbytes).reshape(workload.blocks, -1)
    names = [str(path) for path in paths]

    def load(*, pages: bool) -> int:
        def work(number: int) -> None:
            mine = range(number, workload.blocks, JOBS)
            step = BATCH if pages else len(mine)
            for first in range(0, len(mine), step):
                batch = mine[first : first + step]
                views = [staging[block].data for block in batch]
                fs_io.batch_load_block([names[block] for block in batch], views, direct)
                if not pages:
                    continue
                for block in batch:
                    page = staging[block].reshape(layers, workload.model.heads, -1)
                    workload.pages[:, workload.block_ids[block]] = page

        in_threads(min(JOBS, workload.blocks), work)
        return workload.nbytes

    def poison() -> None:
        staging.fill(0xA5)
        workload.poison()

    def staged_correct() -> bool:
        shape = (layers, workload.model.heads, -1)
        return all(
            (staging[block].reshape(shape) == workload.source[:, block]).all()
            for block in range(workload.blocks)
        )

    return [
        Contender(
            f"{prefix}.vllm",
            ROWS["vllm"],
            lambda: load(pages=False),
            before=before,
            poison=poison,
            correct=staged_correct,
        ),
        Contender(
            f"{prefix}.vllm_pages",
            ROWS["vllm_pages"],
            lambda: load(pages=True),
            before=before,
            poison=poison,
            correct=workload.packed_correct,
        ),
    ]


def vllm_store_peer(
    fs_io: Any, workload: Workload, folder: Path, prefix: str, *, direct: bool
) -> Contender:
    """Store one file a block out of vLLM's staging buffer, as its tier does: it never syncs.

    Args:
        fs_io: the extension module.
        workload: what is stored; copying its pages to the staging buffer is not charged.
        folder: scratch folder for the files, made anew before each run.
        prefix: of the row key.
        direct: write with O_DIRECT, vLLM's way wherever it works.
    """
    staging = aligned_buffer(workload.nbytes).reshape(workload.blocks, -1)
    for block in range(workload.blocks):
        staging[block] = workload.source[:, block].reshape(-1)
    paths = [
        str(folder / f"{block % 256:02x}" / f"{block}.bin") for block in range(workload.blocks)
    ]

    def before() -> None:
        if folder.exists():
            shutil.rmtree(folder)

    def run() -> int:
        def work(number: int) -> None:
            mine = range(number, workload.blocks, JOBS)
            names = [paths[block] for block in mine]
            views = [staging[block].data for block in mine]
            fs_io.batch_store_block([f"{name}.tmp" for name in names], names, views, direct)

        in_threads(min(JOBS, workload.blocks), work)
        return workload.nbytes

    def correct() -> bool:
        return all(
            Path(path).read_bytes() == workload.source[:, block].tobytes()
            for block, path in enumerate(paths)
        )

    return Contender(f"{prefix}.vllm", STORE_ROW["vllm"], run, before=before, correct=correct)
