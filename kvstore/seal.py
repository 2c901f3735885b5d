"""Sealing: a shard that several ranks filled gets its checksums, its index and its final name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from crc32c import crc32c

from kvstore.errors import NotFound
from kvstore.io.protocol import ByteRange, Engine
from kvstore.marks import RunningSums
from kvstore.paths import InflightPath
from kvstore.shard import ShardLayout


def seal_shard(
    engine: Engine,
    inflight: InflightPath,
    name: str,
    layout: ShardLayout,
    running: RunningSums,
    claims: Mapping[str, int | None],
) -> set[str]:
    """Seal one shard, if all of its ranks' bytes are there.

    Several processes may do this at once: they write the same bytes into the same file, and none
    makes a new one.

    Args:
        engine: the I/O engine.
        inflight: where the shard is.
        name: of the shard.
        layout: of the shard.
        running: fresh sums for its ranks.
        claims: rank -> checksum in its mark.

    Returns:
        Ranks whose bytes are not what their marks say; then nothing was sealed.

    Raises:
        NotFound: the shard is gone. Corrupt, StorageError: as named.
    """
    part = inflight.part(name)
    sums = np.zeros(layout.chunks, dtype="<u4")

    def consume(_number: int, offset: int, data: memoryview) -> None:
        first = offset // layout.stride
        for i in range(-(-len(data) // layout.stride)):
            at = i * layout.stride
            chunk = data[at : at + layout.chunk_bytes]
            sums[first + i] = crc32c(chunk)
            running.add(first + i, chunk)

    outcome = engine.read([ByteRange(part, 0, layout.index_offset, layout.stride)], consume)[0]
    try:
        if outcome is not None:
            raise outcome
        wrong = running.contradicting(claims)
        if wrong:
            return wrong
        pieces = [
            (layout.offset(i) + layout.chunk_bytes, sums[i : i + 1].tobytes())
            for i in range(layout.chunks)
        ]
        pieces.append((layout.index_offset, layout.encode_index()))
        engine.write_into(part, layout.shard_bytes, pieces, create=False)
        engine.rename(part, inflight.shard(name), settle=False)
    except NotFound:
        if not engine.exists(inflight.shard(name)):
            raise
    return set()
