"""Prefill, and greedy generation that goes on from a KV cache."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.demo.bits import Bits
from kvstore.demo.model import LoadedModel


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the model says after the prefix.

    Attributes:
        tokens: generated token ids; the end of text does not stop it.
        logits: ``[tokens, vocabulary]``, as the model computed them.
        first_seconds: from the start to the first token.
    """

    tokens: list[int]
    logits: torch.Tensor
    first_seconds: float


@dataclass(frozen=True, slots=True)
class Reference:
    """A run that computed everything itself.

    Attributes:
        cache: bits of the prefix's KV cache.
        prefill_seconds: time to compute the prefix.
        continuation: what came after.
    """

    cache: Bits
    prefill_seconds: float
    continuation: Continuation


def prefill(
    loaded: LoadedModel, prefix: list[int], rest: list[int], steps: int, tick: Callable[[], None]
) -> Reference:
    """Compute the prefix, keep its cache, then the rest of the prompt, then ``steps`` tokens.

    The prompt is computed in the same two pieces as a run that finds the prefix in the store does
    it. One piece instead of two would round differently, with any store or none.

    Args:
        loaded: the model.
        prefix: token ids of the prompt's full blocks.
        rest: token ids of the remainder; at least one.
        steps: tokens to generate; at least one.
        tick: called once after the prefix and once after every generated token.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    start = time.perf_counter()
    _forward(loaded.model, prefix, cache)
    seconds = time.perf_counter() - start
    tick()
    bits = _bits_of(cache)
    return Reference(bits, seconds, _continue(loaded.model, cache, rest, steps, tick))


def resume(
    loaded: LoadedModel, cache: Bits, rest: list[int], steps: int, tick: Callable[[], None]
) -> Continuation:
    """Go on from the bits of a prefix's KV cache; arguments as :func:`prefill`."""
    return _continue(loaded.model, _cache_of(cache, loaded.model.dtype), rest, steps, tick)


def _continue(
    model: Any, cache: Any, rest: list[int], steps: int, tick: Callable[[], None]
) -> Continuation:
    with _one_thread():
        start = time.perf_counter()
        logits = [_forward(model, rest, cache)]
        tokens = [int(logits[0].argmax())]
        first = time.perf_counter() - start
        tick()
        while len(tokens) < steps:
            logits.append(_forward(model, tokens[-1:], cache))
            tokens.append(int(logits[-1].argmax()))
            tick()
    return Continuation(tokens, torch.stack(logits), first)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread, which is all that steps of a few tokens can use.

    More would wait for each other at every operation, and on a busy machine for tens of times
    longer than the work takes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _forward(model: Any, tokens: list[int], cache: Any) -> torch.Tensor:
    """Logits ``[vocabulary]`` after the last of ``tokens``; the cache grows by them."""
    # Releases of transformers 5 differ in this argument's name.
    named = inspect.signature(model.forward).parameters
    keyword = "cache" if "cache" in named else "past_key_values"
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1, **{keyword: cache})
    logits: torch.Tensor = output.logits[0, -1]
    return logits


def _bits_of(cache: Any) -> Bits:
    layers = [torch.stack((layer.keys[0], layer.values[0]), dim=2) for layer in cache.layers]
    tensor = torch.stack(layers)
    # As bytes in between, for NumPy has no bfloat16.
    bits: Bits = tensor.view(torch.uint8).numpy().view(f"u{tensor.element_size()}")
    return bits


def _cache_of(bits: Bits, dtype: torch.dtype) -> Any:
    from transformers import DynamicCache

    tensor = torch.from_numpy(bits.view(np.uint8)).view(dtype)
    cache = DynamicCache()
    for number, layer in enumerate(tensor):
        key, value = (layer[None, :, :, part].contiguous() for part in (0, 1))
        cache.update(key, value, number)
    return cache
