"""Jobs in threads, all of which have ended before the caller goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_all(pool: Callable[[], Executor], jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run jobs at the same time, and give what they return, in their order.

    Args:
        pool: gives the threads.
        jobs: none of which waits for another one. A single one is run by the calling thread.

    Raises:
        BaseException: what the first of those that failed raised. Jobs that had not begun by then
            are not run.
    """
    if len(jobs) == 1:
        return [jobs[0]()]
    futures: list[Future[T]] = []
    try:
        futures.extend(start(pool, job) for job in jobs)
        return [future.result() for future in futures]
    finally:
        settle(futures)


def start(pool: Callable[[], Executor], job: Callable[[], T]) -> Future[T]:
    """Start a job in a thread; at the interpreter's end, when there are none, run it here."""
    try:
        return pool().submit(job)
    except RuntimeError:
        here: Future[T] = Future()
        try:
            here.set_result(job())
        except BaseException as error:  # noqa: BLE001 - handed to the one who waits
            here.set_exception(error)
        return here


def settle(futures: Iterable[Future[Any]]) -> None:
    """Leave no job running: those that have not begun never will."""
    for future in futures:
        if not future.cancel():
            future.exception()
