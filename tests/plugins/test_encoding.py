"""Page encodings, read off what a backend's writer does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import NotCertified
from kvstore.plugins.vllm.encoding import Axis, PartEncoding, probe

HEADS = 3


def scattered(tokens: int, counts: list[int], orders: list[tuple[list[int], list[int]]]) -> Any:
    """A writer that keeps each part in axes ``[token tile, token, element tile, element]``.

    ``orders``: for each part the order of these axes in memory, and their sizes.
    """

    def write(cache: torch.Tensor, parts: list[torch.Tensor], slots: torch.Tensor) -> None:
        page = tokens * sum(counts)
        flat = cache.view(cache.shape[0], HEADS, page)
        block = int(slots[0]) // tokens
        at = 0
        for part, count, (order, sizes) in zip(parts, counts, orders, strict=True):
            for head in range(HEADS):
                here = part[:, head].reshape(sizes).permute(order).reshape(-1)
                flat[block, head, at : at + tokens * count] = here.to(cache.dtype)
            at += tokens * count

    return write


def run(write: Any, tokens: int, counts: list[int], dtype: torch.dtype) -> Any:
    cache = torch.zeros((5, HEADS, tokens, sum(counts)), dtype=dtype)
    return cache, probe(
        write,
        cache,
        heads=HEADS,
        tokens=tokens,
        counts=counts,
        source=torch.bfloat16 if dtype.itemsize == 1 else dtype,
        element=dtype,
        what="layer 'x'",
    )


@given(
    order=st.tuples(st.permutations(range(4)), st.permutations(range(4))),
    tiles=st.tuples(*[st.sampled_from([1, 2, 4]) for _ in range(4)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
)
def test_what_was_written_is_where_the_encoding_says(
    order: tuple[list[int], list[int]], tiles: tuple[int, ...], dtype: torch.dtype
) -> None:
    tokens, counts = 8, [16, 4]
    sizes = [
        [tokens // tiles[0], tiles[0], counts[0] // tiles[1], tiles[1]],
        [tokens // tiles[2], tiles[2], counts[1] // tiles[3], tiles[3]],
    ]
    write = scattered(tokens, counts, list(zip(order, sizes, strict=True)))
    cache, found = run(write, tokens, counts, dtype)
    assert not cache.float().any()  # nothing of the engine's own memory was touched
    content = [
        torch.randint(0, 8, (tokens, HEADS, count)).to(torch.float32).to(dtype) for count in counts
    ]
    write(cache, content, torch.arange(2 * tokens, 3 * tokens))
    for part, encoding, count in zip(content, found, counts, strict=True):
        seen = encoding.view(cache, HEADS)[2].reshape(HEADS, tokens, count)
        assert torch.equal(seen.float(), part.transpose(0, 1).float())


def test_known_encodings() -> None:
    turned = scattered(
        32, [64, 64], [([2, 3, 0, 1], [1, 32, 1, 64]), ([0, 1, 2, 3], [1, 32, 1, 64])]
    )
    _, (key, value) = run(turned, 32, [64, 64], torch.float32)
    assert key == PartEncoding(0, 4096, Axis(1, 0, 32, 1), Axis(1, 0, 64, 32))
    assert value == PartEncoding(2048, 4096, Axis(1, 0, 32, 64), Axis(1, 0, 64, 1))


def irregular(cache: torch.Tensor, parts: list[torch.Tensor], slots: torch.Tensor) -> None:
    flat = cache.view(cache.shape[0], -1)
    whole = torch.cat([p.transpose(0, 1).reshape(-1) for p in parts])
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1))
    flat[int(slots[0]) // 8, order] = whole.to(cache.dtype)


def lossy(cache: torch.Tensor, parts: list[torch.Tensor], slots: torch.Tensor) -> None:
    cache[int(slots[0]) // 8] = parts[0][:, :, :1].amax().to(cache.dtype)


def elsewhere(cache: torch.Tensor, parts: list[torch.Tensor], slots: torch.Tensor) -> None:
    cache[int(slots[0]) // 8, :, :, :4] = parts[0].transpose(0, 1)  # the second part is left out


@pytest.mark.parametrize("writer", [irregular, lossy, elsewhere])
def test_others_are_refused(writer: Any) -> None:
    with pytest.raises(NotCertified, match="layer 'x'"):
        run(writer, 8, [4, 4], torch.float32)
