"""A cache of the engine's own file system tier, converted, is found by this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiering import Model, Tiered, key_of, truth_of

from kvstore.plugins.vllm.roots import DEFAULT_SEED, root_of

KEYS = [key_of(n) for n in range(1, 4)]


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("chunk_blocks", [1, 2])
def test_a_converted_cache_is_hit(tmp_path: Path, layout: str, chunk_blocks: int) -> None:
    writer = Model(4, 2, layout)
    truth = truth_of(writer, 3 * chunk_blocks)
    fs: dict[str, Any] = {"type": "fs", "root_dir": str(tmp_path / "fs")}
    engine = Tiered(writer, fs, chunk_blocks=chunk_blocks)
    engine.store(KEYS, truth)
    engine.close()
    sizes = ["--heads", "4", "--head-size", "16", "--revision", "r1", "--pages", "packed"]
    command = [sys.executable, "-m", "kvstore", "convert", str(tmp_path / "fs")]
    ran = subprocess.run(
        [*command, str(tmp_path / "store"), *sizes, "--json"],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert json.loads(ran.stdout)["imported"] == 3
    tier = {
        "type": "KVStoreTier",
        "module_path": "kvstore.plugins.vllm",
        "root": str(tmp_path / "store"),
        "revision": "r1",
        "heads": 4,
        "head_size": 16,
        "pages": "packed",
    }
    other = "LBHNC" if layout == "LBNHC" else "LBNHC"
    for reader in (Model(4, 1, other), Model(4, 2, layout), Model(4, 1, layout)):
        engine = Tiered(reader, tier, chunk_blocks=chunk_blocks)
        assert torch.equal(engine.load(KEYS), truth[:, :, : reader.local])
        engine.close()


@pytest.mark.parametrize("seed", [None, "0", "a longer seed, of more than 23 characters"])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_roots_are_the_engines(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None
) -> None:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
    assert bytes(kv_cache_utils.NONE_HASH) == root_of(algorithm, seed or DEFAULT_SEED)
