"""Any config reads what any config wrote, in any page layout, byte for byte.

The proof has three parts. Every writer, whatever its config and layout, leaves the very bytes that
an encoder of the tests' own makes out of the content, so no reader can tell writers apart. Every
reader, whatever its config and layout, finds its share in them, and touches no other byte of its
pool. And pairs of configs are run against each other all the same. The ordinary run takes a fixed
sample in which every config writes and reads; ``--full-matrix`` takes everything.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support import canonical
from support.pools import LAYOUTS, layouts_for, suits
from support.world import World, load_all, make_world, store_all

from kvstore.errors import NotCertified
from kvstore.geometry import LayerGroup
from kvstore.parallel import ParallelConfig, Rank

LAYERS = 6
ELEMENTS = ("bfloat16", "float8_e4m3fn", "float32")


def _gqa(heads: int, shard_layers: int, shard_heads: int, element: str) -> LayerGroup:
    return LayerGroup.attention_kv(
        layers=LAYERS,
        heads=heads,
        head_size=2,
        block_tokens=4,
        element=element,
        extent_blocks=2,
        shard_layers=shard_layers,
        shard_heads=shard_heads,
    )


def _group(shape: str, element: str) -> LayerGroup:
    if shape == "mla":
        return LayerGroup.mla(
            layers=LAYERS, latent=6, rope=2, block_tokens=4, element=element, extent_blocks=2
        )
    heads, shard_layers, shard_heads = {
        "gqa4": (4, 2, 2),
        "gqa3": (3, 3, 1),
        "gqa6": (6, 6, 3),
        "mqa": (1, 2, 1),
    }[shape]
    return _gqa(heads, shard_layers, shard_heads, element)


SHAPES = {"gqa4": (45, 45), "gqa3": (18, 72), "gqa6": (27, 63), "mqa": (72, 18), "mla": (72, 18)}
"""Shape -> how many configs can be certified, and how many must be refused."""


def _configs() -> list[ParallelConfig]:
    axes = itertools.product((1, 2, 3, 4, 8), (1, 2, 3), (1, 2), ("none", "sharded", "replicated"))
    return [
        ParallelConfig(
            tp=tp,
            pp=pp,
            dcp=dcp,
            pcp=1 if pcp == "none" else 2,
            pcp_kv="replicated" if pcp == "replicated" else "sharded",
            interleave=1 + i % 2,
        )
        for i, (tp, pp, dcp, pcp) in enumerate(axes)
    ]


def _can(heads: int, config: ParallelConfig) -> bool:
    """Whether a config spreads that many heads without guessing: the rule in one line each."""
    if config.tp <= heads:
        return heads % config.tp == 0 and config.dcp == 1
    return config.tp % heads == 0 and (config.tp // heads) % config.dcp == 0


def _certified(group: LayerGroup) -> list[ParallelConfig]:
    return [c for c in _configs() if _can(group.heads, c)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_other_config_is_refused_and_none_is_left_out(shape: str, tmp_path: Path) -> None:
    world = make_world(tmp_path, _group(shape, "bfloat16"))
    certified, refused = 0, 0
    for config in _configs():
        if _can(world.group.heads, config):
            world.seat(config, Rank())
            certified += 1
            continue
        pool = LAYOUTS["packed-hnd"](world.group, LAYERS, 1, 4, 4)
        with pytest.raises(NotCertified) as caught:
            world.namespace.worker(config, Rank(), pool.buffers, session="s")
        assert str(config) in str(caught.value)
        assert caught.value.reason in str(caught.value)
        refused += 1
    assert (certified, refused) == SHAPES[shape]
    assert certified + refused == 90


def _write(world: World, config: ParallelConfig, layout: str, session: str) -> None:
    """Store under a config, and compare the files with the tests' own encoding."""
    options: dict[str, Any] = {"layout": layout, "tokens": 2 + 2 * (len(session) % 2)}
    _, report = store_all(
        world.namespace, config, world.keys, world.truth, session=session, **options
    )
    assert report is not None
    assert [len(report.committed), report.already, report.missing] == [3, [], []]
    n = world.group.block_tokens
    for first, end in ((0, 2), (2, 4), (4, 5)):
        found = canonical.stored(world.folder(end - 1))
        assert found == canonical.shards(world.group, world.truth, first * n, end * n)


def _clear(world: World) -> None:
    for end in world.ends():
        assert world.namespace.remove(world.keys[end])


def _read(world: World, config: ParallelConfig, layout: str, tokens: int) -> None:
    load_all(
        world.namespace, config, world.keys, world.truth, layout=layout, tokens=tokens, session=None
    )


def _layouts(group: LayerGroup, config: ParallelConfig) -> list[str]:
    heads = max(1, group.heads // config.tp)
    one = [n for n in ("contiguous",) if suits(n, group, heads)]
    return layouts_for(group, heads) + one


def _cases(config: pytest.Config) -> list[Any]:
    """Whole: one test for each writer. Sample: one for every ninth writer's cohort."""
    out = []
    for element, shape in itertools.product(ELEMENTS, SHAPES):
        count = len(_certified(_group(shape, element)))
        if config.getoption("--full-matrix"):
            out += [
                pytest.param(shape, element, range(i, i + 1), True, id=f"{shape}-{element}-{i}")
                for i in range(count)
            ]
        else:
            # All configs of one element type; of the others, which share all code but the copy of
            # items of another size, a third.
            step = 1 if element == ELEMENTS[0] else 3
            out += [
                pytest.param(
                    shape,
                    element,
                    range(i, min(i + 12, count), step),
                    False,
                    id=f"{shape}-{element}-{i}",
                )
                for i in range(0, count, 12)
            ]
    return out


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "writers" in metafunc.fixturenames:
        metafunc.parametrize("shape,element,writers,whole", _cases(metafunc.config))


def test_what_any_config_wrote_any_config_reads(
    shape: str, element: str, writers: range, whole: bool, tmp_path: Path
) -> None:
    world = make_world(tmp_path, _group(shape, element), extra_tokens=0)
    certified = _certified(world.group)
    for i in writers:
        config = certified[i]
        layouts = _layouts(world.group, config)
        chosen = layouts if whole else [layouts[i % len(layouts)]]
        for j, layout in enumerate(chosen):
            if j:
                _clear(world)
            _write(world, config, layout, "s" * (1 + j % 2))
        # 5 and 7 share no factor with the number of configs, so a sample meets all readers.
        readers = range(len(certified)) if whole else [(7 * i + 5) % len(certified)]
        for r in readers:
            reads = _layouts(world.group, certified[r])
            _read(world, certified[r], reads[(i + 3 * r + 1) % len(reads)], 2 + 2 * (r % 3))
        _clear(world)
