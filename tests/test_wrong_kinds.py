"""Arguments of the wrong kind are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.world import ONE, World, make_world

import kvstore
from kvstore import Identity, ParallelConfig, Rank
from kvstore.errors import InvalidArgument


@pytest.mark.parametrize("bad", [[b"x" * 32], None, b"x" * 32])
def test_keys_are_those_of_a_sequence(tmp_path: Path, bad: object) -> None:
    world = make_world(tmp_path)
    seat = world.seat()
    for call in (seat.worker.load, seat.worker.store):
        with pytest.raises(InvalidArgument, match="keys must be what Namespace"):
            call(bad, seat.table)  # type: ignore[operator]  # the wrong type is what is tested
    with pytest.raises(InvalidArgument, match="keys must be what Namespace"):
        world.namespace.match_prefix(bad)  # type: ignore[arg-type]  # the same


def test_ragged_block_ids_are_refused(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    seat = world.seat()
    with pytest.raises(InvalidArgument, match="block_ids must be a 1-D sequence"):
        seat.worker.load(world.keys, [[1], [2, 3]])


WRONG: dict[str, tuple[Callable[[World, Any], object], tuple[object, ...]]] = {
    "layers": (lambda w, bad: w.seat().worker.load(w.keys, [0], layers=bad), (7, [0], "0", 1.5)),
    "stand_in_for": (lambda w, bad: w.seat().worker.store(w.keys, [0], stand_in_for=bad), (7, "0")),
    "extra": (lambda w, bad: w.namespace.keys([1] * 8, extra=bad), (5, None, 1.5, {0: 5})),
    "key": (lambda w, bad: w.namespace.remove(bad), (None, 7, [b"x"])),
    "key ": (lambda w, bad: w.namespace.record(bad), (None, 7)),
    "key is": (lambda w, bad: w.namespace.quarantine(bad, "why"), (None, 7)),
    "session": (
        lambda w, bad: w.namespace.worker(ONE, Rank(), w.seat().pool.buffers, session=bad),
        (7, b"s", ["s"]),
    ),
    "session ": (lambda w, bad: w.namespace.commit(w.keys, ONE, session=bad), (None, 7)),
    "session is": (lambda w, bad: w.namespace.abandon(w.keys, ONE, session=bad), (None, 7)),
    "config": (lambda w, bad: w.namespace.commit(w.keys, bad, session="s"), (None, "tp=1", [1])),
    "config ": (lambda w, bad: w.namespace.abandon(w.keys, bad, session="s"), (None, "tp=1")),
    "config is": (lambda w, bad: w.namespace.share(bad, Rank()), (None, "tp=1", 1)),
    "rank": (lambda w, bad: w.namespace.share(ONE, bad), (None, 0, (0, 0, 0))),
    "rank ": (lambda w, bad: w.namespace.worker(ONE, bad, w.seat().pool.buffers), (None, 0)),
    "buffers": (lambda w, bad: w.namespace.worker(ONE, Rank(), bad), (None, [], 7)),
    "identity": (lambda w, bad: w.store.namespace(bad), (None, "m", 7)),
    "name": (lambda w, bad: w.store.open_namespace(bad), (None, 7, b"m")),
    "name ": (lambda w, bad: w.store.remove_namespace(bad), (None, 7, b"m")),
    "expect": (lambda w, bad: w.store.open_namespace(w.namespace.name, expect=bad), (7, "m")),
    "location": (lambda _, bad: kvstore.open(bad), (3, None, b"kv", 1.5)),
    "threads": (lambda w, bad: kvstore.open(w.root, threads=bad), (None, "2", 1.5)),
    "deadline": (lambda w, bad: kvstore.open(w.root, deadline=bad), ("2", [1])),
    "max_staging_bytes": (lambda w, bad: kvstore.open(w.root, max_staging_bytes=bad), (None, "2")),
    "path": (lambda _, bad: kvstore.open_array(bad), (3, None, b"kv")),
    "pp_layers": (lambda _, bad: ParallelConfig(pp_layers=bad), (3, 1.5)),
    "text": (lambda _, bad: ParallelConfig.parse(bad), (None, 3, b"tp=1")),
    "groups": (lambda _, bad: Identity("m", 4, bad, revision="r"), (None, 3)),
    "layer group": (lambda _, bad: Identity("m", 4, [bad], revision="r"), (None, "kv")),
    "variants": (
        lambda w, bad: Identity("m", 4, (w.group,), revision="r", variants=bad),
        (None, 3, "x", ["x"]),
    ),
    "key_scheme": (
        lambda w, bad: Identity("m", 4, (w.group,), revision="r", key_scheme=bad),
        (None, "sha256"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_arguments(tmp_path: Path, name: str) -> None:
    """Each is named, and what it was, and what to give instead."""
    world = make_world(tmp_path)
    call, wrong = WRONG[name]
    for bad in wrong:
        with pytest.raises(InvalidArgument, match=f"{name.strip()}.*; give "):
            call(world, bad)
