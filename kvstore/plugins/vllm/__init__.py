"""vLLM: a connector for its KV transfer interface, and a tier for its offloading one.

Name them in the engine's own configuration; nothing of kvstore is imported by an engine that does
not, and nothing of the engine is imported before one of the names is asked for::

    --kv-transfer-config '{
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.plugins.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"root": "/nvme/kvstore"}
    }'

The tier is an entry of ``secondary_tiers`` of the engine's TieringOffloadingSpec::

    {"type": "KVStoreTier", "module_path": "kvstore.plugins.vllm", "root": "/nvme/kvstore"}
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.plugins.vllm.connector import KVStoreConnector
    from kvstore.plugins.vllm.tier import KVStoreTier

__all__ = ["KVStoreConnector", "KVStoreTier"]

_HOME = {"KVStoreConnector": "connector", "KVStoreTier": "tier"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
