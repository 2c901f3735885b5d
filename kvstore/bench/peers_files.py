"""Simple file formats loading the same bytes into the same paged buffers.

safetensors with one file an extent, and one plain file a block: what an engine would write without
a store. Both hold the pages as TP=1 has them, so neither could serve another config.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvstore.bench.limits import in_threads
from kvstore.bench.timing import Contender
from kvstore.bench.workload import Workload

SLOW_EVERY = 3
FILE_THREADS = 4


def write_block_files(workload: Workload, folder: Path) -> list[Path]:
    """One file a block: its pages of all layers, one after the other.

    Returns:
        The files, in block order.
    """
    paths = []
    for block in range(workload.blocks):
        sub = folder / f"{block % 256:02x}"
        sub.mkdir(parents=True, exist_ok=True)
        path = sub / f"{block:08d}.bin"
        path.write_bytes(np.ascontiguousarray(workload.source[:, block]).data)
        paths.append(path)
    return paths


def block_files_peer(
    workload: Workload, paths: Sequence[Path], prefix: str, before: Callable[[], None]
) -> Contender:
    """One plain file a block: open, ``readinto``, copy into the pages, in threads."""
    page_of_all_layers = workload.source[:, 0].shape

    def run() -> int:
        def work(number: int) -> None:
            staging = np.empty(page_of_all_layers, dtype=np.uint8)
            view = staging.reshape(-1).data
            for block in range(number, workload.blocks, FILE_THREADS):
                with paths[block].open("rb", buffering=0) as stream:
                    got = stream.readinto(view)
                if got != view.nbytes:
                    raise OSError(f"{paths[block]} gave {got} of {view.nbytes} bytes")
                workload.pages[:, workload.block_ids[block]] = staging

        in_threads(FILE_THREADS, work)
        return workload.nbytes

    return Contender(
        f"{prefix}.block_files",
        "one file a block, plain Python",
        run,
        before=before,
        poison=workload.poison,
        correct=workload.packed_correct,
    )


def write_safetensors(workload: Workload, folder: Path) -> list[Path]:
    """One safetensors file an extent, with one tensor ``[block, head, token, content]`` a layer.

    Returns:
        The files, in sequence order; none where safetensors is not installed.
    """
    if importlib.util.find_spec("safetensors") is None:
        return []
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = workload.source_tensors()
    step = workload.group.extent_blocks
    paths = []
    for extent in range(workload.extents):
        path = folder / f"{extent:06d}.safetensors"
        cut = {
            f"layer.{i:03d}": tensor[extent * step : (extent + 1) * step]
            for i, tensor in enumerate(tensors)
        }
        save_file(cut, path)
        paths.append(path)
    return paths


def safetensors_peer(
    workload: Workload, paths: Sequence[Path], prefix: str, before: Callable[[], None]
) -> Contender:
    """One safetensors file an extent: load it, copy into the pages, in threads.

    The copy is NumPy's: torch's ``index_copy_`` and indexed assignment are far slower.
    """
    import torch
    from safetensors.torch import load_file

    step = workload.group.extent_blocks
    shape = (step, workload.model.heads, -1)

    def run() -> int:
        def work(number: int) -> None:
            for extent in range(number, len(paths), FILE_THREADS):
                where = workload.block_ids[extent * step : (extent + 1) * step]
                for name, tensor in load_file(paths[extent]).items():
                    layer = int(name.removeprefix("layer."))
                    data = tensor.reshape(shape).view(torch.uint8).numpy()
                    workload.pages[layer, where] = data

        in_threads(FILE_THREADS, work)
        return workload.nbytes

    return Contender(
        f"{prefix}.safetensors",
        "safetensors, one file an extent",
        run,
        before=before,
        poison=workload.poison,
        correct=workload.packed_correct,
        every=SLOW_EVERY,
    )
