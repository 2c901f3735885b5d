"""The engines that the conformance suite runs on, and how it runs several processes at once.

A new engine adds one :class:`EngineCase` and passes everything in this folder.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.io.protocol import Engine
from kvstore.io.select import open_engine


@dataclass(frozen=True)
class EngineCase:
    """One way to have an engine.

    Attributes:
        name: shown in the names of tests.
        locate: makes a location of its own from an empty folder.
        options: given to ``open_engine`` (a test may add others).
        only_reads: True for a case that differs from another one in nothing but its reading; only
            the tests of reading run on it.
    """

    name: str
    locate: Callable[[Path], str]
    options: dict[str, object] = field(default_factory=dict)
    only_reads: bool = False

    def open(self, location: str, *, read_only: bool = False, **more: object) -> Engine:
        return open_engine(location, read_only=read_only, create=True, **{**self.options, **more})


def _folder(empty: Path) -> str:
    return str(empty / "root")


CASES = (
    # durable=False: these tests look at what processes see, and not at what a power cut leaves.
    EngineCase("posix", _folder, {"durable": False}),
    EngineCase("posix-direct", _folder, {"durable": False, "direct": "always"}, only_reads=True),
    EngineCase(
        "posix-buffered",
        _folder,
        {"durable": False, "direct": "never", "threads": 1},
        only_reads=True,
    ),
    EngineCase("posix-deadline", _folder, {"durable": False, "deadline": 60.0}, only_reads=True),
)


def together(count: int, function: Callable[..., Any], *args: object) -> list[Any]:
    """Run ``function(rank, start, *args)`` in processes; ``start()`` lets all go on at once.

    Returns:
        What each returned, by rank. One that raised fails the test.
    """
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(count), context.SimpleQueue()
    processes = [
        context.Process(target=_child, args=(rank, barrier, answers, function, args))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    found = dict(answers.get() for _ in processes)
    for process in processes:
        process.join()
    failures = [text for worked, text in found.values() if not worked]
    assert not failures, failures[0]
    return [found[rank][1] for rank in range(count)]


def _child(rank: int, barrier: Any, answers: Any, function: Any, args: Any) -> None:
    try:
        answers.put((rank, (True, function(rank, lambda: barrier.wait(60), *args))))
    except BaseException:
        answers.put((rank, (False, traceback.format_exc())))
        raise
