"""The valid stores of spec/vectors, made by a writer that follows the specification alone.

It shares no code with the kvstore package nor with the reader in spec/: the three check each other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Json = dict[str, Any]
Files = dict[str, bytes]

CREATED = "2026-12-01T03:21:18Z"
CARRIER = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "|u1",
    "float8_e5m2": "|u1",
    "int8": "|i1",
    "uint8": "|u1",
}
PRIVATE = "__kvstore__"


def crc32c(data: bytes) -> bytes:
    """CRC-32C (Castagnoli), reflected, four bytes little endian; a bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def u32(value: int) -> bytes:
    """An integer as four bytes, little endian."""
    return value.to_bytes(4, "little")


def root_preimage(salt: bytes) -> bytes:
    """What the root key is the SHA-256 of."""
    return b"kvstore/v1/root\x00" + u32(len(salt)) + salt


def block_preimage(parent: bytes, tokens: list[int], extra: list[bytes]) -> bytes:
    """What a block's key is the SHA-256 of."""
    out = b"kvstore/v1/block" + parent + u32(len(tokens))
    for token in tokens:
        out += u32(token)
    out += u32(len(extra))
    for item in extra:
        out += u32(len(item)) + item
    return out


def chain(tokens: list[int], block: int, root: bytes, extra: list[list[bytes]]) -> list[bytes]:
    """Keys of every full block; ``extra`` has the extra keys of each, or is empty."""
    keys = []
    parent = root
    for i in range(len(tokens) // block):
        own = extra[i] if extra else []
        preimage = block_preimage(parent, tokens[i * block : (i + 1) * block], own)
        parent = hashlib.sha256(preimage).digest()
        keys.append(parent)
    return keys


def canonical(value: object) -> str:
    """Canonical JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(identity: Json) -> str:
    """SHA-256 that names an identity."""
    return hashlib.sha256(b"kvstore/v1/name\x00" + canonical(identity).encode()).hexdigest()


def slug(model: str) -> str:
    """The readable part of a namespace's name, letter by letter."""
    text = ""
    run = ""
    for letter in model + "\0":
        lower = chr(ord(letter) + 32) if "A" <= letter <= "Z" else letter
        plain = "a" <= lower <= "z" or "0" <= lower <= "9"
        kind = "a" if plain else "." if lower == "." else "-"
        if run and kind != run[0]:
            text += "." if run == "." else "-"
            run = ""
        if plain:
            text += lower
        else:
            run += kind
    return text[:64].strip("-.") or "model"


def pretty(value: object) -> bytes:
    """JSON as it is stored here."""
    return (json.dumps(value, indent=1) + "\n").encode()


def header() -> Json:
    """The fields that every record starts with."""
    return {"format": "kvstore", "version": "1.0", "must_understand": []}


def zarr_group(attributes: Json) -> Json:
    """Metadata of a Zarr group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def group_object(name: str, parts: list[tuple[str, str, int]], **fields: object) -> Json:
    """A layer group object with every field: two layers, one head, two tokens unless given."""
    out: Json = {
        "name": name,
        "layers": [0, 1],
        "heads": 1,
        "block_tokens": 2,
        "parts": [{"name": n, "element": e, "count": c} for n, e, c in parts],
        "attention": "full",
        "window": None,
        "extent_blocks": 2,
        "shard_layers": 2,
        "shard_heads": 1,
        "parallel": None,
    }
    return out | fields


def slot(chunk: int) -> int:
    """Stride of chunks of that many bytes."""
    used = chunk + 4
    aligned = (used + 4095) // 4096 * 4096
    return aligned if (aligned - used) * 16 <= chunk else used


def shard_bytes(chunks: list[bytes]) -> bytes:
    """A whole shard."""
    stride = slot(len(chunks[0]))
    body = b""
    index = b""
    for chunk in chunks:
        index += len(body).to_bytes(8, "little") + (len(chunk) + 4).to_bytes(8, "little")
        body += (chunk + crc32c(chunk)).ljust(stride, b"\0")
    return body + index + crc32c(index)


def carrier_of(group: Json) -> np.dtype[Any]:
    """Carrier type of a group's array."""
    elements = {p["element"] for p in group["parts"]}
    return np.dtype(CARRIER[elements.pop()] if len(elements) == 1 else "|u1")


def shape_of(group: Json, blocks: int) -> list[int]:
    """Shape of an extent's array."""
    width = sum(np.dtype(CARRIER[p["element"]]).itemsize * p["count"] for p in group["parts"])
    tokens = 1 if group["attention"] == "opaque" else group["block_tokens"]
    content = width // carrier_of(group).itemsize
    return [len(group["layers"]), blocks, group["heads"], tokens, content]


def values(shape: list[int], dtype: np.dtype[Any], seed: int) -> NDArray[Any]:
    """Values that differ from place to place, the same on every run."""
    count = np.arange(int(np.prod(shape)), dtype=np.int64) * 37 + seed * 1009
    if dtype.kind == "f":
        return ((count % 2048) / 8).astype(dtype).reshape(shape)
    return (count % (251 * 251)).astype(np.uint16).astype(dtype).reshape(shape)


def telling(shape: list[int]) -> NDArray[Any]:
    """16-bit values that say where they are: 0xLTHC, layer, token in the extent, head, content."""
    out = np.empty(shape, "<u2")
    for layer, block, head, token, content in itertools.product(*map(range, shape)):
        place = layer << 12 | (block * shape[3] + token) << 8 | head << 4 | content
        out[layer, block, head, token, content] = place
    return out


@dataclass
class Store:
    """A store under construction, and what a reader must find in it."""

    files: Files = field(default_factory=dict)
    expected: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.files["zarr.json"] = pretty(zarr_group({"kvstore": header()}))

    def namespace(self, identity: Json) -> str:
        """Add a namespace and its layer groups; returns its name."""
        digest = fingerprint(identity)
        name = f"{slug(identity['model'])}-{digest[:32]}"
        self.files[f"{name}/zarr.json"] = pretty(namespace_document(identity))
        for group in identity["groups"]:
            record = header() | {"group": group["name"]}
            document = zarr_group({"kvstore": record})
            self.files[f"{name}/{group['name']}/zarr.json"] = pretty(document)
        return name

    def extent(
        self, identity: Json, group: Json, keys: list[bytes], start: int, array: NDArray[Any]
    ) -> str:
        """Add the extent that starts at block ``start`` of a sequence; returns its folder."""
        name = f"{slug(identity['model'])}-{fingerprint(identity)[:32]}"
        blocks = keys[start : start + array.shape[1]]
        key = blocks[-1].hex()
        fanout = f"{name}/{group['name']}/{key[:2]}"
        folder = f"{fanout}/{key}"
        self.files[f"{fanout}/zarr.json"] = pretty(zarr_group({}))
        sizes = []
        rows, columns = group["shard_layers"], group["shard_heads"]
        for row, column in itertools.product(
            range(0, array.shape[0], rows), range(0, array.shape[2], columns)
        ):
            box = itertools.product(range(row, row + rows), range(column, column + columns))
            data = shard_bytes([array[layer, :, head].tobytes() for layer, head in box])
            shard = f"c.{row // rows}.0.{column // columns}.0.0"
            self.files[f"{folder}/{shard}"] = data
            sizes.append({"name": shard, "bytes": len(data)})
        document = extent_document(identity, group, keys, start, array.shape[1], sizes)
        self.files[f"{folder}/zarr.json"] = pretty(document)
        self.expected.append(
            {
                "namespace": name,
                "group": group["name"],
                "key": key,
                "start_block": start,
                "shape": list(array.shape),
                "data_type": document["data_type"],
                "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            }
        )
        return folder


def namespace_document(identity: Json) -> Json:
    """``zarr.json`` of a namespace."""
    record = header() | {"identity": identity, "fingerprint": fingerprint(identity)}
    return zarr_group({"kvstore": record | {"created": CREATED}})


def extent_document(
    identity: Json, group: Json, keys: list[bytes], start: int, blocks: int, shards: list[Json]
) -> Json:
    """``zarr.json`` of an extent."""
    shape = shape_of(group, blocks)
    dtype = carrier_of(group)
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    pipeline = [little, {"name": "crc32c"}]
    outer = [group["shard_layers"], blocks, group["shard_heads"], *shape[3:]]
    own = keys[start : start + blocks]
    root = identity["key_scheme"]["root"]
    record = header() | {
        "namespace": f"{slug(identity['model'])}-{fingerprint(identity)[:32]}",
        "group": group["name"],
        "key": own[-1].hex(),
        "parent": keys[start - 1].hex() if start else root,
        "start_block": start,
        "blocks": [k.hex() for k in own],
        "tokens": blocks * group["block_tokens"],
        "parts": group["parts"],
        "chunk_stride": slot(blocks * shape[3] * shape[4] * dtype.itemsize),
        "shards": shards,
        "parallel_invariant": group["attention"] != "opaque",
        "writer": {"software": "make_vectors", "config": "tp=1", "session": "vectors"},
        "write_id": hashlib.sha256(own[-1]).hexdigest()[:32],
        "created": CREATED,
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [1, blocks, 1, *shape[3:]],
                    "codecs": pipeline,
                    "index_codecs": pipeline,
                    "index_location": "end",
                },
            }
        ],
        "dimension_names": ["layer", "block", "head", "token", "content"],
        "attributes": {"kvstore": record},
    }


