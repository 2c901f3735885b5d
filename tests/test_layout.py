from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.elements import element
from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import ContentPart, LayerGroup
from kvstore.layout import PageLayout, PartPlace

INT8 = element("int8")
GROUP = LayerGroup(
    name="kv",
    layers=(0, 1),
    heads=3,
    block_tokens=4,
    parts=(ContentPart("key", INT8, 5), ContentPart("value", INT8, 2)),
)


def byte_places(layout: PageLayout, blocks: int = 3) -> list[tuple[int, int]]:
    """(buffer, offset) of every byte of every layer, block, head and token: the slow way."""
    places = []
    for part in layout.parts:
        for layer, block, head, token, byte in product(
            range(layout.layers),
            range(blocks),
            range(layout.heads),
            range(layout.block_tokens),
            range(part.nbytes),
        ):
            at = part.offset + layer * layout.layer_stride + block * part.block_stride
            at += head * part.head_stride + token * part.token_stride + byte
            places.append((part.buffer, at))
    return places


LAYOUTS = {
    "packed hnd": PageLayout.packed(GROUP),
    "packed nhd": PageLayout.packed(GROUP, order="nhd"),
    "padded": PageLayout.packed(GROUP, order="nhd", token_padding=9, block_stride=200),
    "split hnd": PageLayout.split(GROUP),
    "split nhd": PageLayout.split(GROUP, heads=2, order="nhd"),
    "BLHNC": PageLayout.block_outermost(GROUP, layers=2),
    "BLNHC": PageLayout.block_outermost(GROUP, layers=2, order="nhd", block_stride=400),
    "pool": PageLayout.token_pool(GROUP),
    "paged pool": PageLayout.token_pool(GROUP, page_tokens=4),
    "contiguous": PageLayout.contiguous(GROUP, tokens=6),
    "contiguous, roomy": PageLayout.contiguous(GROUP, tokens=6, capacity=9),
    "latent": PageLayout.latent(LayerGroup.mla(layers=2, latent=3, rope=2, block_tokens=4)),
    "latent, padded": PageLayout.latent(
        LayerGroup.mla(layers=2, latent=3, rope=2, block_tokens=4), token_padding=6
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_byte_of_a_layout_is_used_twice(name: str):
    places = byte_places(LAYOUTS[name])
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("name", "used"),
    [("packed hnd", 252), ("packed nhd", 252), ("split hnd", 252), ("BLHNC", 504), ("latent", 120)],
)
def test_layouts_without_padding_fill_their_memory(name: str, used: int):
    assert sorted(byte_places(LAYOUTS[name])) == [(0, i) for i in range(used)]


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("packed hnd", (3, 4, 7), "hnc"),
        ("packed nhd", (4, 3, 7), "nhc"),
    ],
)
def test_packed_offsets_are_those_of_an_array(name: str, shape: tuple[int, ...], axes: str):
    page = np.arange(84).reshape(shape).transpose([axes.index(a) for a in "hnc"])
    layout = LAYOUTS[name]
    assert layout.offsets("key").tolist() == page[:, :, 0].tolist()
    assert layout.offsets("value").tolist() == page[:, :, 5].tolist()


def test_split_offsets_are_those_of_planes():
    layout = LAYOUTS["split nhd"]
    key = np.arange(40).reshape(4, 2, 5).transpose(1, 0, 2)
    value = 40 + np.arange(16).reshape(4, 2, 2).transpose(1, 0, 2)
    assert layout.offsets("key").tolist() == key[:, :, 0].tolist()
    assert layout.offsets("value").tolist() == value[:, :, 0].tolist()


def test_pools_and_contiguous_tensors_are_a_buffer_a_part():
    pool = PageLayout.token_pool(GROUP, page_tokens=4)
    assert pool.buffers == 2
    assert pool.part("value") == PartPlace("value", 2, 0, 24, 2, 6, buffer=1)
    whole = PageLayout.contiguous(GROUP, tokens=6, capacity=9)
    assert whole.part("key") == PartPlace("key", 5, 0, 135, 45, 5, buffer=0)
    assert whole.part("value").buffer == 1


def test_block_outermost_steps_over_layers():
    layout = PageLayout.block_outermost(GROUP, layers=2)
    assert (layout.layers, layout.layer_stride) == (2, 84)
    assert {p.block_stride for p in layout.parts} == {168}


def test_page_bytes_leave_padding_out():
    assert LAYOUTS["padded"].page_bytes == LAYOUTS["packed hnd"].page_bytes == 84
    assert LAYOUTS["split nhd"].page_bytes == 56


def test_defaults_of_an_opaque_group_are_one_page():
    group = LayerGroup.opaque(
        name="rank0", layers=[0], page_bytes=640, block_tokens=16, parallel="tp=3;rank=0.0.0"
    )
    layout = PageLayout.packed(group)
    assert (layout.heads, layout.block_tokens, layout.page_bytes) == (1, 1, 640)


