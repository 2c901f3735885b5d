"""Segments of tiled parts: what is plain stays plain, and nothing that overlaps is let in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.radix import Radix, radix_pool

from kvstore.buffers import PagedBuffers
from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import LayerGroup
from kvstore.segments import Segment, Tiling

KV = LayerGroup.attention_kv(layers=1, heads=2, head_size=8, block_tokens=4, element="bfloat16")


def _tiles(view: torch.Tensor, tokens: int, elements: int) -> torch.Tensor:
    """The same view with both inner axes in tiles of these sizes."""
    return view.unflatten(2, (-1, tokens)).unflatten(4, (-1, elements))


def _facts(s: Segment) -> tuple[object, ...]:
    own = (s.address, s.nbytes, s.content_offset, s.blocks, s.heads, s.tokens)
    return (*own, s.block_stride, s.head_stride, s.token_stride, s.tiling)


@pytest.mark.parametrize(("tokens", "elements"), [(1, 1), (2, 4), (4, 8), (4, 1), (1, 8)])
def test_a_plain_page_in_tiles_is_plain(tokens: int, elements: int) -> None:
    pages = torch.zeros(3, 2, 4, 16, dtype=torch.bfloat16)
    named = {"key": pages[..., :8], "value": pages[..., 8:]}
    wanted = PagedBuffers(KV, [named]).layers[0]
    assert [s.tiling for s in wanted] == [None]
    tiled = {name: _tiles(view, tokens, elements) for name, view in named.items()}
    found = PagedBuffers(KV, [tiled]).layers[0]
    assert [_facts(s) for s in found] == [_facts(s) for s in wanted]


def test_elements_in_a_row_are_one_item() -> None:
    key = torch.zeros(3, 2, 2, 4, 4, dtype=torch.bfloat16).permute(0, 1, 3, 2, 4)  # ROCm's tiles
    value = torch.zeros(3, 2, 4, 8, dtype=torch.bfloat16)
    segments = PagedBuffers(KV, [{"key": key.unsqueeze(2), "value": value}]).layers[0]
    assert segments[0].tiling == Tiling(8, 2, 4, 0, 8, 1, 32, 8)
    assert segments[1].tiling is None
    turned = torch.zeros(3, 2, 8, 4, dtype=torch.bfloat16).transpose(2, 3)
    segments = PagedBuffers(KV, [{"key": turned, "value": value}]).layers[0]
    assert segments[0].tiling == Tiling(2, 8, 4, 0, 2, 8, 0, 8)


def test_tokens_in_tiles_of_whole_contents() -> None:
    """A step from tile to tile that is not that of tokens, each token's bytes in a row."""
    memory = torch.zeros(3, 2, 2, 3, 8, dtype=torch.bfloat16)  # a third token of padding
    view = memory[:, :, :, :2].unsqueeze(4)
    other = torch.zeros(3, 2, 4, 8, dtype=torch.bfloat16)
    segments = PagedBuffers(KV, [{"key": view, "value": other}]).layers[0]
    assert segments[0].tiling == Tiling(16, 1, 2, 48, 16, 1, 0, 16)
    assert segments[0].reach == 3 * 2 * 2 * 3 * 16 - 16


def test_other_axes_are_refused() -> None:
    view = torch.zeros(3, 2, 4, 8, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="4 axes"):
        PagedBuffers(KV, [{"key": view.unsqueeze(2), "value": view.clone()}])
    with pytest.raises(InvalidArgument, match="16 elements"):
        PagedBuffers(KV, [{"key": _tiles(torch.cat([view] * 2, 3), 2, 4), "value": view}])
    with pytest.raises(InvalidArgument, match="is empty"):
        PagedBuffers(KV, [{"key": _tiles(view, 2, 4)[:0], "value": view}])
    with pytest.raises(InvalidArgument, match=r"different \[block, head, token\] sizes"):
        PagedBuffers(KV, [{"key": _tiles(view, 2, 4)[:, :, :1], "value": view.clone()}])


