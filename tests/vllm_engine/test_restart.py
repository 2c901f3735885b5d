"""A prefix cache that outlives the engine: other processes, other tensor parallel sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Engine, generate, prompt

import kvstore

LONG, EXACT, SHORT = prompt(853), prompt(256, 1), prompt(20, 2)
HIT = 832
"""Tokens of LONG that whole engine blocks of 32 hold."""

SETTLE, RESET = {"do": "settle"}, {"do": "reset"}


@pytest.fixture(scope="module")
def without(engine: Engine, smollm2: str) -> Any:
    """What the engine gives with no connector, at TP=1."""
    done = engine.run(generate(LONG), generate(EXACT), generate(SHORT), model=smollm2)
    return done["steps"]


@pytest.fixture(scope="module")
def root(engine: Engine, smollm2: str, without: Any, tmp_path_factory: Any) -> str:
    """A store that an engine with TP=1 filled."""
    root = str(tmp_path_factory.mktemp("store") / "root")
    done = engine.run(
        generate(LONG), generate(EXACT), generate(SHORT), SETTLE, model=smollm2, root=root
    )
    for mine, plain in zip(done["steps"], without, strict=False):
        assert mine["tokens"] == plain["tokens"]
    assert done["steps"][2]["external"] == 0
    assert "stored bytes are portable" in done["log"]
    return root


def test_a_fresh_process_hits_and_gives_the_same(
    engine: Engine, smollm2: str, root: str, without: Any
) -> None:
    done = engine.run(
        generate(LONG), generate(EXACT), generate(SHORT), SETTLE, model=smollm2, root=root
    )
    long, exact, short = done["steps"][:3]
    assert (long["external"], long["cached"]) == (HIT, [HIT])
    assert exact["external"] - long["external"] == 224  # one block is left to compute from
    assert short["external"] == exact["external"]
    for mine, plain in zip(done["steps"], without, strict=False):
        assert mine["tokens"] == plain["tokens"]
        assert mine["logprobs"][0] == pytest.approx(plain["logprobs"][0], abs=1e-4)
    assert done["metrics"]["vllm:kvstore_load_failed_blocks"] == 0
    assert "vllm:kvstore_store_jobs" not in done["metrics"]  # all of it was there


def test_the_store_is_whole_and_holds_each_block_once(root: str) -> None:
    with kvstore.open(root, read_only=True) as store:
        (name,) = store.namespaces()
        namespace = store.open_namespace(name)
        assert list(namespace.verify()) == []
        (group,) = namespace.groups
        assert (group.num_layers, group.heads, group.block_tokens) == (30, 3, 16)
        stored = sum(len(namespace.record(e.key).blocks) for e in namespace.extents())
        assert stored == 853 // 16 + 256 // 16 + 20 // 16
    assert not list(Path(root).glob("__kvstore__/inflight/*/*/*"))


def test_tp_3_reads_what_tp_1_wrote(engine: Engine, smollm2: str, root: str, without: Any) -> None:
    done = engine.run(generate(LONG), model=smollm2, root=root, tp=3)
    assert done["steps"][0]["external"] == HIT
    assert done["steps"][0]["tokens"] == without[0]["tokens"]
    assert done["steps"][0]["logprobs"][0] == pytest.approx(without[0]["logprobs"][0], abs=1e-2)


def test_tp_1_reads_what_tp_3_wrote(
    engine: Engine, smollm2: str, without: Any, tmp_path: Path
) -> None:
    root = str(tmp_path / "root")
    first = engine.run(generate(LONG), SETTLE, model=smollm2, root=root, tp=3)
    assert first["metrics"]["vllm:kvstore_extents_committed"] == 4
    done = engine.run(generate(LONG), model=smollm2, root=root)
    assert done["steps"][0]["external"] == HIT
    assert done["steps"][0]["tokens"] == without[0]["tokens"]
    assert done["steps"][0]["logprobs"][0] == pytest.approx(without[0]["logprobs"][0], abs=1e-2)


def test_heads_in_the_wrong_place_show(
    engine: Engine, smollm2: str, root: str, without: Any
) -> None:
    """The comparison can fail: a connector that swaps two heads gives other tokens."""
    wrong = {"kv_connector": "SwappedHeads", "kv_connector_module_path": "swapped_heads"}
    settings = {"save": "none"}
    done = engine.run(generate(LONG), model=smollm2, root=root, connector=wrong, settings=settings)
    assert done["steps"][0]["external"] == HIT
    assert done["steps"][0]["tokens"] != without[0]["tokens"]


def test_bfloat16(engine: Engine, smollm2: str, tmp_path: Path) -> None:
    """Another element type is another namespace; on a CPU with AMX its pages are in tiles."""
    root = str(tmp_path / "root")
    job = {"model": smollm2, "dtype": "bfloat16"}
    plain = engine.run(generate(LONG), **job)["steps"][0]
    engine.run(generate(LONG), SETTLE, **job, root=root)
    done = engine.run(generate(LONG), **job, root=root)["steps"][0]
    assert (done["external"], done["tokens"]) == (HIT, plain["tokens"])
