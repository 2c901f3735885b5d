"""Lookups of requests' prefixes, off the scheduler's thread.

A lookup hashes the prompt and asks the file system, which may be a slow one. It starts when a
request arrives; by the time that the scheduler asks, it is mostly done.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.keys import BlockKeys
from kvstore.namespace import Namespace
from kvstore.plugins.vllm.keys import request_keys
from kvstore.plugins.vllm.logs import log

THREADS = 2


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is stored of a request.

    Attributes:
        keys: of all full blocks of its prompt.
        tokens: leading tokens that every layer group can serve.
    """

    keys: BlockKeys
    tokens: int


class Prefixes:
    """Lookups under way and done, by request.

    Args:
        namespace: gives the open namespace; None until it is open.
        salt: of the namespace.
    """

    def __init__(self, namespace: Callable[[], Namespace | None], salt: str) -> None:
        self._namespace = namespace
        self._salt = salt
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstore-lookup")
        self._found: dict[str, Future[Prefix | None]] = {}

    def start(self, request: Any) -> Future[Prefix | None] | None:
        """Start the lookup of a request, once."""
        known = self._found.get(request.request_id)
        if known is not None:
            return known
        namespace = self._namespace()
        if namespace is None:
            return None
        future = self._pool.submit(self._look, namespace, request, int(request.num_prompt_tokens))
        self._found[request.request_id] = future
        return future

    def get(self, request: Any, wait_s: float) -> tuple[bool, Prefix | None]:
        """Whether the lookup is done, and what it found: None when there is nothing to use."""
        future = self.start(request)
        if future is None:
            return True, None
        try:
            return True, future.result(wait_s)
        except FutureTimeout:
            return False, None

    def forget(self, request_id: str) -> None:
        """Drop a request's."""
        future = self._found.pop(request_id, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _look(self, namespace: Namespace, request: Any, tokens: int) -> Prefix | None:
        try:
            size = namespace.groups[0].block_tokens
            root = namespace.identity.key_scheme.root
            keys = request_keys(request, tokens, size, root, self._salt)
            return Prefix(keys, servable(namespace, keys))
        except KVStoreError as error:
            log.warning("request %s is not looked up or stored: %s", request.request_id, error)
        except Exception:  # noqa: BLE001 - whatever it is, the engine goes on without it
            log.exception("request %s is not looked up or stored", request.request_id)
        return None


def servable(namespace: Namespace, keys: BlockKeys) -> int:
    """Leading tokens of a sequence that every layer group can serve.

    A group whose layers see all tokens must have all of them stored; one with a window only those
    that the next token still sees.
    """
    if not len(keys):
        return 0
    size = namespace.groups[0].block_tokens
    blocks = len(keys)
    settled = False
    while blocks and not settled:
        settled = True
        for group in namespace.groups:
            seen = blocks if group.window is None else min(blocks, -(-group.window // size))
            first = blocks - seen
            found = first + namespace.match_prefix(keys[first:blocks], group=group.name).blocks
            if found < blocks:
                # Short of where it should end: so much is left to try, with its own window.
                blocks = found if group.window is None or found > first else first
                settled = False
                break
    return blocks * size
