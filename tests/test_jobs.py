"""Jobs in threads: results in order, the first failure, nothing left running."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from kvstore.jobs import run_all


def test_results_come_in_the_order_of_the_jobs() -> None:
    def slow(number: int) -> int:
        time.sleep(0.02 * (3 - number))
        return number

    with ThreadPoolExecutor(3) as pool:
        assert run_all(lambda: pool, [partial(slow, i) for i in range(3)]) == [0, 1, 2]
        assert run_all(lambda: pool, []) == []


def test_jobs_run_at_the_same_time_and_a_single_one_here() -> None:
    meet = threading.Barrier(2, timeout=10)
    with ThreadPoolExecutor(2) as pool:
        run_all(lambda: pool, [meet.wait, meet.wait])
        assert run_all(lambda: pool, [threading.get_ident]) == [threading.get_ident()]


def test_the_first_failure_is_raised_when_nothing_runs_any_more() -> None:
    events: list[str] = []

    begun = threading.Event()

    def fail() -> None:
        assert begun.wait(10)
        raise KeyError("first")

    def slow() -> None:
        begun.set()
        time.sleep(0.1)
        events.append("ended")

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(KeyError, match="first"):
            run_all(lambda: pool, [fail, slow])
        assert events == ["ended"]


def test_at_the_end_of_the_interpreter_jobs_run_in_the_calling_thread() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    here = threading.get_ident()
    assert run_all(lambda: pool, [threading.get_ident] * 3) == [here] * 3

    def fail() -> int:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        run_all(lambda: pool, [fail, threading.get_ident])
