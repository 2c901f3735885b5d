from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument, StorageError
from kvstore.io.staging import Staging, rounded

KIB, MIB = 1 << 10, 1 << 20


def address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


@given(st.integers(0, 1 << 40))
def test_sizes_are_few_and_waste_little(nbytes: int):
    size = rounded(nbytes)
    assert size >= nbytes
    assert size % 4096 == 0
    assert size == 64 * KIB or size < 1.5 * nbytes
    assert rounded(size) == size


def test_buffers_are_page_aligned_and_long_enough():
    staging = Staging(MIB)
    for nbytes in (1, 4096, 65537, 300_000):
        buffer = staging.acquire(nbytes)
        assert len(buffer) >= nbytes
        assert address(buffer) % 4096 == 0
        staging.release(buffer)
    staging.close()


def test_a_released_buffer_is_used_again():
    staging = Staging(MIB)
    first = staging.acquire(200_000)
    first[:5] = b"hello"
    staging.release(first)
    again = staging.acquire(190_000)
    assert again is first
    assert staging.allocated_bytes == len(first)


def test_two_in_use_are_two():
    staging = Staging(MIB)
    one, two = staging.acquire(100), staging.acquire(100)
    one[:1], two[:1] = b"1", b"2"
    assert one[0] != two[0]


def test_releasing_keeps_the_others_apart():
    """Buffers are told apart by identity: equal bytes do not make them one."""
    staging = Staging(MIB)
    buffers = [staging.acquire(100) for _ in range(4)]
    for buffer in buffers:
        staging.release(buffer)
    again = [staging.acquire(100) for _ in range(4)]
    assert len({address(buffer) for buffer in again}) == 4
    assert staging.allocated_bytes == 4 * 64 * KIB


def test_no_more_than_the_bound_exists():
    staging = Staging(256 * KIB)
    small = [staging.acquire(64 * KIB) for _ in range(4)]
    with pytest.raises(StorageError, match="staging"):
        staging.acquire(1, timeout=0.01)
    for buffer in small:
        staging.release(buffer)
    # The free small ones make room for a large one.
    large = staging.acquire(256 * KIB)
    assert len(large) == 256 * KIB
    assert staging.allocated_bytes == 256 * KIB


@pytest.mark.parametrize("nbytes", [256 * KIB + 1, MIB])
def test_more_than_the_bound_is_had_alone(nbytes: int):
    staging = Staging(256 * KIB)
    staging.release(staging.acquire(1))
    small = staging.acquire(1)
    with pytest.raises(StorageError, match="staging"):
        staging.acquire(nbytes, timeout=0.01)
    staging.release(small)
    large = staging.acquire(nbytes)
    assert nbytes <= len(large) < nbytes + mmap.PAGESIZE
    assert staging.allocated_bytes == len(large)
    with pytest.raises(StorageError, match="staging"):
        staging.acquire(1, timeout=0.01)
    staging.release(large)
    # It is not kept: the bound holds again.
    assert staging.allocated_bytes == 0
    assert len(staging.acquire(1)) == 64 * KIB


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_more_than_there_is_memory(nbytes: int):
    staging = Staging(256 * KIB)
    with pytest.raises(StorageError, match=r"no memory for a piece of .* smaller shard_layers"):
        staging.acquire(nbytes)
    assert len(staging.acquire(1)) == 64 * KIB


def test_large_and_small_requests_take_turns():
    staging = Staging(256 * KIB)
    worst: list[int] = []

    def use(nbytes: int) -> None:
        for _ in range(50):
            buffer = staging.acquire(nbytes, timeout=30)
            worst.append(staging.allocated_bytes)
            staging.release(buffer)

    sizes = [300_000, 100, 400_000, 200_000]
    threads = [threading.Thread(target=use, args=(nbytes,)) for nbytes in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(worst) == 200
    assert max(worst) <= 400_000 + mmap.PAGESIZE


def test_a_bound_that_is_no_round_size_can_be_used_up():
    staging = Staging(200_000)
    assert len(staging.acquire(200_000)) == 200_000


def test_a_bound_below_one_buffer_is_refused():
    with pytest.raises(InvalidArgument, match="65536"):
        Staging(1000)


def test_who_asks_first_is_served_first():
    staging = Staging(256 * KIB)
    held = [staging.acquire(64 * KIB) for _ in range(4)]
    order: list[str] = []

    def ask(name: str, nbytes: int) -> None:
        buffer = staging.acquire(nbytes)
        order.append(name)
        staging.release(buffer)

    def waiting(count: int) -> None:
        until = time.monotonic() + 10
        while len(staging._queue) < count and time.monotonic() < until:
            time.sleep(0.001)

    large = threading.Thread(target=ask, args=("large", 256 * KIB))
    large.start()
    waiting(1)
    small = threading.Thread(target=ask, args=("small", 1))
    small.start()
    waiting(2)
    for buffer in held:
        staging.release(buffer)
    large.join(10)
    small.join(10)
    assert order == ["large", "small"]


def test_many_threads_stay_within_the_bound():
    staging = Staging(512 * KIB)
    worst: list[int] = []
    clashes: list[int] = []

    def use(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            buffer = staging.acquire(int(rng.integers(1, 400_000)), timeout=30)
            buffer[:1] = bytes([seed])
            worst.append(staging.allocated_bytes)
            if buffer[0] != seed:
                clashes.append(seed)
            staging.release(buffer)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(worst) == 600
    assert max(worst) <= 512 * KIB
    assert clashes == []


def test_large_buffers_ask_for_huge_pages():
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("no huge pages here")
    staging = Staging(16 * MIB)

    def asked(buffer: memoryview) -> bool:
        start = f"{address(buffer):x}-"
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        assert any(line.startswith(start) for line in lines)
        return " hg" in next(line for line in lines if line.startswith("VmFlags:"))

    assert asked(staging.acquire(2 * MIB))
    assert asked(staging.acquire(8 * MIB))


@pytest.mark.parametrize(("users", "smallest"), [(1, 2 * MIB), (4, 2 * MIB), (5, 64 * KIB)])
def test_buffers_are_huge_pages_when_all_can_have_one(users: int, smallest: int):
    staging = Staging(8 * MIB, users)
    assert [len(staging.acquire(1)) for _ in range(users)] == [smallest] * users


def test_close_frees_what_nobody_uses():
    staging = Staging(MIB)
    buffer = staging.acquire(100)
    staging.release(buffer)
    memory = buffer.obj
    staging.close()
    assert isinstance(memory, mmap.mmap)
    assert memory.closed
    assert staging.allocated_bytes == 0


def test_close_survives_a_consumer_that_kept_a_view():
    staging = Staging(MIB)
    buffer = staging.acquire(100)
    kept = np.frombuffer(buffer, np.uint8)
    staging.release(buffer)
    staging.close()
    assert kept[0] == 0
    assert staging.allocated_bytes == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_write_into_its_parent():
    staging = Staging(MIB)
    buffer = staging.acquire(100)
    buffer[:6] = b"parent"
    child = os.fork()
    if child == 0:
        buffer[:6] = b"child!"
        os._exit(0)
    os.waitpid(child, 0)
    assert bytes(buffer[:6]) == b"parent"
