"""The faults of JSON documents, of records and of Zarr metadata in spec/vectors."""

from __future__ import annotations

from collections.abc import Iterator

from vector_changes import (
    CHUNK,
    EXTENT,
    FILES,
    KEY,
    NAMESPACE,
    RECORD,
    STRIDE,
    Vector,
    bad,
    corrupt,
    replace,
    splice,
    write,
)
from vector_stores import tiny_identity


def documents() -> Iterator[Vector]:
    """Faults of JSON itself, in an extent's document."""
    text = FILES[RECORD].decode()
    place = f"{NAMESPACE}/kv/{KEY}"
    yield corrupt("json-cut-short", "json-syntax", place, write(RECORD, text[: len(text) // 2]))
    yield corrupt("json-empty", "json-syntax", place, write(RECORD, ""))
    yield corrupt("json-trailing", "json-syntax", place, write(RECORD, text + "{}"))
    yield corrupt(
        "json-comment", "json-syntax", place, replace(RECORD, '"zarr_format"', '/**/"zarr_format"')
    )
    yield corrupt("json-not-utf8", "json-encoding", place, splice(RECORD, 4, b"\xff"))
    yield corrupt("json-byte-order-mark", "json-syntax", place, write(RECORD, "\ufeff" + text))
    nested = f'"attributes": {{"x": {"[" * 31}{"]" * 31}, '
    yield bad("json-deep", "json-depth", place, replace(RECORD, '"attributes": {', nested))
    yield bad(
        "json-very-deep",
        "json-depth",
        place,
        {"op": "repeat", "path": RECORD, "text": '{"a":', "times": 200_000},
    )
    for name, text in (("high", "\\ud83d"), ("low", "\\udE00x"), ("swapped", "\\ude00\\ud83d")):
        change = replace(RECORD, '"session": "vectors"', f'"session": "{text}"')
        yield bad(f"json-surrogate-{name}", "json-surrogate", place, change)
    change = replace(RECORD, '"attributes": {', '"attributes": {"\\udfff": 1, ')
    yield bad("json-surrogate-in-a-name", "json-surrogate", place, change)
    yield bad(
        "json-huge",
        "json-size",
        place,
        {"op": "repeat", "path": RECORD, "text": " ", "times": (16 << 20) + 1},
    )
    yield bad("json-array", "field-type", place, write(RECORD, "[]"))
    twice = '"start_block": 0,\n   "start_block": 0'
    yield bad(
        "json-duplicate-in-record",
        "json-duplicate",
        place,
        replace(RECORD, '"start_block": 0', twice),
    )
    yield bad(
        "json-duplicate-at-top",
        "json-duplicate",
        place,
        replace(RECORD, '"fill_value": 0', '"fill_value": 0, "fill_value": 0'),
    )
    for name, number in (
        ("float", "0.0"),
        ("exponent", "0e0"),
        ("not-a-number", "NaN"),
        ("infinity", "-Infinity"),
        ("beyond-64-bits", "18446744073709551616"),
        ("thousand-digits", "1" + "0" * 1000),
    ):
        change = replace(RECORD, '"start_block": 0', f'"start_block": {number}')
        yield bad(f"json-number-{name}", "json-number", place, change)
    yield bad(
        "json-float-fill-value",
        "json-number",
        place,
        replace(RECORD, '"fill_value": 0', '"fill_value": 0.0'),
    )


def headers() -> Iterator[Vector]:
    """Faults of format, version and must_understand, in every kind of record."""
    for kind, path, at in (
        ("store", "zarr.json", ""),
        ("namespace", f"{NAMESPACE}/zarr.json", NAMESPACE),
        ("extent", RECORD, f"{NAMESPACE}/kv/{KEY}"),
    ):
        version, magic = '"version": "1.0"', '"format": "kvstore"'
        yield bad(f"{kind}-format-name", "format-name", at, replace(path, magic, '"format": "kvs"'))
        yield bad(
            f"{kind}-version-newer-major",
            "version-major",
            at,
            replace(path, version, '"version": "2.0"'),
            error="UnsupportedVersion",
        )
        yield bad(
            f"{kind}-must-understand",
            "must-understand",
            at,
            replace(path, '"must_understand": []', '"must_understand": ["zstd"]'),
            error="UnsupportedVersion",
        )
        yield bad(
            f"{kind}-version-text", "field-range", at, replace(path, version, '"version": "1"')
        )
        yield bad(f"{kind}-version-type", "field-type", at, replace(path, version, '"version": 1'))
        yield bad(f"{kind}-no-version", "field-missing", at, replace(path, version, '"v": "1.0"'))
        yield bad(
            f"{kind}-zarr-format",
            "zarr-format",
            at,
            replace(path, '"zarr_format": 3', '"zarr_format": 2'),
        )
        yield bad(
            f"{kind}-no-record", "field-missing", at, replace(path, '"kvstore": {', '"kv": {')
        )
    yield bad(
        "extent-is-a-group",
        "zarr-node",
        f"{NAMESPACE}/kv/{KEY}",
        replace(RECORD, '"node_type": "array"', '"node_type": "group"'),
    )
    yield bad(
        "store-missing", "not-found", "", {"op": "remove", "path": "zarr.json"}, error="NotFound"
    )
    yield bad(
        "namespace-missing",
        "not-found",
        NAMESPACE,
        {"op": "remove", "path": f"{NAMESPACE}/zarr.json"},
        error="NotFound",
    )
    yield bad(
        "extent-missing",
        "not-found",
        f"{NAMESPACE}/kv/{KEY}",
        {"op": "remove", "path": RECORD},
        error="NotFound",
    )


def places() -> Iterator[Vector]:
    """Faults of the commit record: where it lies, and the keys in it."""
    place = f"{NAMESPACE}/kv/{KEY}"
    other = bytes(32).hex()

    def spoilt(name: str, rule: str, old: str, new: str, error: str = "FormatError") -> Vector:
        return bad(f"record-{name}", rule, place, replace(RECORD, old, new), error=error)

    copied = f"{NAMESPACE}/kv/00/{other}"
    yield corrupt(
        "record-copied-elsewhere",
        "record-place",
        f"{NAMESPACE}/kv/{other}",
        {"op": "copy", "path": EXTENT, "to": copied},
    )
    yield spoilt("other-namespace", "record-place", f'"{NAMESPACE}"', f'"x-{"0" * 32}"', "Corrupt")
    yield spoilt("other-group", "record-place", '"group": "kv"', '"group": "mla"', "Corrupt")
    yield spoilt("last-block-other", "record-key", f'"{KEY}"\n   ]', f'"{other}"\n   ]', "Corrupt")
    upper = place.replace(KEY, KEY.upper())
    move = {"op": "move", "path": EXTENT, "to": EXTENT.replace(KEY, KEY.upper())}
    yield bad("extent-upper", "name", upper, move, error="InvalidArgument")
    short = KEY[:40]
    move = {"op": "move", "path": EXTENT, "to": EXTENT.replace(KEY, short)}
    yield bad("group-unknown", "name", f"{NAMESPACE}/mla/{KEY}", error="InvalidArgument")
    yield bad("extent-short-key", "name", f"{NAMESPACE}/kv/{short}", move, error="InvalidArgument")
    blocks = '"blocks": [\n    "'
    yield spoilt("block-upper", "record-blocks", blocks, blocks + "AA")
    yield spoilt("block-number", "record-blocks", blocks, '"blocks": [\n    7,\n    "')
    yield spoilt("blocks-too-many", "record-blocks", blocks, f'"blocks": [\n    "{other}",\n    "')
    yield spoilt("blocks-text", "field-type", '"blocks": [', '"blocks": "", "old": [')
    first = tiny_first_block()
    yield spoilt("blocks-repeated", "record-blocks", f'"{first}"', f'"{KEY}"')


def records() -> Iterator[Vector]:
    """Faults of the commit record's other fields."""
    place = f"{NAMESPACE}/kv/{KEY}"
    other = bytes(32).hex()

    def spoilt(name: str, rule: str, old: str, new: str, error: str = "FormatError") -> Vector:
        return bad(f"record-{name}", rule, place, replace(RECORD, old, new), error=error)

    parent = f'"parent": "{tiny_identity()["key_scheme"]["root"]}"'
    yield spoilt("parent-short", "record-parent", parent, f'"parent": "{other[:32]}"')
    yield spoilt("parent-inside", "record-parent", parent, f'"parent": "{KEY}"')
    yield spoilt("parent-odd", "field-range", parent, '"parent": "abc"')
    start = '"start_block": 0'
    elsewhere = replace(RECORD, parent, f'"parent": "{other}"')
    uneven = replace(RECORD, start, '"start_block": 1')
    yield bad("record-start-uneven", "record-start", place, elsewhere, uneven)
    yield spoilt("root-in-the-middle", "record-parent", start, '"start_block": 2')
    wrong = f'"parent": "{other[:40]}"'
    middle = replace(RECORD, start, '"start_block": 2')
    yield bad(
        "record-parent-short-in-the-middle",
        "record-parent",
        place,
        replace(RECORD, parent, wrong),
        middle,
    )
    yield spoilt("start-negative", "field-range", start, '"start_block": -2')
    yield spoilt("start-bool", "field-type", start, '"start_block": false')
    yield spoilt("start-text", "field-type", start, '"start_block": "0"')
    yield spoilt("start-null", "field-type", start, '"start_block": null')
    yield spoilt("start-huge", "field-range", start, '"start_block": 4611686018427387904')
    yield spoilt("tokens-wrong", "record-tokens", '"tokens": 4', '"tokens": 3')
    yield spoilt("parts-swapped", "record-parts", '"name": "key"', '"name": "value2"')
    yield spoilt(
        "parts-count",
        "record-parts",
        '"name": "key",\n     "element": "bfloat16",\n     "count": 2',
        '"name": "key",\n     "element": "bfloat16",\n     "count": 3',
    )
    stride = f'"chunk_stride": {STRIDE}'
    yield spoilt("stride-small", "record-stride", stride, '"chunk_stride": 35')
    yield spoilt("stride-huge", "record-stride", stride, f'"chunk_stride": {2 * CHUNK + 65541}')
    yield spoilt("stride-other", "record-shards", stride, '"chunk_stride": 40')
    yield spoilt("stride-bool", "field-type", stride, '"chunk_stride": true')
    yield spoilt(
        "invariant-false",
        "record-invariant",
        '"parallel_invariant": true',
        '"parallel_invariant": false',
    )
    yield spoilt(
        "invariant-number", "field-type", '"parallel_invariant": true', '"parallel_invariant": 1'
    )
    yield spoilt("shard-renamed", "record-shards", '"name": "c.0.0.1.0.0"', '"name": "c.0.0.2.0.0"')
    yield spoilt("shard-path", "field-range", '"name": "c.0.0.1.0.0"', '"name": "../c.0.0.1.0.0"')
    yield spoilt(
        "shard-twice",
        "record-shards",
        '"shards": [',
        '"shards": [{"name": "c.0.0.0.0.0", "bytes": 108},',
    )
    yield spoilt("shards-none", "field-range", '"shards": [', '"shards": [], "old": [')
    size = '"name": "c.0.0.0.0.0",\n     "bytes": 108'
    yield spoilt("shard-bytes", "record-shards", size, size.replace("108", "112"))
    yield spoilt("shard-bytes-huge", "field-range", size, size.replace("108", "1" + "0" * 18))
    yield spoilt("shard-bytes-none", "field-range", size, size.replace("108", "0"))
    yield spoilt("writer-text", "field-type", '"writer": {', '"writer": "x", "old": {')
    yield spoilt("write-id", "field-range", '"write_id": "', '"write_id": "g')
    yield spoilt("created-zone", "field-range", "03:21:18Z", "03:21:18+00:00")
    yield spoilt("created-month", "field-range", "2026-12-01T", "2026-13-01T")
    yield spoilt("created-day", "field-range", "2026-12-01T", "2026-02-29T")
    yield spoilt("created-hour", "field-range", "03:21:18Z", "24:00:00Z")
    yield spoilt("created-leap-second", "field-range", "03:21:18Z", "23:59:60Z")


def tiny_first_block() -> str:
    """Key of the first block of the tiny store's extent."""
    text = FILES[RECORD].decode()
    at = text.index('"blocks": [') + len('"blocks": [\n    "')
    return text[at : at + 64]


def arrays() -> Iterator[Vector]:
    """Faults of the array's Zarr metadata."""
    place = f"{NAMESPACE}/kv/{KEY}"

    def spoilt(name: str, rule: str, old: str, new: str) -> Vector:
        return bad(f"zarr-{name}", rule, place, replace(RECORD, old, new))

    shape = '"shape": [\n  2,\n  2,\n  2,'
    yield spoilt("shape-layers", "zarr-shape", shape, '"shape": [\n  3,\n  2,\n  2,')
    yield spoilt("shape-blocks", "zarr-shape", shape, '"shape": [\n  2,\n  1,\n  2,')
    yield spoilt("shape-huge", "zarr-shape", shape, '"shape": [\n  2,\n  2,\n  1099511627776,')
    yield spoilt("shape-bool", "zarr-shape", shape, '"shape": [\n  2,\n  2,\n  true,')
    yield spoilt("shape-null", "zarr-shape", '"shape": [', '"shape": null, "x": [')
    yield spoilt("shape-missing", "field-missing", '"shape": [', '"shapes": [')
    yield spoilt("data-type", "zarr-data-type", '"data_type": "uint16"', '"data_type": "int16"')
    yield spoilt(
        "data-type-true", "zarr-data-type", '"data_type": "uint16"', '"data_type": "bfloat16"'
    )
    outer = (
        '"chunk_grid": {\n  "name": "regular",\n  "configuration": {\n   "chunk_shape": [\n    2,'
    )
    yield spoilt("chunk-shape", "zarr-chunk-grid", outer, outer[:-2] + "1,")
    yield spoilt("separator", "zarr-chunk-key-encoding", '"separator": "."', '"separator": "/"')
    yield spoilt("fill-value", "zarr-fill-value", '"fill_value": 0', '"fill_value": 1')
    yield spoilt("fill-value-bool", "zarr-fill-value", '"fill_value": 0', '"fill_value": false')
    inner = '"name": "sharding_indexed"'
    yield spoilt("codec-name", "zarr-codecs", inner, '"name": "sharding"')
    yield spoilt(
        "index-at-start", "zarr-codecs", '"index_location": "end"', '"index_location": "start"'
    )
    yield spoilt(
        "codec-extra",
        "zarr-codecs",
        '"codecs": [\n     {',
        '"codecs": [\n     {"name": "gzip", "configuration": {"level": 1}}, {',
    )
    yield spoilt(
        "index-codec-extra",
        "zarr-codecs",
        '"index_codecs": [\n     {',
        '"index_codecs": [\n     {"name": "crc32c"}, {',
    )
    yield spoilt(
        "dimension-names", "zarr-dimension-names", '"token",\n  "content"', '"content",\n  "token"'
    )
    yield spoilt("dimension-names-missing", "field-missing", '"dimension_names"', '"dimensions"')
    yield spoilt(
        "extension",
        "zarr-member",
        '"fill_value": 0',
        '"fill_value": 0, "twist": {"must_understand": true}',
    )
    yield spoilt(
        "extension-unmarked", "zarr-member", '"fill_value": 0', '"fill_value": 0, "twist": {}'
    )
    yield spoilt(
        "transformers",
        "zarr-member",
        '"fill_value": 0',
        '"fill_value": 0, "storage_transformers": [{"name": "x"}]',
    )
