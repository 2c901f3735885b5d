"""Write ``tests/data/vllm_fs_caches.tar.xz`` with the engine's own code.

``python tests/vllm_engine/make_fs_caches.py`` with the engine's Python, the repository's root and
``tests`` in PYTHONPATH.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from support.fs_caches import ARCHIVE, CACHES, LAYERS, MODEL, SIZE, TOKENS, Written
from tiering import LAYERS as RIG_LAYERS
from tiering import SIZE as RIG_SIZE
from tiering import TOKENS as RIG_TOKENS
from tiering import Model, Tiered
from vllm.v1.kv_offload.base import make_offload_key


class Allocated(Model):
    """Caches with the strides that the engine's own allocator gives them, with one head too."""

    def _laid_out(self, mine: torch.Tensor) -> torch.Tensor:
        made = super()._laid_out(mine)
        sizes = made.shape
        if self.layout == "LBNHC" and not self.split:
            fresh = torch.empty([sizes[0], sizes[2], sizes[1], sizes[3]], dtype=made.dtype)
            return fresh.transpose(1, 2).copy_(made)
        return made


def model_of(cache: Written, *, tp: int = 0, layout: str = "", split: bool | None = None) -> Model:
    """The model of a cache, as its own engine or another holds it."""
    return Allocated(
        cache.heads,
        tp or cache.tp,
        layout or cache.layout,
        split=cache.split if split is None else split,
        backwards=cache.backwards,
    )


def keys_of(cache: Written) -> list[Any]:
    """The engine's keys of its chunks."""
    return [make_offload_key(block_hash, 0) for block_hash in cache.hashes()]


def truth_of(cache: Written) -> torch.Tensor:
    """What it holds, as the rig takes it."""
    return torch.from_numpy(cache.truth()).view(torch.bfloat16)


def write(cache: Written, folder: Path) -> None:
    """Write a cache with the engine's file system tier."""
    tiered = Tiered(
        model_of(cache),
        {"type": "fs", "root_dir": str(folder), "n_read_threads": 1, "n_write_threads": 1},
        chunk_blocks=cache.chunk_blocks,
        canonical=cache.canonical,
        agnostic=cache.canonical,
        name=MODEL,
    )
    try:
        tiered.store(keys_of(cache), truth_of(cache))
    finally:
        tiered.close()


def main() -> None:
    """Write the archive."""
    assert (LAYERS, TOKENS, SIZE) == (RIG_LAYERS, RIG_TOKENS, RIG_SIZE)
    ARCHIVE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        for cache in CACHES:
            write(cache, Path(made) / cache.name)
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for path in sorted(p for p in Path(made).rglob("*") if p.is_file()):
                entry = tarfile.TarInfo(path.relative_to(made).as_posix())
                entry.size, entry.mode = path.stat().st_size, 0o644
                with path.open("rb") as opened:
                    archive.addfile(entry, opened)


if __name__ == "__main__":
    main()
