from __future__ import annotations

import numpy as np
import pytest

from kvstore.demo.matrix import DEFAULT_TEXTS, certify_rows, parse_rows
from kvstore.demo.placement import (
    POISON,
    PageStyle,
    gather,
    holding,
    new_pool,
    place,
    shuffled_blocks,
)
from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import LayerGroup
from kvstore.layout import PageLayout
from kvstore.parallel import ParallelConfig
from kvstore.share import share_of

LAYERS, HEADS, TOKENS, SIZE = 30, 3, 80, 4
USUAL = {str(side.config) for row in parse_rows([]) for side in (row.writer, row.reader)}
CONFIGS = [
    *sorted(USUAL),
    "pp=3,pp_layers=14+10+6",
    "pcp=2,interleave=4",
    "pcp=2,pcp_kv=replicated",
    "tp=6,dcp=2,interleave=2",
]
STYLES = [PageStyle(order, parts) for order in ("hnd", "nhd") for parts in ("packed", "split")]


def cache():
    count = LAYERS * HEADS * TOKENS * 2 * SIZE
    return np.arange(count, dtype=np.uint32).reshape(LAYERS, HEADS, TOKENS, 2, SIZE)


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("text", CONFIGS)
def test_what_ranks_hold_is_the_whole_cache(text: str, style: PageStyle):
    config, bits = ParallelConfig.parse(text), cache()
    rebuilt = np.zeros_like(bits)
    for rank in config.ranks():
        held = holding(config, rank, LAYERS, HEADS, TOKENS)
        pool = new_pool(bits, held, style)
        blocks = shuffled_blocks(pool, held, style, seed=config.number(rank))
        place(bits, held, pool, style, blocks)
        unused = sorted(set(range(pool.shape[1])) - set(blocks))
        assert unused
        assert (pool[:, unused].view(np.uint8) == POISON).all()
        gather(rebuilt, held, pool, style, blocks)
    assert np.array_equal(rebuilt, bits)


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("text", CONFIGS)
def test_the_store_sees_the_same_bytes_in_the_same_places(text: str, style: PageStyle):
    config, bits = ParallelConfig.parse(text), cache()
    group = LayerGroup.attention_kv(
        layers=LAYERS, heads=HEADS, head_size=SIZE, block_tokens=16, element="float32"
    )
    make = {"packed": PageLayout.packed, "split": PageLayout.split}[style.parts]
    for rank in config.ranks():
        held = holding(config, rank, LAYERS, HEADS, TOKENS)
        share = share_of(group, config, rank, LAYERS)
        assert (held.layers, held.heads) == (share.layers, share.heads)
        assert list(held.tokens) == list(share.lattice.owned(0, TOKENS))
        layout = make(group, heads=len(held.heads), order=style.order)
        pool = new_pool(bits, held, style)
        blocks = shuffled_blocks(pool, held, style, seed=1)
        place(bits, held, pool, style, blocks)
        memory = pool[0].view(np.uint8).reshape(-1)
        local = len(held.tokens) - 1
        for part, name in enumerate(("key", "value")):
            at = layout.offsets(name)[-1, local % 16]
            at += blocks[local // 16] * layout.part(name).block_stride
            found = memory[at : at + SIZE * 4].view(np.uint32)
            wanted = bits[held.layers[0], held.heads[-1], held.tokens[local], part]
            assert np.array_equal(found, wanted)


def test_the_rows_show_every_kind_of_parallelism_and_change_of_layout():
    rows = parse_rows([])
    assert len(rows) == len(DEFAULT_TEXTS)
    assert {str(row.writer.config) for row in rows} == {
        "tp=3",
        "tp=9",
        "tp=3,pp=2,pp_layers=16+14",
        "tp=9,dcp=3",
    }
    for row in rows:
        assert row.writer.config != row.reader.config or row.writer.style != row.reader.style
        assert row.writer.style != row.reader.style


def test_a_row_of_ones_own():
    (row,) = parse_rows([" tp=3 -> tp=9,dcp=3@nhd-packed"])
    assert (str(row.writer), str(row.reader)) == ("tp=3@hnd-packed", "tp=9,dcp=3@nhd-packed")


@pytest.mark.parametrize("text", ["tp=4 -> tp=1", "tp=1 -> pp=7", "tp=9,dcp=2 -> tp=3"])
def test_a_row_that_the_model_does_not_fit_is_refused(text: str):
    group = LayerGroup.attention_kv(layers=LAYERS, heads=HEADS, head_size=SIZE)
    certify_rows(parse_rows([]), group, LAYERS)
    with pytest.raises(NotCertified):
        certify_rows(parse_rows([text]), group, LAYERS)


@pytest.mark.parametrize("text", ["tp=3", "tp=3 -> tp=1 -> tp=2", "tp=3@hdn-packed -> tp=1"])
def test_a_row_that_is_not_one_is_refused(text: str):
    with pytest.raises(InvalidArgument, match=r"WRITER -> READER|page layout"):
        parse_rows([text])
