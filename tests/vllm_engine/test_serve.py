"""The server as people start it: killed and started again, it goes on from the store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_job import CONNECTOR
from harness import kill, prompt

import kvstore

TEXT = " ".join(f"Line {n} says that {n} is {'odd' if n % 2 else 'even'}." for n in range(60))
HITS = re.compile(r"^vllm:external_prefix_cache_hits_total\{.*\} ([0-9.e+]+)$", re.MULTILINE)


class Server:
    """One vLLM server, with the connector."""

    def __init__(self, model: str, root: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        transfer = {**CONNECTOR, "kv_connector_extra_config": {"root": str(root)}}
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [
                    # What `vllm serve` runs; the command itself is not there in a CPU wheel.
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
                    *("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]),
                    *("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"),
                    *("--served-model-name", "model", "--kv-transfer-config", json.dumps(transfer)),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "HF_HUB_OFFLINE": "1",
                    "OMP_WAIT_POLICY": "passive",
                },
                start_new_session=True,
            )

    def get(self, path: str, body: Any = None) -> str:
        """What the server answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 - this test's own server
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - same
            text: str = answer.read().decode()
        return text

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            time.sleep(0.3)
        raise AssertionError(f"the server does not answer:\n{self.log.read_text()[-8000:]}")

    def complete(self, text: str | list[int]) -> str:
        """The model's greedy completion."""
        body = {"model": "model", "prompt": text, "max_tokens": 12, "temperature": 0}
        choice: str = json.loads(self.get("/v1/completions", body))["choices"][0]["text"]
        return choice

    def hits(self) -> float:
        """Tokens that the engine says came from the store."""
        return sum(float(n) for n in HITS.findall(self.get("/metrics")))


@contextlib.contextmanager
def serving(model: str, root: Path, log: Path) -> Iterator[Server]:
    server = Server(model, root, log)
    try:
        server.wait()
        yield server
    finally:
        kill(server.process)


def wait_for_tokens(root: Path, tokens: int) -> None:
    """Wait until the store holds so many tokens."""
    deadline = time.monotonic() + 60
    stored = 0
    while time.monotonic() < deadline:
        with kvstore.open(str(root), read_only=True) as store:
            namespaces = [store.open_namespace(name) for name in store.namespaces()]
            stored = sum(
                len(ns.record(e.key).blocks) * 16 for ns in namespaces for e in ns.extents()
            )
        if stored >= tokens:
            return
        time.sleep(0.1)
    raise AssertionError(f"the store holds {stored} tokens, and not {tokens}")


def test_a_server_goes_on_after_a_kill(smollm2: str, tmp_path: Path) -> None:
    root, ids = tmp_path / "root", prompt(600)
    with serving(smollm2, root, tmp_path / "first.log") as server:
        text, answer = server.complete(TEXT), server.complete(ids)
        assert server.hits() == 0
        wait_for_tokens(root, 592 + 600)
    # Killed. The next one is stopped as an operator would, with what it stores last still stored.
    with serving(smollm2, root, tmp_path / "second.log") as server:
        assert server.complete(TEXT) == text
        first = server.hits()
        assert first > 500
        assert server.complete(ids) == answer
        assert server.hits() - first >= 512
        metrics = server.get("/metrics")
        assert "vllm:kvstore_load_bytes" in metrics
        server.complete(prompt(300, 5))
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
    wait_for_tokens(root, 592 + 600 + 288)
    with kvstore.open(str(root), read_only=True) as store:
        (name,) = store.namespaces()
        assert list(store.open_namespace(name).verify()) == []
