"""Threads of the tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvstore.plugins.vllm.tier_pool import Job, MovePool


@pytest.fixture
def make() -> Iterator[Callable[..., MovePool]]:
    made: list[MovePool] = []

    def call(threads: int, most: int) -> MovePool:
        made.append(MovePool(threads, most))
        return made[-1]

    yield call
    for pool in made:
        pool.close()


def fail() -> int:
    raise OSError("no")


def test_a_job_reports_which_moves_were_done(make: Callable[..., MovePool]) -> None:
    pool = make(2, 10)
    assert pool.submit(Job(1, is_load=True, keys=[b"a", b"b", b"c"]), [lambda: 3, fail, lambda: 4])
    pool.wait_idle()
    (job,) = pool.finished()
    assert (job.number, job.done, job.nbytes) == (1, {b"a", b"c"}, 7)
    assert pool.finished() == []


def test_what_does_not_fit_is_finished_undone(make: Callable[..., MovePool]) -> None:
    pool = make(1, 2)
    assert not pool.submit(Job(1, is_load=False, keys=[b"a", b"b", b"c"]), [fail] * 3)
    assert not pool.submit(Job(2, is_load=False, keys=[]), [])
    assert [(j.number, j.done) for j in pool.finished()] == [(1, set()), (2, set())]


def test_loads_before_stores_and_urgent_ones_first(make: Callable[..., MovePool]) -> None:
    order: list[str] = []
    go, begun = threading.Event(), threading.Event()

    def wait() -> int:
        begun.set()
        go.wait(10)
        return 0

    def note(name: str) -> Callable[[], int]:
        return lambda: len(order.append(name) or "")

    pool = make(1, 10)
    pool.submit(Job(0, is_load=True, keys=[b"x"]), [wait])
    assert begun.wait(10)
    pool.submit(Job(1, is_load=False, keys=[b"x"]), [note("store")])
    pool.submit(Job(2, is_load=True, keys=[b"x"]), [note("load")])
    urgent = [note("urgent 1"), note("urgent 2")]
    pool.submit(Job(3, is_load=True, keys=[b"x", b"y"]), urgent, urgent=True)
    go.set()
    pool.wait_idle()
    assert order == ["urgent 1", "urgent 2", "load", "store"]


def test_stores_have_threads_of_their_own(make: Callable[..., MovePool]) -> None:
    pool = make(2, 100)
    go, stored = threading.Event(), threading.Event()
    pool.submit(Job(0, is_load=True, keys=[b"x"]), [lambda: int(go.wait(10))])
    keys = [bytes([i]) for i in range(20)]
    pool.submit(Job(1, is_load=False, keys=[b"x"]), [lambda: int(stored.set() or 0)])
    pool.submit(Job(2, is_load=True, keys=keys), [lambda: 0] * 20)
    assert stored.wait(10)
    go.set()
    pool.wait_idle()
    assert len(pool.finished()) == 3


def test_closing_cancels_what_waits_and_waits_for_what_runs(make: Callable[..., MovePool]) -> None:
    pool = make(1, 10)
    go, begun = threading.Event(), threading.Event()

    def wait() -> int:
        begun.set()
        go.wait(10)
        return 1

    pool.submit(Job(1, is_load=False, keys=[b"a"]), [wait])
    assert begun.wait(10)
    pool.submit(Job(2, is_load=False, keys=[b"b", b"c"]), [lambda: 1] * 2)
    threading.Timer(0.05, go.set).start()
    pool.close()
    assert sorted((j.number, len(j.done)) for j in pool.finished()) == [(1, 1), (2, 0)]
    assert not pool.submit(Job(3, is_load=False, keys=[b"d"]), [lambda: 1])
    pool.wait_idle()
    assert [j.number for j in pool.finished()] == [3]
