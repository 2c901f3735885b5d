"""Threads that move chunks, with a queue that is never longer than it may be."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

log = logging.getLogger("kvstore.tier")

Move = Callable[[], int]
"""Moves one chunk and returns its bytes; raises where that fails."""


@dataclass(slots=True)
class Job:
    """Moves that are reported together.

    Attributes:
        number: the engine's number for it.
        is_load: which way it goes.
        keys: of its chunks.
        done: keys of those that were moved, in any order.
        nbytes: bytes moved.
        seconds: time that threads spent on it.
    """

    number: int
    is_load: bool
    keys: Sequence[bytes]
    done: set[bytes] = field(default_factory=set)
    nbytes: int = 0
    seconds: float = 0.0
    left: int = 0


class MovePool:
    """Runs moves. Half of the threads take loads first, the others stores: neither starves.

    Args:
        threads: how many.
        most: moves that may wait.
    """

    def __init__(self, threads: int, most: int) -> None:
        self._most = most
        self._loads: deque[tuple[Job, bytes, Move]] = deque()
        self._stores: deque[tuple[Job, bytes, Move]] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False
        self._finished: deque[Job] = deque()
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"kvstore-tier-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, moves: Sequence[Move], *, urgent: bool = False) -> bool:
        """Queue a job's moves, one a key.

        Args:
            job: the job. It is reported in any case.
            moves: in the order of its keys.
            urgent: before all others.

        Returns:
            False where there was no room for it, or nothing to move: it is finished.
        """
        queue = self._loads if job.is_load else self._stores
        with self._changed:
            room = len(self._loads) + len(self._stores) + len(moves) <= self._most
            if self._closed or not room or not moves:
                self._finished.append(job)
                return False
            job.left = len(moves)
            entries = [(job, key, move) for key, move in zip(job.keys, moves, strict=True)]
            if urgent:
                queue.extendleft(reversed(entries))
            else:
                queue.extend(entries)
            self._changed.notify(len(entries))
        return True

    def finished(self) -> list[Job]:
        """Jobs that have finished since the last call."""
        with self._changed:
            out = list(self._finished)
            self._finished.clear()
        return out

    def wait_idle(self) -> None:
        """Wait until nothing waits or runs."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._loads or self._stores or self._running))

    def close(self) -> None:
        """Cancel what waits, wait for what runs, end the threads."""
        with self._changed:
            self._closed = True
            for queue in (self._loads, self._stores):
                while queue:
                    self._count(queue.popleft()[0])
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, index: int) -> None:
        queues = (self._loads, self._stores) if index % 2 == 0 else (self._stores, self._loads)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(queues))
                if self._closed:
                    return
                job, key, move = next(q for q in queues if q).popleft()
                self._running += 1
            started = time.monotonic()
            nbytes: int | None = None
            try:
                nbytes = move()
            except Exception as error:  # noqa: BLE001 - whatever it is, the chunk is not moved
                way = "load" if job.is_load else "store"
                log.warning("chunk %s: %s failed: %s", key.hex()[:16], way, error)
            finally:
                # The error's traceback holds on to the move; the engine's memory must not stay.
                move = _nothing
            with self._changed:
                job.seconds += time.monotonic() - started
                if nbytes is not None:
                    job.done.add(key)
                    job.nbytes += nbytes
                self._running -= 1
                self._count(job)
                self._changed.notify_all()

    def _count(self, job: Job) -> None:
        job.left -= 1
        if job.left == 0:
            self._finished.append(job)


def _nothing() -> int:
    return 0
