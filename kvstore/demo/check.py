"""What is compared, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvstore.demo.bits import Bits
from kvstore.demo.generation import Continuation


@dataclass(frozen=True, slots=True)
class Verdict:
    """What of a run that loaded its prefix equals the run that computed it.

    Attributes:
        pages: every rank's memory is, byte for byte, what such a rank would have computed, and
            memory that was not asked for is untouched.
        cache: the KV cache put together from the ranks has the same bits.
        logits: the logits of every step have the same bits.
        tokens: the generated tokens are the same.
        largest: the largest difference of two logits, 0 where they are equal to the bit.
    """

    pages: bool
    cache: bool
    logits: bool
    tokens: bool
    largest: float

    @property
    def good(self) -> bool:
        """Whether everything is equal."""
        return self.pages and self.cache and self.logits and self.tokens

    def differences(self) -> str:
        """What differs, in words."""
        found = [name for name in ("pages", "cache", "logits", "tokens") if not getattr(self, name)]
        return f"{', '.join(found)} differ (logits by up to {self.largest:.3g})"


def compare(
    computed: tuple[Bits, Continuation], loaded: tuple[Bits, Continuation], *, pages: bool
) -> Verdict:
    """Compare two runs, each given as its prefix's cache and what it generated."""
    logits, others = computed[1].logits, loaded[1].logits
    return Verdict(
        pages=pages,
        cache=same_bits(computed[0], loaded[0]),
        logits=torch.equal(_bytes(logits), _bytes(others)),
        tokens=computed[1].tokens == loaded[1].tokens,
        largest=float((logits.float() - others.float()).abs().max()),
    )


def same_bits(one: Bits, other: Bits) -> bool:
    """Whether two arrays of bits are equal."""
    return bool(np.array_equal(one, other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes, for as numbers 0.0 equals -0.0 and NaN does not equal itself.
    return tensor.contiguous().view(torch.uint8)
