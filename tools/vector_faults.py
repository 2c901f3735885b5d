"""The faults of spec/vectors: each takes a valid store and spoils one thing, or varies one thing.

Of a spoilt store, exactly one rule of spec/10-rejections.md must be the reason to refuse it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from vector_changes import (
    CHUNK,
    EXTENT,
    FILES,
    INDEX,
    KEY,
    NAMESPACE,
    RECORD,
    SHARD,
    STRIDE,
    Vector,
    bad,
    corrupt,
    replace,
    splice,
    write,
)
from vector_records import arrays, documents, headers, places, records
from vector_stores import (
    PRIVATE,
    Json,
    crc32c,
    fingerprint,
    namespace_document,
    pretty,
    slug,
    tiny_identity,
    zarr_group,
)


def identities() -> Iterator[Vector]:
    """Faults of an identity. The fingerprint and the folder's name are made to agree with it."""

    def spoilt(name: str, rule: str, spoil: Callable[[Json], object]) -> Vector:
        identity = copy.deepcopy(tiny_identity())
        spoil(identity)
        model = identity.get("model")
        new = f"{slug(model if isinstance(model, str) else '')}-{fingerprint(identity)[:32]}"
        return bad(
            f"identity-{name}",
            rule,
            new,
            {"op": "move", "path": NAMESPACE, "to": new},
            write(f"{new}/zarr.json", pretty(namespace_document(identity))),
        )

    def put(**fields: object) -> Callable[[Json], object]:
        return lambda identity: identity.update(fields)

    def group(**fields: object) -> Callable[[Json], object]:
        return lambda identity: identity["groups"][0].update(fields)

    def part(**fields: object) -> Callable[[Json], object]:
        return lambda identity: identity["groups"][0]["parts"][0].update(fields)

    def scheme(**fields: object) -> Callable[[Json], object]:
        return lambda identity: identity["key_scheme"].update(fields)

    for name, rule, spoil in (
        ("unknown-field", "field-unknown", put(tokenizer="x")),
        ("field-missing", "field-missing", lambda identity: identity.pop("variants")),
        ("model-number", "field-type", put(model=7)),
        ("model-empty", "field-range", put(model="")),
        ("no-weights", "identity-weights", put(revision=None)),
        ("variant-number", "field-type", put(variants={"rope": 4})),
        ("layers-bool", "field-type", put(model_layers=True)),
        ("no-groups", "field-range", put(groups=[])),
        ("group-twice", "identity-groups", lambda i: i["groups"].append(i["groups"][0])),
        ("scheme-unknown", "field-range", scheme(scheme="md5")),
        ("scheme-named", "identity-scheme", scheme(name="vllm")),
        ("scheme-short-root", "identity-scheme", scheme(root="00")),
        ("scheme-odd-root", "field-range", scheme(root="0" * 63)),
        ("group-field-missing", "field-missing", lambda i: i["groups"][0].pop("window")),
        ("group-name-upper", "field-range", group(name="KV")),
        ("group-name-dots", "field-range", group(name="k..v")),
        ("group-name-path", "field-range", group(name="../kv")),
        ("layers-unordered", "group-layers", group(layers=[1, 0])),
        ("layers-beyond-model", "group-layers", group(layers=[0, 2])),
        ("layers-bool-inside", "field-type", group(layers=[False, True])),
        ("layers-negative", "group-layers", group(layers=[-1, 0])),
        ("layers-text", "field-type", group(layers=["0", "1"])),
        ("heads-none", "field-range", group(heads=0)),
        ("heads-huge", "field-range", group(heads=1 << 40)),
        ("block-huge", "field-range", group(block_tokens=65537)),
        ("chunk-huge", "group-size", group(block_tokens=65536, extent_blocks=4096)),
        ("content-huge", "group-size", part(count=1 << 20)),
        ("part-count-none", "field-range", part(count=0)),
        ("part-element-unknown", "field-range", part(element="float64")),
        ("part-element-prefixed", "field-range", part(element="torch.bfloat16")),
        ("part-name-upper", "field-range", part(name="Key")),
        ("parts-same-name", "group-parts", part(name="value")),
        ("attention-unknown", "field-range", group(attention="sparse")),
        ("window-missing", "group-attention", group(attention="sliding_window")),
        ("parallel-extra", "group-attention", group(parallel="tp=1;rank=0.0.0")),
        ("variant-empty", "field-range", put(variants={"": "x"})),
        ("variant-long", "field-range", put(variants={"rope": "x" * 4097})),
        ("window-extra", "group-attention", group(window=128)),
        ("opaque-without-rank", "group-attention", group(attention="opaque")),
        (
            "opaque-with-heads",
            "group-attention",
            group(attention="opaque", parallel="tp=1;rank=0.0.0"),
        ),
        (
            "opaque-element",
            "group-attention",
            group(
                attention="opaque",
                parallel="tp=1;rank=0.0.0",
                heads=1,
                parts=[{"name": "page", "element": "bfloat16", "count": 8}],
            ),
        ),
        ("parallel-not-ascii", "field-range", group(attention="opaque", parallel="größe")),
        ("parallel-number", "field-type", group(attention="opaque", parallel=1)),
        ("shard-layers-uneven", "group-shards", group(shard_layers=3)),
        ("shard-heads-uneven", "group-shards", group(shard_heads=3)),
    ):
        yield spoilt(name, rule, spoil)
    path = f"{NAMESPACE}/zarr.json"
    yield corrupt(
        "identity-changed",
        "fingerprint",
        NAMESPACE,
        replace(path, '"revision": "main"', '"revision": "v2"'),
    )
    other = f"{NAMESPACE[:-1]}{'0' if NAMESPACE[-1] != '0' else '1'}"
    move = {"op": "move", "path": NAMESPACE, "to": other}
    yield corrupt("namespace-renamed", "namespace-name", other, move)
    other = f"other{NAMESPACE[-33:]}"
    move = {"op": "move", "path": NAMESPACE, "to": other}
    yield corrupt("namespace-slug", "namespace-name", other, move)
    other = f"Tiny{NAMESPACE[-33:]}"
    move = {"op": "move", "path": NAMESPACE, "to": other}
    yield bad("namespace-upper", "name", other, move, error="InvalidArgument")


