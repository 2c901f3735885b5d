from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutate import Edit, drop, junk, paths_of, put
from tiny import GROUPS, record_of, tiny_identity

from kvstore.errors import Corrupt, FormatError, UnsupportedVersion
from kvstore.extent import (
    CommitRecord,
    decode_extent,
    encode_extent,
    shard_sizes,
)
from kvstore.geometry import LayerGroup
from kvstore.jsonform import compact
from kvstore.keys import root_key

HERE = "attributes.kvstore"
IDENTITY = tiny_identity()


def decode(data: bytes, group: LayerGroup, key: str | None = None) -> CommitRecord:
    return decode_extent(data, IDENTITY, group, key, "extent x")


def test_golden(gqa: LayerGroup) -> None:
    record = record_of(gqa, 3)
    keys = [k.hex() for k in record.blocks]
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    crc = {"name": "crc32c"}
    assert json.loads(encode_extent(gqa, record)) == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4, 3, 4, 4, 16],
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3, 2, 4, 16]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [1, 3, 1, 4, 16],
                    "codecs": [little, crc],
                    "index_codecs": [little, crc],
                    "index_location": "end",
                },
            }
        ],
        "dimension_names": ["layer", "block", "head", "token", "content"],
        "attributes": {
            "kvstore": {
                "format": "kvstore",
                "version": "1.0",
                "must_understand": [],
                "namespace": IDENTITY.namespace,
                "group": "kv",
                "key": keys[2],
                "parent": IDENTITY.key_scheme.root.hex(),
                "start_block": 0,
                "blocks": keys,
                "tokens": 12,
                "parts": [
                    {"name": "key", "element": "bfloat16", "count": 8},
                    {"name": "value", "element": "bfloat16", "count": 8},
                ],
                # A chunk is 3 blocks x 4 tokens x 16 elements x 2 bytes = 384, and its checksum 4.
                "chunk_stride": 388,
                # Four chunks: 4 x 388 + 4 x 16 + 4.
                "shards": [
                    {"name": "c.0.0.0.0.0", "bytes": 1620},
                    {"name": "c.0.0.1.0.0", "bytes": 1620},
                    {"name": "c.1.0.0.0.0", "bytes": 1620},
                    {"name": "c.1.0.1.0.0", "bytes": 1620},
                ],
                "parallel_invariant": True,
                "writer": {"software": "kvstore 0.1.0", "config": "tp=2", "session": "engine-0"},
                "write_id": "00112233445566778899aabbccddeeff",
                "created": "2026-12-01T03:21:18Z",
            }
        },
    }


@pytest.mark.parametrize("extent", [0, 3])
def test_round_trip_of_every_size(any_group: LayerGroup, extent: int) -> None:
    for blocks in range(1, any_group.extent_blocks + 1):
        record = record_of(any_group, blocks, extent)
        data = encode_extent(any_group, record)
        assert decode(data, any_group, record.key.hex()) == record
        assert decode(data, any_group) == record


def test_without_a_stride_only_the_index_says_where_chunks_are(gqa: LayerGroup) -> None:
    stored = valid()
    put(f"{HERE}.chunk_stride", None)(stored)
    put(f"{HERE}.shards.1.bytes", 5000)(stored)
    record = decode(compact(stored), gqa)
    assert record.chunk_stride is None
    assert record.shards["c.0.0.1.0.0"] == 5000


def valid(name: str = "gqa", blocks: int = 3, extent: int = 1) -> Any:
    group = GROUPS[name]()
    return json.loads(
        encode_extent(group, record_of(group, min(blocks, group.extent_blocks), extent))
    )


KEYS = [k.hex() for k in record_of(GROUPS["gqa"](), 3, 1).blocks]
ROOT = IDENTITY.key_scheme.root.hex()
SHARDING = "codecs.0.configuration"
Rejections = dict[str, tuple[Edit, type[FormatError], str]]

