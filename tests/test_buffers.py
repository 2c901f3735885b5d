"""Paged buffers: every constructor shows the engine's own memory, or refuses and says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.pools import LAYOUTS, suits
from support.world import small_group
from tiny import GROUPS

from kvstore.buffers import PagedBuffers
from kvstore.elements import element
from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import ContentPart, LayerGroup
from kvstore.parallel import ParallelConfig, Rank
from kvstore.share import share_of

KV = small_group(layers=2, heads=3, shard_layers=1, shard_heads=1)


def _content(buffers: PagedBuffers, layer: int) -> Any:
    """``[block, head, token, byte]`` as the segments address it, read byte by byte."""
    out = np.zeros(
        (buffers.blocks, buffers.heads, buffers.block_tokens, buffers.group.token_bytes), np.uint8
    )
    for s in buffers.layers[layer]:
        raw = torch.empty(0, dtype=torch.uint8).set_(s.tensor.untyped_storage()).numpy()
        for index in np.ndindex(*out.shape[:3]):
            at = s.address + sum(
                i * step
                for i, step in zip(
                    index, (s.block_stride, s.head_stride, s.token_stride), strict=True
                )
            )
            where = at + np.arange(s.nbytes)
            if s.tiling is not None:
                t = s.tiling
                tile, within = divmod(index[2], t.tile_tokens)
                at += tile * t.tile_stride + within * t.token_stride - index[2] * s.token_stride
                item, byte = np.divmod(np.arange(s.nbytes), t.item)
                outer, inner = np.divmod(item, t.tile_items)
                where = at + outer * t.outer_stride + inner * t.inner_stride + byte
            out[index][s.content_offset : s.content_offset + s.nbytes] = raw[where]
    return out


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (layout, kind)
        for layout in LAYOUTS
        for kind in GROUPS
        if suits(layout, GROUPS[kind](), GROUPS[kind]().heads)
    ],
)
def test_segments_address_the_bytes_that_the_engine_sees(layout: str, kind: str) -> None:
    group = GROUPS[kind]()
    heads = group.heads
    tokens = group.page_tokens
    pool = LAYOUTS[layout](group, group.num_layers, heads, 3, tokens)
    buffers = pool.buffers
    assert (buffers.blocks, buffers.heads, buffers.block_tokens) == (3, heads, tokens)
    assert buffers.device == torch.device("cpu")
    for i in range(group.num_layers):
        expected = np.concatenate([pool.views[i][p.name] for p in group.parts], axis=-1)
        np.testing.assert_array_equal(_content(buffers, i), expected)


@pytest.mark.parametrize(
    ("layout", "segments"),
    [("packed-hnd", 1), ("packed-padded", 1), ("latent", 1), ("split-2b-nhd", 2), ("by-part", 2)],
)
def test_parts_that_lie_together_move_as_one(layout: str, segments: int) -> None:
    group = GROUPS["mla" if layout == "latent" else "gqa"]()
    pool = LAYOUTS[layout](group, 1, group.heads, 3, 4)
    assert [len(layer) for layer in pool.buffers.layers] == [segments]


def test_key_and_value_of_different_sizes() -> None:
    group = small_group(value_size=3, layers=1, shard_layers=1)
    tensor = torch.arange(2 * 4 * 5 * 11).to(torch.bfloat16).view(2, 4, 5, 11)
    buffers = PagedBuffers.packed(group, [tensor])
    assert _content(buffers, 0).tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    key, value = torch.zeros(2, 4, 5, 8).bfloat16(), torch.zeros(2, 4, 5, 3).bfloat16()
    apart = PagedBuffers(group, [{"key": key, "value": value}])
    assert [(s.nbytes, s.content_offset) for s in apart.layers[0]] == [(16, 0), (6, 16)]
    with pytest.raises(InvalidArgument, match="not 3 of bfloat16"):
        PagedBuffers.split(group, [torch.zeros(2, 5, 4, 4, 8).bfloat16()])


def test_any_element_type_may_be_handed_over_as_bytes() -> None:
    group = GROUPS["fp8"]()
    tensors = [torch.zeros(2, 2, 4, 32, dtype=torch.uint8) for _ in range(2)]
    assert PagedBuffers.packed(group, tensors).heads == 2
    mixed = GROUPS["mixed"]()
    assert mixed.token_bytes == 20
    typed = [torch.zeros(2, 2, 4, 5, dtype=torch.float32) for _ in range(2)]
    with pytest.raises(InvalidArgument, match="hand its tensors over as uint8"):
        PagedBuffers.packed(mixed, typed)


def test_size_one_axes_may_have_any_stride() -> None:
    group = small_group(layers=1, heads=1, block_tokens=1, shard_layers=1, shard_heads=1)
    tensor = torch.zeros(64, dtype=torch.bfloat16).as_strided((1, 1, 1, 16), (0, 0, 0, 1))
    assert PagedBuffers.packed(group, [tensor]).blocks == 1


def _packed(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _tiles(dtype: torch.dtype, *steps: int) -> list[dict[str, torch.Tensor]]:
    """Views of key and value of two blocks, three heads, four tokens and eight elements."""
    count = 8 * torch.bfloat16.itemsize // dtype.itemsize
    memory = torch.zeros(4096, dtype=dtype)
    size = (2, 3, 2, 2, count // 2, 2)
    return [
        {
            "key": memory.as_strided(size, steps, 0),
            "value": memory.as_strided(size, steps, 4 * count),
        }
    ]


Bad = Callable[[], object]
REFUSED: dict[str, tuple[Bad, type[Exception], str]] = {
    "axes": (lambda: PagedBuffers.packed(KV, [_packed(2, 3, 16)] * 2), InvalidArgument, "4 axes"),
    "order": (
        lambda: PagedBuffers.packed(KV, [_packed(2, 3, 4, 16)], order="hdn"),
        InvalidArgument,
        "'hnd' or 'nhd'",
    ),
    "content": (
        lambda: PagedBuffers.packed(KV, [_packed(2, 3, 4, 15)]),
        InvalidArgument,
        "has 15 x torch.bfloat16 in these tensors, 30 bytes",
    ),
    "dtype": (
        lambda: PagedBuffers.packed(KV, [_packed(2, 3, 4, 16).half()]),
        InvalidArgument,
        "torch.float16",
    ),
    "no blocks": (
        lambda: PagedBuffers.packed(KV, [_packed(0, 3, 4, 16)]),
        InvalidArgument,
        "is empty",
    ),
    "expanded": (
        lambda: PagedBuffers.packed(KV, [_packed(1, 3, 4, 16).expand(2, 3, 4, 16)]),
        NotCertified,
        "overlaps itself",
    ),
    "overlapping": (
        lambda: PagedBuffers.packed(KV, [_packed(999).as_strided((2, 3, 4, 16), (192, 48, 15, 1))]),
        NotCertified,
        "overlaps itself",
    ),
    "overlapping blocks": (
        lambda: PagedBuffers.packed(KV, [_packed(999).as_strided((2, 3, 4, 16), (191, 64, 16, 1))]),
        NotCertified,
        "two content parts share memory",
    ),
    "tiles overlap": (
        lambda: PagedBuffers(KV, _tiles(torch.bfloat16, 192, 64, 15, 2, 4, 1)),
        NotCertified,
        "overlaps itself",
    ),
    "tiles of two parts meet": (
        lambda: PagedBuffers(KV, _tiles(torch.bfloat16, 192, 48, 16, 2, 4, 1)),
        NotCertified,
        "two content parts share memory",
    ),
    "tiles of another type": (
        lambda: PagedBuffers(KV, _tiles(torch.uint8, 384, 128, 32, 16, 1, 8)),
        NotCertified,
        "does not show where",
    ),
    "split of two blocks": (
        lambda: PagedBuffers.split(KV, [_packed(2, 2, 4, 3, 8)]),
        NotCertified,
        "two axes of size 2",
    ),
    "split of three": (
        lambda: PagedBuffers.split(KV, [_packed(3, 3, 4, 3, 8)]),
        InvalidArgument,
        "key/value axis of size 2",
    ),
    "split of one part": (
        lambda: PagedBuffers.split(
            LayerGroup("x", (0,), 1, 4, (ContentPart("key", element("int8"), 4),)),
            [_packed(2, 3, 4, 3, 8)],
        ),
        InvalidArgument,
        "the group has 1 parts",
    ),
    "latent axes": (
        lambda: PagedBuffers.latent(GROUPS["mla"](), [_packed(2, 1, 4, 16)]),
        InvalidArgument,
        "3 axes",
    ),
    "pool of odd tokens": (
        lambda: PagedBuffers.token_pools(KV, [[_packed(7, 3, 8)] * 2], block_tokens=2),
        InvalidArgument,
        "pool of 7 tokens",
    ),
    "a part missing": (
        lambda: PagedBuffers(KV, [{"key": _packed(2, 3, 4, 8)}]),
        InvalidArgument,
        "views of parts ['key']",
    ),
    "a pool missing": (
        lambda: PagedBuffers.token_pools(KV, [[_packed(8, 3, 8)]]),
        InvalidArgument,
        "1 tensors",
    ),
    "one tensor for both parts": (
        lambda: PagedBuffers(KV, [dict.fromkeys(("key", "value"), _packed(2, 3, 4, 8))]),
        NotCertified,
        "two content parts share memory",
    ),
    "one tensor for both layers": (
        lambda: PagedBuffers.packed(KV, [_packed(2, 3, 4, 16)] * 2),
        NotCertified,
        "layers 0 and 1 of the rank share memory",
    ),
    "layers of two sizes": (
        lambda: PagedBuffers.packed(KV, [_packed(2, 3, 4, 16), _packed(2, 3, 8, 16)]),
        InvalidArgument,
        "different [block, head, token] sizes",
    ),
    "two devices": (
        lambda: PagedBuffers.packed(
            KV, [_packed(2, 3, 4, 16), torch.zeros(2, 3, 4, 16, dtype=torch.bfloat16).to("meta")]
        ),
        InvalidArgument,
        "different devices",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, kind, words = REFUSED[case]
    with pytest.raises(kind, match=re.escape(words)) as caught:
        make()
    assert type(caught.value) is kind


def test_layers_interleaved_in_one_pool_are_told_from_layers_that_overlap() -> None:
    pool = torch.zeros(4, 2, 3, 4, 16, dtype=torch.bfloat16)
    PagedBuffers.block_outermost(KV, pool)
    PagedBuffers.packed(KV, [pool[:2, 0], pool[2:, 0]])
    with pytest.raises(NotCertified, match="share memory"):
        PagedBuffers.packed(KV, [pool[:3, 0], pool[1:, 0]])
    flat = pool.view(-1)
    with pytest.raises(NotCertified, match="share memory"):
        PagedBuffers.packed(
            KV, [flat[at:].as_strided((2, 3, 4, 16), (384, 64, 16, 1)) for at in (0, 160)]
        )


@given(
    order=st.permutations(range(3)),
    gaps=st.tuples(*[st.integers(0, 5)] * 4),
    offset=st.integers(0, 9),
    layer_gap=st.integers(-40, 40),
)
def test_never_accepts_views_that_share_a_byte(
    order: list[int], gaps: tuple[int, ...], offset: int, layer_gap: int
) -> None:
    """Whatever the strides: if two places coincide it is refused; ample padding is accepted."""
    group = small_group(layers=2, heads=2, head_size=2, shard_layers=1, shard_heads=1)
    sizes = (3, 2, 2)
    strides, step = [0, 0, 0], 4 + gaps[3] - 2
    for axis in order:
        strides[axis] = step
        step = step * sizes[axis] + gaps[axis] - 2
    if min(strides) <= 0:
        return
    reach = sum(s * (n - 1) for s, n in zip(strides, sizes, strict=True)) + 4
    second = offset + max(0, reach + layer_gap)
    memory = torch.zeros(second + reach + 8, dtype=torch.bfloat16)
    views = [memory.as_strided((*sizes, 4), (*strides, 1), at) for at in (offset, second)]
    places = [
        at + sum(i * s for i, s in zip(index, (*strides, 1), strict=True))
        for at in (offset, second)
        for index in np.ndindex(*sizes, 4)
    ]
    distinct = len(set(places)) == len(places)
    try:
        PagedBuffers.packed(group, views)
    except NotCertified:
        assert not distinct or layer_gap < 0 or min(gaps) < 2
    else:
        assert distinct


def test_buffers_must_be_the_ranks_own() -> None:
    group = small_group()
    wide = share_of(group, ParallelConfig(), Rank(), 4)
    tensors = [_packed(3, 4, 6, 16) for _ in range(4)]
    PagedBuffers.packed(group, tensors).require(wide)
    for layers, heads, reason in ((3, 4, "3 layers, not 4"), (4, 2, "2 heads")):
        with pytest.raises(NotCertified, match=reason) as caught:
            PagedBuffers.packed(group, [t[:, :heads] for t in tensors[:layers]]).require(wide)
        assert caught.value.reason in str(caught.value)
    context = share_of(group, ParallelConfig(tp=8, dcp=2, interleave=4), Rank(), 4)
    with pytest.raises(NotCertified, match="no multiple of the interleave 4"):
        PagedBuffers.packed(group, [t[:, :1] for t in tensors]).require(context)
    nothing = share_of(group, ParallelConfig(pp=2, pp_layers=(4, 0)), Rank(1), 4)
    PagedBuffers.empty(group).require(nothing)
    with pytest.raises(NotCertified, match="0 layers"):
        PagedBuffers.empty(group).require(wide)


def test_repr_says_what_it_is() -> None:
    text = repr(PagedBuffers.packed(KV, [_packed(2, 3, 4, 16) for _ in range(2)]))
    assert text == ("PagedBuffers('kv', layers=2, blocks=2, heads=3, block_tokens=4, device=cpu)")


def test_a_view_that_negates_is_refused() -> None:
    group = LayerGroup.attention_kv(layers=1, heads=1, head_size=8, element="float32")
    plain = torch.zeros(2, 1, 16, 8)
    negated = torch._neg_view(plain)  # type: ignore[attr-defined]  # torch has no public way
    with pytest.raises(NotCertified, match="computed when read"):
        PagedBuffers(group, [{"key": plain, "value": negated}])