counts = st.integers(1, 3)
steps = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24])
places = st.builds(
    PartPlace,
    name=st.just("key"),
    nbytes=st.integers(1, 4),
    offset=st.integers(0, 12),
    block_stride=st.sampled_from([24, 36, 60, 100]),
    head_stride=steps,
    token_stride=steps,
    buffer=st.integers(0, 1),
)


@settings(max_examples=300)
@given(places, places, st.booleans(), st.tuples(counts, counts, st.integers(1, 2), steps))
def test_any_layout_that_is_accepted_has_no_overlap(
    key: PartPlace, value: PartPlace, alike: bool, numbers: tuple[int, int, int, int]
):
    # Parts that step alike are the usual case, and one that chance alone hardly ever draws.
    other = replace(key, nbytes=value.nbytes, offset=value.offset) if alike else value
    named = replace(other, name="value")
    try:
        layout = PageLayout((key, named), *numbers)
    except NotCertified:
        return
    places = byte_places(layout)
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    "change",
    [
        {"head_stride": 19},  # heads run into each other
        {"head_stride": 0},
        {"token_stride": 4},  # less than the part
        {"token_stride": 20},  # equal steps of head and token
        {"block_stride": 59},  # blocks run into each other
    ],
)
def test_overlap_is_refused(change: dict[str, int]):
    numbers = {"block_stride": 60, "head_stride": 20, "token_stride": 5} | change
    with pytest.raises(NotCertified, match="overlap"):
        PageLayout((PartPlace("key", 5, 0, **numbers),), heads=3, block_tokens=4)


def test_parts_that_overlap_are_refused():
    key = PartPlace("key", 5, 0, 100, 28, 7)
    with pytest.raises(NotCertified, match="key, value overlap"):
        PageLayout((key, PartPlace("value", 2, 4, 100, 28, 7)), heads=3, block_tokens=4)
    PageLayout((key, PartPlace("value", 2, 4, 100, 28, 7, buffer=1)), heads=3, block_tokens=4)


def test_parts_with_unlike_block_strides_in_one_buffer_are_refused():
    # Apart in block 0, but value's block 2 is where key's block 1 is.
    key = PartPlace("key", 5, 0, 20, 5, 5)
    with pytest.raises(NotCertified):
        PageLayout((key, PartPlace("value", 5, 10, 15, 5, 5)), heads=1, block_tokens=1)


def test_part_within_the_outline_of_an_earlier_one_is_refused():
    planes = PartPlace("key", 4, 0, 100, 10, 30)
    inside = PartPlace("value", 1, 5, 100, 1, 1)
    beyond = PartPlace("extra", 1, 11, 100, 1, 1)  # past value, but still within key
    with pytest.raises(NotCertified):
        PageLayout((planes, inside, beyond), heads=2, block_tokens=1)


def test_padding_follows_every_token():
    key = PageLayout.packed(GROUP, order="nhd", token_padding=9).part("key")
    assert (key.head_stride, key.token_stride, key.block_stride) == (16, 48, 192)


def test_layers_that_overlap_are_refused():
    with pytest.raises(NotCertified):
        PageLayout.block_outermost(GROUP, layers=2, block_stride=167)
    with pytest.raises(NotCertified):
        PageLayout((PartPlace("key", 5, 0, 900, 20, 5),), 3, 4, layers=2, layer_stride=59)


def test_large_layouts_are_checked_without_listing_elements():
    group = LayerGroup.attention_kv(
        layers=80, heads=4096, head_size=128, block_tokens=4096, extent_blocks=1, shard_heads=1
    )
    assert PageLayout.packed(group, order="nhd").page_bytes == 4096 * 4096 * 512


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PageLayout.packed(GROUP, order="hdn"), "order"),
        (lambda: PageLayout.packed(GROUP, heads=0), "heads"),
        (lambda: PageLayout.split(GROUP, block_tokens=-1), "block_tokens"),
        (lambda: PageLayout.packed(GROUP, heads=True), "heads"),
        (lambda: PageLayout.block_outermost(GROUP, layers=0), "layers"),
        (lambda: PageLayout.latent(GROUP), "one head"),
        (lambda: PageLayout((), 1, 1), "parts"),
        (lambda: PageLayout((PartPlace("key", 1, -1, 1, 1, 1),), 1, 1), "offset of part 'key'"),
        (lambda: PageLayout.packed(GROUP).part("latent"), "no part 'latent'"),
    ],
)
def test_bad_arguments_are_refused(call, message: str):  # noqa: ANN001
    with pytest.raises(InvalidArgument, match=message):
        call()