def identity_object(model: str, groups: list[Json], root: bytes, **fields: object) -> Json:
    """An identity with every field: two layers, revision ``main``, unless given."""
    scheme: Json = {"scheme": "kvstore-sha256", "name": None, "algorithm": None}
    out: Json = {
        "model": model,
        "model_layers": 2,
        "revision": "main",
        "weights_digest": None,
        "variants": {},
        "key_scheme": scheme | {"root": root.hex(), "key_bytes": 32},
        "groups": groups,
    }
    return out | fields


def tiny_identity() -> Json:
    """Identity of the store in the specification's appendix."""
    parts = [("key", "bfloat16", 2), ("value", "bfloat16", 2)]
    root = hashlib.sha256(root_preimage(b"")).digest()
    return identity_object("Tiny/Example-1", [group_object("kv", parts, heads=2)], root)


def tiny() -> Store:
    """One namespace, one extent of two blocks, two shards."""
    store = Store()
    identity = tiny_identity()
    store.namespace(identity)
    root = bytes.fromhex(identity["key_scheme"]["root"])
    group = identity["groups"][0]
    store.extent(identity, group, chain([11, 22, 33, 44], 2, root, []), 0, telling([2, 2, 2, 2, 4]))
    return store


def chained() -> Store:
    """Two full extents and a short one, aligned slots, a salt, extra keys, and leavings about."""
    store = Store()
    root = hashlib.sha256(root_preimage(b"tenant-7")).digest()
    parts = [("key", "int8", 255), ("value", "int8", 255)]
    shape: Json = {"layers": [0], "heads": 2, "block_tokens": 4}
    group = group_object("kv", parts, **shape, shard_layers=1, shard_heads=2)
    identity = identity_object("chain", [group], root, model_layers=1, variants={"rope": "yarn-4"})
    name = store.namespace(identity)
    keys = chain(list(range(100, 122)), 4, root, [[b"lora:a"], [], [b"", b"img"], [], []])
    folder = ""
    for start, blocks in ((0, 2), (2, 2), (4, 1)):
        array = values(shape_of(group, blocks), np.dtype("|i1"), start)
        folder = store.extent(identity, group, keys, start, array)
        record = store.files[f"{folder}/zarr.json"]
        if blocks > 1:
            block = keys[start].hex()
            store.files[f"{PRIVATE}/refs/{name}/kv/{block[:2]}/{block}"] = record
    writer = hashlib.sha256(b"engine-0\0tp=2").hexdigest()[:16]
    inflight = f"{PRIVATE}/inflight/{name}/kv/{'ab' * 32}-{writer}"
    store.files[f"{inflight}/array/c.0.0.0.0.0.part"] = b"\0" * 16
    store.files[f"{inflight}/done/0-0-1"] = b""
    bad = f"{PRIVATE}/quarantine/{name}/kv/{'cd' * 32}-0123abcd"
    store.files[f"{bad}/reason.json"] = b'{"reason": "chunk-checksum"}\n'
    store.files[f"{PRIVATE}/trash/0123456789abcdef/zarr.json"] = b"{"
    store.files[f"{folder}/.tmp-0123456789abcdef"] = b"left by a crash"
    store.files["notes.txt"] = b"a name that the format does not know\n"
    return store


