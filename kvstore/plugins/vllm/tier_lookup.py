"""Which chunks are stored, asked on a thread of its own: the scheduler never waits for a disk.

An answer holds for as long as a request that asked is there. A chunk that could not be loaded is
forced to a miss for these requests, or they would ask for it, and fail, for ever.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

log = logging.getLogger("kvstore.lookup")


@dataclass(slots=True)
class _Answer:
    """What is known of one key, and who asked."""

    found: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups:
    """Lookups under way and their answers.

    Args:
        stored: whether a key is stored; called on the thread. What it raises counts as no.
    """

    def __init__(self, stored: Callable[[bytes], bool]) -> None:
        self._stored = stored
        self._lock = threading.Lock()
        self._answers: dict[bytes, _Answer] = {}
        self._asked: dict[str, set[bytes]] = {}
        self._new: list[tuple[bytes, _Answer]] = []
        self._queue: queue.SimpleQueue[list[tuple[bytes, _Answer]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kvstore-lookup", daemon=True)
        self._thread.start()

    def ask(self, key: bytes, request: str) -> bool | None:
        """Whether a key is stored; None: not known yet, to be asked again."""
        with self._lock:
            answer = self._answers.get(key)
            if answer is None:
                answer = self._answers[key] = _Answer()
                self._new.append((key, answer))
            answer.requests.add(request)
            self._asked.setdefault(request, set()).add(key)
            return answer.found

    def send(self) -> None:
        """Start looking for all keys that are new since the last call."""
        with self._lock:
            new, self._new = self._new, []
        if new:
            self._queue.put(new)

    def miss(self, keys: Iterable[bytes]) -> None:
        """From now on these are misses, for the requests that have asked for them."""
        with self._lock:
            for key in keys:
                if key in self._answers:
                    # Another object, so that a lookup under way does not undo it.
                    self._answers[key] = _Answer(found=False, requests=self._answers[key].requests)

    def finished(self, request: str) -> None:
        """Forget what only this request asked for."""
        with self._lock:
            for key in self._asked.pop(request, ()):
                answer = self._answers[key]
                answer.requests.discard(request)
                if not answer.requests:
                    del self._answers[key]

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join()

    def __len__(self) -> int:
        return len(self._answers)

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            for key, answer in batch:
                if not answer.requests:
                    continue  # nobody waits for it any more
                try:
                    found = self._stored(key)
                except Exception as error:  # noqa: BLE001 - whatever it is, the chunk is computed
                    log.warning("lookup of chunk %s failed: %s", key.hex()[:16], error)
                    found = False
                answer.found = found
