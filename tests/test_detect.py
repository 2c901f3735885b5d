"""Detection: one reading of a shape is taken, several are refused, none is a clear error."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.pools import LAYOUTS
from support.world import small_group
from tiny import GROUPS

from kvstore.detect import detect_buffers
from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import LayerGroup
from kvstore.parallel import ParallelConfig, Rank
from kvstore.share import Share, share_of

KV = small_group(layers=2, shard_layers=1)


def _share(group: LayerGroup, tp: int = 1) -> Share:
    return share_of(group, ParallelConfig(tp=tp), Rank(), 8)


def _zeros(shape: Sequence[int], layers: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(*shape, dtype=torch.bfloat16) for _ in range(layers)]


@pytest.mark.parametrize(
    ("shape", "tp", "constructor"),
    [
        ((9, 4, 6, 16), 1, "packed-hnd"),
        ((9, 6, 4, 16), 1, "packed-nhd"),
        ((9, 2, 6, 16), 2, "packed-hnd"),
        ((2, 9, 6, 4, 8), 1, "split-2b-nhd"),
        ((2, 9, 4, 6, 8), 1, "split-2b-hnd"),
        ((9, 2, 6, 4, 8), 1, "split-b2-nhd"),
        ((9, 2, 4, 6, 8), 1, "split-b2-hnd"),
        ((9, 6, 16), 4, "latent"),
        ((6, 6, 16), 4, "latent"),
    ],
)
def test_reads_a_shape_as_its_constructor_would(
    shape: tuple[int, ...], tp: int, constructor: str
) -> None:
    share = _share(KV, tp)
    found = detect_buffers(KV, share, _zeros(shape), block_tokens=6)
    blocks = 6 if shape[0] == 6 else 9
    twin = LAYOUTS[constructor](KV, 2, len(share.heads), blocks, 6).buffers
    assert (found.blocks, found.heads, found.block_tokens) == (blocks, len(share.heads), 6)
    for mine, other in zip(found.layers, twin.layers, strict=True):
        assert [
            (s.address, s.nbytes, s.content_offset, s.block_stride, s.head_stride, s.token_stride)
            for s in mine
        ] == [
            (s.address, s.nbytes, s.content_offset, s.block_stride, s.head_stride, s.token_stride)
            for s in other
        ]


def test_takes_strides_as_they_are() -> None:
    tensors = [torch.zeros(6, 4, 9, 16, dtype=torch.bfloat16).permute(2, 1, 0, 3) for _ in "ab"]
    found = detect_buffers(KV, _share(KV), tensors, block_tokens=6)
    assert [(s.block_stride, s.head_stride, s.token_stride) for s in found.layers[1]] == [
        (32, 9 * 32, 4 * 9 * 32)
    ]


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [((9, 4, 4, 16), 4), ((2, 9, 4, 4, 8), 4), ((9, 2, 4, 4, 8), 4), ((2, 2, 6, 4, 8), 6)],
)
def test_refuses_what_sizes_do_not_tell(shape: tuple[int, ...], tokens: int) -> None:
    with pytest.raises(NotCertified, match=r"two axes of size 2|sizes do not tell"):
        detect_buffers(KV, _share(KV), _zeros(shape), block_tokens=tokens)


def test_names_the_readings_between_which_it_cannot_choose() -> None:
    with pytest.raises(NotCertified, match="may be packed hnd or packed nhd") as caught:
        detect_buffers(KV, _share(KV), _zeros((9, 4, 4, 16)), block_tokens=4)
    assert caught.value.reason == "the page layout is ambiguous"


@pytest.mark.parametrize(
    "shape",
    [
        (9, 4, 6, 8),
        (9, 5, 6, 16),
        (9, 6, 16),
        (3, 9, 6, 4, 8),
        (9, 4, 6, 8, 2),
        (9, 4, 7, 16),
        (5,),
    ],
)
def test_refuses_unknown_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="no known page layout") as caught:
        detect_buffers(KV, _share(KV), _zeros(shape), block_tokens=6)
    assert str(shape) in str(caught.value)


def test_refuses_layers_of_different_shapes() -> None:
    tensors = [*_zeros((9, 4, 6, 16), 1), *_zeros((8, 4, 6, 16), 1)]
    with pytest.raises(InvalidArgument, match="different shapes"):
        detect_buffers(KV, _share(KV), tensors, block_tokens=6)


def test_parts_of_different_sizes_are_never_split() -> None:
    group = small_group(layers=2, shard_layers=1, value_size=3)
    with pytest.raises(InvalidArgument, match="no known page layout"):
        detect_buffers(group, _share(group), _zeros((2, 9, 6, 4, 8)), block_tokens=6)
    found = detect_buffers(group, _share(group), _zeros((9, 4, 6, 11)), block_tokens=6)
    assert found.layers[0][0].nbytes == 22
    uneven = small_group(layers=1, shard_layers=1, head_size=6, value_size=2, element="int8")
    halves = [torch.zeros(2, 9, 6, 4, 4, dtype=torch.int8)]
    with pytest.raises(InvalidArgument, match="no known page layout"):
        detect_buffers(uneven, _share(uneven), halves, block_tokens=6)


def test_latent_pages_and_mixed_pages() -> None:
    mla = GROUPS["mla"]()
    found = detect_buffers(mla, _share(mla), _zeros((5, 4, 16), 3), block_tokens=4)
    assert (found.blocks, found.heads, found.block_tokens) == (5, 1, 4)
    mixed = GROUPS["mixed"]()
    raw = [torch.zeros(5, 2, 8, 20, dtype=torch.uint8) for _ in "ab"]
    assert detect_buffers(mixed, _share(mixed), raw, block_tokens=8).heads == 2


def test_no_layers_make_no_buffers() -> None:
    assert detect_buffers(KV, _share(KV), [], block_tokens=4).layers == ()
