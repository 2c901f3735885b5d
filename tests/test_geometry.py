from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import geometry
from kvstore.elements import ELEMENT_TYPES, element
from kvstore.errors import InvalidArgument
from kvstore.geometry import ContentPart, LayerGroup, chunk_count

KEY = ContentPart("key", element("bfloat16"), 8)
VALUE = ContentPart("value", element("bfloat16"), 8)
PAGE = ContentPart("page", element("uint8"), 8)
SCALE = ContentPart("key_scale", element("float32"), 1)


def group(**changed: Any) -> LayerGroup:
    fields: dict[str, Any] = {
        "name": "kv",
        "layers": (0, 1, 2, 3),
        "heads": 4,
        "block_tokens": 16,
        "parts": (KEY, VALUE),
    }
    return LayerGroup(**(fields | changed))


@pytest.fixture
def smollm() -> LayerGroup:
    return LayerGroup.attention_kv(layers=30, heads=3, head_size=64)


def test_smollm2_by_hand(smollm: LayerGroup) -> None:
    assert smollm.layers == tuple(range(30))
    assert (smollm.block_tokens, smollm.extent_blocks) == (16, 16)
    assert smollm.token_bytes == 2 * 64 * 2
    assert (smollm.content, smollm.carrier.name) == (128, "bfloat16")
    assert smollm.page_bytes == 3 * 16 * 256
    assert smollm.chunk_bytes() == 16 * 16 * 256 == 65536
    assert smollm.chunk_bytes(2) == 2 * 16 * 256
    assert smollm.shape(5) == (30, 5, 3, 16, 128)
    # One head of 30 layers is 1.875 MiB, which is enough for a shard.
    assert (smollm.shard_layers, smollm.shard_heads) == (30, 1)
    assert smollm.shard_grid() == (1, 3)
    assert chunk_count(smollm) == 30
    assert (smollm.part_offset("key"), smollm.part_offset("value")) == (0, 128)


def test_deepseek_mla_by_hand() -> None:
    mla = LayerGroup.mla(layers=61)
    assert (mla.heads, mla.block_tokens, mla.extent_blocks) == (1, 64, 4)
    assert [p.name for p in mla.parts] == ["latent", "rope_key"]
    assert (mla.token_bytes, mla.content) == (1152, 576)
    assert mla.part_offset("rope_key") == 1024
    assert mla.chunk_bytes() == 4 * 64 * 1152
    assert [p.name for p in LayerGroup.mla(layers=1, rope=0).parts] == ["latent"]


def test_parts_of_several_types_are_stored_as_bytes() -> None:
    mixed = group(parts=(KEY, SCALE, VALUE))
    assert (mixed.carrier.name, mixed.content) == ("uint8", 16 + 4 + 16)
    assert mixed.part_offset("value") == 20


def test_opaque_pages_have_one_long_token() -> None:
    opaque = LayerGroup.opaque(
        name="tp2-rank1", layers=[4, 5], page_bytes=1000, block_tokens=32, parallel="tp=2 rank 1"
    )
    assert (opaque.page_tokens, opaque.block_tokens, opaque.content) == (1, 32, 1000)
    assert opaque.page_bytes == 1000
    assert opaque.extent_blocks == 8
    assert opaque.shape(8) == (2, 8, 1, 1, 1000)


def test_opaque_pages_are_bytes() -> None:
    page = ContentPart("page", element("uint8"), 24)
    opaque = group(attention="opaque", parallel="tp=2", heads=1, parts=(page,))
    assert (opaque.carrier.name, opaque.content) == ("uint8", 24)
    page = ContentPart("page", element("float32"), 6)
    with pytest.raises(InvalidArgument, match="one part, 'page', of uint8"):
        group(attention="opaque", parallel="tp=2", heads=1, parts=(page,))


def test_limits_of_the_format() -> None:
    found = {n: v for n, v in vars(geometry).items() if n.startswith(("MAX_", "MIN_", "EXTENT"))}
    assert found == {
        "MAX_LAYERS": 4096,
        "MAX_HEADS": 4096,
        "MAX_BLOCK_TOKENS": 65536,
        "MAX_CONTENT": 1048576,
        "MAX_EXTENT_BLOCKS": 4096,
        "MAX_PARTS": 16,
        "MAX_CHUNK_BYTES": 1073741824,
        "MAX_CHUNKS": 1048576,
        "MAX_SHARDS": 65536,
        "MAX_SHARD_BYTES": 1099511627776,
        "EXTENT_TOKENS": 256,
        "MIN_SHARD_BYTES": 1048576,
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"layers": range(4096)},
        {"layers": (0, 4095)},
        {"heads": 4096},
        {"block_tokens": 65536},
        {"extent_blocks": 4096},
        {"attention": "chunked", "window": 1 << 31},
        {"parts": [ContentPart(f"p{i}", element("int8"), 1) for i in range(16)]},
        {"parts": [ContentPart("a", element("float32"), 1 << 20)]},
        {"layers": range(256), "heads": 256, "shard_layers": 1, "shard_heads": 1},
        {"layers": range(1024), "heads": 1024, "shard_heads": 1024},
        # Shards of 2^39 bytes: 512 x 1024 chunks of a mebibyte.
        {
            "layers": range(512),
            "heads": 1024,
            "shard_heads": 1024,
            "block_tokens": 32768,
            "extent_blocks": 1,
        },
    ],
    ids=lambda x: f"{x!r:.50}",
)
def test_the_limits_themselves_are_accepted(changed: dict[str, Any]) -> None:
    group(**changed)


