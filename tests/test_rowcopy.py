"""The C function that moves rows: what it refuses, and that it then touches nothing."""

from __future__ import annotations

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from kvstore.rowcopy import Functions, Part, Parts, functions

found = functions()
if found is None:
    pytest.skip("the C functions were not built here", allow_module_level=True)
NATIVE: Functions = found
CHUNK, STRIDE, CHUNKS = 96, 104, 5


def _ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def _part(**changes: object) -> Part:
    """Three items of 8 bytes, 32 apart in a chunk and 40 apart in a page, in each of two units."""
    usual: dict[str, object] = {
        "starts": _ints(0, 16, -1, 32, 24),
        "page_units": _ints(200, 400),
        "data_units": _ints(0, 16),
        "content": 8,
        "count": 3,
        "nbytes": 8,
        "page_step": 40,
        "data_step": 32,
    }
    return Part(**{**usual, **changes})  # type: ignore[arg-type]


def _by_hand(pages: bytearray, data: bytearray, part: Part, *, to_pages: bool) -> None:
    for c, start in enumerate(part.starts.tolist()):
        for page_unit, data_unit in zip(
            part.page_units.tolist(), part.data_units.tolist(), strict=True
        ):
            for k in range(part.count if start >= 0 else 0):
                a = start + page_unit + k * part.page_step
                b = c * STRIDE + part.content + data_unit + k * part.data_step
                one, two = slice(a, a + part.nbytes), slice(b, b + part.nbytes)
                if to_pages:
                    pages[one] = data[two]
                else:
                    data[two] = pages[one]


def _memory() -> tuple[bytearray, bytearray]:
    rng = np.random.default_rng(1)
    data = bytearray(rng.bytes(STRIDE * CHUNKS))
    for c in range(CHUNKS):
        at = c * STRIDE
        sum_ = crc32c(data[at : at + CHUNK])
        data[at + CHUNK : at + CHUNK + 4] = sum_.to_bytes(4, "little")
    return bytearray(rng.bytes(600)), data


def _parts(pages: bytearray, *parts: Part) -> Parts:
    address = np.frombuffer(pages, np.uint8).ctypes.data
    return Parts(NATIVE, (address, len(pages)), parts, CHUNK, STRIDE)


@pytest.mark.parametrize("to_pages", [True, False])
@pytest.mark.parametrize("nbytes", [8, 1, 24])
def test_rows_go_where_they_should(nbytes: int, *, to_pages: bool) -> None:
    pages, data = _memory()
    twins = bytearray(pages), bytearray(data)
    part = _part(nbytes=nbytes, data_units=_ints(0, 0))
    _by_hand(*twins, part, to_pages=to_pages)
    move = _parts(pages, part).move
    assert move(memoryview(data), 0, CHUNKS, to_pages=to_pages, sums=False) is None
    assert (pages, data) == twins
    assert (pages, data) != _memory()


@pytest.mark.parametrize("wrong", range(CHUNKS))
def test_a_chunk_that_does_not_match_is_not_moved_nor_any_after_it(wrong: int) -> None:
    pages, data = _memory()
    data[wrong * STRIDE + 50] ^= 4
    twins = bytearray(pages), bytearray(data)
    before = _part(starts=np.where(np.arange(CHUNKS) < wrong, _part().starts, -1))
    _by_hand(*twins, before, to_pages=True)
    move = _parts(pages, _part()).move
    assert move(memoryview(data), 0, CHUNKS, to_pages=True, sums=True) == wrong
    assert (pages, data) == twins
    rest = memoryview(data)[(wrong + 1) * STRIDE :]
    assert move(rest, wrong + 1, CHUNKS - wrong - 1, to_pages=True, sums=True) is None


def test_checksums_are_put_behind_what_was_gathered() -> None:
    pages, data = _memory()
    _parts(pages, _part()).move(memoryview(data), 0, CHUNKS, to_pages=False, sums=True)
    _, untouched = _memory()
    assert data != untouched
    for c in range(CHUNKS):
        chunk = data[c * STRIDE : c * STRIDE + CHUNK]
        assert data[c * STRIDE + CHUNK : c * STRIDE + CHUNK + 4] == crc32c(chunk).to_bytes(
            4, "little"
        )


FAR = [-1, -(1 << 62), 1 << 40, 1 << 61, (1 << 63) - 1, 600, 593 - 80]


@given(
    st.sampled_from(["starts", "page_units", "data_units", "content", "nbytes", "steps", "count"]),
    st.sampled_from(FAR),
    st.booleans(),
)
def test_what_leads_out_of_memory_is_refused_and_nothing_is_touched(
    field: str, value: int, to_pages: bool
) -> None:
    changes: dict[str, object] = {
        "starts": {"starts": _ints(0, 16, -1, max(value, 600), 24)},
        "page_units": {"page_units": _ints(200, value)},
        "data_units": {"data_units": _ints(value, 16)},
        "content": {"content": value},
        "nbytes": {"nbytes": value},
        "steps": {"page_step": value, "data_step": value},
        "count": {"count": value},
    }[field]
    pages, data = _memory()
    parts = _parts(pages, _part(), _part(**changes))
    with pytest.raises(IndexError):
        parts.move(memoryview(data), 0, CHUNKS, to_pages=to_pages, sums=False)
    assert (pages, data) == _memory()


@pytest.mark.parametrize(
    ("nbytes", "first", "count"),
    [
        (STRIDE * CHUNKS, 1, CHUNKS),
        (STRIDE * CHUNKS, -1, 2),
        (STRIDE * CHUNKS, 0, 1 << 62),
        (STRIDE * CHUNKS, 0, -1),
        (STRIDE * 4 + CHUNK + 3, 0, CHUNKS),
        (0, 0, 1),
    ],
)
def test_chunks_that_are_not_there_are_refused(nbytes: int, first: int, count: int) -> None:
    pages, data = _memory()
    parts = _parts(pages, _part())
    with pytest.raises(IndexError):
        parts.move(memoryview(data)[:nbytes], first, count, to_pages=True, sums=True)
    assert (pages, data) == _memory()


def test_the_last_chunk_needs_no_gap_behind_it() -> None:
    pages, data = _memory()
    cut = memoryview(data)[: STRIDE * 4 + CHUNK + 4]
    assert _parts(pages, _part()).move(cut, 0, CHUNKS, to_pages=True, sums=True) is None


def test_unlike_numbers_of_offsets_are_refused() -> None:
    pages, _ = _memory()
    with pytest.raises(IndexError, match="different numbers"):
        _parts(pages, _part(), _part(starts=_ints(1, 2)))
    with pytest.raises(IndexError, match="different numbers"):
        _parts(pages, _part(data_units=_ints(1)))
