"""Lookup: which extents hold the blocks of a sequence.

Whether an extent exists is one existence check of its record: the file system or the bucket is the
index. Extents are named by their last block, so full extents are asked for directly. Where the
chain ends, inside an extent's span, a shorter extent or a hint reference to a longer one is looked
for, longest first.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import KVStoreError
from kvstore.extent import CommitRecord, decode_extent
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.io.protocol import Engine
from kvstore.jsonform import MAX_RECORD_BYTES
from kvstore.keys import BlockKeys, require_keys
from kvstore.paths import GroupPath

_MOST_DECODED = 4096


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks of a sequence, and the extent that holds them.

    Attributes:
        key: hex of the extent's key.
        first: index in the sequence of the first block, at or after the extent's first.
        stop: one past the last.
    """

    key: str
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a sequence.

    Attributes:
        blocks: leading blocks that are stored.
        tokens: the same in tokens.
        extents: where they are.
    """

    blocks: int
    tokens: int
    extents: tuple[Hit, ...]


class Lookup:
    """Finds extents of one layer group."""

    def __init__(
        self, engine: Engine, identity: Identity, group: LayerGroup, names: GroupPath
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._group = group
        self._names = names
        # Checking a record takes ten times as long as reading it, and its bytes hardly ever change.
        self._decoded: dict[str, tuple[bytes, CommitRecord]] = {}

    def match(self, keys: BlockKeys) -> Match:
        """The longest prefix of ``keys`` that is stored."""
        require_keys(keys)
        hits = self.extents(keys)
        blocks = hits[-1].stop - keys.start if hits else 0
        return Match(blocks, blocks * self._group.block_tokens, tuple(hits))

    def holds(self, key: bytes) -> bool:
        """Whether the block of that key, and so every block before it in its extent, is stored."""
        name = key.hex()
        return self._engine.exists(self._names.record(name)) or self.referred(name) is not None

    def extents(self, keys: BlockKeys) -> list[Hit]:
        """The extents that hold the leading blocks of ``keys``, up to the first gap."""
        span = self._group.extent_blocks
        first, stop = keys.start, keys.start + len(keys)
        exists, record = self._engine.exists, self._names.record
        hits: list[Hit] = []
        while first < stop:
            end = min(first - first % span + span, stop)
            key = keys[end - 1 - keys.start].hex()
            if end % span == 0 and exists(record(key)):
                hits.append(Hit(key, first, end))
                first = end
                continue
            hit = self._inside(keys, first, end)
            if hit is None:
                break
            hits.append(hit)
            if hit.stop < end:
                break
            first = end
        return hits

    def _inside(self, keys: BlockKeys, first: int, end: int) -> Hit | None:
        """An extent that ends, or is known to reach, as far as possible into the span."""
        for stop in range(end, first, -1):
            key = keys[stop - 1 - keys.start].hex()
            if self._engine.exists(self._names.record(key)):
                return Hit(key, first, stop)
            longer = self.referred(key)
            if longer is not None:
                return Hit(longer, first, stop)
        return None

    def referred(self, block_key: str) -> str | None:
        """Key of an extent that holds a block before its last, if a hint names one that exists."""
        path = self._names.ref(block_key)
        if not self._engine.exists(path):
            return None
        try:
            data = self._engine.get(path, MAX_RECORD_BYTES)
            found = decode_extent(data, self._identity, self._group, None, f"reference {path}")
        except KVStoreError:
            return None  # a hint: at worst a miss
        key = found.key.hex()
        held = any(k.hex() == block_key for k in found.blocks)
        return key if held and self._engine.exists(self._names.record(key)) else None

    def record(self, key: str) -> CommitRecord:
        """The checked commit record of an extent.

        Raises:
            NotFound: no such extent. FormatError: its record is not valid here.
        """
        path = self._names.record(key)
        data = self._engine.get(path, MAX_RECORD_BYTES)
        known = self._decoded.get(key)
        if known is not None and known[0] == data:
            return known[1]
        record = decode_extent(data, self._identity, self._group, key, f"extent {path}")
        if len(self._decoded) >= _MOST_DECODED:
            self._decoded.clear()
        self._decoded[key] = (data, record)
        return record
