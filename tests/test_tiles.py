"""Pages tiled or transposed inside: the encodings that backends use, and any mixed radix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.by_hand import by_hand
from support.pools import LAYOUTS, TILED, Bytes, Pool, pattern
from support.radix import radices, radix_pool
from support.tiled import tiled
from support.world import make_world, store_all

from kvstore.buffers import PagedBuffers
from kvstore.device_scatter import DevicePages
from kvstore.elements import element
from kvstore.geometry import ContentPart, LayerGroup
from kvstore.parallel import ParallelConfig, Rank
from kvstore.placement import Placement, place, unit_tokens
from kvstore.rowcopy import functions
from kvstore.scatter import HostPages
from kvstore.share import TokenLattice

ENCODINGS = ("turned", "amx", "rocm")
Offsets = Callable[[int, int, int, int], int]
"""(token, element, block tokens, head size) -> offset in a head's page, in elements."""
KNOWN: dict[str, tuple[Offsets, Offsets]] = {
    # As the backends' writers put them.
    "turned": (lambda t, e, n, _: e * n + t, lambda t, e, n, d: n * d + t * d + e),
    "amx": (
        lambda t, e, _, d: t // 16 * 16 * d + t % 16 * 2 + e // 2 * 32 + e % 2,
        lambda t, e, n, d: n * d + t // 2 * 32 + t % 2 + e // 16 * n * 16 + e % 16 * 2,
    ),
    "rocm": (
        lambda t, e, n, _: e // 8 * n * 8 + t * 8 + e % 8,
        lambda t, e, n, d: n * d + e * n + t,
    ),
}


def _known(kind: str) -> Any:
    def make(group: LayerGroup, layers: int, heads: int, blocks: int, tokens: int) -> Pool:
        buffers, views, memory = tiled(kind)(group, layers, heads, blocks, tokens, pattern)
        return Pool(buffers, views, memory, tokens, blocks)

    return make


@pytest.fixture(autouse=True)
def _layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ENCODINGS:
        monkeypatch.setitem(LAYOUTS, kind, _known(kind))


def _kv(**changes: Any) -> LayerGroup:
    options: dict[str, Any] = {"layers": 2, "heads": 2, "head_size": 32, "block_tokens": 32}
    return LayerGroup.attention_kv(**{**options, **changes})


def _narrow() -> LayerGroup:
    """A shard for each layer and head, extents of two blocks."""
    return _kv(extent_blocks=2, block_tokens=16, shard_layers=1, shard_heads=1)


@pytest.mark.parametrize("kind", ENCODINGS)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn"])
def test_known_encodings_by_their_formulas(kind: str, name: str) -> None:
    group, blocks, size = _kv(element=name), 3, element(name).itemsize
    pool = _known(kind)(group, 2, 2, blocks, 32)
    data = np.random.default_rng(5).integers(0, 256, 4 * 64 * group.token_bytes, dtype=np.uint8)
    slots = [(layer, head) for layer in range(2) for head in range(2)]
    where = place(TokenLattice(), 32, 32, np.array([2, 0]), 0, 0, 64)
    HostPages(pool.buffers).scatter(slots, where, memoryview(data), 64 * group.token_bytes)
    content = data.reshape(2, 2, 2, 32, 2, 32, size)  # layer, head, block, token, part, element
    for layer in range(2):
        pages = pool.memory[layer].reshape(blocks, 2, 2 * 32 * 32, size)
        for at, block in enumerate((2, 0)):
            for part, offset in enumerate(KNOWN[kind]):
                for t, e in ((0, 0), (1, 0), (0, 1), (17, 16), (30, 31), (31, 3)):
                    found = pages[block, :, offset(t, e, 32, 32)]
                    assert np.array_equal(found, content[layer, :, at, t, part, e]), (part, t, e)


