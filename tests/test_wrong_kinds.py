"""Arguments of the wrong kind are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.world import make_world

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
