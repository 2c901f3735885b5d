"""The stored bytes that an extent must have, worked out apart from the library."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

from crc32c import crc32c

from kvstore.geometry import LayerGroup
from support.pools import Bytes


def shards(group: LayerGroup, truth: Bytes, first: int, stop: int) -> dict[str, bytes]:
    """Name -> bytes of the shards of the extent of canonical tokens ``first`` to ``stop - 1``."""
    rows = group.num_layers // group.shard_layers
    columns = group.heads // group.shard_heads
    out = {}
    for row, column in itertools.product(range(rows), range(columns)):
        body, index = b"", b""
        for layer, head in itertools.product(range(group.shard_layers), range(group.shard_heads)):
            this, head_at = row * group.shard_layers + layer, column * group.shard_heads + head
            chunk = truth[this, head_at, first:stop].tobytes()
            used = len(chunk) + 4
            aligned = (used + 4095) // 4096 * 4096
            stride = aligned if (aligned - used) * 16 <= len(chunk) else used
            index += struct.pack("<QQ", len(body), used)
            body += (chunk + struct.pack("<I", crc32c(chunk))).ljust(stride, b"\0")
        out[f"c.{row}.0.{column}.0.0"] = body + index + struct.pack("<I", crc32c(index))
    return out


def stored(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of what lies in an extent's folder, without its record."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "zarr.json"}
