"""The shard codec: one stored object of an extent, a box of layers and heads, all its blocks.

A shard is a Zarr v3 ``sharding_indexed`` shard with its index at the end::

    slot 0 | slot 1 | ... | slot n-1 | n * (offset u64le, nbytes u64le) | crc32c of the index u32le

A slot holds one inner chunk (all tokens of one head of one layer), its crc32c, and zeros up to the
stride. Strides are fixed, so offsets are known without reading the index; aligned strides keep
every chunk on a boundary that O_DIRECT and GPUDirect want.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import Corrupt, InvalidArgument

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CRC_BYTES = 4
INDEX_ENTRY_BYTES = 16
ALIGNMENT = 4096
MISSING = 0xFFFF_FFFF_FFFF_FFFF
"""Offset and length of an index entry whose chunk is absent (Zarr's own mark)."""


def checksum(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """CRC-32C of some bytes, or of ``before``'s bytes and these."""
    # Imported here: a tool that reads records alone does without, and answers sooner.
    from crc32c import crc32c

    return crc32c(data, before)


def slot_stride(chunk_bytes: int) -> int:
    """Bytes from one slot to the next.

    Aligned to 4096 when the padding costs at most 1/16 of a chunk, else packed.
    """
    used = chunk_bytes + CRC_BYTES
    aligned = -(-used // ALIGNMENT) * ALIGNMENT
    return aligned if (aligned - used) * 16 <= chunk_bytes else used


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where the chunks of one shard are.

    Attributes:
        chunks: number of inner chunks, in C order of (layer in the shard, head in the shard).
        chunk_bytes: bytes of one chunk, without its checksum.
        stride: bytes from one chunk's start to the next's.
    """

    chunks: int
    chunk_bytes: int
    stride: int

    @classmethod
    def of(cls, chunks: int, chunk_bytes: int) -> ShardLayout:
        """The layout that a writer uses."""
        return cls(chunks, chunk_bytes, slot_stride(chunk_bytes))

    @property
    def index_offset(self) -> int:
        """First byte of the index, and the bytes of all slots."""
        return self.chunks * self.stride

    @property
    def index_bytes(self) -> int:
        """Bytes of the index with its checksum."""
        return self.chunks * INDEX_ENTRY_BYTES + CRC_BYTES

    @property
    def shard_bytes(self) -> int:
        """Bytes of the whole shard."""
        return self.index_offset + self.index_bytes

    def offset(self, chunk: int) -> int:
        """First byte of a chunk."""
        return chunk * self.stride

    def encode_index(self) -> bytes:
        """The index of a shard in which no chunk is missing."""
        import numpy as np

        table = np.empty((self.chunks, 2), dtype="<u8")
        table[:, 0] = np.arange(self.chunks, dtype=np.uint64) * np.uint64(self.stride)
        table[:, 1] = self.chunk_bytes + CRC_BYTES
        body = table.tobytes()
        return body + checksum(body).to_bytes(CRC_BYTES, "little")


def decode_index(
    data: bytes, chunks: int, chunk_bytes: int, shard_bytes: int, what: str
) -> NDArray[np.uint64]:
    """Chunk offsets out of a shard's index, in chunk order.

    Args:
        data: the last ``16 * chunks + 4`` bytes of the shard.
        chunks: inner chunks that the shard must have.
        chunk_bytes: bytes of each, without its checksum.
        shard_bytes: bytes of the stored object.
        what: the shard, for messages.

    Returns:
        ``[chunks]`` byte offsets. Chunks lie within the shard, before the index, without overlap.

    Raises:
        Corrupt: wrong size or checksum, a missing chunk, or a chunk out of range or overlapping.
    """
    import numpy as np

    wanted = chunks * INDEX_ENTRY_BYTES + CRC_BYTES
    if len(data) != wanted:
        raise Corrupt(f"{what}: the index has {len(data)} bytes; {chunks} chunks need {wanted}")
    body = data[:-CRC_BYTES]
    stored, computed = int.from_bytes(data[-CRC_BYTES:], "little"), checksum(body)
    if stored != computed:
        raise Corrupt(f"{what}: index checksum is {stored:08x}, its bytes give {computed:08x}")
    table = np.frombuffer(body, dtype="<u8").reshape(chunks, 2)
    offsets, lengths = table[:, 0], table[:, 1]
    if (offsets == MISSING).any():
        raise Corrupt(f"{what}: chunk {int((offsets == MISSING).argmax())} is missing")
    size = chunk_bytes + CRC_BYTES
    if (lengths != size).any():
        chunk = int((lengths != size).argmax())
        raise Corrupt(f"{what}: chunk {chunk} has {int(lengths[chunk])} bytes, not {size}")
    limit = shard_bytes - wanted - size
    if limit < 0 or (offsets > np.uint64(limit)).any():
        raise Corrupt(f"{what}: a chunk lies outside the shard's {shard_bytes} bytes")
    ordered = np.sort(offsets)
    if (np.diff(ordered) < np.uint64(size)).any():
        raise Corrupt(f"{what}: two chunks overlap")
    return offsets


def join_chunks(layout: ShardLayout, chunks: Sequence[bytes]) -> bytes:
    """A whole shard out of its chunks: the plain form of the codec, for small shards and tests.

    Raises:
        InvalidArgument: the number or size of chunks is not the layout's.
    """
    if len(chunks) != layout.chunks or any(len(c) != layout.chunk_bytes for c in chunks):
        raise InvalidArgument(
            f"a shard of {layout.chunks} chunks of {layout.chunk_bytes} bytes was given "
            f"{len(chunks)} of {sorted({len(c) for c in chunks})}"
        )
    out = bytearray(layout.index_offset)
    for i, chunk in enumerate(chunks):
        at = layout.offset(i)
        out[at : at + len(chunk)] = chunk
        out[at + len(chunk) : at + len(chunk) + CRC_BYTES] = checksum(chunk).to_bytes(4, "little")
    return bytes(out) + layout.encode_index()


def split_chunks(layout: ShardLayout, shard: bytes, what: str = "shard") -> list[bytes]:
    """Chunks out of a whole shard, through its index, each checked.

    A layout with stride 0 lets chunks lie anywhere: only the index says where.

    Raises:
        Corrupt: the index or a chunk is damaged, or the index disagrees with the stride.
    """
    tail = shard[-layout.index_bytes :]
    offsets = decode_index(tail, layout.chunks, layout.chunk_bytes, len(shard), what)
    out = []
    for i, at in enumerate(offsets.tolist()):
        if layout.stride and at != layout.offset(i):
            raise Corrupt(f"{what}: chunk {i} is at {at}; the stride puts it at {layout.offset(i)}")
        chunk = shard[at : at + layout.chunk_bytes]
        stored = shard[at + layout.chunk_bytes : at + layout.chunk_bytes + CRC_BYTES]
        if checksum(chunk).to_bytes(CRC_BYTES, "little") != stored:
            raise Corrupt(f"{what}: chunk {i} does not match its checksum")
        out.append(chunk)
    return out
