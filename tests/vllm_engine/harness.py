"""Engines in processes of their own, and what the tests ask of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Engine:
    """Runs jobs, one engine after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, steps: list[dict[str, Any]], **job: Any) -> subprocess.Popen[str]:
        """Start an engine on some steps, in a process group of its own."""
        name = uuid.uuid4().hex[:8]
        outcome = self.folder / f"{name}.json"
        tp = job.get("tp", 1)
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(i % 2) for i in range(tp))
            if tp > 1
            else os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto"),
            # Threads that spin while they wait make a busy machine several times slower.
            "OMP_WAIT_POLICY": "passive",
            **job.pop("env", {}),
        }
        log = (self.folder / f"{name}.log").open("w+")
        process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_job.py")],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            start_new_session=True,
        )
        assert process.stdin is not None
        json.dump({**job, "steps": steps, "outcome": str(outcome)}, process.stdin)
        process.stdin.close()
        process.outcome, process.log = outcome, log  # type: ignore[attr-defined]
        return process

    def wait(self, process: Any, seconds: float = 600) -> dict[str, Any]:
        """The outcome of an engine that was started; its log where it has none."""
        try:
            process.wait(seconds)
        finally:
            kill(process)
        process.log.seek(0)
        log = process.log.read()
        process.log.close()
        if not process.outcome.exists():
            raise AssertionError(f"the engine ended with {process.returncode}:\n{log[-8000:]}")
        outcome: dict[str, Any] = json.loads(process.outcome.read_text())
        outcome["log"] = log
        return outcome

    def run(self, *steps: dict[str, Any], **job: Any) -> dict[str, Any]:
        """Run an engine to its end."""
        return self.wait(self.start(list(steps), **job))


def kill(process: subprocess.Popen[str]) -> None:
    """Kill an engine with all of its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def prompt(tokens: int, seed: int = 0, vocabulary: int = 40000) -> list[int]:
    """Token ids, the same for the same seed: the beginnings of longer prompts are shorter ones."""
    return [(i * 7919 + seed * 104729) % (vocabulary - 200) + 100 for i in range(tokens)]


def generate(*prompts: list[int], **options: Any) -> dict[str, Any]:
    """A step that generates."""
    return {"do": "generate", "prompts": list(prompts), **options}
