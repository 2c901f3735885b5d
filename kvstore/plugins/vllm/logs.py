"""The plugin's logger: one of the engine's, so that its lines come out among the engine's own."""

from __future__ import annotations

from vllm.logger import init_logger

log = init_logger("vllm.kvstore")
