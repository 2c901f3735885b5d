"""Ranged reads: what every engine does alike."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
from engines import EngineCase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import Corrupt, InvalidArgument, NotFound
from kvstore.io.protocol import ByteRange, Engine
from kvstore.native import Sink

KIB, MIB = 1 << 10, 1 << 20
SIZE = 3 * MIB + 4097


@cache
def content(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


class Collected:
    """A consumer that copies everything out and checks what it was promised about pieces."""

    def __init__(self, ranges: list[ByteRange]) -> None:
        self.ranges = ranges
        self.parts: dict[int, list[bytes]] = defaultdict(list)
        self.threads: dict[int, set[int]] = defaultdict(set)
        self.lengths: dict[int, list[int]] = defaultdict(list)

    def __call__(self, index: int, offset: int, data: memoryview) -> None:
        wanted = self.ranges[index]
        assert offset == sum(self.lengths[index]), "pieces out of order"
        assert data.contiguous
        assert data.itemsize == 1
        assert data.ndim == 1
        last = offset + len(data) == wanted.length
        if wanted.piece:
            assert last or len(data) % wanted.piece == 0
        else:
            assert len(data) == wanted.length
        self.lengths[index].append(len(data))
        self.threads[index].add(threading.get_ident())
        self.parts[index].append(bytes(data))

    def check(self, stored: dict[str, bytes]) -> None:
        for index, wanted in enumerate(self.ranges):
            expected = stored[wanted.path][wanted.offset : wanted.offset + wanted.length]
            assert b"".join(self.parts[index]) == expected
            assert len(self.threads[index]) <= 1


def read_back(engine: Engine, ranges: list[ByteRange], stored: dict[str, bytes]) -> Collected:
    collected = Collected(ranges)
    assert engine.read(ranges, collected) == [None] * len(ranges)
    collected.check(stored)
    return collected


@pytest.fixture
def stored(engine: Engine) -> dict[str, bytes]:
    objects = {f"a/{i}": content(SIZE, i) for i in range(3)}
    for path, data in objects.items():
        engine.write(path, [data])
    return objects


def test_no_ranges(engine: Engine):
    assert engine.read([], Collected([])) == []


def test_a_whole_object_comes_in_one_call(engine: Engine, stored: dict[str, bytes]):
    collected = read_back(engine, [ByteRange("a/0", 0, SIZE)], stored)
    assert len(collected.parts[0]) == 1


def test_pieces_are_whole_multiples(engine: Engine, stored: dict[str, bytes]):
    piece = 100_004
    collected = read_back(engine, [ByteRange(f"a/{i}", 0, SIZE, piece) for i in range(3)], stored)
    assert all(len(parts) > 1 or len(parts[0]) == SIZE for parts in collected.parts.values())


def test_a_piece_longer_than_the_range(engine: Engine, stored: dict[str, bytes]):
    read_back(engine, [ByteRange("a/1", 17, 100, 10 * SIZE)], stored)


def test_many_ranges_of_few_objects(engine: Engine, stored: dict[str, bytes]):
    step = 4099
    ranges = [
        ByteRange(f"a/{i}", at, min(step, SIZE - at))
        for i in range(3)
        for at in range(0, SIZE, step)
    ]
    assert len(ranges) > 2000
    read_back(engine, ranges, stored)
    read_back(engine, ranges[::-1], stored)


def test_many_small_objects(engine: Engine):
    objects = {f"s/{i:04d}": content(1 + i * 7, i) for i in range(500)}
    for path, data in objects.items():
        engine.write(path, [data])
    read_back(engine, [ByteRange(path, 0, len(data)) for path, data in objects.items()], objects)


def test_offsets_and_lengths_at_page_bounds(engine: Engine, stored: dict[str, bytes]):
    for offset in (0, 1, 511, 4095, 4096, 4097, SIZE - 4096, SIZE - 1):
        for length in (1, 2, 4095, 4096, 4097, 8192):
            read_back(engine, [ByteRange("a/2", offset, min(length, SIZE - offset))], stored)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_ranges(engine: Engine, stored: dict[str, bytes], data: st.DataObject):
    ranges = []
    for _ in range(data.draw(st.integers(1, 12))):
        offset = data.draw(st.integers(0, SIZE))
        length = data.draw(st.integers(0, SIZE - offset))
        piece = data.draw(st.one_of(st.just(0), st.integers(max(1, length // 50), SIZE)))
        ranges.append(ByteRange(f"a/{data.draw(st.integers(0, 2))}", offset, length, piece))
    read_back(engine, ranges, stored)


def test_a_range_of_no_bytes_asks_whether_the_object_is_there(
    engine: Engine, stored: dict[str, bytes]
):
    assert stored
    ranges = [ByteRange("a/0", 5, 0), ByteRange("absent", 0, 0), ByteRange("a/1", 0, 0, 4)]
    collected = Collected(ranges)
    results = engine.read(ranges, collected)
    assert results[0] is None
    assert isinstance(results[1], NotFound)
    assert results[2] is None
    assert not collected.parts


@pytest.mark.parametrize("padding", [1, 100 * KIB, 2 * MIB])
def test_one_failure_touches_no_other(engine: Engine, stored: dict[str, bytes], padding: int):
    ranges = [
        ByteRange("a/0", 0, padding),
        ByteRange("a/0", SIZE - 5, 6),  # one byte too many
        ByteRange("a/0", SIZE, 1),
        ByteRange("a/0", SIZE + MIB, MIB),  # far behind the end
        ByteRange("absent", 0, 10),
        ByteRange("a/1", 1, padding),
        ByteRange("a", 0, 10),  # a folder
        ByteRange("a/1", -1, 10),
        ByteRange("a/1", 0, -1),
        ByteRange("../up", 0, 10),
        ByteRange("a/2", 2, padding),
    ]
    kinds = [None, Corrupt, Corrupt, Corrupt, NotFound, None, NotFound, InvalidArgument]
    kinds += [InvalidArgument, InvalidArgument, None]
    collected = Collected(ranges)
    results = engine.read(ranges, collected)
    for index, (result, kind) in enumerate(zip(results, kinds, strict=True)):
        if kind is None:
            assert result is None
            wanted = ranges[index]
            expected = stored[wanted.path][wanted.offset : wanted.offset + wanted.length]
            assert b"".join(collected.parts[index]) == expected
        else:
            assert isinstance(result, Exception)
            assert isinstance(result, kind)
    assert "a/0" in str(results[1])
    assert "absent" in str(results[4])


def test_a_short_object_is_corrupt_also_in_pieces(engine: Engine, stored: dict[str, bytes]):
    assert stored
    ranges = [ByteRange("a/0", 0, SIZE + 1, 64 * KIB), ByteRange("a/1", 0, 2 * SIZE, 64 * KIB)]
    results = engine.read(ranges, lambda _i, _o, _data: None)
    assert [type(result) for result in results] == [Corrupt, Corrupt]


class OwnError(Exception):
    """Raised by a consumer."""


@pytest.mark.parametrize("error", [OwnError("no"), OSError(28, "no"), NotFound("no"), KeyError(1)])
def test_what_the_consumer_raises_is_the_result(
    engine: Engine, stored: dict[str, bytes], error: Exception
):
    ranges = [ByteRange(f"a/{i % 3}", 0, SIZE, 64 * KIB) for i in range(9)]
    collected = Collected(ranges)

    def consume(index: int, offset: int, data: memoryview) -> None:
        if index == 4 and offset + len(data) == SIZE:
            raise error
        collected(index, offset, data)

    results = engine.read(ranges, consume)
    assert [result is None for result in results] == [index != 4 for index in range(9)]
    assert results[4] is error
    assert sum(collected.lengths[4]) < SIZE
    assert b"".join(collected.parts[5]) == stored["a/2"]


def test_after_a_failure_no_more_of_that_range_is_handed_over(
    engine: Engine, stored: dict[str, bytes]
):
    assert stored
    calls: list[int] = []

    def consume(_index: int, offset: int, _data: memoryview) -> None:
        calls.append(offset)
        raise OwnError

    results = engine.read([ByteRange("a/0", 0, SIZE, 1000)], consume)
    assert isinstance(results[0], OwnError)
    assert calls == [0]


SINK = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
)


class Sinks:
    """Takes ranges through C functions, some of them only up to a point; the rest is consumed."""

    def __init__(self, ranges: list[ByteRange], most: int) -> None:
        self.memory = [np.zeros(max(wanted.length, 0), np.uint8) for wanted in ranges]
        self.sunk = [0] * len(ranges)
        self.consumed = [0] * len(ranges)
        self.most = most
        self.asked = 0

    def consume(self, index: int, offset: int, data: memoryview) -> None:
        assert offset == self.sunk[index] + self.consumed[index]
        self.memory[index][offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self.consumed[index] += len(data)

    def of(self, index: int) -> Sink | None:
        self.asked += 1
        if index % 3 == 2:
            return None

        def take(_context: int, data: int, offset: int, nbytes: int) -> int:
            assert offset == self.sunk[index]
            if offset + nbytes > self.most:
                return 1
            ctypes.memmove(self.memory[index].ctypes.data + offset, data, nbytes)
            self.sunk[index] += nbytes
            return 0

        function = SINK(take)
        return Sink(ctypes.cast(function, ctypes.c_void_p).value or 0, 0, function)


@pytest.mark.parametrize("most", [0, 500_000, SIZE])
@pytest.mark.parametrize("piece", [0, 100_000])
def test_an_engine_may_hand_bytes_to_a_c_function(
    engine: Engine, stored: dict[str, bytes], most: int, piece: int
):
    step = 1_000_003
    ranges = [
        ByteRange(f"a/{i}", at, min(step, SIZE - at), piece)
        for i in range(3)
        for at in range(0, SIZE, step)
    ]
    sinks = Sinks(ranges, most)
    assert engine.read(ranges, sinks.consume, sinks.of) == [None] * len(ranges)
    for wanted, memory in zip(ranges, sinks.memory, strict=True):
        whole = stored[wanted.path][wanted.offset : wanted.offset + wanted.length]
        assert memory.tobytes() == whole
    # Not every engine asks, but what it asks for it uses; what a sink does not take is consumed.
    if sinks.asked and most == SIZE:
        assert any(sinks.sunk)
    for index, wanted in enumerate(ranges):
        assert sinks.sunk[index] + sinks.consumed[index] == wanted.length
        assert sinks.sunk[index] <= (0 if index % 3 == 2 else most)


def test_what_goes_wrong_on_the_way_to_a_sink_is_the_result(
    engine: Engine, stored: dict[str, bytes]
):
    assert stored
    ranges = [ByteRange("a/0", 0, MIB, 1000), ByteRange("a/0", 0, SIZE + 1, 1000)]
    error = OwnError("no")
    sinks = Sinks(ranges, SIZE + 1)

    def sink_of(index: int) -> Sink | None:
        if index == 0:
            sinks.asked += 1
            raise error
        return sinks.of(index)

    results = engine.read(ranges, sinks.consume, sink_of)
    assert isinstance(results[1], Corrupt)
    if sinks.asked:
        assert results[0] is error


def test_reads_larger_than_the_staging_memory(case: EngineCase, location: str):
    engine = case.open(location, max_staging_bytes=MIB)
    stored = {"big": content(5 * MIB + 3), "more": content(MIB, 1)}
    for path, data in stored.items():
        engine.write(path, [data])
    ranges = [ByteRange("big", at, 5 * MIB + 3 - at, 1000) for at in (0, 1, 4096, 5 * MIB)]
    ranges += [ByteRange("more", 0, MIB // 2), ByteRange("more", 8192, MIB // 2)]
    read_back(engine, ranges, stored)
    # In one piece too: then nothing else is read meanwhile.
    ranges.insert(1, ByteRange("big", 0, 3 * MIB))
    ranges.insert(3, ByteRange("big", 0, 5 * MIB, 2 * MIB))
    read_back(engine, ranges, stored)
    read_back(engine, [ByteRange("big", 1, 3 * MIB)], stored)
    engine.close()


def test_several_callers_at_once(engine: Engine, stored: dict[str, bytes]):
    failures: list[BaseException] = []

    def call(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(5):
                ranges = [
                    ByteRange(f"a/{rng.integers(3)}", int(at), 200_000, int(rng.integers(2)) * 4096)
                    for at in rng.integers(0, SIZE - 200_000, 20)
                ]
                read_back(engine, ranges, stored)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("count", [1, 8])
def test_a_consumer_that_reads_is_refused_instead_of_waiting_for_ever(
    engine: Engine, stored: dict[str, bytes], count: int
):
    seen: list[bytes] = []

    def consume(_index: int, _offset: int, _data: memoryview) -> None:
        seen.append(engine.get("a/1", SIZE)[:10])
        engine.read([ByteRange("a/1", 0, MIB)] * 8, lambda _i, _o, _data: None)

    results = engine.read([ByteRange("a/0", 0, MIB)] * count, consume)
    assert [type(result) for result in results] == [InvalidArgument] * count
    assert seen == [stored["a/1"][:10]] * count
    assert engine.read([ByteRange("a/0", 0, MIB)] * 8, lambda _i, _o, _data: None) == [None] * 8