@pytest.mark.parametrize(
    ("heads", "wanted"),
    [(1, 1), (8, 4), (6, 6), (12, 4), (7, 7)],
)
def test_default_shard_is_the_fewest_heads_that_make_one_mebibyte(heads: int, wanted: int) -> None:
    # 16 blocks of 16 tokens of 512 bytes: 128 KiB a head and layer; two layers, 256 KiB a head.
    made = LayerGroup.attention_kv(layers=2, heads=heads, head_size=128)
    assert made.chunk_bytes() == 128 << 10
    assert made.shard_heads == wanted


def test_long_blocks_make_extents_of_one_block() -> None:
    assert group(block_tokens=512).extent_blocks == 1


REJECTED = {
    "name-empty": ({"name": ""}, "layer group name"),
    "name-upper": ({"name": "KV"}, "layer group name"),
    "name-climbs": ({"name": "a..b"}, "layer group name"),
    "name-is-a-record": ({"name": "zarr.json"}, "layer group name"),
    "name-slash": ({"name": "a/b"}, "layer group name"),
    "name-newline": ({"name": "kv\n"}, "layer group name"),
    "name-long": ({"name": "k" * 65}, "layer group name"),
    "name-type": ({"name": 3}, "layer group name"),
    "layers-none": ({"layers": ()}, "number of layers"),
    "layers-too-many": ({"layers": range(4097)}, "number of layers"),
    "layers-order": ({"layers": (1, 0)}, "must be ascending"),
    "layers-repeat": ({"layers": (1, 1)}, "must be ascending"),
    "layer-negative": ({"layers": (-1, 0)}, "layer index"),
    "layer-large": ({"layers": (4096,)}, "layer index"),
    "layer-bool": ({"layers": (0, True)}, "layer index"),
    "layer-false": ({"layers": (False, 1)}, "layer index"),
    "layer-float": ({"layers": (0.0,)}, "layer index"),
    "layer-text": ({"layers": "01"}, "layer index"),
    "heads-zero": ({"heads": 0}, "heads of layer group 'kv'"),
    "heads-bool": ({"heads": True}, "heads of layer group 'kv'"),
    "heads-large": ({"heads": 4097}, "heads of layer group 'kv'"),
    "tokens-zero": ({"block_tokens": 0}, "block_tokens"),
    "tokens-large": ({"block_tokens": 65537}, "block_tokens"),
    "tokens-float": ({"block_tokens": 16.0}, "block_tokens"),
    "parts-none": ({"parts": ()}, "number of content parts"),
    "parts-many": (
        {"parts": [ContentPart(f"p{i}", element("int8"), 1) for i in range(17)]},
        "number of content parts",
    ),
    "parts-same-name": ({"parts": (KEY, KEY)}, "different names"),
    "content-large": (
        {"parts": (ContentPart("a", element("int8"), 1 << 20), SCALE)},
        "content of layer group",
    ),
    "attention": ({"attention": "linear "}, "must be one of: full"),
    "window-missing": ({"attention": "sliding_window"}, "window"),
    "window-extra": ({"window": 8}, "window"),
    "window-zero": ({"attention": "chunked", "window": 0}, "window"),
    "window-bool": ({"attention": "chunked", "window": True}, "window"),
    "parallel-extra": ({"parallel": "tp=2"}, "goes with opaque"),
    "parallel-missing": ({"attention": "opaque"}, "goes with opaque"),
    "parallel-type": ({"attention": "opaque", "parallel": 2}, "parallel of layer group"),
    "parallel-empty": ({"attention": "opaque", "parallel": ""}, "parallel of layer group"),
    "parallel-control": ({"attention": "opaque", "parallel": "a\x1b[m"}, "parallel of layer"),
    "opaque-heads": (
        {"attention": "opaque", "parallel": "tp=2", "parts": (PAGE,)},
        "one head and one part",
    ),
    "opaque-parts": (
        {"attention": "opaque", "parallel": "tp=2", "heads": 1, "parts": (PAGE, SCALE)},
        "one head and one part",
    ),
    "opaque-part-name": (
        {"attention": "opaque", "parallel": "tp=2", "heads": 1, "parts": (KEY,)},
        "one head and one part",
    ),
    "window-large": ({"attention": "chunked", "window": (1 << 31) + 1}, "window"),
    "extent-large": ({"extent_blocks": 4097}, "extent_blocks"),
    "extent-negative": ({"extent_blocks": -1}, "extent_blocks"),
    "chunk-large": ({"block_tokens": 65536, "extent_blocks": 4096}, "chunk bytes"),
    "shard-layers": ({"shard_layers": 3}, "does not divide its 4 layers"),
    "shard-heads": ({"shard_heads": 3}, "does not divide its 4 heads"),
    "shard-layers-large": ({"shard_layers": 8}, "shard_layers"),
    "shard-layers-text": ({"shard_layers": "2"}, "shard_layers"),
    "shard-heads-negative": ({"shard_heads": -2}, "shard_heads"),
    # A record lists every shard and an index lists every chunk: their number is bounded too.
    "shards-many": (
        {"layers": range(4096), "heads": 4096, "shard_layers": 1, "shard_heads": 1},
        "number of shards",
    ),
    "chunks-many": (
        {"layers": range(4096), "heads": 4096, "shard_heads": 4096},
        "chunks of a shard",
    ),
    "shard-bytes": (
        {"layers": range(1024), "heads": 1024, "shard_heads": 1024, "block_tokens": 65536},
        "shard bytes",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case: str) -> None:
    changed, fragment = REJECTED[case]
    with pytest.raises(InvalidArgument, match=fragment):
        group(**changed)


@pytest.mark.parametrize(
    ("name", "of", "count", "fragment"),
    [
        ("Key", "int8", 1, "content part name"),
        ("", "int8", 1, "content part name"),
        ("k" * 33, "int8", 1, "content part name"),
        (None, "int8", 1, "content part name"),
        ("key", "int4", 1, "is not known"),
        ("key", "int8", 0, "count of content part 'key'"),
        ("key", "int8", True, "count of content part 'key'"),
        ("key", "int8", (1 << 20) + 1, "count of content part 'key'"),
        ("key", "int8", 1.0, "count of content part 'key'"),
    ],
)
def test_rejected_part(name: Any, of: Any, count: Any, fragment: str) -> None:
    with pytest.raises(InvalidArgument, match=fragment):
        ContentPart(name, of, count)


@pytest.mark.parametrize("layers", [0, -1, 4097, 10**12, True])
def test_a_number_of_layers_is_checked_before_it_is_counted_out(layers: int) -> None:
    with pytest.raises(InvalidArgument, match="number of layers"):
        LayerGroup.attention_kv(layers=layers, heads=1, head_size=8)
    with pytest.raises(InvalidArgument, match="number of layers"):
        LayerGroup.mla(layers=layers)


def test_an_unknown_part_has_no_offset(smollm: LayerGroup) -> None:
    with pytest.raises(InvalidArgument, match="no part 'scale'; it has: key, value"):
        smollm.part_offset("scale")


@st.composite
def groups(draw: st.DrawFn) -> LayerGroup:
    """Any group that the format takes, kept small."""
    layers = draw(st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True).map(sorted))
    heads = draw(st.integers(1, 12))
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True))
    kinds = st.sampled_from(sorted(ELEMENT_TYPES))
    parts = [ContentPart(n, element(draw(kinds)), draw(st.integers(1, 40))) for n in names]
    attention = draw(st.sampled_from(["full", "sliding_window", "chunked", "linear"]))
    divisors = st.sampled_from([d for d in range(1, heads + 1) if heads % d == 0])
    return LayerGroup(
        name="g",
        layers=tuple(layers),
        heads=heads,
        block_tokens=draw(st.integers(1, 600)),
        parts=tuple(parts),
        attention=attention,
        window=draw(st.integers(1, 4096)) if attention in ("sliding_window", "chunked") else None,
        extent_blocks=draw(st.integers(0, 20)),
        shard_heads=draw(st.just(0) | divisors),
    )


