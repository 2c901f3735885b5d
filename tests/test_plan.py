"""Plans: the chunks of a share, each once, in runs as long as they can be."""

from __future__ import annotations

import itertools

import pytest
from support.reference import held
from support.world import small_group

from kvstore.extent import shard_layout
from kvstore.geometry import LayerGroup
from kvstore.parallel import ParallelConfig
from kvstore.plan import planned_layout, shard_parts, split_run
from kvstore.share import share_of

GROUPS = {
    "four": small_group(),
    "one-shard": small_group(shard_layers=4, shard_heads=4),
    "tall": small_group(shard_layers=4, shard_heads=1),
    "flat": small_group(shard_layers=1, shard_heads=4),
    "six": small_group(layers=6, heads=6, shard_layers=3, shard_heads=2),
}
CONFIGS = [
    ParallelConfig(tp=tp, pp=pp, dcp=dcp, pp_layers=layers)
    for tp, dcp in ((1, 1), (2, 1), (8, 1), (8, 2), (12, 2), (3, 1))
    for pp, layers in ((1, None), (2, None), (2, (1, 3)), (2, (2, 4)), (3, (1, 2, 3)))
]


def _fits(group: LayerGroup, config: ParallelConfig) -> bool:
    small, large = sorted((config.tp, group.heads))
    copies = config.tp // group.heads if config.tp > group.heads else 1
    layers = sum(config.pp_layers) if config.pp_layers else group.num_layers
    return large % small == 0 and copies % config.dcp == 0 and layers == group.num_layers


@pytest.mark.parametrize("name", GROUPS)
def test_a_plan_names_every_chunk_of_the_share_once(name: str) -> None:
    group = GROUPS[name]
    tried = 0
    for config in (c for c in CONFIGS if _fits(group, c)):
        for rank in config.ranks():
            mine = held(group, config, rank, group.num_layers)
            share = share_of(group, config, rank, group.num_layers)
            for layers in (None, range(1), range(1, len(mine.layers)), range(0)):
                chosen = range(len(mine.layers)) if layers is None else layers
                expected = {
                    (mine.layers[i], head): (i, h)
                    for i in chosen
                    for h, head in enumerate(mine.heads)
                    if i < len(mine.layers)
                }
                found = {}
                for part in shard_parts(group, share, layers):
                    row, column = (int(part.name.split(".")[i]) for i in (1, 3))
                    for run in part.runs:
                        assert run.shard == part.name
                        for i, slot in enumerate(run.slots):
                            layer, head = divmod(run.first + i, group.shard_heads)
                            place = (
                                row * group.shard_layers + layer,
                                column * group.shard_heads + head,
                            )
                            assert place not in found
                            found[place] = slot
                    for a, b in itertools.pairwise(part.runs):
                        assert a.first + len(a.slots) < b.first
                    size = sum(len(r.slots) for r in part.runs)
                    full = size == group.shard_layers * group.shard_heads and mine.cp == 1
                    assert part.whole == full
                assert found == expected
                tried += 1
    assert tried > 20


def test_split_runs_keep_every_chunk_in_order() -> None:
    group = GROUPS["one-shard"]
    (part,) = shard_parts(group, share_of(group, ParallelConfig(), next(CONFIGS[0].ranks()), 4))
    (run,) = part.runs
    pieces = list(split_run(run, 5))
    assert [(p.first, len(p.slots)) for p in pieces] == [(0, 5), (5, 5), (10, 5), (15, 1)]
    assert sum((p.slots for p in pieces), ()) == run.slots


def test_a_records_own_stride_is_planned_with() -> None:
    group = GROUPS["four"]
    ours = shard_layout(group, 2)
    assert planned_layout(group, 2, None) == planned_layout(group, 2, ours.stride) == ours
    other = planned_layout(group, 2, 4096)
    assert (other.stride, other.chunks, other.chunk_bytes) == (4096, ours.chunks, ours.chunk_bytes)
