"""Tests on the real engine: collected by the engine's own Python, see ``tools/test``."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from harness import Engine


@pytest.fixture(autouse=True)
def no_hash_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine keeps the root of its block hashes in a global: each test finds none."""
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delattr(kv_cache_utils, "NONE_HASH", raising=False)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """A real model: SmolLM2-135M, 30 layers, 3 KV heads."""
    folder = os.environ.get("KVSTORE_SMOLLM2")
    if not folder:
        pytest.fail("KVSTORE_SMOLLM2 names no checkpoint; run these tests through tools/test")
    return folder
