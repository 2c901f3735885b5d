"""Ranks as real processes, which may be killed. Forked from a clean server: quick and safe."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import CommitReport, ParallelConfig, Rank
from kvstore.io import failpoints
from support.pools import Bytes
from support.world import Seat, make_world, seat, small_group

_context: Any = None


def context() -> Any:
    """A server that has imported what children need, and forks them."""
    global _context  # noqa: PLW0603 - one server for the test process
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["torch", "kvstore.worker", "support.world"])
    return _context


def start(function: Callable[..., object], *args: object) -> BaseProcess:
    """Start a process."""
    process: BaseProcess = context().Process(target=function, args=args, daemon=True)
    process.start()
    return process


def together(calls: Sequence[tuple[Callable[..., object], tuple[object, ...]]]) -> list[Any]:
    """Run calls in a process each, all let go at once; their results, in order."""
    barrier = context().Barrier(len(calls))
    answers = context().SimpleQueue()
    processes = [
        start(_child, i, barrier, answers, function, args)
        for i, (function, args) in enumerate(calls)
    ]
    found = dict(answers.get() for _ in processes)
    for process in processes:
        process.join(60)
    failures = [text for worked, text in found.values() if not worked]
    assert not failures, failures[0]
    return [found[i][1] for i in range(len(calls))]


def _child(number: int, barrier: Any, answers: Any, function: Any, args: Any) -> None:
    try:
        answers.put((number, (True, function(lambda: barrier.wait(60), *args))))
    except BaseException:  # noqa: BLE001 - it goes to the test, as text
        answers.put((number, (False, traceback.format_exc())))


def store_and_commit(
    root: str,
    config: ParallelConfig,
    ranks: Sequence[Rank],
    session: str,
    failpoint: str = "",
    *,
    durable: bool = False,
    seed: int = 0,
) -> CommitReport:
    """What a rank's process does: store, then commit. Ranks given together run one by one."""
    world = make_world(Path(root), small_group(), durable=durable, seed=seed)
    failpoints.arm_from(failpoint)
    report = CommitReport()
    for rank in ranks:
        one = seat(
            world.namespace, config, rank, total=world.truth.shape[2], session=session, tokens=4
        )
        one.fill(world.truth)
        one.worker.store(world.keys, one.table)
        report = one.worker.commit(world.keys)
    failpoints.disarm()
    return report


def hits_are_right(one: Seat, truth: Bytes, misses: Iterable[int]) -> bool:
    """Whether every block of the sequence that is no miss is in the pool, byte for byte."""
    n = one.group.page_tokens
    lost = set(misses)
    for block in range(truth.shape[2] // n):
        if block in lost:
            continue
        tokens = one.held.tokens(block * n, block * n + n)
        local = one.held.local(tokens)
        ids, slot = one.table[local // one.pool.tokens], local % one.pool.tokens
        for i, layer in enumerate(one.held.layers):
            at = 0
            for part in one.group.parts:
                heads = slice(one.held.heads.start, one.held.heads.stop)
                wanted = truth[layer, heads, :, at : at + part.nbytes][:, tokens].swapaxes(0, 1)
                if not np.array_equal(one.pool.views[i][part.name][ids, :, slot], wanted):
                    return False
                at += part.nbytes
    return True