GROUPS = {
    "fp32": lambda n: _small(n, "float32"),
    "bf16": lambda n: _small(n, "bfloat16"),
    "fp8": lambda n: _small(n, "float8_e5m2"),
    "two types": lambda n: LayerGroup(
        name="mixed",
        layers=(0, 1),
        heads=2,
        block_tokens=n,
        parts=(
            ContentPart("key", element("int8"), 8),
            ContentPart("value", element("float16"), 4),
            ContentPart("value_scale", element("float32"), 1),
        ),
    ),
}


def _small(block_tokens: int, name: str) -> LayerGroup:
    return LayerGroup.attention_kv(
        layers=2, heads=2, head_size=8, block_tokens=block_tokens, element=name
    )


@st.composite
def _moves(draw: st.DrawFn) -> tuple[Any, ...]:
    block_tokens = draw(st.sampled_from([2, 4, 6, 8, 12]))
    group = GROUPS[draw(st.sampled_from(sorted(GROUPS)))](block_tokens)
    lattice = draw(
        st.sampled_from(
            [TokenLattice(), TokenLattice(), TokenLattice(1, 2, 1), TokenLattice(2, 3, 2)]
        )
    )
    pools = []
    for _ in range(2):
        tokens = draw(st.sampled_from([4, 6, 8, 12]))
        pools.append((tokens, draw(radices(group, tokens))))
    start = draw(st.integers(0, 2))
    stop = draw(st.integers(start + 1, 4))
    return group, lattice, pools, start * block_tokens, stop * block_tokens, draw(st.integers(0, 9))


@pytest.mark.parametrize("mover", [HostPages, DevicePages])
@settings(max_examples=60, deadline=None)
@given(_moves())
def test_any_radix_into_any_other(mover: Any, case: tuple[Any, ...]) -> None:
    """Out of one pool and into another, and nothing else of either is touched."""
    group, lattice, (source, target), start, stop, gap = case
    slots = [(1, 1), (0, 0), (0, 1)]
    total = 4 * group.block_tokens
    stride = total * group.token_bytes + gap
    raw = np.random.default_rng(3).integers(0, 256, stride * len(slots), dtype=np.uint8)

    def chunks(data: Bytes) -> Bytes:
        shape = (len(slots), total, group.token_bytes)
        return np.ndarray(shape, np.uint8, data, 0, (stride, group.token_bytes, 1))

    def where(tokens: int) -> Placement:
        unit = unit_tokens(lattice, group.block_tokens, tokens)
        table = np.random.default_rng(tokens).permutation(13)
        return place(lattice, unit, tokens, table, 0, start, stop)

    def pool(tokens: int, how: Any) -> Pool:
        return radix_pool(group, 2, 2, 13, tokens, how)

    full, moved, expected = pool(*source), raw.copy(), raw.copy()
    before = full.snapshot()
    by_hand(full, slots, where(source[0]), chunks(expected), out=False)
    mover(full.buffers).gather(slots, where(source[0]), memoryview(moved), stride)
    assert np.array_equal(moved, expected)
    assert full.snapshot() == before

    empty, twin = pool(*target), pool(*target)
    mover(empty.buffers).scatter(slots, where(target[0]), memoryview(moved), stride)
    by_hand(twin, slots, where(target[0]), chunks(moved), out=True)
    assert empty.snapshot() == twin.snapshot()

    back = np.zeros_like(raw)
    mover(empty.buffers).gather(slots, where(target[0]), memoryview(back), stride)
    own = where(target[0]).split().source
    rows = np.arange(start, stop) if own is None else own
    assert np.array_equal(chunks(back)[:, rows], chunks(moved)[:, rows])


