"""Threads that work through batches of reads, and callers that stop waiting for a stuck one."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from kvstore.errors import StorageError

_MOST_STUCK = 64


class Gate:
    """Held by a thread while it hands bytes over; closed when the batch is given up."""

    __slots__ = ("_batch", "_lock")

    def __init__(self, batch: Batch) -> None:
        self._lock = threading.Lock()
        self._batch = batch

    def __enter__(self) -> bool:
        """Enter; True when the batch was given up and nothing may be handed over."""
        self._lock.acquire()
        return self._batch.abandoned

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self._lock.release()


class Batch:
    """Units of work, numbered from 0, that several threads take one by one.

    ``work(next_unit, gate, finished, recruit)`` runs once in each thread. It calls ``next_unit()``
    for the number of a unit until there are none left (a number >= units), and ``finished()`` after
    each. ``recruit()`` calls in the threads that the batch was not started with, if there are any.
    """

    def __init__(self, units: int, work: Work, queue: _Queue) -> None:
        self.units = units
        self._queue = queue
        self._waiting: list[Gate] = []
        self.work = work
        self.abandoned = False
        self.gates: list[Gate] = []
        # next() of a count is one step under the interpreter lock: no two threads get one number.
        self.next_unit = itertools.count().__next__
        self._one_more = itertools.count(1).__next__
        self._done = threading.Lock()
        self._done.acquire()

    def start(self, threads: int, first: int) -> None:
        """Let ``first`` threads begin, and up to ``threads`` in all when they recruit."""
        self.gates = [Gate(self) for _ in range(threads)]
        self._waiting = self.gates[first:]
        for gate in self.gates[:first]:
            self._queue.put((self, gate))

    def recruit(self) -> None:
        """Let the other threads begin; once."""
        waiting = self._waiting
        while waiting:
            try:
                gate = waiting.pop()
            except IndexError:
                return  # another thread was recruiting too
            self._queue.put((self, gate))

    def finished(self) -> None:
        """Count one unit as done."""
        if self._one_more() == self.units:
            self._done.release()

    def wait(self, timeout: float | None) -> bool:
        """Wait until all units are done; False when the time passed first."""
        return self._done.acquire(timeout=-1 if timeout is None else max(timeout, 0))

    def abandon(self) -> None:
        """Give the batch up: after this returns, no thread hands bytes over any more."""
        self.abandoned = True
        for gate in self.gates:
            # A thread that is handing over right now is in memory, not in the medium: wait for it.
            with gate:
                pass


Work = Callable[[Callable[[], int], Gate, Callable[[], None], Callable[[], None]], None]
_Queue = SimpleQueue["tuple[Batch, Gate] | None"]


class Workers:
    """A set of threads, started when first needed and again after a fork."""

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self._name = name
        self._finalizer: weakref.finalize[[_Queue, int], Workers] | None = None
        self.reset()

    def reset(self) -> None:
        """Start anew without threads; what a forked child calls, where none of them exists."""
        self._lock = threading.Lock()
        self._queue: _Queue = SimpleQueue()
        self._serving: list[_Thread] = []
        self._stuck: list[_Thread] = []
        # Waiting threads know the queue and not this object, so that it can be collected.
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _stop, self._queue, self.threads)
        self._finalizer.atexit = False

    def run(self, units: int, work: Work, timeout: float | None, first: int) -> bool:
        """Run a batch, in ``first`` threads until these recruit the others, and wait for it.

        Returns:
            False when it was not done in ``timeout`` seconds. The batch is given up then, and the
            threads that are stuck in it are replaced.

        Raises:
            StorageError: too many threads are stuck already.
        """
        batch = Batch(units, work, self._queue)
        if len(self._serving) < self.threads:
            self._start_threads()
        batch.start(min(self.threads, units), first)
        try:
            if batch.wait(timeout):
                return True
        except BaseException:
            batch.abandon()
            raise
        batch.abandon()
        with self._lock:
            for thread in [t for t in self._serving if t.batch is batch]:
                thread.retired = True
                self._serving.remove(thread)
                self._stuck.append(thread)
        return False

    def close(self, timeout: float) -> None:
        """End the threads after what is queued; wait ``timeout`` seconds for them at most."""
        with self._lock:
            serving, self._serving = self._serving, []
        for _ in serving:
            self._queue.put(None)
        until = time.monotonic() + timeout
        for thread in serving:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _start_threads(self) -> None:
        with self._lock:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            if len(self._stuck) > _MOST_STUCK:
                raise StorageError(
                    f"{len(self._stuck)} reading threads hang in the medium: check its mount and "
                    f"the kernel log, then restart this process"
                )
            while len(self._serving) < self.threads:
                thread = _Thread(self._queue, self._name)
                thread.start()
                self._serving.append(thread)


class _Thread(threading.Thread):
    """One thread. A daemon: one that is stuck in the medium must not keep the process alive."""

    def __init__(self, queue: _Queue, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._queue = queue
        self.batch: Batch | None = None
        self.retired = False

    def run(self) -> None:
        """Serve until told to stop."""
        while not self.retired and (item := self._queue.get()) is not None:
            batch, gate = item
            self.batch = batch
            if not batch.abandoned:
                batch.work(batch.next_unit, gate, batch.finished, batch.recruit)
            self.batch = None
            del item, batch, gate


def _stop(queue: _Queue, threads: int) -> None:
    for _ in range(threads):
        queue.put(None)
