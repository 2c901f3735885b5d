"""The plugin's logger: one of the engine's, so that its lines come out among the engine's own."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from vllm.logger import init_logger


class _Named(logging.LoggerAdapter[logging.Logger]):
    """Says whose lines they are: the engine's format shows a file's name and no logger's."""

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        return f"kvstore: {msg}", kwargs


log = _Named(init_logger("vllm.kvstore"), {})
