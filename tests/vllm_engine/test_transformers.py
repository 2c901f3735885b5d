"""One store, two programs: what vLLM wrote, transformers goes on from, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Engine, generate, prompt

import kvstore

A = prompt(600)
FULL = 592
"""Tokens of A in whole blocks of 16."""

ANSWER = 12
SETTLE = {"do": "settle"}


@pytest.fixture(scope="module")
def model(smollm2: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def computed(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values that transformers computes for A."""
    with torch.inference_mode():
        cache = model(torch.tensor([A[:FULL]]), use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.fixture(scope="module")
def shared(engine: Engine, smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store that vLLM wrote A to, and its answer."""
    root = str(tmp_path_factory.mktemp("store") / "root")
    done = engine.run(generate(A, max_tokens=ANSWER), SETTLE, model=smollm2, root=root)
    return root, done["steps"][0]["tokens"][0]


def only(store: Any) -> Any:
    (name,) = store.namespaces()
    return store.open_namespace(name)


def answer(model: Any, pairs: Any) -> list[int]:
    """Greedy tokens after A, from a cache of its first FULL tokens."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (key, value) in enumerate(pairs):
        cache.update(key, value, layer)
    fed, out = torch.tensor([A[FULL:]]), []
    with torch.inference_mode():
        for _ in range(ANSWER):
            fed = model(fed, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)[None]
            out.append(int(fed))
    return out


def test_vllm_writes_and_transformers_reads(model: Any, computed: Any, shared: Any) -> None:
    root, tokens = shared
    with kvstore.open(root, read_only=True) as store:
        namespace = only(store)
        (group,) = namespace.groups
        keys = namespace.keys(A)
        pairs = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in computed]
        buffers = kvstore.PagedBuffers.contiguous(group, pairs)
        worker = namespace.worker(kvstore.ParallelConfig(), kvstore.Rank(), buffers)
        assert worker.load(keys, [0]).blocks == len(keys) == FULL // 16
    for mine, theirs in zip(pairs, computed, strict=True):
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(mine[1], theirs[1], rtol=1e-3, atol=1e-3)
    assert answer(model, pairs) == tokens


def test_transformers_writes_and_vllm_reads(
    engine: Engine, smollm2: str, computed: Any, shared: Any, tmp_path: Path
) -> None:
    _, tokens = shared
    root = str(tmp_path / "root")
    engine.run(generate(prompt(20, 3)), SETTLE, model=smollm2, root=root)  # makes the namespace
    with kvstore.open(root) as store:
        namespace = only(store)
        (group,) = namespace.groups
        buffers = kvstore.PagedBuffers.contiguous(group, computed)
        worker = namespace.worker(kvstore.ParallelConfig(), kvstore.Rank(), buffers)
        keys = namespace.keys(A)
        worker.store(keys, [0])
        assert worker.commit(keys).complete
    done = engine.run(generate(A, max_tokens=ANSWER), model=smollm2, root=root)
    assert done["steps"][0]["cached"] == [576]
    assert done["steps"][0]["tokens"][0] == tokens
