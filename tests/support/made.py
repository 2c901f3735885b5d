"""Stores made of the codecs alone, without workers, threads or torch: quick, and easy to damage."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tiny import GROUPS

from kvstore.extent import CommitRecord, Writer, encode_extent, shard_layout, shard_sizes
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.keys import BlockKeys, chain_keys
from kvstore.paths import GroupPath, parse_shard_name
from kvstore.records import (
    NamespaceRecord,
    encode_layer_group,
    encode_plain_group,
    encode_store,
)
from kvstore.shard import ShardLayout, checksum, join_chunks

Bytes = NDArray[np.uint8]
CREATED = "2026-12-01T03:21:18Z"


def padded_group() -> LayerGroup:
    """Chunks of 4,032 bytes, so that slots are aligned and have 60 bytes of padding."""
    return LayerGroup.attention_kv(
        name="padded", layers=2, heads=2, head_size=63, block_tokens=4, extent_blocks=4
    )


@dataclass
class Made:
    """A store on disk, and what it holds.

    Attributes:
        root: its folder.
        identity: of its one namespace.
        keys: layer group -> keys of the sequence stored in it.
        records: extent folder, relative to the root -> its record.
        values: extent folder -> ``[layer, block, head, token, byte]``.
    """

    root: Path
    identity: Identity
    keys: dict[str, BlockKeys]
    records: dict[str, CommitRecord]
    values: dict[str, Bytes]

    @property
    def name(self) -> str:
        """The namespace's directory name."""
        return self.identity.namespace

    def extents(self, group: str) -> list[str]:
        """Folders of a group's extents, in order of the sequence."""
        found = [(r.start_block, p) for p, r in self.records.items() if r.group == group]
        return [path for _, path in sorted(found)]

    def rewrite(self, extent: str, **fields: object) -> None:
        """Write an extent's record anew, with some fields changed."""
        record = replace(self.records[extent], **fields)  # type: ignore[arg-type]
        group = self.identity.group(record.group)
        (self.root / extent / "zarr.json").write_bytes(encode_extent(group, record))


def make_store(
    root: Path,
    groups: Sequence[LayerGroup] | None = None,
    *,
    blocks: int = 10,
    model: str = "Tiny/Model-1.5B (test)",
    seed: int = 0,
) -> Made:
    """Store one sequence of that many blocks in every layer group, and a shorter last extent."""
    if groups is None:
        groups = [make() for make in GROUPS.values()]
    identity = Identity(model, model_layers=8, groups=tuple(groups), revision="0123abc")
    made = Made(root, identity, {}, {}, {})
    root.mkdir(parents=True)
    (root / "zarr.json").write_bytes(encode_store())
    folder = root / identity.namespace
    folder.mkdir()
    (folder / "zarr.json").write_bytes(NamespaceRecord(identity, CREATED).encode())
    rng = np.random.default_rng(seed)
    for group in groups:
        tokens = np.arange(blocks * group.block_tokens) + seed
        keys = made.keys[group.name] = chain_keys(tokens, group.block_tokens)
        (folder / group.name).mkdir()
        (folder / group.name / "zarr.json").write_bytes(encode_layer_group(group.name))
        for first in range(0, blocks, group.extent_blocks):
            _add(made, group, keys[first : first + group.extent_blocks], rng)
    return made


def _add(made: Made, group: LayerGroup, keys: BlockKeys, rng: np.random.Generator) -> None:
    blocks = len(keys)
    names = GroupPath(made.name, group.name)
    key = keys[-1].hex()
    record = CommitRecord(
        namespace=made.name,
        group=group.name,
        blocks=tuple(keys),
        parent=keys.parent,
        start_block=keys.start,
        chunk_stride=shard_layout(group, blocks).stride,
        shards=shard_sizes(group, blocks),
        parallel_invariant=group.attention != "opaque",
        writer=Writer("tests", "tp=1", "made"),
        write_id="ab" * 16,
        created=CREATED,
    )
    shape = (*group.shape(blocks)[:4], group.token_bytes)
    values = rng.integers(0, 256, shape, dtype=np.uint8)
    folder = made.root / names.extent(key)
    folder.mkdir(parents=True)
    (folder.parent / "zarr.json").write_bytes(encode_plain_group())
    for name in record.shards:
        chunks = chunks_of(group, values, name)
        (folder / name).write_bytes(join_chunks(shard_layout(group, blocks), chunks))
    (folder / "zarr.json").write_bytes(encode_extent(group, record))
    for block in keys[: blocks - 1]:
        hint = made.root / names.ref(block.hex())
        hint.parent.mkdir(parents=True, exist_ok=True)
        os.link(folder / "zarr.json", hint)
    made.records[names.extent(key)] = record
    made.values[names.extent(key)] = values


def chunks_of(group: LayerGroup, values: Bytes, shard: str) -> list[bytes]:
    """The chunks of one shard, in order."""
    row, column = parse_shard_name(shard)
    layers = range(row * group.shard_layers, (row + 1) * group.shard_layers)
    heads = range(column * group.shard_heads, (column + 1) * group.shard_heads)
    return [values[layer, :, head].tobytes() for layer in layers for head in heads]


def shuffle_chunks(made: Made, extent: str) -> None:
    """Store an extent as another Zarr writer might: chunks anywhere, only the index says where."""
    record = made.records[extent]
    group = made.identity.group(record.group)
    order = random.Random(5)  # noqa: S311 - a shuffle, no secret
    sizes: dict[str, int] = {}
    for name in record.shards:
        chunks = chunks_of(group, made.values[extent], name)
        body, index = b"junk", [b""] * len(chunks)
        for i in order.sample(range(len(chunks)), len(chunks)):
            at, used = len(body), len(chunks[i]) + 4
            index[i] = at.to_bytes(8, "little") + used.to_bytes(8, "little")
            body += chunks[i] + checksum(chunks[i]).to_bytes(4, "little") + b"gap"
        table = b"".join(index)
        shard = body + table + checksum(table).to_bytes(4, "little")
        (made.root / extent / name).write_bytes(shard)
        sizes[name] = len(shard)
    made.records[extent] = replace(record, chunk_stride=None, shards=sizes)
    made.rewrite(extent)


def layout_of(made: Made, extent: str) -> ShardLayout:
    """Layout of an extent's shards, as a writer makes them."""
    record = made.records[extent]
    return shard_layout(made.identity.group(record.group), len(record.blocks))


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
