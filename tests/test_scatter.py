"""Scatter and gather, on the host and as on a device, against copies made token by token."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.by_hand import by_hand
from support.pools import LAYOUTS, suits
from support.world import small_group
from tiny import GROUPS

import kvstore
from kvstore.buffers import PagedBuffers
from kvstore.device_scatter import DevicePages
from kvstore.errors import InvalidArgument
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.pages import Mover, Pages, pages_of
from kvstore.parallel import ParallelConfig, Rank
from kvstore.placement import Placement, place, unit_tokens
from kvstore.scatter import HostPages, Slots
from kvstore.share import TokenLattice


class Moved:
    """Pages through their movers, a few chunks at a time, as a load's pieces come."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages

    def scatter(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        for mover, first, count, part in self._pieces(slots, where, data, stride):
            assert mover.scatter(part, first, count, verify=False) is None

    def gather(self, slots: Slots, where: Placement, data: memoryview, stride: int) -> None:
        for mover, first, count, part in self._pieces(slots, where, data, stride):
            mover.gather(part, first, count, sums=False)

    def _pieces(
        self, slots: Slots, where: Placement, data: memoryview, stride: int
    ) -> Iterator[tuple[Mover, int, int, memoryview]]:
        mover = self.pages.mover(slots, where, stride, stride)
        for first in range(0, len(slots), 3):
            count = min(3, len(slots) - first)
            yield mover, first, count, data[first * stride : (first + count) * stride]


MOVERS: dict[str, Callable[[PagedBuffers], Moved]] = {
    "native": lambda buffers: Moved(HostPages(buffers)),
    "numpy": lambda buffers: Moved(HostPages(buffers, fast=False)),
    "device": lambda buffers: Moved(DevicePages(buffers)),
}
LATTICES = {
    "whole": TokenLattice(),
    "two": TokenLattice(2, 2, 1),
    "fine": TokenLattice(1, 3, 2),
    "coarse": TokenLattice(4, 2, 0),
}
TOKENS = 8
"""Local tokens of an engine block; a multiple of every interleave above."""

_PAIRS = [
    (kind, layout)
    for kind in ("gqa", "mla", "fp8", "mixed", "opaque")
    for layout in LAYOUTS
    if suits(layout, GROUPS[kind](), GROUPS[kind]().heads)
]


def _where(
    group: LayerGroup, lattice: TokenLattice, blocks: int, start: int, stop: int
) -> Placement:
    table = np.random.default_rng(3).permutation(blocks)
    unit = unit_tokens(lattice, group.block_tokens, TOKENS)
    return place(lattice, unit, TOKENS, table, 0, start, stop)


@pytest.mark.parametrize("lattice", LATTICES)
@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize(("kind", "layout"), _PAIRS)
def test_moves_what_it_should_and_nothing_else(
    kind: str, layout: str, mover: str, lattice: str
) -> None:
    group = GROUPS[kind]()
    tokens, gap = 24, 7
    slots = [(1, h) for h in range(group.heads)] + [(0, 0)]
    make = LAYOUTS[layout]
    for start, stop in ((0, 24), (0, 16), (8, 20)):
        pool = make(group, 2, group.heads, 5, TOKENS)
        twin = make(group, 2, group.heads, 5, TOKENS)
        where = _where(group, LATTICES[lattice], 5, start, stop)
        size = tokens * group.token_bytes
        raw = np.random.default_rng(9).integers(0, 256, len(slots) * (size + gap), dtype=np.uint8)
        chunks = np.ndarray(
            (len(slots), tokens, group.token_bytes),
            np.uint8,
            raw,
            0,
            (size + gap, group.token_bytes, 1),
        )
        MOVERS[mover](pool.buffers).scatter(slots, where, memoryview(raw), size + gap)
        by_hand(twin, slots, where, chunks, out=True)
        assert pool.snapshot() == twin.snapshot()

        found = raw.copy()
        expected = raw.copy()
        view = np.ndarray(chunks.shape, np.uint8, expected, 0, chunks.strides)
        full = make(group, 2, group.heads, 5, TOKENS)
        by_hand(full, slots, where, view, out=False)
        MOVERS[mover](full.buffers).gather(slots, where, memoryview(found), size + gap)
        assert np.array_equal(found, expected)
        assert not np.array_equal(found, raw) or not len(where.block)


@settings(max_examples=40)
@given(
    layout=st.sampled_from(sorted(set(LAYOUTS) - {"latent"})),
    lattice=st.sampled_from(sorted(LATTICES)),
    start=st.integers(0, 5),
    length=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_host_and_device_agree(
    layout: str, lattice: str, start: int, length: int, seed: int
) -> None:
    group = small_group()
    where = _where(group, LATTICES[lattice], 7, 4 * start, 4 * (start + length))
    slots = [(layer, head) for layer in (2, 0) for head in (3, 1)]
    stride = 4 * 12 * group.token_bytes + seed
    raw = np.random.default_rng(seed).integers(0, 256, stride * len(slots), dtype=np.uint8)
    ends = []
    for mover in MOVERS.values():
        pool = LAYOUTS[layout](group, 4, 4, 7, TOKENS)
        mover(pool.buffers).scatter(slots, where, memoryview(raw), stride)
        back = np.zeros_like(raw)
        mover(pool.buffers).gather(slots, where, memoryview(back), stride)
        ends.append((pool.snapshot(), back.tobytes()))
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("mover", MOVERS)
def test_what_is_scattered_is_gathered_again(mover: str) -> None:
    group = small_group()
    pool = LAYOUTS["packed-permuted"](group, 4, 4, 5, TOKENS)
    where = _where(group, TokenLattice(), 5, 0, 24)
    slots = [(layer, head) for layer in range(4) for head in range(4)]
    stride = 24 * group.token_bytes
    raw = np.random.default_rng(1).integers(0, 256, stride * 16, dtype=np.uint8)
    pages = MOVERS[mover](pool.buffers)
    pages.scatter(slots, where, memoryview(raw), stride)
    back = np.zeros_like(raw)
    pages.gather(slots, where, memoryview(back), stride)
    assert np.array_equal(back, raw)


def test_nothing_wanted_moves_nothing() -> None:
    group = small_group()
    pool = LAYOUTS["packed-hnd"](group, 4, 4, 5, TOKENS)
    before = pool.snapshot()
    where = place(TokenLattice(4, 8, 7), 4, TOKENS, np.array([0]), 0, 0, 4)
    for mover in MOVERS.values():
        mover(pool.buffers).scatter([(0, 0)], where, memoryview(b""), 0)
        mover(pool.buffers).gather([(0, 0)], where, memoryview(b""), 0)
    assert pool.snapshot() == before


def test_host_memory_is_moved_by_the_host() -> None:
    pool = LAYOUTS["packed-hnd"](small_group(), 4, 4, 5, TOKENS)
    assert isinstance(pages_of(pool.buffers), HostPages)


def test_long_units_far_apart_at_odd_addresses(tmp_path: Path) -> None:
    """NumPy counts the bytes of overlapping rows, which were more than fit 63 bits here."""
    tokens = 1024
    group = LayerGroup.attention_kv(
        layers=2, heads=1, head_size=64, block_tokens=tokens, extent_blocks=1
    )
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    span, size = 1 << 46, tokens * group.token_bytes
    try:
        far = torch.frombuffer(mmap.mmap(-1, span, flags=flags), dtype=torch.uint8)
    except OSError:
        pytest.skip("this machine lends no address space that it does not have")
    ends = [far[:size], far[span - 1 - size : span - 1]]
    pages = [t.view(1, 1, tokens, group.token_bytes) for t in ends]
    for page in pages:
        page.random_(0, 255)
    wanted = [page.clone() for page in pages]

    identity = Identity("far", model_layers=2, groups=(group,), revision="1")
    with kvstore.open(tmp_path) as store:
        namespace = store.namespace(identity)
        buffers = PagedBuffers.packed(group, pages)
        worker = namespace.worker(ParallelConfig(), Rank(), buffers)
        keys = namespace.keys(range(tokens))
        worker.store(keys, [0])
        worker.commit(keys)
        for page in pages:
            page.zero_()
        assert worker.load(keys, [0]).blocks == 1
    assert all(torch.equal(a, b) for a, b in zip(pages, wanted, strict=True))


def test_memory_that_has_moved_is_refused() -> None:
    group = GROUPS["gqa"]()
    layers = [torch.zeros(3, 4, 4, 16, dtype=torch.bfloat16) for _ in range(4)]
    pages = pages_of(PagedBuffers.packed(group, layers))
    pages.require_unmoved()
    layers[2].share_memory_()
    with pytest.raises(InvalidArgument, match="elsewhere than when the worker was made"):
        pages.require_unmoved()
