"""Starting one process a rank, and hearing from them all."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from kvstore.demo import rank as rank_module
from kvstore.demo.errors import DemoError
from kvstore.demo.job import Job, RankReport

START_METHODS = ("forkserver", "spawn")
"""``forkserver`` forks ranks from a server that has imported torch and done nothing else; ``spawn``
makes every rank import it again."""

PATIENCE = 120.0
"""Seconds without a word from a rank after which it is given up."""


def run_ranks(jobs: Sequence[Job], start_method: str, tick: Callable[[], None]) -> list[RankReport]:
    """Run every job in a process of its own, at the same time; all begin when all are ready.

    Args:
        jobs: one job a rank.
        start_method: one of :data:`START_METHODS`.
        tick: called whenever a rank has finished.

    Raises:
        DemoError: a rank failed, died or fell silent; the others are stopped.
    """
    context: ForkServerContext | SpawnContext
    if start_method == "forkserver":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([rank_module.__name__])
    else:
        context = multiprocessing.get_context("spawn")
    started: list[tuple[Job, BaseProcess, Connection]] = []
    try:
        for job in jobs:
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=rank_module.serve, args=(theirs, job.to_json())
            )
            process.start()
            # Ours must be the only copy but the rank's, or its death would not be noticed.
            theirs.close()
            started.append((job, process, ours))
        for job, _, connection in started:
            _hear(job, connection)
        for _, _, connection in started:
            connection.send_bytes(b"go")
        reports = []
        for job, _, connection in started:
            reports.append(RankReport(**json.loads(_hear(job, connection))))
            tick()
        return reports
    finally:
        for _, process, connection in started:
            connection.close()
            process.join(timeout=1)
            if process.is_alive():
                process.kill()
                process.join()


def _hear(job: Job, connection: Connection) -> bytes:
    """The next message of a rank, unless it is an error."""
    who = f"rank {job.rank} of {job.config}, asked to {job.action}"
    if not connection.poll(PATIENCE):
        raise DemoError(f"{who}, has said nothing for {PATIENCE:.0f} s")
    try:
        message = connection.recv_bytes()
    except (EOFError, ConnectionError) as error:
        raise DemoError(f"{who}, died") from error
    if message.startswith(b'{"error"'):
        raise DemoError(f"{who}, failed: {json.loads(message)['error']}")
    return message
