"""An extent's ``zarr.json``: the Zarr v3 metadata of its array, and the commit record within.

The metadata is the one file that makes an extent exist. A reader takes nothing from it on trust:
the array must be the one that the layer group and the number of blocks call for, and the record
must hold the namespace, the group and the key under which it was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvstore.errors import Corrupt, FormatError
from kvstore.geometry import (
    MAX_EXTENT_BLOCKS,
    MAX_PARTS,
    MAX_SHARD_BYTES,
    MAX_SHARDS,
    LayerGroup,
)
from kvstore.identity import Identity, parts_from_json, parts_to_json
from kvstore.jsonform import Fields, compact, hex_bytes, parse
from kvstore.keys import MAX_KEY_BYTES, KeyScheme
from kvstore.paths import shard_name
from kvstore.records import FORMAT, check_created, check_header, header
from kvstore.shard import ShardLayout

MAX_START_BLOCK = 1 << 40
DIMENSIONS = ("layer", "block", "head", "token", "content")


@dataclass(frozen=True, slots=True)
class Writer:
    """Who stored an extent. For people and tools; nothing depends on it."""

    software: str
    config: str
    session: str


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What an extent holds.

    Attributes:
        namespace: directory name of its namespace.
        group: name of its layer group.
        blocks: keys of its blocks; the last is the extent's own key.
        parent: the key before its first block; the root key at the start of a sequence.
        start_block: index of its first block in the sequence, a multiple of the group's
            ``extent_blocks``.
        chunk_stride: bytes between chunks in every shard; None: only the index says.
        shards: name -> bytes of every shard, in C order of the shard grid.
        parallel_invariant: False for opaque pages, which one rank of one config may use.
        writer: who stored it.
        write_id: 32 hex digits drawn at random for this very write.
        created: UTC time.
    """

    namespace: str
    group: str
    blocks: tuple[bytes, ...]
    parent: bytes
    start_block: int
    chunk_stride: int | None
    shards: dict[str, int]
    parallel_invariant: bool
    writer: Writer
    write_id: str
    created: str

    @property
    def key(self) -> bytes:
        """The extent's key: its last block's."""
        return self.blocks[-1]


def shard_layout(group: LayerGroup, blocks: int) -> ShardLayout:
    """Layout of the shards of an extent of that many blocks, as a writer makes them."""
    return ShardLayout.of(group.shard_layers * group.shard_heads, group.chunk_bytes(blocks))


def shard_sizes(group: LayerGroup, blocks: int) -> dict[str, int]:
    """Name -> bytes of the shards of an extent, as a writer makes them, in grid order."""
    size = shard_layout(group, blocks).shard_bytes
    rows, columns = group.shard_grid()
    return {shard_name(row, column): size for row in range(rows) for column in range(columns)}


def _array(group: LayerGroup, blocks: int) -> dict[str, Any]:
    n, c = group.page_tokens, group.content
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    checksum = {"name": "crc32c"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(group.shape(blocks)),
        "data_type": group.carrier.carrier,
        "chunk_grid": {
            "name": "regular",
            "configuration": {
                "chunk_shape": [group.shard_layers, blocks, group.shard_heads, n, c],
            },
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [1, blocks, 1, n, c],
                    "codecs": [little, checksum],
                    "index_codecs": [little, checksum],
                    "index_location": "end",
                },
            },
        ],
        "dimension_names": list(DIMENSIONS),
    }


def encode_extent(group: LayerGroup, record: CommitRecord) -> bytes:
    """``zarr.json`` of an extent."""
    blocks = len(record.blocks)
    attributes = {
        **header(),
        "namespace": record.namespace,
        "group": record.group,
        "key": record.key.hex(),
        "parent": record.parent.hex(),
        "start_block": record.start_block,
        "blocks": [k.hex() for k in record.blocks],
        "tokens": blocks * group.block_tokens,
        "parts": parts_to_json(group.parts),
        "chunk_stride": record.chunk_stride,
        "shards": _shards_to_json(record.shards),
        "parallel_invariant": record.parallel_invariant,
        "writer": {
            "software": record.writer.software,
            "config": record.writer.config,
            "session": record.writer.session,
        },
        "write_id": record.write_id,
        "created": record.created,
    }
    return compact({**_array(group, blocks), "attributes": {FORMAT: attributes}})


