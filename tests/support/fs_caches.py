"""Caches that vLLM's own file system tier wrote, and what is in them.

``tests/data/vllm_fs_caches.tar.xz`` was written by the engine's own managers, tier and mappings,
see ``tests/vllm_engine/make_fs_caches.py``. Every element follows from where it belongs.
"""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ARCHIVE = Path(__file__).resolve().parent.parent / "data" / "vllm_fs_caches.tar.xz"
LAYERS, TOKENS, SIZE = 3, 8, 16
MODEL = "org/tiny"


@dataclass(frozen=True)
class Written:
    """One cache of the archive.

    Attributes:
        name: folder in the archive; the tier's ``root_dir``.
        heads: KV heads; 0 for latent attention.
        tp: ranks of the engine that wrote it.
        layout: the engine's name of its pages' layout.
        split: keys and values in two planes.
        chunk_blocks: engine blocks of a file.
        chunks: files.
        backwards: the engine registered the layers from the last to the first.
        canonical: whether the engine wrote canonical rows.
    """

    name: str
    heads: int = 2
    tp: int = 2
    layout: str = "LBNHC"
    split: bool = False
    chunk_blocks: int = 1
    chunks: int = 2
    backwards: bool = False
    canonical: bool = True

    @property
    def content(self) -> int:
        """Elements of one head for one token."""
        return 2 * SIZE if self.heads else SIZE

    def truth(self) -> np.ndarray[Any, Any]:
        """Bits of every element, ``[layer, engine block, head, token, content]``, all different."""
        shape = (LAYERS, self.chunks * self.chunk_blocks, self.heads or 1, TOKENS, self.content)
        place = np.arange(np.prod(shape), dtype=np.uint32)
        return ((place * 40503 + 40503) & 0xFFFF).astype(np.uint16).reshape(shape)

    def hashes(self) -> list[bytes]:
        """Block hash of each chunk."""
        return [hashlib.sha256(f"{self.name} {i}".encode()).digest() for i in range(self.chunks)]

    @property
    def options(self) -> list[str]:
        """What ``kvstore convert`` has to be told of it."""
        out = ["--revision", "r1"]
        if not self.heads:
            return [*out, "--latent", str(SIZE)]
        pages = "split" if self.split else "packed"
        return [*out, "--heads", str(self.heads), "--head-size", str(SIZE), "--pages", pages]


CACHES = (
    Written("nhd", chunks=3),
    # Two copies of each head: rows are twice as long as what is in them.
    Written("hnd", tp=4, layout="LBHNC", backwards=True),
    Written("split", tp=1, split=True),
    Written("split-hnd", layout="LBHNC", split=True, chunk_blocks=2),
    Written("chunks", layout="LBHNC", chunk_blocks=2),
    Written("latent", heads=0),
    Written("direct", canonical=False, chunks=1),
)
CANONICAL = tuple(c for c in CACHES if c.canonical)


def named(name: str) -> Written:
    """A cache by its name."""
    return next(c for c in CACHES if c.name == name)


def unpack(name: str, folder: Path) -> Path:
    """Unpack a cache; its ``root_dir``."""
    with tarfile.open(ARCHIVE) as archive:
        inside = [m for m in archive.getmembers() if m.name.split("/")[0] == name]
        archive.extractall(folder, inside, filter="data")
    return folder / name