def test_views_of_bytes_where_these_show_the_elements() -> None:
    value = torch.zeros(3, 2, 4, 16, dtype=torch.uint8)

    def key(*order: int) -> torch.Tensor:
        return torch.zeros(3, 2, 4, 4, 4, dtype=torch.uint8).permute(0, 1, *order).unsqueeze(2)

    made = PagedBuffers(KV, [{"key": key(3, 2, 4), "value": value}])  # two whole elements a tile
    assert made.layers[0][0].tiling == Tiling(4, 4, 4, 0, 4, 1, 16, 4)
    with pytest.raises(NotCertified, match="does not show where"):
        PagedBuffers(KV, [{"key": key(4, 2, 3), "value": value}])  # every fourth byte
    single = torch.zeros(3, 2, 16, 4, dtype=torch.uint8).transpose(2, 3)
    with pytest.raises(NotCertified, match="does not show where"):
        PagedBuffers(KV, [{"key": single, "value": value}])
    fp8 = LayerGroup.attention_kv(
        layers=1, heads=2, head_size=16, block_tokens=4, element="float8_e4m3fn"
    )
    made = PagedBuffers(fp8, [{"key": single, "value": value}])  # a byte is an element here
    assert made.layers[0][0].tiling == Tiling(1, 16, 4, 0, 1, 16, 0, 4)


@pytest.mark.parametrize(
    "order", ["bhTtEep", "bhpTtEe", "pbhEeTt", "bTthpEe", "tbEpehT", "epbhTtE"]
)
def test_parts_woven_into_each_other_are_told_apart(order: str) -> None:
    """Element by element, token by token, head by head: whatever the axis, it is shown."""
    pool = radix_pool(KV, 1, 2, 3, 4, [Radix((2, 4), tuple(order), (0,) * 7)] * 2)
    assert len(pool.buffers.layers[0]) in (1, 2)


def test_parts_of_two_encodings_in_one_page() -> None:
    """Along axes that only one has, all of it counts."""
    memory = torch.zeros(3 * 2 * 64, dtype=torch.bfloat16)
    plain, turned = (128, 64, 8, 1), (128, 64, 1, 4)

    def views(key: tuple[int, ...], value: tuple[int, ...], at: int) -> dict[str, torch.Tensor]:
        size = (2, 2, 4, 8)
        return {"key": memory.as_strided(size, key), "value": memory.as_strided(size, value, at)}

    for key, value in ((plain, turned), (turned, plain)):
        assert len(PagedBuffers(KV, [views(key, value, 32)]).layers[0]) == 2
        for at in (1, 8, 31, 33):
            with pytest.raises(NotCertified, match="two content parts share memory"):
                PagedBuffers(KV, [views(key, value, at)])


def test_layers_of_tiles_in_one_memory() -> None:
    memory = torch.zeros(3, 2, 2, 2, 8, 4, dtype=torch.bfloat16)  # block, layer, part, head, e, t
    two = LayerGroup.attention_kv(layers=2, heads=2, head_size=8, block_tokens=4)
    views = [
        {name: memory[:, layer, part].transpose(2, 3) for part, name in enumerate(("key", "value"))}
        for layer in (0, 1)
    ]
    PagedBuffers(two, views)
    with pytest.raises(NotCertified, match="layers 0 and 1 of the rank share memory"):
        PagedBuffers(two, [views[0], views[0]])


def _memory_of(views: dict[str, torch.Tensor]) -> list[int]:
    out: list[int] = []
    for view in views.values():
        at = np.array(view.storage_offset())
        for step, count in zip(view.stride(), view.shape, strict=True):
            at = at[..., None] + np.arange(count) * step
        out += at.ravel().tolist()
    return out


@settings(max_examples=300)
@given(
    order=st.permutations(range(6)),
    second=st.permutations(range(6)),
    same=st.booleans(),
    gaps=st.lists(st.sampled_from([0, 0, 0, 0, -1, 1, -2, 3]), min_size=12, max_size=12),
    start=st.integers(0, 160),
)
def test_never_accepts_tiles_that_share_a_byte(
    order: list[int], second: list[int], same: bool, gaps: list[int], start: int
) -> None:
    """Whatever the steps: what two elements would share is refused."""
    group = LayerGroup.attention_kv(layers=1, heads=2, head_size=4, block_tokens=4)
    memory = torch.zeros(4096, dtype=torch.bfloat16)
    sizes, views = (2, 2, 2, 2, 2, 2), {}
    for name, axes, own, at in (
        ("key", order, gaps[:6], 0),
        ("value", order if same else second, gaps[:6] if same else gaps[6:], start),
    ):
        steps, step = [0] * 6, 1
        for axis, gap in zip(axes, own, strict=True):
            steps[axis] = step
            step = max(1, step * 2 + gap)
        views[name] = memory.as_strided(sizes, steps, at)
    places = _memory_of(views)
    distinct = len(set(places)) == len(places)
    try:
        PagedBuffers(group, [views])
    except NotCertified:
        apart = start > max(_memory_of({"key": views["key"]}))
        assert not distinct or not apart or min(gaps) < 0
    else:
        assert distinct
