"""Whatever happens to the store or the engine: output stays right, and nothing false is kept."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from harness import Engine, generate, kill, prompt

import kvstore

A, B = prompt(600), prompt(500, 7)
SETTLE, RESET = {"do": "settle"}, {"do": "reset"}
CORRUPT, REMOVE = {"do": "corrupt"}, {"do": "remove"}


def faults(root: str) -> list[Any]:
    """What a check of every stored byte finds."""
    with kvstore.open(root, read_only=True) as store:
        return [f for n in store.namespaces() for f in store.open_namespace(n).verify()]


def test_damaged_and_removed_extents_are_computed_again(
    engine: Engine, smollm2: str, tmp_path: Path
) -> None:
    root = str(tmp_path / "root")
    done = engine.run(
        generate(A, B),  # 0: computed, stored
        RESET,
        generate(A, B),  # 2: loaded
        RESET,
        CORRUPT,
        generate(A, B),  # 5: one extent is damaged
        RESET,
        generate(A, B),  # 7: it was stored again
        RESET,
        REMOVE,
        generate(A, B),  # 10: every other extent is gone
        RESET,
        generate(A, B),  # 12: and is there again
        SETTLE,
        model=smollm2,
        root=root,
    )
    steps = done["steps"]
    wanted = steps[0]["tokens"]
    every = 576 + 480
    got = {i: steps[i] for i in (0, 2, 5, 7, 10, 12)}
    assert {i: s["tokens"] == wanted for i, s in got.items()} == dict.fromkeys(got, True)
    hits = {i: sum(s["cached"]) for i, s in got.items()}
    assert (hits[0], hits[2], hits[7], hits[12]) == (0, every, every, every)
    assert hits[10] < every  # for the damaged one the engine counts what it was promised
    assert done["metrics"]["vllm:kvstore_load_failed_blocks"] > 0
    assert faults(root) == []
    assert list(Path(root).glob("__kvstore__/quarantine/*/*/*/reason.json"))


def test_layer_by_layer_and_what_was_generated(
    engine: Engine, smollm2: str, tmp_path: Path
) -> None:
    root = str(tmp_path / "root")
    settings = {"load": "layerwise", "save": "all"}
    first = generate(A, max_tokens=40)
    done = engine.run(
        first, RESET, first, RESET, CORRUPT, first, RESET, first, SETTLE,
        model=smollm2, root=root, settings=settings,
    )  # fmt: skip
    steps = done["steps"]
    assert steps[2]["cached"] == [576]
    assert [steps[i]["tokens"] for i in (2, 5, 7)] == [steps[0]["tokens"]] * 3
    assert done["metrics"]["vllm:kvstore_load_failed_blocks"] > 0
    assert faults(root) == []
    # The next turn of a conversation: the answer's own blocks are there too.
    turn = A + steps[0]["tokens"][0] + prompt(40, 9)
    after = engine.run(generate(turn), model=smollm2, root=root)
    assert after["steps"][0]["cached"] == [608]


def test_prefixes_salts_and_batches(engine: Engine, smollm2: str, tmp_path: Path) -> None:
    longer, other = A[:512] + prompt(200, 3), A[:256] + prompt(100, 4)
    done = engine.run(
        generate(A),
        RESET,
        generate(longer, other, B),  # 2: one batch, two of it with stored beginnings
        RESET,
        generate(A, salts=["tenant"]),  # 4: never meets what was stored without its salt
        RESET,
        generate(A, salts=["tenant"]),  # 6: but its own
        RESET,
        generate(longer, other, B, A),  # 8
        model=smollm2,
        root=str(tmp_path / "root"),
    )
    plain = engine.run(generate(A), generate(longer, other, B), model=smollm2)
    steps = done["steps"]
    assert steps[2]["cached"] == [512, 256, 0]
    assert (steps[4]["cached"], steps[6]["cached"]) == ([0], [576])
    assert sum(steps[8]["cached"]) >= 704 + 352 + 480 + 576 - 96
    assert steps[2]["tokens"] == plain["steps"][1]["tokens"] == steps[8]["tokens"][:3]
    for i in (0, 4, 6):
        assert steps[i]["tokens"] == plain["steps"][0]["tokens"]


def test_preemption_under_a_small_cache(engine: Engine, smollm2: str, tmp_path: Path) -> None:
    prompts = [prompt(120, seed) for seed in range(20, 26)]
    job = {"model": smollm2, "engine": {"num_gpu_blocks_override": 28}, "max_model_len": 512}
    step = generate(*prompts, max_tokens=45)
    plain = engine.run(step, **job)["steps"][0]["tokens"]
    root = str(tmp_path / "root")
    done = engine.run(step, SETTLE, step, SETTLE, **job, root=root)
    assert done["steps"][0]["tokens"] == plain
    assert done["steps"][2]["tokens"] == plain
    assert done["metrics"]["vllm:num_preemptions"] > 0
    assert faults(root) == []


def test_a_full_disk(engine: Engine, smollm2: str, tmp_path: Path) -> None:
    """A file system of 24 MiB: not all of a prompt fits, and the engine does not care."""
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        root = str(mount / "root")
        done = engine.run(generate(A), SETTLE, RESET, generate(A), SETTLE, model=smollm2, root=root)
        assert done["metrics"]["vllm:kvstore_store_failed"] > 0
        assert "No space left" in done["log"]
        assert done["steps"][3]["tokens"] == done["steps"][0]["tokens"]
        assert faults(root) == []
    finally:
        subprocess.run(["/bin/umount", str(mount)], check=True)


def test_killed_while_storing(engine: Engine, smollm2: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    settings = {"durable": True}  # slower, so that there is something to kill it in
    process = engine.start(
        [generate(A, B), {"do": "wait_for", "mark": str(tmp_path / "m"), "seconds": 60}],
        model=smollm2, root=str(root), settings=settings,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not list(root.glob("__kvstore__/inflight/*/*/*")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    kill(process)
    process.log.close()
    assert faults(str(root)) == []
    done = engine.run(generate(A, B), SETTLE, RESET, generate(A, B), model=smollm2, root=str(root))
    plain = engine.run(generate(A, B), model=smollm2)
    assert done["steps"][0]["tokens"] == plain["steps"][0]["tokens"]
    assert done["steps"][3]["tokens"] == plain["steps"][0]["tokens"]
    assert sum(done["steps"][3]["cached"]) == 576 + 480
    assert faults(str(root)) == []
