"""Page encodings: where an attention backend really puts each element of a token.

Shapes do not tell. vLLM's CPU backend, for one, keeps keys transposed, or in tiles for the matrix
unit, inside a page whose shape says ``[head, token, key | value]``. So the backend's own writer is
run on a scratch page, on numbers that name their token and element, and the places where these turn
up are read off. What does not come out as strides of tiles is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvstore.errors import NotCertified

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Write = Callable[[torch.Tensor, list[torch.Tensor], torch.Tensor], None]
"""Writes parts ``[token, head, element]`` into a cache at slots."""

_BLOCKS, _PROBED = 3, 1  # a block on either side, which must stay untouched


class Axis(NamedTuple):
    """Steps along one axis, in elements.

    Item ``i`` is at ``(i // inner) * outer_step + (i % inner) * inner_step``.
    """

    outer: int
    outer_step: int
    inner: int
    inner_step: int


class PartEncoding(NamedTuple):
    """Where one content part lies in a page, in elements of the cache.

    Attributes:
        offset: of head 0, token 0, element 0, from the start of the block.
        head_step: from a head to the next.
        tokens, elements: steps along these axes.
    """

    offset: int
    head_step: int
    tokens: Axis
    elements: Axis

    def view(self, cache: torch.Tensor, heads: int) -> torch.Tensor:
        """The part in a whole cache ``[block, ...]``: four axes, or six where it is tiled.

        ``[block, head, token, element]`` or
        ``[block, head, token tile, token, element tile, element]``.
        """
        t, e = self.tokens, self.elements
        size: tuple[int, ...]
        if t.outer == e.outer == 1:
            size = (cache.shape[0], heads, t.inner, e.inner)
            steps: tuple[int, ...] = (cache.stride(0), self.head_step, t.inner_step, e.inner_step)
        else:
            size = (cache.shape[0], heads, t.outer, t.inner, e.outer, e.inner)
            token_steps = (t.outer_step, t.inner_step)
            steps = (cache.stride(0), self.head_step, *token_steps, e.outer_step, e.inner_step)
        return cache.as_strided(size, steps, cache.storage_offset() + self.offset)


def probe(
    write: Write,
    cache: torch.Tensor,
    *,
    heads: int,
    tokens: int,
    counts: Sequence[int],
    source: torch.dtype,
    element: torch.dtype,
    what: str,
) -> tuple[PartEncoding, ...]:
    """Find the encoding of every part by writing one block.

    Args:
        write: the backend's writer.
        cache: the registered cache of a layer, ``[block, head, token, ...]``; only its shape,
            strides and dtype are used, nothing of it is written.
        heads: heads of the rank.
        tokens: tokens of a block.
        counts: elements of each part.
        source: dtype that the writer takes.
        element: dtype of what is in the cache, whose own may be bytes.
        what: the layer and backend, for messages.

    Raises:
        NotCertified: the writer puts the elements elsewhere than strides of tiles can say.
    """
    total = heads * tokens * sum(counts)
    digit = 4 if element.itemsize == 1 else 128  # whole numbers below it are exact in these types
    places: Ints = np.zeros(0, dtype=np.int64)
    scale, rest = 1, total
    while rest:
        found = _written(write, cache, heads, tokens, counts, source, element, scale, digit)
        places = found if not len(places) else places + found * scale
        scale, rest = scale * digit, rest // digit
    start = _PROBED * cache.stride(0)
    where = np.full(total + 1, -1, dtype=np.int64)
    where[np.clip(places, 0, total)] = np.arange(len(places)) - start
    if np.count_nonzero(places) != total or (where[1:] == -1 - start).any():
        raise _refusal(what, "its writer does not put every element of a page in one place")
    out, at = [], 1
    for count in counts:
        size = tokens * heads * count
        out.append(_fit(where[at : at + size].reshape(tokens, heads, count), what))
        at += size
    return tuple(out)


def _written(
    write: Write,
    cache: torch.Tensor,
    heads: int,
    tokens: int,
    counts: Sequence[int],
    source: torch.dtype,
    element: torch.dtype,
    scale: int,
    digit: int,
) -> Ints:
    """One digit of the number found at each place of a scratch cache; numbers start at 1."""
    shape = (_BLOCKS, *cache.shape[1:])
    scratch = torch.empty_strided(shape, cache.stride(), dtype=cache.dtype, device=cache.device)
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device)
    raw.set_(scratch.untyped_storage())
    raw.zero_()
    parts, at = [], 1
    for count in counts:
        size = tokens * heads * count
        numbers = torch.arange(at, at + size).div(scale, rounding_mode="floor") % digit
        parts.append(numbers.reshape(tokens, heads, count).to(source).to(cache.device))
        at += size
    slots = torch.arange(_PROBED * tokens, (_PROBED + 1) * tokens, device=cache.device)
    write(scratch, parts, slots)
    found: Ints = raw.view(element).float().cpu().numpy().round().astype(np.int64)
    return found


def _fit(places: Ints, what: str) -> PartEncoding:
    """Steps out of places ``[token, head, element]``."""
    offset = int(places[0, 0, 0])
    relative = places - offset
    head_step = int(relative[0, 1, 0]) if places.shape[1] > 1 else 0
    tokens, elements = _axis(relative[:, 0, 0], what), _axis(relative[0, 0, :], what)
    wanted = (
        relative[:, 0, 0][:, None, None]
        + (np.arange(places.shape[1]) * head_step)[None, :, None]
        + relative[0, 0, :][None, None, :]
    )
    if not np.array_equal(wanted, relative):
        raise _refusal(what, "places of tokens and elements in its pages depend on each other")
    if head_step == 0:
        head_step = int(np.abs(relative).max()) + 1
    return PartEncoding(offset, head_step, tokens, elements)


def _axis(steps: Ints, what: str) -> Axis:
    count = len(steps)
    inner_step = int(steps[1]) if count > 1 else 1
    straight = steps == np.arange(count) * inner_step
    inner = count if straight.all() else int(np.argmin(straight))
    outer_step = int(steps[inner]) if inner < count else 0
    index = np.arange(count)
    fitted = (index // inner) * outer_step + (index % inner) * inner_step
    if count % inner or not np.array_equal(fitted, steps) or min(inner_step, outer_step) < 0:
        raise _refusal(what, "its pages are no regular tiles")
    return Axis(count // inner, outer_step, inner, inner_step)


def _refusal(what: str, reason: str) -> NotCertified:
    return NotCertified(
        f"{what}: {reason}, so its cache cannot be stored in a form that others could read; use "
        "another attention backend, or run the engine without the connector",
        reason=reason,
    )
