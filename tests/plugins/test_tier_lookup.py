"""Lookups of the tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.errors import StorageError
from kvstore.plugins.vllm.tier_lookup import Lookups


@pytest.fixture
def make() -> Iterator[Callable[..., Lookups]]:
    made: list[Lookups] = []

    def call(stored: Callable[[bytes], bool]) -> Lookups:
        made.append(Lookups(stored))
        return made[-1]

    yield call
    for lookups in made:
        lookups.close()


def answer(lookups: Lookups, key: bytes, request: str) -> bool:
    deadline = time.monotonic() + 10
    while (found := lookups.ask(key, request)) is None:
        lookups.send()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def test_answers_come_later_and_are_asked_for_once(make: Callable[..., Lookups]) -> None:
    asked: list[bytes] = []

    def stored(key: bytes) -> bool:
        asked.append(key)
        return key == b"a"

    lookups = make(stored)
    assert lookups.ask(b"a", "r") is None
    assert answer(lookups, b"a", "r") is True
    assert answer(lookups, b"b", "r") is False
    assert answer(lookups, b"a", "other") is True
    assert asked == [b"a", b"b"]


def test_an_answer_goes_with_the_last_request_that_asked(make: Callable[..., Lookups]) -> None:
    lookups = make(lambda _key: True)
    answer(lookups, b"a", "r")
    answer(lookups, b"a", "s")
    lookups.finished("r")
    assert lookups.ask(b"a", "s") is True
    lookups.finished("s")
    lookups.finished("s")
    assert len(lookups) == 0
    assert lookups.ask(b"a", "t") is None


def test_what_is_forced_to_a_miss_stays_one(make: Callable[..., Lookups]) -> None:
    go, started = threading.Event(), threading.Event()

    def stored(_key: bytes) -> bool:
        started.set()
        return go.wait(10)

    lookups = make(stored)
    lookups.ask(b"a", "r")
    lookups.send()
    assert started.wait(10)
    lookups.miss([b"a", b"unknown"])
    go.set()
    assert answer(lookups, b"b", "r") is True  # so the first one has been answered, too late
    assert lookups.ask(b"a", "r") is False
    lookups.finished("r")
    assert answer(lookups, b"a", "s") is True


def test_an_error_is_a_miss(make: Callable[..., Lookups]) -> None:
    def stored(_key: bytes) -> bool:
        raise StorageError(5, "EIO")

    assert answer(make(stored), b"a", "r") is False


def test_what_nobody_waits_for_is_not_looked_up(make: Callable[..., Lookups]) -> None:
    asked: list[bytes] = []
    lookups = make(lambda key: bool(asked.append(key)))
    lookups.ask(b"a", "r")
    lookups.finished("r")
    lookups.send()
    assert answer(lookups, b"b", "s") is False
    assert asked == [b"b"]
