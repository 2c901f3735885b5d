from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupt, InvalidArgument
from kvstore.shard import ShardLayout, decode_index, join_chunks, slot_stride, split_chunks

CHUNKS = [b"abcd", b"efgh", b"ijkl"]
LAYOUT = ShardLayout.of(3, 4)


def crc_by_hand(data: bytes) -> int:
    """CRC-32C bit by bit (Castagnoli, reflected polynomial 0x82F63B78)."""
    crc = 0xFFFF_FFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F6_3B78 if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF


def index(entries: list[tuple[int, int]], crc: int | None = None) -> bytes:
    body = b"".join(struct.pack("<QQ", *e) for e in entries)
    return body + struct.pack("<I", crc32c(body) if crc is None else crc)


def test_crc_golden() -> None:
    # The check value of CRC-32C in every catalogue.
    assert crc32c(b"123456789") == crc_by_hand(b"123456789") == 0xE306_9283


def test_shard_golden() -> None:
    wanted = b"".join(c + struct.pack("<I", crc_by_hand(c)) for c in CHUNKS)
    body = struct.pack("<6Q", 0, 8, 8, 8, 16, 8)
    wanted += body + struct.pack("<I", crc_by_hand(body))
    assert join_chunks(LAYOUT, CHUNKS) == wanted
    assert (LAYOUT.index_offset, LAYOUT.index_bytes, LAYOUT.shard_bytes) == (24, 52, 76)


@pytest.mark.parametrize(
    ("chunk", "wanted"),
    [
        (1, 5),
        (4092, 4096),  # the checksum fills the page
        (4096, 4100),  # 4092 of padding is far more than 1/16
        (65536, 69632),  # 4092 * 16 = 65472 <= 65536
        (50112, 53248),  # padding of 3132, exactly 1/16
        (50111, 50115),  # one byte more is too much
        (131072, 135168),
    ],
)
def test_stride_golden(chunk: int, wanted: int) -> None:
    assert slot_stride(chunk) == wanted


@given(st.integers(1, 1 << 30))
def test_stride_holds_the_chunk_and_costs_little(chunk: int) -> None:
    stride = slot_stride(chunk)
    padding = stride - chunk - 4
    assert 0 <= padding < 4096
    assert padding == 0 or (stride % 4096 == 0 and padding * 16 <= chunk)
    aligned = -(-(chunk + 4) // 4096) * 4096
    assert stride == aligned or (aligned - chunk - 4) * 16 > chunk


def test_gaps_are_zero_and_slots_aligned() -> None:
    layout = ShardLayout.of(2, 65536)
    shard = join_chunks(layout, [b"\xff" * 65536] * 2)
    assert layout.stride == 69632
    assert shard[65540:69632] == bytes(4092)
    assert layout.offset(1) == 69632
    assert len(shard) == layout.shard_bytes == 2 * 69632 + 2 * 16 + 4


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=1, max_size=8)
    )
)
def test_round_trip(chunks: list[bytes]) -> None:
    layout = ShardLayout.of(len(chunks), len(chunks[0]))
    shard = join_chunks(layout, chunks)
    assert len(shard) == layout.shard_bytes
    assert split_chunks(layout, shard) == chunks
    assert shard[layout.index_offset :] == layout.encode_index()


def test_chunks_may_lie_anywhere_before_the_index() -> None:
    """Another writer may pack, reorder or pad: the index says where chunks are."""
    entries = [(30, 8), (0, 8), (14, 8)]
    offsets = decode_index(index(entries), 3, 4, 100, "shard")
    assert offsets.dtype == np.uint64
    assert offsets.tolist() == [30, 0, 14]


def test_an_index_must_agree_with_the_stride() -> None:
    swapped = [CHUNKS[1], CHUNKS[0], CHUNKS[2]]
    shard = join_chunks(LAYOUT, swapped)[: LAYOUT.index_offset] + index([(8, 8), (0, 8), (16, 8)])
    assert split_chunks(ShardLayout(3, 4, 0), shard, "shard") == CHUNKS
    with pytest.raises(Corrupt, match="chunk 0 is at 8; the stride puts it at 0"):
        split_chunks(LAYOUT, shard)


