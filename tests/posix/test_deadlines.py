"""Reads that do not finish in time, and memory that belongs to the caller."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.reads import (
    MIB,
    Open,
    nothing,
)

from kvstore.errors import StorageError
from kvstore.io import workers
from kvstore.io.protocol import ByteRange
from kvstore.io.pump import pump


class Medium:
    """Hangs when reading at chosen offsets until let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hanging: set[int] = set()
        self.let_go = threading.Event()
        real = os.preadv

        def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset in self.hanging:
                self.let_go.wait(30)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)


def test_a_stuck_read_does_not_hold_the_caller(opened: Open, file: Path, monkeypatch: Any):
    assert file.exists()
    engine = opened(deadline=0.3, threads=2)
    medium = Medium(monkeypatch)
    medium.hanging = {5 * MIB}
    handed: list[int] = []
    ranges = [ByteRange("file", at * MIB, MIB) for at in range(20)]
    started = time.monotonic()
    results = engine.read(ranges, lambda i, _o, _d: handed.append(i))
    assert 0.3 <= time.monotonic() - started < 5
    assert [i for i, result in enumerate(results) if result is not None] == [5]
    assert isinstance(results[5], StorageError)
    assert "0.3 s" in str(results[5])
    # The engine goes on, with a thread in place of the stuck one.
    medium.hanging = set()
    for _ in range(3):
        assert engine.read(ranges, nothing) == [None] * 20
    # What comes late is handed to nobody.
    assert 5 not in handed
    stuck = list(engine._workers._stuck)
    assert len(stuck) == 1
    medium.let_go.set()
    stuck[0].join(10)
    assert not stuck[0].is_alive()
    assert 5 not in handed
    assert results[5] is not None


def test_one_small_range_has_the_deadline_too(opened: Open, file: Path, monkeypatch: Any):
    assert file.exists()
    engine = opened(deadline=0.2)
    medium = Medium(monkeypatch)
    medium.hanging = {0}
    (result,) = engine.read([ByteRange("file", 0, 10)], nothing)
    assert isinstance(result, StorageError)
    medium.let_go.set()


def test_the_caller_waits_for_a_consumer_in_the_middle(opened: Open, file: Path):
    """The target's memory must not change once ``read`` has returned."""
    assert file.exists()
    engine = opened(deadline=0.1)
    log: list[str] = []

    def consume(_index: int, _offset: int, _data: memoryview) -> None:
        log.append("in")
        time.sleep(0.4)
        log.append("out")

    (result,) = engine.read([ByteRange("file", 0, 10 * MIB, MIB)], consume)
    log.append("returned")
    time.sleep(0.6)
    assert isinstance(result, StorageError)
    assert log == ["in", "out", "returned"]


def test_a_caller_that_is_interrupted_takes_its_memory_back(
    opened: Open, file: Path, monkeypatch: Any
):
    assert file.exists()
    engine = opened()
    handed: list[int] = []

    class Interrupt(BaseException):
        pass

    def wait(self: workers.Batch, _timeout: float | None) -> bool:
        assert self
        raise Interrupt

    def consume(index: int, _offset: int, _data: memoryview) -> None:
        time.sleep(0.05)
        handed.append(index)

    with monkeypatch.context() as patch:
        patch.setattr(workers.Batch, "wait", wait)
        with pytest.raises(Interrupt):
            engine.read([ByteRange("file", at * MIB, MIB) for at in range(20)], consume)
    count = len(handed)
    time.sleep(0.3)
    assert len(handed) == count < 20


def test_threads_are_not_lost_without_end(opened: Open, file: Path, monkeypatch: Any):
    assert file.exists()
    monkeypatch.setattr(workers, "_MOST_STUCK", 3)
    engine = opened(deadline=0.05, threads=2)
    medium = Medium(monkeypatch)
    medium.hanging = {at * MIB for at in range(20)}
    ranges = [ByteRange("file", at * MIB, MIB) for at in range(2)]
    for _ in range(100):  # a slow machine may take more rounds to have them all stuck
        if len(engine._workers._stuck) > 3:
            break
        assert all(isinstance(r, StorageError) for r in engine.read(ranges, nothing))
    with pytest.raises(StorageError, match="hang in the medium"):
        engine.read(ranges, nothing)
    medium.let_go.set()
    for thread in engine._workers._stuck:
        thread.join(10)
    medium.hanging = set()
    assert engine.read(ranges, nothing) == [None] * 2


def test_with_a_deadline_no_bytes_go_to_a_c_function(opened: Open, file: Path):
    """A read that hangs while the gate is held could not be given up."""
    file.read_bytes()
    engine = opened(deadline=5, direct="never")
    asked: list[int] = []
    assert engine.read([ByteRange("file", 0, MIB)], nothing, asked.append) == [None]
    assert not asked
    engine = opened(direct="never")
    assert engine.read([ByteRange("file", 0, MIB)], nothing, asked.append) == [None]
    assert asked == [0] * (pump() is not None)
