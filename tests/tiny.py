"""Small layer groups of every kind of geometry, and records of their extents."""

from __future__ import annotations

from kvstore.elements import element
from kvstore.extent import CommitRecord, Writer, shard_layout, shard_sizes
from kvstore.geometry import ContentPart, LayerGroup
from kvstore.identity import Identity
from kvstore.keys import chain_keys


def gqa_group() -> LayerGroup:
    """Two shards along each axis, four blocks of four tokens."""
    return LayerGroup.attention_kv(
        layers=4,
        heads=4,
        head_size=8,
        block_tokens=4,
        extent_blocks=4,
        shard_layers=2,
        shard_heads=2,
    )


def mqa_group() -> LayerGroup:
    """One head, a sliding window, layers that are not consecutive in the model."""
    return LayerGroup.attention_kv(
        name="swa",
        layers=(1, 3, 4),
        heads=1,
        head_size=4,
        block_tokens=2,
        element="float16",
        window=32,
        extent_blocks=2,
    )


def mla_group() -> LayerGroup:
    """A latent and a rope key, of one element type."""
    return LayerGroup.mla(layers=3, latent=12, rope=4, block_tokens=4, extent_blocks=3)


def fp8_group() -> LayerGroup:
    """One-byte elements, whose codec some writers spell without a byte order."""
    return LayerGroup.attention_kv(
        name="fp8",
        layers=2,
        heads=2,
        head_size=16,
        block_tokens=4,
        element="float8_e4m3fn",
        extent_blocks=2,
    )


def mixed_group() -> LayerGroup:
    """Parts of several element types, stored as bytes."""
    return LayerGroup(
        name="mixed",
        layers=(0, 2),
        heads=2,
        block_tokens=4,
        parts=(
            ContentPart("key", element("int8"), 6),
            ContentPart("key_scale", element("float32"), 1),
            ContentPart("value", element("float8_e5m2"), 6),
            ContentPart("value_scale", element("float32"), 1),
        ),
        extent_blocks=2,
    )


def opaque_group() -> LayerGroup:
    """Pages of one rank of one config."""
    return LayerGroup.opaque(
        name="rank0", layers=(0, 1), page_bytes=24, block_tokens=4, parallel="tp=2 rank 0"
    )


GROUPS = {
    "gqa": gqa_group,
    "mqa": mqa_group,
    "mla": mla_group,
    "fp8": fp8_group,
    "mixed": mixed_group,
    "opaque": opaque_group,
}


def tiny_identity() -> Identity:
    """A namespace of every tiny group."""
    return Identity(
        "Tiny/Model-1.5B (test)",
        model_layers=8,
        groups=tuple(make() for make in GROUPS.values()),
        revision="0123abc",
        variants={"rope": "yarn"},
    )


def record_of(group: LayerGroup, blocks: int, extent: int = 0) -> CommitRecord:
    """The record of an extent of a sequence of tokens 0, 1, 2 ..."""
    start = extent * group.extent_blocks
    tokens = range((start + blocks) * group.block_tokens)
    keys = chain_keys(tokens, group.block_tokens)[start:]
    return CommitRecord(
        namespace=tiny_identity().namespace,
        group=group.name,
        blocks=tuple(keys),
        parent=keys.parent,
        start_block=start,
        chunk_stride=shard_layout(group, blocks).stride,
        shards=shard_sizes(group, blocks),
        parallel_invariant=group.attention != "opaque",
        writer=Writer("kvstore 0.1.0", "tp=2", "engine-0"),
        write_id="00112233445566778899aabbccddeeff",
        created="2026-12-01T03:21:18Z",
    )