RECORD_REJECTED: Rejections = {
    **{
        f"no-{name}": (drop(f"{HERE}.{name}"), FormatError, f"'{name}' is missing")
        for name in valid()["attributes"]["kvstore"]
    },
    **{
        f"no-writer-{name}": (drop(f"{HERE}.writer.{name}"), FormatError, f"'{name}' is missing")
        for name in ("software", "config", "session")
    },
    "attributes": (drop("attributes"), FormatError, "'attributes' is missing"),
    "record": (put(HERE, None), FormatError, "a NoneType where an object belongs"),
    "format": (put(f"{HERE}.format", "x"), FormatError, "format is not"),
    "version": (put(f"{HERE}.version", "2.0"), UnsupportedVersion, "format version 2.0"),
    "feature": (put(f"{HERE}.must_understand", ["x"]), UnsupportedVersion, "feature 'x'"),
    "namespace": (put(f"{HERE}.namespace", "x-" + "0" * 32), Corrupt, "copied or renamed"),
    "namespace-long": (put(f"{HERE}.namespace", "x" * 200), FormatError, "at most 160"),
    "namespace-escape": (put(f"{HERE}.namespace", "\x1b[2J"), Corrupt, r"'\\x1b\[2J'"),
    "group": (put(f"{HERE}.group", "mla"), Corrupt, "says group 'mla', but it lies under 'kv'"),
    "key": (put(f"{HERE}.key", KEYS[1]), Corrupt, "says key"),
    "key-number": (put(f"{HERE}.key", 5), FormatError, "'key' is 5"),
    "blocks-none": (put(f"{HERE}.blocks", []), FormatError, "0 block keys"),
    "blocks-many": (put(f"{HERE}.blocks", KEYS * 2), FormatError, "6 block keys"),
    "blocks-huge": (put(f"{HERE}.blocks", KEYS * 1400), FormatError, "at most 4096 items"),
    "blocks-repeat": (put(f"{HERE}.blocks", [KEYS[2]] * 3), FormatError, "without repeats"),
    "blocks-order": (put(f"{HERE}.blocks", KEYS[::-1]), Corrupt, "not the key of its last"),
    "blocks-fewer": (put(f"{HERE}.blocks", KEYS[1:]), FormatError, "'shape'"),
    "block-short": (put(f"{HERE}.blocks.0", KEYS[0][2:]), FormatError, "hex of 32 to 32"),
    "block-upper": (put(f"{HERE}.blocks.0", KEYS[0].upper()), FormatError, "lower-case hex"),
    "block-null": (put(f"{HERE}.blocks.0", None), FormatError, "lower-case hex"),
    "parent-null": (put(f"{HERE}.parent", None), FormatError, "lower-case hex"),
    "parent-short": (put(f"{HERE}.parent", "00" * 16), FormatError, "cannot be the key before"),
    "parent-root": (put(f"{HERE}.parent", ROOT), FormatError, "cannot be the key before"),
    "parent-own": (put(f"{HERE}.parent", KEYS[0]), FormatError, "cannot be the key before"),
    "start-odd": (put(f"{HERE}.start_block", 3), FormatError, "not a multiple"),
    "start-negative": (put(f"{HERE}.start_block", -4), FormatError, "'start_block' is -4"),
    "start-huge": (put(f"{HERE}.start_block", 1 << 60), FormatError, "'start_block' is"),
    "start-bool": (put(f"{HERE}.start_block", value=False), FormatError, "'start_block' is False"),
    "tokens": (put(f"{HERE}.tokens", 11), FormatError, "'tokens' is 11, not 12"),
    "parts": (drop(f"{HERE}.parts.1"), FormatError, "are not the layer group's"),
    "part-count": (put(f"{HERE}.parts.0.count", 9), FormatError, "are not the layer group's"),
    "part-element": (put(f"{HERE}.parts.0.element", "x"), FormatError, "is not known"),
    "part-name": (put(f"{HERE}.parts.0.name", "K"), FormatError, "content part name"),
    "parts-many": (put(f"{HERE}.parts", [{}] * 17), FormatError, "at most 16 items"),
    "stride-small": (put(f"{HERE}.chunk_stride", 387), FormatError, "'chunk_stride' is 387"),
    "stride-huge": (put(f"{HERE}.chunk_stride", 1 << 30), FormatError, "'chunk_stride' is"),
    "stride-other": (put(f"{HERE}.chunk_stride", 400), FormatError, "a stride of 400 makes it"),
    "stride-bool": (put(f"{HERE}.chunk_stride", value=True), FormatError, "'chunk_stride' is True"),
    "shard-bytes": (put(f"{HERE}.shards.0.bytes", 1621), FormatError, "has 1621 bytes; a stride"),
    "shard-small": (put(f"{HERE}.shards.0.bytes", 1619), FormatError, "'bytes' is 1619"),
    "shard-huge": (put(f"{HERE}.shards.0.bytes", 1 << 50), FormatError, "'bytes' is"),
    "shard-climbs": (
        put(f"{HERE}.shards.0.name", "../x"),
        FormatError,
        "not the name of one of its",
    ),
    "shard-fewer": (drop(f"{HERE}.shards.3"), FormatError, "its shards are"),
    "shard-other": (
        put(f"{HERE}.shards.3.name", "c.2.0.0.0.0"),
        FormatError,
        "not the name of one of its",
    ),
    "shard-twice": (put(f"{HERE}.shards.3.name", "c.0.0.0.0.0"), FormatError, "listed twice"),
    "shard-null": (put(f"{HERE}.shards.0", None), FormatError, "where an object belongs"),
    "shards-order": (
        lambda s: s["attributes"]["kvstore"]["shards"].reverse(),
        FormatError,
        "its shards are",
    ),
    "shards-repeated": (
        lambda s: s["attributes"]["kvstore"]["shards"].append(
            s["attributes"]["kvstore"]["shards"][0]
        ),
        FormatError,
        "listed twice",
    ),
    "invariant": (put(f"{HERE}.parallel_invariant", value=False), FormatError, "not True"),
    "invariant-number": (put(f"{HERE}.parallel_invariant", 1), FormatError, "not True"),
    "writer": (put(f"{HERE}.writer", "me"), FormatError, "a str where an object belongs"),
    "writer-long": (put(f"{HERE}.writer.session", "x" * 4097), FormatError, "at most 4096"),
    "write-id": (put(f"{HERE}.write_id", "00"), FormatError, "hex of 16 to 16"),
    "created": (put(f"{HERE}.created", "2026-02-30T00:00:00Z"), FormatError, "not a time"),
}
ARRAY_REJECTED: Rejections = {
    **{
        f"no-{name}": (drop(name), FormatError, f"'{name}' is missing")
        for name in valid()
        if name != "attributes"
    },
    "zarr": (put("zarr_format", 2), FormatError, "'zarr_format' is 2"),
    "node": (put("node_type", "group"), FormatError, "'node_type' is 'group'"),
    "shape": (put("shape.0", 5), FormatError, "'shape' is"),
    "shape-bool": (put("shape", value=True), FormatError, "'shape' is True"),
    "shape-longer": (put("shape", [4, 3, 4, 4, 16, 1]), FormatError, "'shape' is"),
    "type": (put("data_type", "bfloat16"), FormatError, "'data_type' is 'bfloat16'"),
    "grid": (put("chunk_grid.name", "rectangular"), FormatError, "'chunk_grid' is"),
    "grid-shape": (
        put("chunk_grid.configuration.chunk_shape.2", 4),
        FormatError,
        "'chunk_grid' is",
    ),
    "keys": (put("chunk_key_encoding.name", "v2"), FormatError, "'chunk_key_encoding' is"),
    "separator": (
        put("chunk_key_encoding.configuration.separator", "/"),
        FormatError,
        "'chunk_key_encoding' is",
    ),
    "fill": (put("fill_value", 1), FormatError, "'fill_value' is 1"),
    "fill-bool": (put("fill_value", value=False), FormatError, "'fill_value' is False"),
    "codecs-none": (put("codecs", []), FormatError, "'codecs' is"),
    "codecs-null": (put("codecs", None), FormatError, "'codecs' is None"),
    "codecs-text": (put("codecs.0", "sharding_indexed"), FormatError, "'codecs' is"),
    "codecs-two": (
        lambda s: s["codecs"].append({"name": "gzip", "configuration": {"level": 1}}),
        FormatError,
        "'codecs' is",
    ),
    "inner-shape": (put(f"{SHARDING}.chunk_shape.0", 2), FormatError, "'codecs' is"),
    "inner-big": (
        put(f"{SHARDING}.codecs.0.configuration.endian", "big"),
        FormatError,
        "'codecs' is",
    ),
    # Only one-byte elements may leave the byte order out.
    "inner-order": (put(f"{SHARDING}.codecs.0", {"name": "bytes"}), FormatError, "'codecs' is"),
    "inner-no-crc": (drop(f"{SHARDING}.codecs.1"), FormatError, "'codecs' is"),
    "inner-none": (put(f"{SHARDING}.codecs", None), FormatError, "'codecs' is"),
    "index-no-crc": (drop(f"{SHARDING}.index_codecs.1"), FormatError, "'codecs' is"),
    "index-order": (
        put(f"{SHARDING}.index_codecs.0", {"name": "bytes"}),
        FormatError,
        "'codecs' is",
    ),
    "index-start": (put(f"{SHARDING}.index_location", "start"), FormatError, "'codecs' is"),
    "sharding-extra": (put(f"{SHARDING}.extra", 1), FormatError, "'codecs' is"),
    "dimensions": (put("dimension_names.0", "head"), FormatError, "'dimension_names' is"),
    "dimensions-null": (put("dimension_names", None), FormatError, "'dimension_names' is None"),
    "extension": (put("ext", {"name": "x"}), FormatError, "extension 'ext'"),
    "extension-true": (
        put("ext", {"must_understand": True}),
        FormatError,
        "extension 'ext'",
    ),
    "extension-zero": (put("ext", {"must_understand": 0}), FormatError, "extension 'ext'"),
    "transformers": (put("storage_transformers", [{}]), FormatError, "storage transformers"),
}
REJECTED = {f"{n}-record": x for n, x in RECORD_REJECTED.items()} | ARRAY_REJECTED


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case: str, gqa: LayerGroup) -> None:
    edit, error, fragment = REJECTED[case]
    stored = valid()
    edit(stored)
    with pytest.raises(error, match=fragment) as caught:
        decode(compact(stored), gqa, KEYS[2])
    assert type(caught.value) is error
    assert str(caught.value).startswith("extent x")
    assert len(str(caught.value)) < 700
    assert str(caught.value).isprintable()


