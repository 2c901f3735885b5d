"""Rounds, medians and ratios.

A *contender* is one way to do a job. In each round every contender runs once, in an order that
changes from round to round, so that drift and after-effects meet all of them. A ratio is taken
within a round, and the median over rounds is what is reported.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


def _nothing() -> None:
    """Do nothing, the default of a contender's untimed steps."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do a section's job.

    Attributes:
        key: unique in the run, for instance ``llama.hot.verified``.
        title: what a person reads.
        run: the timed part; returns the payload bytes it moved.
        before: untimed, before every run (drop caches, remove what the last run wrote).
        poison: untimed, before the run that is checked: spoils the target.
        correct: untimed, after the run that is checked: whether the target holds the right bytes.
            None where there is nothing to compare (a raw limit moves bytes that nobody reads).
        every: takes part in every so many rounds (slow peers need not run in all).
    """

    key: str
    title: str
    run: Callable[[], int]
    before: Callable[[], None] = _nothing
    poison: Callable[[], None] = _nothing
    correct: Callable[[], bool] | None = None
    every: int = 1


@dataclass(slots=True)
class Samples:
    """What was measured of one contender.

    Attributes:
        key: the contender's.
        title: the contender's.
        nbytes: payload bytes of one run.
        seconds: run time by round.
        correct: whether its bytes were right; None when there was nothing to compare.
    """

    key: str
    title: str
    nbytes: int = 0
    seconds: dict[int, float] = field(default_factory=dict)
    correct: bool | None = None

    @property
    def rate(self) -> float:
        """Median rate, bytes a second."""
        return self.nbytes / statistics.median(self.seconds.values())


def _check(contender: Contender) -> Samples:
    """The untimed first run: warms up, and proves the bytes."""
    samples = Samples(contender.key, contender.title)
    contender.poison()
    contender.before()
    samples.nbytes = contender.run()
    if contender.correct is not None:
        samples.correct = contender.correct()
    return samples


def measure(
    contenders: Sequence[Contender],
    rounds: int,
    progress: Callable[[str], None] = lambda _title: None,
) -> dict[str, Samples]:
    """Check every contender once, then time them all in interleaved rounds.

    Args:
        contenders: the ways to do one job.
        rounds: how often each runs (fewer for one that takes part in only every so many).
        progress: told what is about to run.

    Returns:
        For each contender's key what was measured.
    """
    results: dict[str, Samples] = {}
    for contender in contenders:
        progress(f"checking {contender.title}")
        results[contender.key] = _check(contender)
    for round_ in range(rounds):
        order = [c for c in contenders if round_ % c.every == 0]
        turn = round_ % max(1, len(order))
        order = order[turn:] + order[:turn]
        for contender in order if round_ % 2 == 0 else reversed(order):
            progress(f"round {round_ + 1} of {rounds}: {contender.title}")
            contender.before()
            gc.collect()
            start = time.perf_counter()
            contender.run()
            results[contender.key].seconds[round_] = time.perf_counter() - start
    return results


def ratio(a: Samples, b: Samples) -> float:
    """Median over common rounds of the rate of ``a`` divided by the rate of ``b``.

    Raises:
        ValueError: they have no round in common.
    """
    common = sorted(a.seconds.keys() & b.seconds.keys())
    if not common:
        raise ValueError(f"{a.key} and {b.key} have no round in common")
    scale = a.nbytes / b.nbytes
    return statistics.median(scale * b.seconds[r] / a.seconds[r] for r in common)