def decode_extent(
    data: bytes, identity: Identity, group: LayerGroup, key: str | None, what: str
) -> CommitRecord:
    """Check and read an extent's ``zarr.json``.

    Args:
        data: its bytes.
        identity: of the namespace it was found in.
        group: layer group it was found in.
        key: hex of the key it was found under; None to take the record's own (hint references).
        what: the extent, for messages.

    Raises:
        Corrupt: cut short; or an extent of another place, copied or renamed into this one.
        FormatError: a field is missing or out of range, or the array is not the group's.
        UnsupportedVersion: a newer major version or feature.
    """
    fields = Fields(parse(data, what), what)
    record = fields.fields("attributes").fields(FORMAT)
    record.what = what
    check_header(record)
    _check_place(record, identity.namespace, group.name, key)
    size = identity.key_scheme.key_bytes
    keys = tuple(
        hex_bytes(k, size, size, f"{what}, block key")
        for k in record.array("blocks", MAX_EXTENT_BLOCKS)
    )
    if not 1 <= len(keys) <= group.extent_blocks or len(set(keys)) != len(keys):
        raise FormatError(
            f"{what}: {len(keys)} block keys; an extent of this group has 1 to "
            f"{group.extent_blocks}, without repeats"
        )
    if keys[-1].hex() != record.text("key", 128):
        raise Corrupt(f"{what}: its key is not the key of its last block")
    _check_array(fields, group, len(keys))
    start = record.integer("start_block", 0, MAX_START_BLOCK)
    if start % group.extent_blocks:
        raise FormatError(f"{what}: start_block {start} is not a multiple of the extent's blocks")
    parent = record.hex_bytes("parent", 1, MAX_KEY_BYTES)
    if not _may_precede(parent, start, identity.key_scheme) or parent in keys:
        raise FormatError(
            f"{what}: parent {parent.hex()} cannot be the key before block {start} of a sequence"
        )
    record.exactly("tokens", len(keys) * group.block_tokens)
    parts = record.array("parts", MAX_PARTS)
    usual = repr(parts) == _expected(group, len(keys)).parts
    if not usual and parts_from_json(parts, what) != group.parts:
        raise FormatError(f"{what}: content parts are not the layer group's")
    record.exactly("parallel_invariant", group.attention != "opaque")
    writer = record.fields("writer")
    stride = _check_stride(record, group, len(keys))
    return CommitRecord(
        namespace=identity.namespace,
        group=group.name,
        blocks=keys,
        parent=parent,
        start_block=start,
        chunk_stride=stride,
        shards=_check_shards(record, group, len(keys), stride),
        parallel_invariant=group.attention != "opaque",
        writer=Writer(writer.text("software"), writer.text("config"), writer.text("session")),
        write_id=record.hex_bytes("write_id", 16, 16).hex(),
        created=check_created(record),
    )


def _may_precede(parent: bytes, start: int, scheme: KeyScheme) -> bool:
    """Whether a key may stand before block ``start``. Every salt has a root key of its own."""
    if start:
        return parent != scheme.root and len(parent) == scheme.key_bytes
    return parent == scheme.root or (not scheme.opaque_keys and len(parent) == scheme.key_bytes)


def _check_place(record: Fields, namespace: str, group: str, key: str | None) -> None:
    for name, here in (("namespace", namespace), ("group", group), ("key", key)):
        stored = record.text(name, 160)
        if here is not None and stored != here:
            raise Corrupt(
                f"{record.what}: its record says {name} {stored!r}, but it lies under {here!r}; "
                "it was copied or renamed. Remove it"
            )


@dataclass(frozen=True, slots=True)
class _Expected:
    """What our own writers write, as ``repr`` text: comparing it is quick, and tells true from 1.

    A record that looks otherwise may still be valid; it is then checked field by field.
    """

    array: str
    parts: str
    shards: str
    stride: int


@lru_cache(maxsize=256)
def _expected(group: LayerGroup, blocks: int) -> _Expected:
    return _Expected(
        array=repr(_array(group, blocks)),
        parts=repr(parts_to_json(group.parts)),
        shards=repr(_shards_to_json(shard_sizes(group, blocks))),
        stride=shard_layout(group, blocks).stride,
    )


def _shards_to_json(shards: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "bytes": size} for name, size in shards.items()]


