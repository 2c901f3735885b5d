"""Detection of a page layout from shapes and strides, where these leave only one reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.buffers import PagedBuffers
from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import LayerGroup
from kvstore.share import Share

if TYPE_CHECKING:
    import torch


def detect_buffers(
    group: LayerGroup, share: Share, layers: Sequence[torch.Tensor], *, block_tokens: int
) -> PagedBuffers:
    """Paged buffers out of one tensor a layer, its axes told apart by their sizes.

    Known: ``[block, head, token, C]``, ``[block, token, head, C]``, ``[block, token, C]`` for one
    head, and the key/value splits ``[2, block, ...]`` and ``[block, 2, ...]`` of the first two.
    Memory order does not matter: strides are taken as they are.

    Args:
        group: the layer group.
        share: the rank's share, which says how many heads a page has.
        layers: one tensor for each layer that the rank holds.
        block_tokens: local tokens of an engine block.

    Raises:
        InvalidArgument: no known layout has such a shape.
        NotCertified: more than one has; use the constructor of the right one.
    """
    if not layers:
        return PagedBuffers.empty(group)
    shapes = {tuple(t.shape) for t in layers}
    if len(shapes) > 1:
        raise InvalidArgument(f"the layers' tensors have different shapes: {sorted(shapes)}")
    shape = shapes.pop()
    readings = _readings(group, len(share.heads), shape, layers[0].element_size(), block_tokens)
    if not readings:
        raise InvalidArgument(
            f"no known page layout of layer group {group.name!r} has the shape {shape} with "
            f"{len(share.heads)} heads and {block_tokens} tokens a block; hand over views by part"
        )
    if len(readings) > 1:
        listed = " or ".join(sorted(readings))
        raise NotCertified(
            f"a tensor of shape {shape} may be {listed}; sizes do not tell. Say which with the "
            "constructor of PagedBuffers for it",
            reason="the page layout is ambiguous",
        )
    kind, _, order = readings.pop().partition(" ")
    if kind == "latent":
        return PagedBuffers.latent(group, layers)
    if kind == "packed":
        return PagedBuffers.packed(group, layers, order=order)
    return PagedBuffers.split(group, layers, order=order)


def _readings(
    group: LayerGroup, heads: int, shape: tuple[int, ...], size: int, tokens: int
) -> set[str]:
    """Every reading of a shape: ``latent``, or ``packed`` or ``split`` and an order."""
    out: set[str] = set()
    if shape[-1] * size == group.token_bytes:
        if len(shape) == 3 and heads == 1 and shape[1] == tokens:
            out.add("latent ")
        if len(shape) == 4:
            out |= {f"packed {o}" for o in _orders(heads, tokens, shape[1:3])}
    even = len(group.parts) == 2 and group.parts[0].nbytes == group.parts[1].nbytes
    if len(shape) == 5 and even and shape[-1] * size * 2 == group.token_bytes and 2 in shape[:2]:
        out |= {f"split {o}" for o in _orders(heads, tokens, shape[2:4])}
    return out


def _orders(heads: int, tokens: int, axes: tuple[int, ...]) -> set[str]:
    out = set()
    if axes == (heads, tokens):
        out.add("hnd")
    if axes == (tokens, heads):
        out.add("nhd")
    return out