@given(groups(), st.integers(1, 20))
def test_sizes_agree_with_one_another(made: LayerGroup, blocks: int) -> None:
    shape = made.shape(blocks)
    assert math.prod(shape[1:]) * made.carrier.itemsize == blocks * made.page_bytes
    assert made.chunk_bytes(blocks) * made.heads == blocks * made.page_bytes
    assert made.content * made.carrier.itemsize == made.token_bytes
    rows, columns = made.shard_grid()
    assert (rows * made.shard_layers, columns * made.shard_heads) == (made.num_layers, made.heads)
    assert rows * columns * chunk_count(made) == made.num_layers * made.heads
    offsets = [made.part_offset(p.name) for p in made.parts]
    ends = [at + p.nbytes for at, p in zip(offsets, made.parts, strict=True)]
    assert [*offsets, made.token_bytes] == [0, *ends]


@given(groups())
def test_defaults_written_out_give_the_same_group(made: LayerGroup) -> None:
    again = group(
        name=made.name,
        layers=made.layers,
        heads=made.heads,
        block_tokens=made.block_tokens,
        parts=made.parts,
        attention=made.attention,
        window=made.window,
        extent_blocks=made.extent_blocks,
        shard_layers=made.shard_layers,
        shard_heads=made.shard_heads,
    )
    assert again == made
    assert hash(again) == hash(made)
