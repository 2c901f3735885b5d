"""Commits, off the scheduler's thread: what all ranks have written becomes visible."""

from __future__ import annotations

import queue
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from kvstore.errors import KVStoreError
from kvstore.namespace import Namespace
from kvstore.parallel import ParallelConfig
from kvstore.plugins.vllm.logs import log
from kvstore.plugins.vllm.messages import StoreJob

THREADS = 2


@dataclass(frozen=True, slots=True)
class Stored:
    """A store job that was committed.

    Attributes:
        job: its number.
        extents: extents that it made visible.
        complete: whether all that it asked for is there now.
    """

    job: int
    extents: int
    complete: bool


class Commits:
    """Commits of store jobs under one session."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._namespace: Namespace | None = None
        self._config = ParallelConfig()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstore-commit")
        self._jobs: dict[int, StoreJob] = {}
        self._running: set[Future[None]] = set()
        self._done: queue.SimpleQueue[Stored] = queue.SimpleQueue()

    def open(self, namespace: Namespace, config: ParallelConfig) -> None:
        """Commit to this namespace from now on."""
        self._namespace, self._config = namespace, config

    def expect(self, job: StoreJob) -> None:
        """Take note of a job given to the ranks."""
        self._jobs[job.number] = job

    def start(self, number: int) -> None:
        """All ranks are done with a job, or no more is to be expected of them: commit it."""
        job = self._jobs.pop(number, None)
        if job is not None:
            future = self._pool.submit(self._commit, job)
            self._running.add(future)
            future.add_done_callback(self._running.discard)

    def done(self) -> list[Stored]:
        """Jobs committed since the last call."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def close(self, seconds: float) -> None:
        """Wait for commits under way, no longer than that."""
        wait(list(self._running), timeout=seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _commit(self, job: StoreJob) -> None:
        extents, complete = 0, True
        for group, first in job.first.items():
            try:
                extents += self._commit_group(job, group, first)
            except KVStoreError as error:
                complete = False
                log.warning("not stored: %s", error)
        self._done.put(Stored(job.number, extents, complete))

    def _commit_group(self, job: StoreJob, group: str, first: int) -> int:
        if self._namespace is None:
            return 0
        keys = job.keys[first - job.keys.start :]
        report = self._namespace.commit(
            keys, self._config, session=self._session, group=group, tail=job.tail
        )
        if report.missing:
            log.warning("not stored: %s", "; ".join(map(str, report.missing[:3])))
            self._namespace.abandon(
                keys, self._config, session=self._session, group=group, tail=job.tail
            )
        return len(report.committed)