def test_an_extent_copied_to_another_key_is_corrupt(gqa: LayerGroup) -> None:
    data = encode_extent(gqa, record_of(gqa, 3))
    with pytest.raises(Corrupt, match="it was copied or renamed"):
        decode(data, gqa, "00" * 32)


def test_a_first_extent_follows_a_root(gqa: LayerGroup) -> None:
    """Every salt has a root key of its own, so any key may be one; other lengths are none."""
    stored = valid(extent=0)
    salted = root_key(b"tenant-7")
    put(f"{HERE}.parent", salted.hex())(stored)
    assert decode(compact(stored), gqa).parent == salted
    put(f"{HERE}.parent", "11" * 31)(stored)
    with pytest.raises(FormatError, match="cannot be the key before block 0"):
        decode(compact(stored), gqa)


def test_another_groups_extent_does_not_pass(any_group: LayerGroup) -> None:
    """Even where the record lies about its group, the array gives it away."""
    for name, make in GROUPS.items():
        if make() == any_group:
            continue
        stored = valid(name, 1, 0)
        stored["attributes"]["kvstore"]["group"] = any_group.name
        with pytest.raises(FormatError):
            decode(compact(stored), any_group)


EQUAL: dict[str, tuple[str, Edit]] = {
    "crc-configuration": ("gqa", put(f"{SHARDING}.codecs.1.configuration", {})),
    "index-location-default": ("gqa", drop(f"{SHARDING}.index_location")),
    "one-byte-without-order": ("fp8", put(f"{SHARDING}.codecs.0", {"name": "bytes"})),
    "one-byte-empty": ("fp8", put(f"{SHARDING}.codecs.0.configuration", {})),
    "no-transformers": ("gqa", put("storage_transformers", [])),
    "harmless-extension": ("gqa", put("ext", {"name": "x", "must_understand": False})),
    "other-attributes": ("gqa", put("attributes.someone", {"else": [1]})),
    "newer-minor": ("gqa", put(f"{HERE}.version", "1.7")),
    "newer-field": ("gqa", put(f"{HERE}.later", {"x": 1})),
}


