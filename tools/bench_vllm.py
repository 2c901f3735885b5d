"""Time to the first token of a long prompt on a real vLLM engine, by where its prefix cache is.

    tools/bench_vllm [--dtype float32] [--tokens 1500] [--json]           sets up and runs SmolLM2
    .venv-vllm/bin/python tools/bench_vllm.py CHECKPOINT [...]            another model

Rows: computed (nothing cached); the engine's own prefix cache; the store with its files in the page
cache; the store with them on the disk only; and the engine's own CPU offload, where the platform
has it. Each engine runs in a process of its own; medians of several rounds within it. A row counts
only if the engine says, request by request, that what it stands for was found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STORE = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "kvstore.plugins.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
OFFLOAD = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
}
BLOCK = 32
"""Tokens of one of the engine's blocks."""


def prompt(tokens: int, seed: int) -> list[int]:
    """Token ids that no other seed shares a block with."""
    return [(i * 7919 + seed * 104729) % 40000 + 100 for i in range(tokens)]


def engine(arguments: argparse.Namespace, mode: str, root: str) -> dict[str, list[float]]:
    """Measure in this process: row -> seconds of each round."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", PYTHONPATH=str(Path(__file__).parents[1])
    )
    from vllm import LLM, SamplingParams

    connectors: dict[str, Any] = {
        "engine": None,
        "store": {**STORE, "kv_connector_extra_config": {"root": root}},
        "offload": OFFLOAD,
    }
    llm = LLM(
        model=arguments.checkpoint,
        dtype=arguments.dtype,
        max_model_len=arguments.tokens + 64,
        block_size=BLOCK,
        enforce_eager=True,
        kv_transfer_config=connectors[mode],
        disable_log_stats=False,
    )

    def first_token(seed: int, *, hit: bool) -> float:
        ids = prompt(arguments.tokens, seed)
        params = SamplingParams(max_tokens=1, temperature=0)
        before = from_connector(llm)
        started = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        wanted = (arguments.tokens - 1) // BLOCK * BLOCK if hit else 0
        loaded = from_connector(llm) - before
        if (output.num_cached_tokens, loaded) != (wanted, 0 if mode == "engine" else wanted):
            raise RuntimeError(
                f"Error: {output.num_cached_tokens} tokens hit, {loaded} of the connector's, "
                f"and not {wanted}"
            )
        return seconds

    def cool() -> None:
        """Let stores end, and empty the engine's own cache."""
        for _ in range(100):
            llm.generate(
                [{"prompt_token_ids": [1, 2]}], SamplingParams(max_tokens=2), use_tqdm=False
            )
            if llm.reset_prefix_cache():
                time.sleep(0.5)  # for what is published after the last block was read
                return
            time.sleep(0.1)

    out: dict[str, list[float]] = {}
    first_token(99, hit=False)  # the engine's own warming up
    if mode != "engine":
        first_token(0, hit=False)
    for seed in range(arguments.rounds):
        if mode == "engine":
            out.setdefault("computed", []).append(first_token(seed, hit=False))
            out.setdefault("engine's prefix cache", []).append(first_token(seed, hit=True))
            continue
        row = "store, page cache" if mode == "store" else "engine's CPU offload"
        cool()
        out.setdefault(row, []).append(first_token(0, hit=True))
        if mode == "store":
            cool()
            forget(Path(root))
            out.setdefault("store, disk", []).append(first_token(0, hit=True))
    llm.llm_engine.engine_core.shutdown()
    return out


def from_connector(llm: Any) -> int:
    """Tokens that came from a connector so far, by the engine's own count."""
    name = "vllm:external_prefix_cache_hits"
    return sum(int(m.value) for m in llm.get_metrics() if m.name == name)


def forget(root: Path) -> None:
    """Have the kernel drop the store's files from the page cache."""
    for file in root.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    """Measure every row, each engine in a child."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", help="folder for the store; default a temporary one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mode", choices=["engine", "store", "offload"], help=argparse.SUPPRESS)
    parser.add_argument("--outcome", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mode:
        found = engine(arguments, arguments.mode, arguments.root)
        Path(arguments.outcome).write_text(json.dumps(found))
        return
    rows: dict[str, list[float]] = {}
    notes: list[str] = []
    with tempfile.TemporaryDirectory(dir=arguments.root) as folder:
        for mode in ("engine", "store", "offload"):
            outcome = Path(folder) / f"{mode}.json"
            more = ["--mode", mode, "--outcome", str(outcome), "--root", f"{folder}/store"]
            child = subprocess.run(  # noqa: S603 - this very file
                [sys.executable, __file__, *sys.argv[1:], *more],
                capture_output=True,
                text=True,
                check=False,
            )
            if outcome.exists():
                rows.update(json.loads(outcome.read_text()))
            else:
                said = [x for x in (child.stdout + child.stderr).splitlines() if "rror" in x]
                notes.append(f"{mode}: does not run here: {said[-1].strip() if said else '?'}")
    report(arguments, rows, notes)


def report(arguments: argparse.Namespace, rows: dict[str, list[float]], notes: list[str]) -> None:
    """Print the table, or JSON."""
    medians = {name: statistics.median(seconds) for name, seconds in rows.items()}
    if arguments.json:
        print(json.dumps({"medians": medians, "rounds": rows, "notes": notes}, indent=1))
        return
    print(f"first token of {arguments.tokens} tokens, {arguments.dtype}, {arguments.rounds} rounds")
    base = medians.get("computed")
    for name, seconds in medians.items():
        ratio = f"{base / seconds:6.1f} x" if base else ""
        print(f"  {name:24}{seconds * 1000:9.0f} ms {ratio}")
    for note in notes:
        print(f"  {note}")


if __name__ == "__main__":
    main()
