"""Runs a vLLM engine in a process of its own: a job as JSON on standard input, outcome in a file.

A job is a model, an engine configuration and steps. Steps are done in order; each that generates
adds an entry to the outcome. Everything the tests know of the engine they learn from here.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1

CONNECTOR = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "kvstore.plugins.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def main() -> None:
    # Should the tests be killed, so is this.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    job = json.load(sys.stdin)
    from vllm import LLM

    config: dict[str, Any] | None = None
    if job.get("root"):
        extra = {"root": job["root"], **job.get("settings", {})}
        config = {**CONNECTOR, **job.get("connector", {}), "kv_connector_extra_config": extra}
    llm = LLM(
        model=job["model"],
        dtype=job.get("dtype", "float32"),
        tensor_parallel_size=job.get("tp", 1),
        max_model_len=job.get("max_model_len", 2048),
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=config,
        **{"block_size": 32, **job.get("engine", {})},
    )
    outcome: dict[str, Any] = {"steps": []}
    for step in job["steps"]:
        outcome["steps"].append(run_step(llm, job, step))
    outcome["metrics"] = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    llm.llm_engine.engine_core.shutdown()
    Path(job["outcome"]).write_text(json.dumps(outcome))


def run_step(llm: Any, job: dict[str, Any], step: dict[str, Any]) -> Any:
    """One step; what it returns goes into the outcome."""
    does: dict[str, Callable[[], Any]] = {
        "generate": lambda: generate(llm, step),
        "settle": lambda: settle(llm),
        "reset": lambda: settle(llm) and llm.reset_prefix_cache(),
        "corrupt": lambda: corrupt(Path(job["root"])),
        "remove": lambda: remove(job["root"]),
        "abort": lambda: abort(llm, step),
        "hook": lambda: hook(step),
        "wait_for": lambda: wait_for(step),
    }
    return does[step["do"]]()


def wait_for(step: dict[str, Any]) -> None:
    """Leave a mark for whoever watches; then sleep until killed."""
    Path(step["mark"]).touch()
    time.sleep(step["seconds"])


def hook(step: dict[str, Any]) -> list[tuple[str, float]]:
    """Change what the connector of ``hooked`` does from here on; returns what it did so far."""
    import hooked

    hooked.plan.update(step.get("plan", {}))
    if step.get("release"):
        hooked.released.set()
    return list(hooked.events)


def generate(llm: Any, step: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=step.get("max_tokens", 8),
        logprobs=1,
        prompt_logprobs=step.get("prompt_logprobs"),
        ignore_eos=True,
    )
    prompts = [{"prompt_token_ids": ids} for ids in step["prompts"]]
    for prompt, salt in zip(prompts, step.get("salts", []), strict=False):
        prompt["cache_salt"] = salt
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        "seconds": time.perf_counter() - started,
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "logprobs": [
            [next(iter(p.values())).logprob for p in o.outputs[0].logprobs] for o in outputs
        ],
        "prompt_logprobs": [
            [p[t].logprob for p, t in zip(o.prompt_logprobs or (), ids, strict=False) if p]
            for o, ids in zip(outputs, step["prompts"], strict=True)
        ],
        "first_token_s": [o.metrics.first_token_latency for o in outputs],
        "cached": [o.num_cached_tokens for o in outputs],
        "external": external_hits(llm),
    }


def abort(llm: Any, step: dict[str, Any]) -> float:
    """Give prompts to the engine, let it step a few times, and abort them.

    Returns the time at which they were aborted.
    """
    from vllm import SamplingParams

    engine, names = llm.llm_engine, []
    for ids in step["prompts"]:
        names.append(f"aborted-{uuid.uuid4()}")
        params = SamplingParams(temperature=0, max_tokens=step.get("max_tokens", 8))
        engine.add_request(names[-1], {"prompt_token_ids": ids}, params)
    for _ in range(step["steps"]):
        engine.step()
    time.sleep(step.get("sleep", 0))
    at = time.time()
    engine.abort_request(names)
    return at


def external_hits(llm: Any) -> int:
    """Tokens that the engine's own metric says came from the connector, since it started."""
    name = "vllm:external_prefix_cache_hits"
    return sum(int(m.value) for m in llm.get_metrics() if m.name == name)


def settle(llm: Any) -> bool:
    """Let the engine step until no store is under way and all that was written is committed."""
    from vllm import SamplingParams

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector
    if scheduler is None or not hasattr(scheduler, "has_pending_push_work"):
        return True
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        few = SamplingParams(temperature=0, max_tokens=2)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], few, use_tqdm=False)
        if not scheduler.has_pending_push_work():
            time.sleep(0.3)  # for commits
            return True
        time.sleep(0.1)
    return False


def corrupt(root: Path) -> str:
    """Flip a byte in the middle of the largest stored shard."""
    shards = [p for p in root.rglob("c.*") if "__kvstore__" not in p.parts]
    shard = max(shards, key=lambda p: p.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 0x10
    shard.write_bytes(data)
    return str(shard)


def remove(root: str) -> int:
    """Remove every other stored extent."""
    import kvstore

    with kvstore.open(root) as store:
        for name in store.namespaces():
            namespace = store.open_namespace(name)
            keys = [e.key for e in namespace.extents()]
            for key in keys[::2]:
                namespace.remove(key)
            return len(keys[::2])
    return 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
