"""Copy runs: the recorded placements of a real engine, and the invariants for every config."""

from __future__ import annotations

import json
import math
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.election import elected_ranks
from kvstore.elements import element
from kvstore.errors import NotCertified
from kvstore.geometry import ContentPart, LayerGroup
from kvstore.layout import PageLayout, PartPlace
from kvstore.parallel import ParallelConfig, Rank
from kvstore.runs import CopyRun, check_layout, copy_runs
from kvstore.share import Share, all_shares, certify, share_of

INT8 = element("int8")
Bytes = npt.NDArray[np.uint8]
VECTORS = json.loads((Path(__file__).parent / "vectors" / "page_mapping.json").read_text())


def group_of(heads: int, parts: dict[str, int], *, layers: int = 1, tokens: int = 8) -> LayerGroup:
    return LayerGroup(
        name="kv",
        layers=tuple(range(layers)),
        heads=heads,
        block_tokens=tokens,
        parts=tuple(ContentPart(name, INT8, count) for name, count in parts.items()),
        attention="mla" if "latent" in parts else "full",
    )


def vector_name(v: dict[str, Any]) -> str:
    names = ("layout", "tp", "dcp", "pcp", "interleave", "kv_heads", "block_tokens")
    return "-".join(str(v[name]) for name in names)


def run_vector(v: dict[str, Any]) -> None:
    """Raise NotCertified where the vector's config is refused; check all it says otherwise."""
    kind, _, order = v["layout"].partition("_")
    content = v["content_bytes"]
    if kind == "latent":
        parts = {"latent": content}
    else:
        parts = {"key": content // 2, "value": content - content // 2}
    group = group_of(v["kv_heads"], parts)
    config = ParallelConfig(v["tp"], dcp=v["dcp"], pcp=v["pcp"], interleave=v["interleave"])
    certify(group, config, 1)
    span = v["block_tokens"] * config.cp
    assert len(v["ranks"]) == config.world_size
    for expected in v["ranks"]:
        share = share_of(group, config, config.rank(expected["rank"]), 1)
        held = {"heads": len(share.heads), "block_tokens": v["block_tokens"]}
        if kind == "latent":
            layout = PageLayout.latent(group, block_tokens=v["block_tokens"])
        elif kind == "split":
            layout = PageLayout.split(group, order=order, **held)
        else:
            layout = PageLayout.packed(group, order=order, **held)
        runs = copy_runs(group, share, layout, span)
        assert [[r.local, r.canonical, r.nbytes] for r in runs] == expected["runs"]
        assert share.replicas == expected["num_writers"]
        assert share.replica == expected["writer_index"]
        assert layout.page_bytes == v["local_page_bytes"]
        assert share.page_bytes(group, v["block_tokens"]) == v["local_page_bytes"]
        assert group.heads * span * group.token_bytes == v["canonical_page_bytes"]


@pytest.mark.parametrize("v", VECTORS["vectors"], ids=vector_name)
def test_placements_recorded_from_an_engine(v: dict[str, Any]):
    if v["certified"]:
        run_vector(v)
    else:
        with pytest.raises(NotCertified):
            run_vector(v)


def test_all_vectors_are_there():
    assert len(VECTORS["vectors"]) == 126
    assert sum(not v["certified"] for v in VECTORS["vectors"]) == 24


@st.composite
def configs(draw: st.DrawFn, heads: int, layers: int) -> ParallelConfig:
    """Any config that maps those heads: GQA splits, MQA and MLA replicas, DCP, PCP, uneven PP."""
    if draw(st.booleans()):
        tp, dcp = draw(st.sampled_from([t for t in range(1, heads + 1) if heads % t == 0])), 1
    else:
        dcp = draw(st.integers(1, 3))
        tp = heads * dcp * draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, layers), max_size=2)))
    ends = [0, *cuts, layers]
    return ParallelConfig(
        tp=tp,
        dcp=dcp,
        pp=len(cuts) + 1,
        pcp=draw(st.integers(1, 3)),
        interleave=draw(st.sampled_from([1, 2, 4])),
        pcp_kv=draw(st.sampled_from(["sharded", "replicated"])),
        pp_layers=tuple(b - a for a, b in pairwise(ends)),
    )


def layout_for(draw: st.DrawFn, group: LayerGroup, share: Share, tokens: int) -> PageLayout:
    heads = len(share.heads)
    order = draw(st.sampled_from(["hnd", "nhd"]))
    kind = draw(st.sampled_from(["packed", "padded", "split", "outermost", "pool", "contiguous"]))
    if kind == "packed":
        return PageLayout.packed(group, heads=heads, block_tokens=tokens, order=order)
    if kind == "padded":
        return PageLayout.packed(
            group, heads=heads, block_tokens=tokens, order=order, token_padding=3
        )
    if kind == "split":
        return PageLayout.split(group, heads=heads, block_tokens=tokens, order=order)
    if kind == "outermost":
        return PageLayout.block_outermost(
            group, layers=2, heads=heads, block_tokens=tokens, order=order
        )
    if kind == "pool":
        return PageLayout.token_pool(group, heads=heads, page_tokens=tokens)
    return PageLayout.contiguous(group, heads=heads, tokens=tokens, capacity=tokens + 1)