def mixed() -> Store:
    """Every carrier and attention kind that has rules of its own, under an engine's opaque keys."""
    store = Store()
    fp8 = [("key", "float8_e4m3fn", 4), ("value", "float8_e5m2", 4), ("key_scale", "float32", 1)]
    ints: Json = {"attention": "sliding_window", "window": 4096, "layers": [1]}
    rank: Json = {"attention": "opaque", "parallel": "tp=5;rank=0.0.3", "extent_blocks": 3}
    groups = [
        group_object("kv", [("key", "float16", 3), ("value", "float16", 2)], heads=2)
        | {"shard_layers": 1, "shard_heads": 1},
        group_object("fp8-window", fp8, **ints, shard_layers=1),
        group_object("mla", [("latent", "bfloat16", 6), ("rope_key", "bfloat16", 2)])
        | {"attention": "mla", "block_tokens": 3},
        group_object("rank-3", [("page", "uint8", 50)], **rank),
        group_object("full32", [("key", "float32", 1), ("value", "float32", 1)], heads=2)
        | {"shard_heads": 2},
    ]
    scheme: Json = {"scheme": "opaque", "name": "vllm", "algorithm": "sha256_cbor"}
    scheme |= {"root": "00" * 8, "key_bytes": 20}
    identity = identity_object(
        "Org/Mixed Größe 7B (v2)",
        groups,
        b"",
        key_scheme=scheme,
        revision=None,
        weights_digest="sha256:ab12",
    )
    store.namespace(identity)
    for seed, group in enumerate(groups):
        keys = [hashlib.sha1(bytes([seed, i])).digest() for i in range(4)]  # noqa: S324 - a stand-in
        blocks = group["extent_blocks"]
        start = 0 if seed % 2 else blocks if 2 * blocks <= len(keys) else 0
        array = values(shape_of(group, blocks), carrier_of(group), seed)
        store.extent(identity, group, keys, start, array)
    return store


STORES = {"tiny": tiny, "chain": chained, "mixed": mixed}
"""Every valid store, by name."""