M = 0xFFFF_FFFF_FFFF_FFFF
GOOD = [(0, 8), (8, 8), (16, 8)]
REJECTED = {
    "short": (index(GOOD)[:-1], "the index has 51 bytes; 3 chunks need 52"),
    "long": (index(GOOD) + b"\0", "the index has 53 bytes; 3 chunks need 52"),
    "empty": (b"", "the index has 0 bytes"),
    "other-count": (index(GOOD[:2]), "3 chunks need 52"),
    "checksum": (index(GOOD, crc=0), "index checksum is 00000000, its bytes give"),
    "missing": (index([(0, 8), (M, M), (16, 8)]), "chunk 1 is missing"),
    "missing-offset": (index([(0, 8), (8, 8), (M, 8)]), "chunk 2 is missing"),
    "missing-length": (index([(0, M), (8, 8), (16, 8)]), "chunk 0 has 18446744073709551615 bytes"),
    "length-zero": (index([(0, 0), (8, 8), (16, 8)]), "chunk 0 has 0 bytes, not 8"),
    "length-long": (index([(0, 8), (8, 9), (16, 8)]), "chunk 1 has 9 bytes, not 8"),
    "overlap": (index([(0, 8), (7, 8), (16, 8)]), "two chunks overlap"),
    "same": (index([(8, 8), (8, 8), (16, 8)]), "two chunks overlap"),
    "in-the-index": (index([(0, 8), (8, 8), (17, 8)]), "lies outside the shard's 76 bytes"),
    "past-the-end": (index([(0, 8), (8, 8), (76, 8)]), "lies outside"),
    "wraps": (index([(0, 8), (8, 8), (M - 4, 8)]), "lies outside"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_index_rejected(case: str) -> None:
    data, fragment = REJECTED[case]
    with pytest.raises(Corrupt, match=fragment) as caught:
        decode_index(data, 3, 4, LAYOUT.shard_bytes, "shard c.0")
    assert str(caught.value).startswith("shard c.0: ")


@pytest.mark.parametrize("size", [0, 51, 52, 59, 75])
def test_a_shard_too_short_for_its_chunks_is_rejected(size: int) -> None:
    with pytest.raises(Corrupt, match="lies outside"):
        decode_index(index(GOOD), 3, 4, size, "shard")
    with pytest.raises(Corrupt):
        split_chunks(LAYOUT, join_chunks(LAYOUT, CHUNKS)[:size])


@pytest.mark.parametrize("position", range(LAYOUT.shard_bytes))
def test_every_flipped_byte_of_a_packed_shard_is_noticed(position: int) -> None:
    shard = bytearray(join_chunks(LAYOUT, CHUNKS))
    shard[position] ^= 0x20
    with pytest.raises(Corrupt):
        split_chunks(LAYOUT, bytes(shard))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40) | st.sampled_from([M, M - 3, 1 << 63]), st.sampled_from([8, M])
        ),
        min_size=3,
        max_size=3,
    ),
    st.integers(0, 120),
)
def test_accepted_offsets_can_be_read_without_overlap(
    entries: list[tuple[int, int]], shard_bytes: int
) -> None:
    try:
        offsets = decode_index(index(entries), 3, 4, shard_bytes, "shard").tolist()
    except Corrupt:
        starts = sorted(at for at, _ in entries)
        fits = all(length == 8 for _, length in entries) and starts[-1] + 8 + 52 <= shard_bytes
        apart = all(b - a >= 8 for a, b in pairwise(starts))
        assert not (fits and apart)
        return
    covered = [byte for at in offsets for byte in range(at, at + 8)]
    assert len(set(covered)) == len(covered)
    assert max(covered) < shard_bytes - 52


@given(st.binary(max_size=120))
def test_any_bytes_are_a_shard_or_corrupt(data: bytes) -> None:
    try:
        chunks = split_chunks(LAYOUT, data)
    except Corrupt:
        return
    assert [len(c) for c in chunks] == [4, 4, 4]


@pytest.mark.parametrize("chunks", [CHUNKS[:2], [*CHUNKS, b"mnop"], [*CHUNKS[:2], b"ijk"], []])
def test_join_rejects_other_chunks_than_the_layouts(chunks: list[bytes]) -> None:
    with pytest.raises(InvalidArgument, match="a shard of 3 chunks of 4 bytes was given"):
        join_chunks(LAYOUT, chunks)