@pytest.mark.parametrize("case", EQUAL)
def test_other_spellings_of_the_same_extent(case: str) -> None:
    name, edit = EQUAL[case]
    group = GROUPS[name]()
    stored = valid(name)
    edit(stored)
    assert decode(compact(stored), group) == record_of(group, min(3, group.extent_blocks), 1)


@given(st.sampled_from(sorted(GROUPS)), st.data())
def test_any_change_gives_a_consistent_record_or_a_format_error(
    name: str, data: st.DataObject
) -> None:
    group = GROUPS[name]()
    stored = copy.deepcopy(valid(name))
    put(data.draw(st.sampled_from(paths_of(stored))), data.draw(junk))(stored)
    check(compact(stored), group)


@given(
    st.sampled_from(sorted(GROUPS)),
    st.integers(0, 10_000),
    st.binary(max_size=4),
    st.integers(0, 3),
)
def test_any_damaged_bytes_give_a_consistent_record_or_a_format_error(
    name: str, at: int, new: bytes, removed: int
) -> None:
    group = GROUPS[name]()
    whole = encode_extent(group, record_of(group, 1))
    at %= len(whole)
    check(whole[:at] + new + whole[at + removed :], group)


def check(data: bytes, group: LayerGroup) -> None:
    try:
        record = decode(data, group)
    except FormatError:
        return
    assert decode(encode_extent(group, record), group, record.key.hex()) == record
    assert list(record.shards) == list(shard_sizes(group, len(record.blocks)))
    assert record.start_block % group.extent_blocks == 0
