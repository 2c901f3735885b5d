"""The stage: storing a cache as one engine's ranks, and loading it as another's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import kvstore
from kvstore.demo.bits import Bits
from kvstore.demo.check import same_bits
from kvstore.demo.errors import DemoError
from kvstore.demo.job import SESSION, CacheFacts, Job, RankReport
from kvstore.demo.matrix import Side
from kvstore.demo.placement import (
    POISON,
    Holding,
    gather,
    holding,
    new_pool,
    place,
    shuffled_blocks,
)
from kvstore.demo.processes import run_ranks

_STORE_SEED, _LOAD_SEED = 1 << 20, 2 << 20


@dataclass(frozen=True, slots=True)
class Stage:
    """What every engine of a demonstration has in common.

    Attributes:
        root: the store.
        work: folder for the ranks' memory on its way between processes.
        facts: what the cache is of.
        cache: the computed cache of the prefix.
        tokens: token ids of the prefix; whole blocks.
        start_method: how ranks' processes start.
        tick: called whenever a rank has finished.
    """

    root: Path
    work: Path
    facts: CacheFacts
    cache: Bits
    tokens: list[int]
    start_method: str
    tick: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stored:
    """One writer's outcome.

    Attributes:
        seconds: from the first rank's start to the last one's end, and the commit.
        disk_bytes: bytes of all files of its namespace.
        private_bytes: bytes of all ranks' parts, which storage by rank would have taken.
        ranks: number of ranks.
    """

    seconds: float
    disk_bytes: int
    private_bytes: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """One reader's outcome.

    Attributes:
        seconds: to look the prefix up, and from the first rank's start to the last one's end.
        nbytes: bytes put into the ranks' memory.
        pages: whether every rank's memory is as it should be, unused memory untouched.
        cache: the cache, put together from the ranks' memory.
    """

    seconds: float
    nbytes: int
    pages: bool
    cache: Bits


def store_as(stage: Stage, writer: Side) -> Stored:
    """Let every rank of ``writer`` store its part, then commit.

    Raises:
        DemoError: a rank failed, or the store does not have all afterwards.
    """
    identity = stage.facts.identity(str(writer))
    jobs, private = [], 0
    for job, held, pool in _ranks(stage, "store", writer, writer):
        place(stage.cache, held, pool, job.style, job.blocks)
        pool.tofile(job.pool)
        jobs.append(job)
        private += len(held.layers) * len(held.heads) * len(held.tokens) * _token_bytes(stage)
    with kvstore.open(stage.root) as store:
        namespace = store.namespace(identity)
        keys = namespace.keys(stage.tokens)
        reports = run_ranks(jobs, stage.start_method, stage.tick)
        start = time.monotonic()
        committed = namespace.commit(keys, writer.config, session=SESSION)
        seconds = _span(reports) + time.monotonic() - start
    if not committed.complete or any(report.blocks != len(keys) for report in reports):
        missing = "; ".join(map(str, committed.missing)) or "blocks were left out"
        raise DemoError(f"{writer} has stored, but not all of it is in the store: {missing}")
    _remove(jobs)
    files = [path for path in (stage.root / identity.namespace).rglob("*") if path.is_file()]
    disk = sum(path.stat().st_size for path in files)
    return Stored(seconds, disk, private, len(jobs))


def load_as(stage: Stage, writer: Side, reader: Side) -> Loaded:
    """Load what ``writer`` stored into fresh ranks of ``reader``, and put the cache together.

    Raises:
        DemoError: a rank failed, or found less than the whole prefix.
    """
    identity = stage.facts.identity(str(writer))
    with kvstore.open(stage.root, create=False, read_only=True) as store:
        namespace = store.namespace(identity, create=False)
        start = time.monotonic()
        keys = namespace.keys(stage.tokens)
        found = namespace.match_prefix(keys)
        lookup = time.monotonic() - start
    if found.tokens != len(stage.tokens):
        raise DemoError(f"{writer} stored {len(stage.tokens)} tokens, but {found.tokens} are found")
    jobs = [job for job, _, _ in _ranks(stage, "load", writer, reader)]
    reports = run_ranks(jobs, stage.start_method, stage.tick)
    troubles = [text for report in reports for text in report.troubles]
    if troubles or any(report.blocks != len(keys) for report in reports):
        raise DemoError(f"{reader} could not load what {writer} stored: {troubles or 'too few'}")
    cache = np.empty_like(stage.cache)
    cache.view(np.uint8).fill(POISON)
    pages = True
    for job, held, expected in _ranks(stage, "load", writer, reader):
        pool = np.fromfile(job.pool, expected.dtype).reshape(expected.shape)
        place(stage.cache, held, expected, job.style, job.blocks)
        pages = pages and same_bits(pool, expected)
        gather(cache, held, pool, job.style, job.blocks)
    _remove(jobs)
    nbytes = sum(report.nbytes for report in reports)
    return Loaded(lookup + _span(reports), nbytes, pages, cache)


def _ranks(
    stage: Stage, action: str, writer: Side, side: Side
) -> Iterator[tuple[Job, Holding, Bits]]:
    """Each rank of a side: its job, what it holds, and its memory, all poison."""
    layers, heads, tokens = stage.cache.shape[:3]
    style = replace(side.style, block_tokens=stage.facts.block_tokens)
    for rank in side.config.ranks():
        number = side.config.number(rank)
        held = holding(side.config, rank, layers, heads, tokens)
        pool = new_pool(stage.cache, held, style)
        seed = number + (_STORE_SEED if action == "store" else _LOAD_SEED)
        job = Job(
            action=action,
            root=str(stage.root),
            facts=stage.facts,
            writer=str(writer),
            config=str(side.config),
            number=number,
            order=style.order,
            parts=style.parts,
            shape=pool.shape,
            pool=str(stage.work / f"{action}-{number}.pages"),
            tokens=stage.tokens,
            blocks=shuffled_blocks(pool, held, style, seed),
        )
        yield job, held, pool


def _token_bytes(stage: Stage) -> int:
    return int(stage.cache.itemsize * stage.cache[0, 0, 0].size)


def _span(reports: list[RankReport]) -> float:
    return max(r.ended for r in reports) - min(r.started for r in reports)


def _remove(jobs: list[Job]) -> None:
    for job in jobs:
        Path(job.pool).unlink()
