"""Measure what the defaults for extents cost: span in tokens, and how slots are aligned.

    python tools/measure_defaults.py [--size MIB] [--rounds N] [--dir DIR]

Prints a Markdown table for the geometry of Llama-3-8B (32 layers, 8 KV heads, head size 128,
bfloat16, blocks of 16 tokens). Spans take turns within each round; figures are medians, and rates
are given as ratios to the default span's, since a machine's own speed drifts from run to run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import kvstore
from kvstore.shard import slot_stride

SPANS = (64, 128, 256, 512, 1024)
DEFAULT = 256


class Case:
    """One span: a namespace of its own, filled with the same bytes."""

    def __init__(self, store: kvstore.Store, span: int, pages: list[torch.Tensor]) -> None:
        self.group = kvstore.LayerGroup.attention_kv(
            layers=32, heads=8, head_size=128, block_tokens=16, extent_blocks=span // 16
        )
        identity = kvstore.Identity("llama-3-8b", 32, (self.group,), revision=f"span-{span}")
        self.namespace = store.namespace(identity)
        blocks = len(pages[0])
        self.keys = self.namespace.keys(np.arange(blocks * 16))
        self.ids = np.random.default_rng(0).permutation(blocks)
        self.nbytes = blocks * 32 * self.group.page_bytes
        buffers = kvstore.PagedBuffers.packed(self.group, pages)
        self.worker = self.namespace.worker(
            kvstore.ParallelConfig(), kvstore.Rank(), buffers, session="measure"
        )
        self.root = Path(store.location)
        self.rates: dict[str, list[float]] = {"store": [], "hot": [], "cold": []}

    def store(self) -> None:
        """Store all of it anew."""
        for extent in list(self.namespace.extents()):
            self.namespace.remove(extent.key)
        started = time.perf_counter()
        self.worker.store(self.keys, self.ids)
        report = self.worker.commit(self.keys)
        self.rates["store"].append(self.nbytes / (time.perf_counter() - started))
        if not report.complete:
            raise SystemExit(str(report.missing[0]))

    def load(self, kind: str) -> None:
        """Load all of it: ``hot`` from the page cache, ``cold`` after dropping it from there."""
        if kind == "cold":
            for file in self.files():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        result = self.worker.load(self.keys, self.ids)
        self.rates[kind].append(self.nbytes / result.seconds)
        if result.blocks != len(self.keys):
            raise SystemExit(str(result.misses))

    def files(self) -> list[Path]:
        """All files of the namespace."""
        found = (self.root / self.namespace.name).rglob("*")
        return [path for path in found if path.is_file()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512, metavar="MIB", help="KV bytes of a span")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=".")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="kvstore-defaults-", dir=args.dir)
    try:
        with kvstore.open(folder, durable=False) as store:
            blocks = args.size * (1 << 20) // (32 * 8 * 16 * 512)
            pages = [
                torch.randint(0, 255, (blocks, 8, 16, 512), dtype=torch.uint8) for _ in range(32)
            ]
            cases = {span: Case(store, span, pages) for span in SPANS}
            for _ in range(args.rounds):
                for case in cases.values():
                    case.store()
                    case.load("hot")
                    case.load("cold")
                    case.load("hot")
            report(cases)
    finally:
        shutil.rmtree(folder)


def report(cases: dict[int, Case]) -> None:
    """Print the table."""
    print(
        "| extent, tokens | chunk | shard | padding | files a GiB | store | hot load | cold load |"
    )
    print("|---|---|---|---|---|---|---|---|")
    base = {kind: statistics.median(rates) for kind, rates in cases[DEFAULT].rates.items()}
    for span, case in cases.items():
        chunk = case.group.chunk_bytes()
        padding = slot_stride(chunk) / chunk - 1
        files = len(case.files()) / (case.nbytes / (1 << 30))
        shard = case.group.shard_layers * case.group.shard_heads * chunk
        ratios = [statistics.median(case.rates[k]) / base[k] for k in ("store", "hot", "cold")]
        print(
            f"| {span} | {chunk >> 10} KiB | {shard / (1 << 20):.0f} MiB | {padding:.1%} | "
            f"{files:.0f} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |"
        )


if __name__ == "__main__":
    main()
