"""Checksums of consecutive chunks, each followed by its own, with few calls of the interpreter."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from crc32c import crc32c

from kvstore.shard import CRC_BYTES


def first_mismatch(data: memoryview, chunks: int, chunk_bytes: int, stride: int) -> int | None:
    """The first of the chunks that does not match the checksum behind it; None: all match."""
    if crc32c(data) == _sum_of_all(chunks, chunk_bytes, stride):
        return None
    stored = np.ndarray((chunks,), "<u4", data, chunk_bytes, (stride,)).tolist()
    for i in range(chunks):
        if crc32c(data[i * stride : i * stride + chunk_bytes]) != stored[i]:
            return i
    return None  # only the gaps are not zero, which is allowed


def put_sums(data: memoryview, chunks: int, chunk_bytes: int, stride: int) -> None:
    """Put its checksum behind each chunk."""
    sums = np.ndarray((chunks,), "<u4", data, chunk_bytes, (stride,))
    for i in range(chunks):
        sums[i] = crc32c(data[i * stride : i * stride + chunk_bytes])


@lru_cache(maxsize=256)
def _sum_of_all(chunks: int, chunk_bytes: int, stride: int) -> int:
    """The checksum of a piece in which all chunks match, with zeros between.

    CRC is linear: a chunk followed by its own CRC takes the register from any state to one that
    does not depend on the chunk. So this is one constant; any one chunk that does not match changes
    it, several together escape with a chance of 2^-32.
    """
    slot = bytearray(stride)
    own = crc32c(memoryview(slot)[:chunk_bytes])
    slot[chunk_bytes : chunk_bytes + CRC_BYTES] = own.to_bytes(CRC_BYTES, "little")
    total = 0
    for _ in range(chunks):
        total = crc32c(slot, total)
    return total
