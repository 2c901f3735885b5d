"""Prefix lookup: keys a second on stores of very different size.

The stores are made of extents of a tiny geometry that have a record and no shards: a lookup reads
names only, and 100,000 extents with data would take longer to write than all else takes to measure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.timing import Contender
from kvstore.extent import CommitRecord, Writer, encode_extent, shard_layout, shard_sizes
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.keys import BlockKeys
from kvstore.paths import RECORD, GroupPath
from kvstore.records import encode_plain_group

EXTENTS_A_SEQUENCE = 32
"""A prompt of 8192 tokens: 32 extents of 256."""

LOOKUPS = 200
SIZES = {"small": 100, "medium": 10_000, "large": 100_000}
QUICK_SIZES = {"small": 8, "medium": 64, "large": 256}


@dataclass(frozen=True, slots=True)
class LookupStore:
    """One store to look keys up in.

    Attributes:
        key: ``small``, ``medium`` or ``large``.
        extents: extents in it.
        namespace: opened.
        sequences: keys of some of the sequences in it.
    """

    key: str
    extents: int
    namespace: Any
    sequences: list[BlockKeys]


def _group() -> LayerGroup:
    return LayerGroup.attention_kv(layers=1, heads=1, head_size=8)


def fill(root: Path, name: str, extents: int) -> LookupStore:
    """Make a store with so many extents.

    Args:
        root: folder for it; must not exist.
        name: the size's name.
        extents: how many extents.
    """
    import kvstore

    group = _group()
    identity = Identity("lookup", 1, (group,), revision="benchmark")
    namespace = kvstore.open(root).namespace(identity)
    paths = GroupPath(identity.namespace, group.name)
    rng = np.random.default_rng(extents)
    made = 0
    sequences = []
    for prefix in range(256):
        folder = root / paths.folder / f"{prefix:02x}"
        folder.mkdir(parents=True, exist_ok=True)
        record = folder / RECORD
        if not record.exists():
            record.write_bytes(encode_plain_group())
    while made < extents:
        count = min(EXTENTS_A_SEQUENCE, extents - made)
        tokens = rng.integers(0, 32000, count * group.extent_blocks * group.block_tokens)
        keys = namespace.keys(tokens)
        for number in range(count):
            record_of = _commit_record(identity, group, keys, number)
            folder = root / paths.extent(record_of.key.hex())
            folder.mkdir()
            (folder / RECORD).write_bytes(encode_extent(group, record_of))
        made += count
        sequences.append(keys)
    picked = rng.permutation(len(sequences))[:LOOKUPS]
    return LookupStore(name, extents, namespace, [sequences[i] for i in picked])


def _commit_record(
    identity: Identity, group: LayerGroup, keys: BlockKeys, number: int
) -> CommitRecord:
    blocks = group.extent_blocks
    first = number * blocks
    return CommitRecord(
        namespace=identity.namespace,
        group=group.name,
        blocks=tuple(keys[first : first + blocks]),
        parent=keys.parent_of(first),
        start_block=first,
        chunk_stride=shard_layout(group, blocks).stride,
        shards=shard_sizes(group, blocks),
        parallel_invariant=True,
        writer=Writer("kvstore bench", "tp=1", "bench"),
        write_id=f"{first:032x}",
        created="2026-01-01T00:00:00Z",
    )


def lookup_contender(store: LookupStore) -> Contender:
    """Look whole sequences up, all of them stored; ``nbytes`` counts keys."""
    asked = [store.sequences[i % len(store.sequences)] for i in range(LOOKUPS)]

    def run() -> int:
        return sum(store.namespace.match_prefix(keys).blocks for keys in asked)

    def correct() -> bool:
        return run() == sum(len(keys) for keys in asked)

    return Contender(
        f"lookup.{store.key}",
        f"prefix lookup, {store.extents:,} extents",
        run,
        correct=correct,
    )


def lookup_contenders(
    folder: Path, *, quick: bool, progress: Callable[[str], None]
) -> list[Contender]:
    """Stores of all sizes, and a contender for each.

    Args:
        folder: where to make the stores.
        quick: small sizes, for tests.
        progress: told what is being made.
    """
    contenders = []
    for name, extents in (QUICK_SIZES if quick else SIZES).items():
        progress(f"making a store of {extents:,} extents")
        contenders.append(lookup_contender(fill(folder / name, name, extents)))
    return contenders