def index_of(*entries: tuple[int, int]) -> bytes:
    """An index with its checksum."""
    body = b"".join(a.to_bytes(8, "little") + b.to_bytes(8, "little") for a, b in entries)
    return body + crc32c(body)


def unstrided() -> Json:
    """The change after which only the index says where chunks are."""
    return replace(RECORD, f'"chunk_stride": {STRIDE}', '"chunk_stride": null')


def shards() -> Iterator[Vector]:
    """Faults of a shard."""
    place = f"{NAMESPACE}/kv/{KEY}"
    good = FILES[SHARD]
    size = CHUNK + 4
    last = (1 << 64) - 1

    def indexed(name: str, rule: str, *entries: tuple[int, int], free: bool = True) -> Vector:
        change = splice(SHARD, INDEX, index_of(*entries))
        return corrupt(f"shard-{name}", rule, place, *([unstrided()] if free else []), change)

    flipped = bytes([good[5] ^ 1])
    yield corrupt("shard-bit-flip", "chunk-checksum", place, splice(SHARD, 5, flipped))
    yield corrupt("shard-checksum", "chunk-checksum", place, splice(SHARD, CHUNK, b"\0\0\0\0"))
    yield corrupt("shard-last-chunk", "chunk-checksum", place, splice(SHARD, STRIDE, b"\xff\xff"))
    yield corrupt("shard-index-flip", "index-checksum", place, splice(SHARD, INDEX + 8, b"\x25"))
    yield corrupt(
        "shard-index-checksum", "index-checksum", place, splice(SHARD, len(good) - 1, b"\x00")
    )
    yield corrupt(
        "shard-short", "shard-size", place, {"op": "truncate", "path": SHARD, "bytes": 107}
    )
    yield corrupt("shard-empty", "shard-size", place, {"op": "truncate", "path": SHARD, "bytes": 0})
    yield corrupt("shard-long", "shard-size", place, {"op": "append", "path": SHARD, "hex": "00"})
    yield corrupt("shard-missing", "shard-missing", place, {"op": "remove", "path": SHARD})
    yield indexed("index-not-strided", "index-entry", (STRIDE, size), (0, size), free=False)
    yield indexed("index-missing-chunk", "index-entry", (0, size), (last, last))
    yield indexed("index-length-short", "index-entry", (0, size), (STRIDE, size - 1))
    yield indexed("index-length-huge", "index-entry", (0, size), (STRIDE, last - STRIDE + 1))
    yield indexed("index-beyond-end", "index-range", (0, size), (STRIDE + 1, size))
    yield indexed("index-offset-huge", "index-range", (0, size), (last - 10, size))
    yield indexed("index-overlap", "index-overlap", (0, size), (STRIDE - 1, size))
    yield indexed("index-same-chunk", "index-overlap", (0, size), (0, size))


