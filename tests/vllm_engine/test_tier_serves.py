"""An engine whose prefixes come back through the tier: other processes, the same tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import Engine, generate, prompt
from test_models import COMMON, VOCABULARY, save

import kvstore

LONG = prompt(853, 7, VOCABULARY)
ALL = [853 // 64 * 64]
"""Tokens of LONG that whole chunks of two engine blocks hold."""

LATER = [generate(prompt(20, seed, VOCABULARY), max_tokens=6) for seed in range(20, 23)]
"""Something for the engine to do while chunks are stored: it looks after the tier as it steps."""


def job(root: Path, model: str, *, tp: int = 1, blocks: int = 2) -> dict[str, Any]:
    """Options of an engine with the tier."""
    tier = {
        "type": "KVStoreTier",
        "module_path": "kvstore.plugins.vllm",
        "root": str(root),
        "threads": 2,
    }
    return {
        "model": model,
        "tp": tp,
        "engine": {"skip_tokenizer_init": True},
        "root": str(root),
        "connector": {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None},
        "settings": {
            "spec_name": "MemcpyTieringSpec",
            "spec_module_path": "memcpy_spec",
            "cpu_bytes_to_use": 1 << 28,
            "blocks_per_chunk": blocks,
            "secondary_tiers": [tier],
        },
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of random weights, with two KV heads."""
    from transformers import LlamaConfig

    config = LlamaConfig(**COMMON, num_key_value_heads=2, head_dim=64)
    return save(config, tmp_path_factory.mktemp("gqa"))


@pytest.mark.parametrize("tp", [1, 2])
def test_prefixes_outlive_the_engine(engine: Engine, tiny: str, tmp_path: Path, tp: int) -> None:
    root = tmp_path / "store"
    options = job(root, tiny, tp=tp)
    first = engine.run(generate(LONG), *LATER, **options)
    assert "kept as they are" in first["log"]  # the CPU backend's pages are of its own order
    with kvstore.open(root, read_only=True) as store:
        (name,) = store.namespaces()
        namespace = store.open_namespace(name)
        assert list(namespace.verify()) == []
        assert len(list(namespace.extents())) >= 853 // 64
    again = engine.run(generate(LONG), *LATER, **options)
    assert again["steps"][0]["cached"] == ALL
    assert again["steps"][0]["tokens"] == first["steps"][0]["tokens"]
    if tp == 1:
        damaged(engine, options, first)


def damaged(engine: Engine, options: dict[str, Any], first: dict[str, Any]) -> None:
    """Chunks that are damaged or gone are computed: the same tokens again, and no loop."""
    with kvstore.open(options["root"]) as store:
        namespace = store.open_namespace(next(store.namespaces()))
        extents = [Path(options["root"]) / e.path for e in namespace.extents()]
    shard = next(extents[3].glob("c.*"))
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    shutil.rmtree(extents[6])
    third = engine.run(generate(LONG), *LATER, **options)
    assert third["steps"][0]["cached"] < ALL
    assert third["steps"][0]["tokens"] == first["steps"][0]["tokens"]
    # What was missing has been stored anew.
    fourth = engine.run(generate(LONG), **options)
    assert fourth["steps"][0]["cached"] == ALL
