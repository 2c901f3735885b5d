"""KV cache events: what became visible in the store, in the engine's own block hashes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvstore.plugins.vllm.events import MEDIUM, Events

HASHES = [bytes([i]) * 32 for i in range(4)]
SHOWN = [maybe_convert_block_hash(h) for h in HASHES]
"""As the engine publishes them: by default as numbers."""


def events(*, on: bool = True) -> Events:
    made = Events(SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=on)))
    made.hash_tokens(32)
    return made


def request(**more: Any) -> Any:
    fields = {"block_hashes": HASHES, "all_token_ids": list(range(140)), "lora_request": None}
    return SimpleNamespace(**{**fields, **more})


def test_a_stored_range_names_its_blocks_and_their_parent() -> None:
    mine = events()
    mine.prepare(1, request(), 32, 128)
    assert mine.take() == []
    mine.publish(1, complete=True)
    (event,) = mine.take()
    assert event.block_hashes == SHOWN[1:4]
    assert event.parent_block_hash == SHOWN[0]
    assert event.token_ids == list(range(32, 128))
    assert (event.block_size, event.medium) == (32, MEDIUM)
    assert mine.take() == []


def test_only_whole_blocks_of_the_engine_are_named() -> None:
    mine = events()
    mine.prepare(1, request(), 16, 80)  # its first half block, and the last, are not whole
    mine.prepare(2, request(), 0, 16)
    mine.publish(1, complete=True)
    mine.publish(2, complete=True)
    (event,) = mine.take()
    assert event.block_hashes == [SHOWN[1]]


def test_nothing_is_said_of_what_is_not_there_or_not_asked_for() -> None:
    mine = events()
    mine.prepare(1, request(), 0, 128)
    mine.publish(1, complete=False)
    mine.publish(7, complete=True)
    assert mine.take() == []
    silent = events(on=False)
    silent.prepare(1, request(), 0, 128)
    silent.publish(1, complete=True)
    assert silent.take() == []