def test_layers_of_two_encodings_in_one_piece() -> None:
    group = _kv()
    made = [_known(kind)(group, 2, 2, 3, 32) for kind in ENCODINGS]
    made.append(LAYOUTS["split-2b-hnd"](group, 2, 2, 3, 32))
    views = [_given(pool, layer) for layer, pool in enumerate([made[0], made[1]])]
    mixed = PagedBuffers(group, views)
    plain = made[3]
    slots = [(0, 0), (1, 1), (0, 1)]
    where = place(TokenLattice(), 32, 32, np.array([2, 1]), 0, 0, 64)
    stride = 64 * group.token_bytes
    data = np.random.default_rng(5).integers(0, 256, 3 * stride, dtype=np.uint8)
    back = np.zeros_like(data)
    for mover in (HostPages(mixed), DevicePages(mixed), HostPages(plain.buffers)):
        mover.scatter(slots, where, memoryview(data), stride)
        back[:] = 0
        mover.gather(slots, where, memoryview(back), stride)
        assert np.array_equal(back, data)
    for layer, head in slots:
        for part in group.parts:
            found = np.array(made[layer].views[layer][part.name][1:, head])
            assert np.array_equal(found, plain.views[layer][part.name][1:, head])


def _given(pool: Pool, layer: int) -> dict[str, torch.Tensor]:
    group = pool.buffers.group
    return {p.name: s.tensor for p, s in zip(group.parts, pool.buffers.layers[layer], strict=True)}


@pytest.mark.parametrize("kind", [*ENCODINGS, *TILED])
def test_tiled_pages_have_no_c_function(kind: str) -> None:
    group = _kv(block_tokens=64)
    where = place(TokenLattice(), 64, 64, np.array([2, 1]), 0, 0, 128)
    size = 128 * group.token_bytes
    pool = LAYOUTS[kind](group, 2, 2, 3, 64)
    mover = HostPages(pool.buffers).mover([(0, 0)], where, size, size)
    assert mover.sink(verify=False) is None
    plain = LAYOUTS["packed-hnd"](group, 2, 2, 3, 64)
    mover = HostPages(plain.buffers).mover([(0, 0)], where, size, size)
    assert (mover.sink(verify=False) is None) == (functions() is None)


SEATS = [
    ("turned", ParallelConfig(), 32),
    ("amx", ParallelConfig(tp=2), 64),
    ("rocm", ParallelConfig(tp=4, dcp=2, interleave=4), 32),
    ("amx", ParallelConfig(tp=4, dcp=2), 32),
    ("packed-nhd", ParallelConfig(), 16),
]


@pytest.mark.parametrize("writer", SEATS, ids=lambda s: f"{s[0]}-{s[1]}")
def test_through_a_store(tmp_path: Path, writer: tuple[str, ParallelConfig, int]) -> None:
    """Written by one, read by all: whole, as a prefix that ends inside an extent, by layer."""
    # Two full extents, a shorter last one, and an unfinished block.
    world = make_world(tmp_path, _narrow())
    layout, config, tokens = writer
    _, report = store_all(
        world.namespace, config, world.keys, world.truth, layout=layout, tokens=tokens
    )
    assert report is not None
    assert len(report.committed) == 3
    for layout, config, tokens in SEATS:
        world.load_all(config, layout=layout, tokens=tokens)
        for rank in config.ranks():
            one = world.seat(config, rank, layout=layout, tokens=tokens)
            assert one.worker.load(world.keys[:3], one.table).blocks == 3
            one.expect(world.truth, 0, 48)
    one = world.seat(ParallelConfig(), Rank(), layout="amx", tokens=32)
    assert [r.blocks for _, r in one.worker.load_layers(world.keys, one.table)] == [5, 5]
    one.expect(world.truth, 0, 80)


def test_stored_bytes_do_not_tell_the_encoding(tmp_path: Path) -> None:
    found = []
    for kind in (*ENCODINGS, "packed-hnd"):
        world = make_world(tmp_path / kind, _narrow())
        world.store_all(layout=kind, tokens=32)
        folder = world.folder(1)
        found.append({p.name: p.read_bytes() for p in sorted(folder.glob("c.*"))})
    assert len(found[0]) == 4
    assert all(shards == found[0] for shards in found)