groups = st.sampled_from(
    [
        (1, {"key": 3, "value": 3}),
        (1, {"latent": 4, "rope_key": 1}),
        (1, {"latent": 5}),
        (2, {"key": 2, "value": 2}),
        (3, {"key": 1, "value": 4}),
        (4, {"key": 3, "value": 2, "key_scale": 1}),
        (6, {"key": 1, "value": 1}),
    ]
).flatmap(lambda g: st.integers(1, 4).map(lambda layers: group_of(*g, layers=layers)))

cases = groups.flatmap(lambda g: st.tuples(st.just(g), configs(g.heads, g.num_layers)))


def page_tokens(draw: st.DrawFn, config: ParallelConfig) -> int:
    return config.interleave * draw(st.integers(1, 4 // config.interleave))


@given(cases, st.binary(min_size=32, max_size=32), st.data())
def test_elected_writers_tile_every_page_once(
    case: tuple[LayerGroup, ParallelConfig], key: bytes, data: st.DataObject
):
    group, config = case
    certify(group, config, group.num_layers)
    tokens = page_tokens(data.draw, config)
    span = tokens * config.cp
    written = np.zeros((group.num_layers, group.heads * span * group.token_bytes), np.int64)
    for _, share in elected_ranks(all_shares(group, config, group.num_layers), key):
        layout = layout_for(data.draw, group, share, tokens)
        for run in copy_runs(group, share, layout, span):
            rows = slice(share.layers.start, share.layers.stop)
            written[rows, run.canonical : run.canonical + run.nbytes] += 1
    assert written.min() == written.max() == 1


@given(cases, st.data())
def test_runs_cover_the_local_page_once(
    case: tuple[LayerGroup, ParallelConfig], data: st.DataObject
):
    group, config = case
    tokens = page_tokens(data.draw, config)
    rank = config.rank(data.draw(st.integers(0, config.world_size - 1)))
    share = share_of(group, config, rank, group.num_layers)
    layout = layout_for(data.draw, group, share, tokens)
    wanted = {
        (part.buffer, int(offset) + byte)
        for part in layout.parts
        for offset in layout.offsets(part.name).flat
        for byte in range(part.nbytes)
    }
    runs = copy_runs(group, share, layout, tokens * config.cp)
    covered = [(r.buffer, r.local + byte) for r in runs for byte in range(r.nbytes)]
    assert len(covered) == len(wanted) == layout.page_bytes
    assert set(covered) == wanted
    assert [(r.buffer, r.local) for r in runs] == sorted((r.buffer, r.local) for r in runs)
    for a, b in pairwise(runs):
        joins = (a.buffer, a.local + a.nbytes, a.canonical + a.nbytes)
        assert joins != (b.buffer, b.local, b.canonical)


class Engine:
    """Ranks with memory of their own, filled and drained through copy runs alone."""

    def __init__(
        self, group: LayerGroup, config: ParallelConfig, tokens: int, draw: st.DrawFn
    ) -> None:
        self.group, self.span = group, tokens * config.cp
        self.shares = dict(all_shares(group, config, group.num_layers))
        self.layouts = {r: layout_for(draw, group, s, tokens) for r, s in self.shares.items()}

    def _pages(self, cache: Bytes) -> list[tuple[slice, Bytes]]:
        """The canonical pages, one for each engine block, of a cache [layer, head, token, byte]."""
        starts = range(0, cache.shape[2], self.span)
        return [(s, cache[:, :, s]) for s in (slice(a, a + self.span) for a in starts)]

    def fill(self, cache: Bytes) -> dict[Rank, Bytes]:
        """Memory [layer, block, buffer, byte] of each rank, holding its share of the cache."""
        pages = self._pages(cache)
        memories = {}
        for rank, share in self.shares.items():
            layout = self.layouts[rank]
            runs = copy_runs(self.group, share, layout, self.span)
            room = max(p.block_stride for p in layout.parts)
            memory = np.full((len(share.layers), len(pages), layout.buffers, room), 255, np.uint8)
            for layer, (block, (_, page)) in product(range(len(share.layers)), enumerate(pages)):
                flat = page[share.layers[layer]].reshape(-1)
                for r in runs:
                    memory[layer, block, r.buffer, r.local : r.local + r.nbytes] = flat[
                        r.canonical : r.canonical + r.nbytes
                    ]
            memories[rank] = memory
        return memories

    def drain(self, memories: dict[Rank, Bytes], shape: tuple[int, ...], key: bytes) -> Bytes:
        """The cache, from what the elected writers hold."""
        cache = np.full(shape, 254, np.uint8)
        for rank, share in elected_ranks(self.shares.items(), key):
            runs = copy_runs(self.group, share, self.layouts[rank], self.span)
            for layer, (block, (where, page)) in product(
                range(len(share.layers)), enumerate(self._pages(cache))
            ):
                flat = page[share.layers[layer]].reshape(-1).copy()
                for r in runs:
                    flat[r.canonical : r.canonical + r.nbytes] = memories[rank][
                        layer, block, r.buffer, r.local : r.local + r.nbytes
                    ]
                held = cache[share.layers[layer], :, where]
                held[...] = flat.reshape(held.shape)
        return cache


@settings(max_examples=40, deadline=None)
@given(
    groups.flatmap(
        lambda g: st.tuples(
            st.just(g), configs(g.heads, g.num_layers), configs(g.heads, g.num_layers)
        )
    ),
    st.binary(min_size=32, max_size=32),
    st.data(),
)
def test_what_one_config_writes_another_reads(
    case: tuple[LayerGroup, ParallelConfig, ParallelConfig], key: bytes, data: st.DataObject
):
    group, writing, reading = case
    writer = Engine(group, writing, page_tokens(data.draw, writing), data.draw)
    reader = Engine(group, reading, page_tokens(data.draw, reading), data.draw)
    shape = (group.num_layers, group.heads, math.lcm(writer.span, reader.span), group.token_bytes)
    cache = np.random.default_rng(7).integers(0, 250, shape, np.uint8)
    stored = writer.drain(writer.fill(cache), shape, key)
    assert np.array_equal(stored, cache)
    assert np.array_equal(reader.drain(reader.fill(stored), shape, key[::-1]), cache)


def test_local_tokens_are_where_the_lattice_says():
    """Against the definition: a mapping wrong in both directions would pass a round trip."""
    group = group_of(2, {"key": 2, "value": 1})
    config = ParallelConfig(tp=4, dcp=2, pcp=2, interleave=2)
    span = 4 * config.cp
    cache = np.zeros((2, span, 3), np.int64)
    cache[:] = np.arange(2)[:, None, None] * 1000 + np.arange(span)[None, :, None] * 10
    cache += np.arange(3)
    for rank in config.ranks():
        share = share_of(group, config, rank, 1)
        layout = PageLayout.packed(group, heads=1, block_tokens=4, order="nhd")
        local = np.zeros(12, np.int64)
        for r in copy_runs(group, share, layout, span):
            local[r.local : r.local + r.nbytes] = cache.ravel()[
                r.canonical : r.canonical + r.nbytes
            ]
        turn = rank.pcp * 2 + rank.tp % 2
        tokens = [t for t in range(span) if t // 2 % 4 == turn]
        head = rank.tp // 2
        assert local.tolist() == [
            head * 1000 + token * 10 + byte for token in tokens for byte in range(3)
        ]


def test_canonical_layout_is_a_single_run():
    group = group_of(4, {"key": 3, "value": 2})
    share = share_of(group, ParallelConfig(tp=2), Rank(tp=1), 1)
    layout = PageLayout.packed(group, heads=2)
    assert copy_runs(group, share, layout, 8) == [CopyRun(0, 80, 80, 0)]


def test_runs_do_not_join_across_buffers():
    group = group_of(1, {"key": 1, "value": 1})
    share = share_of(group, ParallelConfig(), Rank(), 1)
    layout = PageLayout.token_pool(group)
    assert copy_runs(group, share, layout, 1) == [CopyRun(0, 0, 1, 0), CopyRun(0, 1, 1, 1)]
    places = (PartPlace("key", 1, 0, 9, 1, 1), PartPlace("value", 1, 1, 9, 1, 1, buffer=1))
    runs = copy_runs(group, share, PageLayout(places, 1, 1), 1)
    assert runs == [CopyRun(0, 0, 1, 0), CopyRun(1, 1, 1, 1)]


def test_share_without_layers_still_has_runs():
    group = group_of(2, {"key": 1, "value": 1}, layers=2)
    config = ParallelConfig(pp=2, pp_layers=(2, 0))
    share = share_of(group, config, Rank(pp=1), 2)
    assert share.empty
    assert copy_runs(group, share, PageLayout.packed(group), 8) == [CopyRun(0, 0, 32)]


def test_layouts_that_do_not_fit_are_refused():
    group = group_of(2, {"key": 2, "value": 1})
    config = ParallelConfig(tp=4, dcp=2, interleave=4)
    share = share_of(group, config, Rank(), 1)
    fitting = PageLayout.packed(group, heads=1, block_tokens=4)
    check_layout(group, share, fitting)
    other = group_of(2, {"key": 1, "value": 2})
    for layout, tokens, message in (
        (PageLayout.packed(group, block_tokens=4), 8, "the layout has 2 heads"),
        (PageLayout.packed(other, heads=1, block_tokens=4), 8, "parts of bytes"),
        (PageLayout.packed(group, heads=1, block_tokens=6), 12, "no multiple of interleave 4"),
        (fitting, 4, "spans 8 tokens under cp=2, not 4"),
    ):
        with pytest.raises(NotCertified, match=message):
            copy_runs(group, share, layout, tokens)


def test_interleave_does_not_matter_without_context_ranks():
    group = group_of(2, {"key": 2, "value": 1})
    share = share_of(group, ParallelConfig(interleave=16), Rank(), 1)
    layout = PageLayout.packed(group, block_tokens=3)
    assert copy_runs(group, share, layout, 3) == [CopyRun(0, 0, 18)]