def _check_array(fields: Fields, group: LayerGroup, blocks: int) -> None:
    found_array = {name: fields.value(name) for name in fields.names() if name != "attributes"}
    if repr(found_array) == _expected(group, blocks).array:
        return
    array = _array(group, blocks)
    for name, wanted in array.items():
        found = fields.value(name)
        if name == "codecs":
            found = _normal_codecs(found, one_byte=group.carrier.itemsize == 1)
        if canonical_equal(found, wanted):
            continue
        raise FormatError(
            f"{fields.what}: the array's {name!r} is {found!r:.200}; an extent of {blocks} blocks "
            f"of layer group {group.name!r} has {wanted!r:.200}"
        )
    known = {*array, "attributes", "storage_transformers"}
    for name in fields.names():
        if name not in known:
            extra = fields.value(name)
            if not (isinstance(extra, dict) and extra.get("must_understand") is False):
                raise FormatError(
                    f"{fields.what}: the Zarr extension {name!r:.80} is not in the format's subset"
                )
    if fields.has("storage_transformers") and fields.value("storage_transformers") != []:
        raise FormatError(f"{fields.what}: storage transformers are not in the format's subset")


def canonical_equal(found: object, wanted: object) -> bool:
    """Equality of JSON values in which true is not 1."""
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and found.keys() == wanted.keys()
            and all(canonical_equal(found[k], v) for k, v in wanted.items())
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(canonical_equal(a, b) for a, b in zip(found, wanted, strict=True))
        )
    return type(found) is type(wanted) and found == wanted


def _normal_codecs(codecs: object, *, one_byte: bool) -> object:
    """Codecs with the spelling variants that Zarr writers use undone.

    ``{"name": "bytes"}`` without a configuration is how writers spell it for one-byte types, and an
    empty configuration is the same as none.
    """
    if isinstance(codecs, list):
        return [_normal_codecs(c, one_byte=one_byte) for c in codecs]
    if not isinstance(codecs, dict):
        return codecs
    out = dict(codecs)
    if out.get("configuration") == {}:
        del out["configuration"]
    if out == {"name": "bytes"} and one_byte:
        return {"name": "bytes", "configuration": {"endian": "little"}}
    inner = out.get("configuration")
    if out.get("name") == "sharding_indexed" and isinstance(inner, dict):
        inner = dict(inner)
        inner["codecs"] = _normal_codecs(inner.get("codecs"), one_byte=one_byte)
        inner["index_codecs"] = _normal_codecs(inner.get("index_codecs"), one_byte=False)
        inner.setdefault("index_location", "end")
        out["configuration"] = inner
    return out


def _check_stride(record: Fields, group: LayerGroup, blocks: int) -> int | None:
    chunk = group.chunk_bytes(blocks)
    return record.optional_integer("chunk_stride", chunk + 4, 2 * chunk + 4 + (1 << 16))


def _check_shards(
    record: Fields, group: LayerGroup, blocks: int, stride: int | None
) -> dict[str, int]:
    wanted = shard_sizes(group, blocks)
    listed = record.array("shards", MAX_SHARDS)
    expected = _expected(group, blocks)
    if stride == expected.stride and repr(listed) == expected.shards:
        return wanted
    layout = shard_layout(group, blocks)
    if stride is not None:
        layout = ShardLayout(layout.chunks, layout.chunk_bytes, stride)
    least = layout.chunks * (layout.chunk_bytes + 4) + layout.index_bytes
    shards: dict[str, int] = {}
    for item in listed:
        shard = Fields(item, f"{record.what}, shard")
        name = shard.text("name", 32)
        if name not in wanted:
            raise FormatError(f"{record.what}: {name!r} is not the name of one of its shards")
        size = shard.integer("bytes", least, MAX_SHARD_BYTES)
        if stride is not None and size != layout.shard_bytes:
            raise FormatError(
                f"{record.what}: shard {name} has {size} bytes; a stride of {stride} makes it "
                f"{layout.shard_bytes}"
            )
        if name in shards:
            raise FormatError(f"{record.what}: shard {name} is listed twice")
        shards[name] = size
    if list(shards) != list(wanted):
        raise FormatError(
            f"{record.what}: its shards are {list(shards)!r:.200}, not {list(wanted)!r:.200}"
        )
    return shards
