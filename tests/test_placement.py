"""Placement: every token that is owned and asked for, and no other, at its place in the pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.placement import block_table, place, unit_tokens
from kvstore.share import TokenLattice


@st.composite
def _cases(draw: st.DrawFn) -> tuple[TokenLattice, int, int, int, int, int]:
    cp = draw(st.integers(1, 5))
    interleave = draw(st.sampled_from((1, 2, 3, 4, 6)))
    lattice = TokenLattice(interleave, cp, draw(st.integers(0, cp - 1)))
    block = draw(st.sampled_from((1, 2, 4, 6, 8)))
    local = interleave * draw(st.integers(1, 4)) if cp > 1 else draw(st.integers(1, 9))
    chunk = block * draw(st.integers(0, 12))
    start = chunk + block * draw(st.integers(0, 4))
    stop = start + block * draw(st.integers(1, 6))
    return lattice, block, local, chunk, start, stop


@given(_cases(), st.randoms(use_true_random=False))
def test_agrees_with_counting_token_by_token(
    case: tuple[TokenLattice, int, int, int, int, int], random: np.random.Generator
) -> None:
    lattice, block, local, chunk, start, stop = case
    table = np.arange(200, dtype=np.int64)
    random.shuffle(table)  # type: ignore[arg-type]  # random.Random, which shuffles in place
    unit = unit_tokens(lattice, block, local)
    found = place(lattice, unit, local, table, chunk, start, stop)
    count, expected = 0, []
    for t in range(stop):
        if t // lattice.interleave % lattice.cp != lattice.index:
            continue
        if t >= start:
            expected.append((t - chunk, int(table[count // local]), count % local))
        count += 1
    single = found.split()
    source = np.arange(len(single.block)) if single.source is None else single.source
    assert list(zip(source, single.block, single.slot, strict=True)) == expected
    assert len(found.block) * unit == len(expected)


@given(_cases())
def test_units_are_as_large_as_blocks_and_interleave_allow(
    case: tuple[TokenLattice, int, int, int, int, int],
) -> None:
    lattice, block, local, *_ = case
    unit = unit_tokens(lattice, block, local)
    sizes = [block, local] if lattice.whole else [block, local, lattice.interleave]
    assert all(n % unit == 0 for n in sizes)
    assert not any(all(n % u == 0 for n in sizes) for u in range(unit + 1, max(sizes) + 1))


def test_a_whole_chunk_in_order_needs_no_selection() -> None:
    where = place(TokenLattice(), 4, 8, np.array([5, 3]), 0, 0, 16)
    assert where.source is None
    assert where.block.tolist() == [5, 5, 3, 3]
    assert where.slot.tolist() == [0, 1, 0, 1]
    inner = place(TokenLattice(), 4, 8, np.array([5, 3]), 0, 8, 16)
    assert inner.source is not None
    assert (inner.source.tolist(), inner.block.tolist()) == ([2, 3], [3, 3])


def test_table_too_short() -> None:
    with pytest.raises(InvalidArgument, match="block_ids has 1 entries; tokens up to 16 need 2"):
        place(TokenLattice(), 4, 8, np.array([5]), 0, 0, 16)


def test_invalid_entries_matter_only_where_tokens_move() -> None:
    table = block_table([-1, 3, 99, 2], 10)
    assert table.tolist() == [-1, 3, -1, 2]
    assert place(TokenLattice(), 4, 8, table, 0, 8, 16).block.tolist() == [3, 3]
    with pytest.raises(InvalidArgument, match=r"block_ids\[2\] is not an engine block"):
        place(TokenLattice(), 4, 8, table, 0, 8, 24)
    with pytest.raises(InvalidArgument, match=r"block_ids\[0\]"):
        place(TokenLattice(), 4, 8, table, 0, 0, 8)


@pytest.mark.parametrize(
    "ids", [[[1, 2]], [1.0, 2.0], ["a"], 3, [True, False], np.array([1], dtype=np.float32)]
)
def test_block_ids_are_a_row_of_whole_numbers(ids: object) -> None:
    with pytest.raises(InvalidArgument, match="1-D sequence of whole numbers"):
        block_table(ids, 10)


@pytest.mark.parametrize("kind", ["list", "tuple", "range", "int32", "uint64", "torch", "empty"])
def test_block_ids_of_every_usual_kind(kind: str) -> None:
    import torch

    made = {
        "list": [1, 0],
        "tuple": (1, 0),
        "range": range(1, -1, -1),
        "int32": np.array([1, 0], dtype=np.int32),
        "uint64": np.array([1, 0], dtype=np.uint64),
        "torch": torch.tensor([1, 0]),
        "empty": [],
    }[kind]
    assert block_table(made, 2).tolist() == ([] if kind == "empty" else [1, 0])


def test_huge_unsigned_ids_do_not_wrap_into_valid_ones() -> None:
    ids = np.array([2**64 - 1, 2**63, 1], dtype=np.uint64)
    assert block_table(ids, 4).tolist() == [-1, -1, 1]
