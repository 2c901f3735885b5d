"""In the middle of a load or a store: aborts, a store that vanishes, crashes, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Engine, generate, kill, prompt

import kvstore
from kvstore.io.failpoints import KILLED

A, B, C = prompt(600), prompt(500, 7), prompt(600, 8)
HIT = 576
"""Tokens of A and of C that can be loaded."""

SETTLE, RESET = {"do": "settle"}, {"do": "reset"}
RELEASE, EVENTS = {"do": "hook", "release": True}, {"do": "hook"}
HOOKED = {"kv_connector": "Hooked", "kv_connector_module_path": "hooked"}
FEW = {"num_gpu_blocks_override": 25, "max_num_seqs": 4}
"""So few blocks of 32 that A and B do not fit at once."""


def plan(**changes: Any) -> dict[str, Any]:
    """A step that changes what the connector does from here on."""
    return {"do": "hook", "plan": changes}


def faults(root: Path) -> list[Any]:
    """What a check of every stored byte finds."""
    with kvstore.open(str(root), read_only=True) as store:
        return [f for n in store.namespaces() for f in store.open_namespace(n).verify()]


@pytest.fixture(scope="module")
def plain(engine: Engine, smollm2: str) -> Any:
    """What the engine gives for A, B and C with no connector."""
    return engine.run(generate(A), generate(B), generate(C), model=smollm2)["steps"]


def test_a_request_aborted_while_it_loads(
    engine: Engine, smollm2: str, plain: Any, tmp_path: Path
) -> None:
    """Its blocks must not go to another request before the load is done with them."""
    done = engine.run(
        generate(A),
        SETTLE,
        RESET,
        plan(load="sleep:1.5"),
        {"do": "abort", "prompts": [A], "steps": 3, "sleep": 0.4},  # 4
        generate(B),  # 5: needs A's blocks
        EVENTS,  # 6
        plan(load=None),
        generate(A),  # 8
        SETTLE,
        RESET,
        {"do": "abort", "prompts": [C], "steps": 1, "max_tokens": 100},  # 11: while it computes
        generate(A, C),  # 12
        SETTLE,
        model=smollm2,
        root=str(tmp_path / "root"),
        connector=HOOKED,
        engine=FEW,
        max_model_len=704,
    )
    steps = done["steps"]
    times = {what: at for what, at in steps[6] if what.startswith("load")}
    assert times["load begins"] < steps[4] < times["load ends"]
    assert steps[5]["tokens"] == plain[1]["tokens"]
    assert steps[5]["logprobs"][0] == pytest.approx(plain[1]["logprobs"][0], abs=1e-4)
    assert (steps[8]["cached"], steps[8]["tokens"]) == ([HIT], plain[0]["tokens"])
    assert steps[12]["cached"][0] == HIT
    assert steps[12]["tokens"] == plain[0]["tokens"] + plain[2]["tokens"]
    assert faults(tmp_path / "root") == []


def test_blocks_stay_as_they_are_while_they_are_stored(
    engine: Engine, smollm2: str, plain: Any, tmp_path: Path
) -> None:
    """And where they are not held, the comparison shows it."""
    done = engine.run(
        plan(store="sleep:1.5"),
        generate(A, max_tokens=1),
        generate(B),  # 2: needs the blocks that are being stored
        plan(store=None),
        SETTLE,
        RESET,
        generate(A),  # 6
        SETTLE,
        RESET,
        plan(store="wait", hold=False),
        generate(C, max_tokens=1),
        generate(B),  # 11: takes the blocks from the store that waits
        RELEASE,
        SETTLE,
        plan(store=None, hold=True),
        RESET,
        generate(C),  # 16
        model=smollm2,
        root=str(tmp_path / "root"),
        connector=HOOKED,
        engine=FEW,
        max_model_len=704,
    )
    steps = done["steps"]
    assert steps[2]["tokens"] == steps[11]["tokens"] == plain[1]["tokens"]
    assert (steps[6]["cached"], steps[16]["cached"]) == ([HIT], [HIT])
    assert steps[6]["tokens"] == plain[0]["tokens"]
    assert steps[6]["logprobs"][0] == pytest.approx(plain[0]["logprobs"][0], abs=1e-4)
    assert steps[16]["logprobs"][0] != pytest.approx(plain[2]["logprobs"][0], abs=1e-1)


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_a_store_that_vanishes_under_a_load(
    engine: Engine, smollm2: str, plain: Any, tmp_path: Path, load: str
) -> None:
    root = tmp_path / "root"
    again = [generate(A), SETTLE, RESET]
    steps = [*again]
    for action in ("remove", "rmtree", "rmtree-meanwhile", "wipe"):
        steps += [plan(load=action), *again, plan(load=None), *again]
    done = engine.run(
        *steps,
        model=smollm2,
        root=str(root),
        connector=HOOKED,
        settings={"load": load},
    )
    given = [s for s in done["steps"] if isinstance(s, dict) and "tokens" in s]
    assert len(given) == 9
    assert [s["tokens"] for s in given] == [plain[0]["tokens"]] * 9
    # It was gone when it was loaded; what the request computed was stored again.
    assert [s["cached"][0] for s in given[::2]][:4] == [0, HIT, HIT, HIT]
    assert done["metrics"]["vllm:kvstore_load_failed_blocks"] > 0
    # A store that is gone altogether is made again by the next engine.
    after = engine.run(*again, *again, model=smollm2, root=str(root))["steps"]
    assert [after[0]["tokens"], after[3]["tokens"]] == [plain[0]["tokens"]] * 2
    assert after[3]["cached"] == [HIT]
    assert faults(root) == []


@pytest.mark.parametrize("point", ["store.after_shard=kill@2", "commit.before_publish=kill@2"])
def test_killed_at_a_point(
    engine: Engine, smollm2: str, plain: Any, tmp_path: Path, point: str
) -> None:
    root = tmp_path / "root"
    process = engine.start(
        [generate(A), SETTLE], model=smollm2, root=str(root), env={"KVSTORE_FAILPOINTS": point}
    )
    try:
        assert process.wait(300) == KILLED
    finally:
        kill(process)
    assert faults(root) == []
    done = engine.run(generate(A), SETTLE, RESET, generate(A), model=smollm2, root=str(root))
    assert [done["steps"][i]["tokens"] for i in (0, 3)] == [plain[0]["tokens"]] * 2
    assert done["steps"][3]["cached"] == [HIT]
    assert faults(root) == []


@pytest.mark.parametrize("point", ["store.before_shard=error@2", "commit.before_publish=error@2"])
def test_a_medium_that_fails(
    engine: Engine, smollm2: str, plain: Any, tmp_path: Path, point: str
) -> None:
    root = tmp_path / "root"
    done = engine.run(
        generate(A), SETTLE, RESET, generate(A, B), SETTLE,
        model=smollm2, root=str(root), env={"KVSTORE_FAILPOINTS": point},
    )  # fmt: skip
    assert f"injected at failpoint {point.partition('=')[0]}" in done["log"]
    assert done["steps"][0]["tokens"] == plain[0]["tokens"]
    assert done["steps"][3]["tokens"] == plain[0]["tokens"] + plain[1]["tokens"]
    assert done["steps"][3]["cached"][0] < HIT
    assert faults(root) == []
