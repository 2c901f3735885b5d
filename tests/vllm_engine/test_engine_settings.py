"""Engines that are set up differently share a store: block sizes, chunked prefill."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Engine, generate, prompt

LONG = prompt(853)
SETTLE, RESET = {"do": "settle"}, {"do": "reset"}


@pytest.fixture(scope="module")
def written(engine: Engine, smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store written by an engine that prefills in chunks of 200 tokens, and what it gave."""
    root = str(tmp_path_factory.mktemp("store") / "root")
    done = engine.run(
        generate(LONG, prompt_logprobs=0),
        SETTLE,
        model=smollm2,
        root=root,
        engine={"max_num_batched_tokens": 200},
    )
    return root, done["steps"][0]


@pytest.mark.parametrize(("block", "hit"), [(64, 832), (96, 768), (128, 768)])
def test_engine_block_sizes(
    engine: Engine, smollm2: str, written: Any, block: int, hit: int
) -> None:
    root, wanted = written
    done = engine.run(generate(LONG), model=smollm2, root=root, engine={"block_size": block})
    assert (done["steps"][0]["cached"], done["steps"][0]["external"]) == ([hit], hit)
    assert done["steps"][0]["tokens"] == wanted["tokens"]
    assert done["steps"][0]["logprobs"][0] == pytest.approx(wanted["logprobs"][0], abs=1e-4)


def test_chunks_and_prompt_logprobs(engine: Engine, smollm2: str, written: Any) -> None:
    """A request that needs all of its prompt computed gets that, whatever is stored."""
    root, wanted = written
    longer = LONG + prompt(500, 3)
    done = engine.run(
        generate(LONG, prompt_logprobs=0),
        RESET,
        generate(longer),  # 2: stored beginning, and chunks after it
        SETTLE,
        RESET,
        generate(longer),  # 5
        model=smollm2,
        root=root,
        engine={"max_num_batched_tokens": 200},
    )
    steps = done["steps"]
    assert (steps[0]["cached"], len(steps[0]["prompt_logprobs"][0])) == ([0], 852)
    assert steps[0]["prompt_logprobs"][0] == pytest.approx(wanted["prompt_logprobs"][0], abs=1e-3)
    assert (steps[2]["cached"], steps[5]["cached"]) == ([832], [1344])
    plain = engine.run(generate(longer), model=smollm2)["steps"][0]
    assert steps[2]["tokens"] == steps[5]["tokens"] == plain["tokens"]
