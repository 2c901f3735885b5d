"""What is stored and loaded: one long sequence of a known model, and paged buffers for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvstore.bench.limits import Bytes, aligned_buffer
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity

if TYPE_CHECKING:
    import torch

BLOCK_TOKENS = 16
ELEMENT = "bfloat16"
POISON = 0xA5


@dataclass(frozen=True, slots=True)
class Model:
    """A model whose cache is stored.

    Attributes:
        key: short name, as in row keys.
        title: what a person reads.
        layers: layers, all with full attention.
        heads: KV heads.
        head_size: elements of a key and of a value.
        other_tp: tensor parallel size of the readers with another config.
    """

    key: str
    title: str
    layers: int
    heads: int
    head_size: int
    other_tp: int

    @property
    def group(self) -> LayerGroup:
        """The model's one layer group: 16-token blocks, extents of 256 tokens."""
        return LayerGroup.attention_kv(
            layers=self.layers,
            heads=self.heads,
            head_size=self.head_size,
            block_tokens=BLOCK_TOKENS,
            element=ELEMENT,
        )


LLAMA = Model("llama", "Llama-3-8B", layers=32, heads=8, head_size=128, other_tp=4)
SMOLLM = Model("smollm", "SmolLM2-135M", layers=30, heads=3, head_size=64, other_tp=3)


class Workload:
    """One sequence of a model, of about so many bytes of KV cache.

    ``source`` is what one rank that holds all of it (TP=1) has in its pages: per layer
    ``[block, head, token, key and value]``, block ids in order. ``arena`` is memory of the same
    size that loads go into, as one engine or another would lay its pages out in it. Engine block
    ids of loads are a random permutation, as a running engine's are.

    Args:
        model: the model.
        nbytes: wanted bytes; cut to whole extents, one at least.
        seed: of tokens, bytes and block ids.
    """

    def __init__(self, model: Model, nbytes: int, seed: int = 0) -> None:
        self.model = model
        self.group = model.group
        extent = self.group.extent_blocks * self.group.page_bytes * model.layers
        self.extents = max(1, nbytes // extent)
        self.blocks = self.extents * self.group.extent_blocks
        self.nbytes = self.extents * extent
        rng = np.random.default_rng(seed)
        self.tokens: NDArray[np.int64] = rng.integers(0, 32000, self.blocks * BLOCK_TOKENS)
        self.block_ids: NDArray[np.int64] = rng.permutation(self.blocks).astype(np.int64)
        self._source = aligned_buffer(self.nbytes)
        step = 1 << 24
        for start in range(0, self.nbytes, step):
            part = self._source[start : start + step]
            part[:] = np.frombuffer(rng.bytes(part.size), np.uint8)
        self._arena = aligned_buffer(self.nbytes)

    @property
    def identity(self) -> Identity:
        """Identity of the namespace."""
        return Identity(self.model.title, self.model.layers, (self.group,), revision="benchmark")

    @cached_property
    def in_order(self) -> NDArray[np.int64]:
        """The source's block ids."""
        return np.arange(self.blocks, dtype=np.int64)

    @property
    def source_bytes(self) -> Bytes:
        """The source as flat bytes."""
        return self._source

    @property
    def arena_bytes(self) -> Bytes:
        """The arena as flat bytes."""
        return self._arena

    @cached_property
    def source(self) -> Bytes:
        """The source, ``[layer, block, head, bytes of 16 tokens]``."""
        return self._source.reshape(self.model.layers, self.blocks, self.model.heads, -1)

    @cached_property
    def pages(self) -> Bytes:
        """The arena as TP=1 HND pages, ``[layer, block, head, bytes of 16 tokens]``."""
        return self._arena.reshape(self.source.shape)

    def poison(self) -> None:
        """Spoil the arena, so that bytes of an earlier load cannot pass for this one's."""
        self._arena.fill(POISON)

    # -- paged buffers as engines have them --

    def source_tensors(self) -> list[torch.Tensor]:
        """The source as one tensor a layer, ``[block, head, token, key and value]``."""
        return _packed(self._source, self.model, self.blocks, 1)[0]

    def packed_tensors(self, tp: int) -> list[list[torch.Tensor]]:
        """The arena as the HND pages of ``tp`` ranks, key next to value: ``[rank][layer]``."""
        return _packed(self._arena, self.model, self.blocks, tp)

    def split_tensors(self) -> list[torch.Tensor]:
        """The arena as TP=1 NHD pages: ``[block, keys and values, token, head, size]`` a layer."""
        shape = (self.model.layers, self.blocks, 2, BLOCK_TOKENS, self.model.heads, -1)
        return [_tensor(layer) for layer in self._arena.reshape(shape)]

    # -- proofs --

    def packed_correct(self, tp: int = 1) -> bool:
        """Whether HND pages of ``tp`` ranks hold the source, at the permuted block ids."""
        heads = self.model.heads // tp
        pages = self._arena.reshape(tp, self.model.layers, self.blocks, heads, -1)
        return all(
            np.array_equal(
                pages[rank, layer, self.block_ids],
                self.source[layer, :, rank * heads : (rank + 1) * heads],
            )
            for rank in range(tp)
            for layer in range(self.model.layers)
        )

    def split_correct(self) -> bool:
        """Whether NHD pages hold the source, at the permuted block ids."""
        model = self.model
        pages = self._arena.reshape(model.layers, self.blocks, 2, BLOCK_TOKENS, model.heads, -1)
        for layer in range(model.layers):
            canonical = self.source[layer].reshape(self.blocks, model.heads, BLOCK_TOKENS, 2, -1)
            if not np.array_equal(pages[layer, self.block_ids], canonical.transpose(0, 3, 2, 1, 4)):
                return False
        return True

    def extent_correct(self, number: int, array: NDArray[Any]) -> bool:
        """Whether an array read out of extent ``number``, ``[L, B, H, N, C]``, is the source's."""
        first = number * self.group.extent_blocks
        expected = self.source[:, first : first + self.group.extent_blocks]
        found = np.ascontiguousarray(array).view(np.uint8).reshape(expected.shape)
        return np.array_equal(found, expected)


def _tensor(array: Bytes) -> torch.Tensor:
    import torch

    return torch.from_numpy(array).view(torch.bfloat16)


def _packed(memory: Bytes, model: Model, blocks: int, tp: int) -> list[list[torch.Tensor]]:
    shape = (tp, model.layers, blocks, model.heads // tp, BLOCK_TOKENS, -1)
    return [[_tensor(layer) for layer in rank] for rank in memory.reshape(shape)]
