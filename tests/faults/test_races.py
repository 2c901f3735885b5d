"""Many processes at once: one copy of each extent, and only full hits or misses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.processes import hits_are_right, store_and_commit, together
from support.world import ONE, make_world, seat, seats, small_group

from kvstore import ParallelConfig, Rank

SHARED = ParallelConfig(tp=8, dcp=2, interleave=2)
SEVERAL = [
    ONE,
    ParallelConfig(tp=2),
    ParallelConfig(pp=2),
    ParallelConfig(tp=4, pp=4),
    ParallelConfig(tp=8),
    SHARED,
    ParallelConfig(pcp=2, interleave=4),
    ParallelConfig(tp=4, pcp=2, pcp_kv="replicated"),
]
Go = Callable[[], object]


def _engine(
    go: Go, root: str, config: ParallelConfig, session: str, seeds: Sequence[int]
) -> list[str]:
    """All ranks of one engine, one by one; the keys that its commits published."""
    published = []
    for seed in seeds:
        go()
        report = store_and_commit(root, config, list(config.ranks()), session, seed=seed)
        assert report.complete
        world = make_world(Path(root), small_group(), seed=seed)
        assert world.namespace.match_prefix(world.keys).blocks == 5
        published += report.committed
    return published


@pytest.mark.parametrize("configs", [[ONE] * 2, [SHARED] * 2, [ONE] * 8, SEVERAL], ids=len)
def test_engines_that_store_the_same_extents(tmp_path: Path, configs: list[ParallelConfig]) -> None:
    seeds = range(3)
    make_world(tmp_path)
    answers = together(
        [
            (_engine, (str(tmp_path), config, f"engine-{i}", seeds))
            for i, config in enumerate(configs)
        ]
    )
    for seed in seeds:
        world = make_world(tmp_path, seed=seed)
        world.load_all()
        world.load_all(ParallelConfig(tp=8, dcp=2), layout="packed-nhd")
    # Each extent was published once at most by what the last commits say, and is there once.
    counts = Counter(key for keys in answers for key in keys)
    assert set(counts.values()) <= {1}
    assert len(list(world.namespace.extents())) == 3 * len(seeds)
    assert list(world.namespace.verify()) == []


def _rank(go: Go, root: str, config: ParallelConfig, rank: Rank, rounds: int) -> list[list[str]]:
    """One rank of an engine: stores, waits for the others, commits with them at once."""
    out = []
    for seed in range(rounds):
        world = make_world(Path(root), small_group(), seed=seed)
        one = seat(world.namespace, config, rank, total=23, session="engine")
        one.fill(world.truth)
        one.worker.store(world.keys, one.table)
        go()
        report = one.worker.commit(world.keys)
        assert report.complete, report
        assert world.namespace.match_prefix(world.keys).blocks == 5
        result = one.worker.load(world.keys, one.table)
        assert result.blocks == 5
        out.append(report.committed)
    return out


@pytest.mark.parametrize("config", [SHARED, ParallelConfig(tp=2, pp=4)], ids=str)
def test_all_ranks_commit_at_once(tmp_path: Path, config: ParallelConfig) -> None:
    rounds = 12
    make_world(tmp_path)
    answers = together([(_rank, (str(tmp_path), config, rank, rounds)) for rank in config.ranks()])
    for seed in range(rounds):
        world = make_world(tmp_path, seed=seed)
        published = sorted(key for ranks in answers for key in ranks[seed])
        assert published == sorted(world.keys[i].hex() for i in world.ends())
        world.load_all()
    assert not (tmp_path / "__kvstore__" / "quarantine").exists()
    assert list(world.namespace.verify()) == []


def _writer(go: Go, root: str, config: ParallelConfig, session: str, until: float) -> int:
    world = make_world(Path(root), small_group())
    everyone = seats(world.namespace, config, total=23, session=session)
    for one in everyone:
        one.fill(world.truth)
    go()
    done = 0
    stop = time.monotonic() + until
    while time.monotonic() < stop:
        for one in everyone:
            one.worker.store(world.keys, one.table)
        for one in everyone[:2]:
            done += len(one.worker.commit(world.keys).committed)
    return done


def _spoiler(go: Go, root: str, kind: str, until: float) -> int:
    """Removes extents, or flips bits of their shards, or moves them away."""
    world = make_world(Path(root), small_group())
    random = np.random.default_rng(5)
    go()
    done = 0
    stop = time.monotonic() + until
    while time.monotonic() < stop:
        end = world.ends()[int(random.integers(3))]
        time.sleep(float(random.random()) * 0.02)
        if kind == "remove":
            done += world.namespace.remove(world.keys[end])
        elif kind == "quarantine":
            world.namespace.quarantine(world.keys[end], "a test")
            done = world.namespace.counters["quarantined"]
        else:
            try:
                with (world.folder(end) / "c.0.0.1.0.0").open("r+b") as file:
                    file.seek(7)
                    byte = file.read(1)[0]
                    file.seek(7)
                    file.write(bytes([byte ^ 1]))
                done += 1
            except FileNotFoundError:
                pass
    return done


def _reader(go: Go, root: str, config: ParallelConfig, layout: str, until: float) -> Counter[str]:
    world = make_world(Path(root), small_group())
    go()
    seen: Counter[str] = Counter()
    stop = time.monotonic() + until
    ranks = list(config.ranks())
    while time.monotonic() < stop:
        rank = ranks[seen["loads"] % len(ranks)]
        one = seat(world.namespace, config, rank, total=23, layout=layout, session=None)
        result = one.worker.load(world.keys, one.table)
        assert hits_are_right(one, world.truth[:, :, :20], result.misses), result
        assert result.blocks == min(result.misses, default=5)
        seen["loads"] += 1
        seen["hit blocks"] += 5 - len(result.misses)
        seen["missed blocks"] += len(result.misses)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("spoiler", ["remove", "quarantine", "flip"])
def test_readers_among_writers_and_spoilers(tmp_path: Path, spoiler: str) -> None:
    until = 2.0
    make_world(tmp_path).store_all()
    root = str(tmp_path)
    writers = [
        (_writer, (root, ONE, "one", until)),
        (_writer, (root, SHARED, "two", until)),
        (_writer, (root, SHARED, "two", until)),  # the same engine twice: all ranks in step or not
    ]
    readers = [
        (_reader, (root, ONE, "packed-hnd", until)),
        (_reader, (root, SHARED, "split-2b-nhd", until)),
    ]
    *counts, spoilt = together([*writers, *readers, (_spoiler, (root, spoiler, until))])
    assert sum(counts[:3]) > 3
    assert spoilt > 3
    for seen in counts[3:]:
        assert seen["hit blocks"]
        assert seen["missed blocks"]
    # Quiet again: what is there is right, and everything can be there.
    world = make_world(tmp_path)
    world.seat().worker.load(world.keys, world.seat().table)
    world.store_all(session="last")
    one = world.seat()
    if one.worker.load(world.keys, one.table).misses:  # a flip that nobody had read yet
        world.store_all(session="very last")
    world.load_all()