def variations() -> Iterator[Vector]:
    """Changes after which the store is as valid as before."""

    def good(name: str, *changes: Json) -> Vector:
        return {"name": f"ok-{name}", "base": "tiny", "changes": changes}

    body = FILES[SHARD][:INDEX]
    first, second = body[:STRIDE], body[STRIDE:]
    swapped = second + b"\xee" * 24 + first
    moved = swapped + index_of((STRIDE + 24, STRIDE), (0, STRIDE))
    size = '"name": "c.0.0.0.0.0",\n     "bytes": 108'
    yield good(
        "chunks-anywhere",
        unstrided(),
        replace(RECORD, size, size.replace("108", str(len(moved)))),
        {"op": "write", "path": SHARD, "hex": moved.hex()},
    )
    yield good("no-stride", unstrided())
    nested = f'"attributes": {{"x": {"[" * 30}{"]" * 30}, '
    yield good("deep", replace(RECORD, '"attributes": {', nested))
    yield good(
        "surrogate-pair", replace(RECORD, '"session": "vectors"', '"session": "\\ud83d\\ude00"')
    )
    yield good("unknown-part-field", replace(RECORD, '"name": "key"', '"name": "key", "note": 1'))
    root = f'"parent": "{tiny_identity()["key_scheme"]["root"]}"'
    yield good("salted-root", replace(RECORD, root, f'"parent": "{bytes(32).hex()}"'))
    yield good("newer-minor", replace(RECORD, '"version": "1.0"', '"version": "1.7"'))
    yield good(
        "unknown-record-field", replace(RECORD, '"tokens": 4', '"tokens": 4, "score": {"a": [1]}')
    )
    yield good(
        "other-attributes", replace(RECORD, '"attributes": {', '"attributes": {"note": "x", ')
    )
    yield good(
        "ignorable-extension",
        replace(RECORD, '"fill_value": 0', '"fill_value": 0, "twist": {"must_understand": false}'),
    )
    yield good(
        "no-transformers",
        replace(RECORD, '"fill_value": 0', '"fill_value": 0, "storage_transformers": []'),
    )
    consolidated = '"zarr_format": 3, "consolidated_metadata": {"must_understand": false}'
    yield good("consolidated-metadata", replace("zarr.json", '"zarr_format": 3', consolidated))
    yield good("no-layer-group-record", {"op": "remove", "path": f"{NAMESPACE}/kv/zarr.json"})
    yield good("no-fan-out-record", {"op": "remove", "path": f"{NAMESPACE}/kv/{KEY[:2]}/zarr.json"})
    yield good(
        "unknown-names",
        write("UPPER/zarr.json", pretty(zarr_group({}))),
        write(f"{EXTENT}/extra", "x"),
    )
    other = bytes(32).hex()
    yield good(
        "extents-misplaced-are-not-listed",
        {
            "op": "copy",
            "path": EXTENT,
            "to": f"{NAMESPACE}/kv/{'00' if KEY[:2] != '00' else '01'}/{KEY}",
        },
        {"op": "copy", "path": EXTENT, "to": f"{NAMESPACE}/kv/00/{other.upper()}X"},
    )
    yield good(
        "half-built",
        {
            "op": "copy",
            "path": EXTENT,
            "to": f"{PRIVATE}/inflight/{NAMESPACE}/kv/{KEY}-{'0' * 16}/array",
        },
    )
    yield good("no-record-no-extent", write(f"{NAMESPACE}/kv/00/{other}/c.0.0.0.0.0", "x"))


def invalid() -> list[Vector]:
    """Every vector that must be refused."""
    makers = (documents, headers, identities, places, records, arrays, shards)
    return [vector for make in makers for vector in make()]
