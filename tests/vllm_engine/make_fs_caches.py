"""Makes ``tests/data/vllm_fs``: small caches, written by the engine's own file system tier.

Run it in the engine's environment, in ``tests/vllm_engine``. ``truth.bin`` holds what was stored:
bfloat16 bits ``[layer, block, head, token, content]`` for each cache, see ``truth.json``.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tiering import LAYERS, Model, Tiered, key_of, truth_of

DATA = Path(__file__).resolve().parents[1] / "data" / "vllm_fs"
TOKENS, SIZE = 4, 4
model = partial(Model, tokens=TOKENS, size=SIZE)
CACHES: dict[str, tuple[Model, int, dict[str, Any]]] = {
    "nhd": (model(2, 2, "LBNHC"), 2, {}),
    "hnd": (model(2, 1, "LBHNC", backwards=True), 2, {"chunk_blocks": 2}),
    "split": (model(2, 2, "LBHNC", split=True), 1, {}),
    "latent": (model(0, 2, "LBNHC"), 1, {}),
    "direct": (model(2, 1, "LBNHC"), 1, {"canonical": False, "agnostic": False}),
}


def main() -> None:
    shutil.rmtree(DATA, ignore_errors=True)
    about, content = {}, b""
    for number, (name, (shape, chunks, options)) in enumerate(CACHES.items()):
        tier = {"type": "fs", "root_dir": str(DATA / name), "n_read_threads": 1}
        engine = Tiered(shape, {**tier, "n_write_threads": 1}, name="org/tiny", **options)
        keys = [key_of(0x10 * number + i) for i in range(1, chunks + 1)]
        truth = truth_of(shape, len(keys) * engine.chunk_blocks, seed=number)
        engine.store(keys, truth)
        engine.close()
        data = truth.view(torch.uint8).numpy().tobytes()
        about[name] = {
            "shape": list(truth.shape),
            "offset": len(content),
            "hashes": [key[:-4].hex() for key in keys],
            "chunk_blocks": engine.chunk_blocks,
        }
        content += data
    sizes = {"layers": LAYERS, "tokens": TOKENS, "head_size": SIZE}
    (DATA / "truth.json").write_text(json.dumps({"sizes": sizes, "caches": about}, indent=1) + "\n")
    (DATA / "truth.bin").write_bytes(content)


if __name__ == "__main__":
    main()
