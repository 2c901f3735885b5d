"""Paged buffers: one rank's KV cache as an engine holds it, seen through one shape.

Whatever an engine's page layout, each content part of each layer can be looked at as a strided
tensor ``[block, head, token, element]``. The constructors of :class:`PagedBuffers` make these views
out of the tensors of common layouts; nothing is copied, and memory order stays the engine's own.

Pages whose tokens or elements are in tiles, as matrix units and some CPU backends keep them, are
looked at with two axes for each: ``[block, head, token tile, token, element tile, element]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import ContentPart, LayerGroup
from kvstore.segments import Segment, check_layers_apart, require_axes, segments_of
from kvstore.share import Share

if TYPE_CHECKING:
    import torch


class PagedBuffers:
    """One rank's buffers for one layer group.

    Args:
        group: the layer group.
        layers: for each layer that the rank holds, in order: content part name -> view of that
            part, of any strides: ``[block, head, token, element]``, or ``[block, head, token tile,
            token in tile, element tile, element in tile]``, where token ``t`` is ``t % n`` of tile
            ``t // n`` for tiles of ``n``, and elements likewise. All views agree on the number of
            blocks, heads and tokens. The dtype is the part's, or uint8 or int8 for its bytes, if
            the bytes of each element are in a row.

    Raises:
        InvalidArgument: a view is missing, or its shape or dtype is not the part's.
        NotCertified: elements of views overlap, within a layer or between layers, or cannot be
            shown not to; a view of bytes cuts elements apart.

    Example:
        Keys of head size ``D`` kept ``[element, token]`` in blocks of ``N``, and values in tiles of
        two tokens by 16 elements, the tokens of a tile innermost::

            keys = memory.as_strided((B, H, N, D), (block, head, 1, N), at)
            values = memory.as_strided(
                (B, H, N // 2, 2, D // 16, 16), (block, head, 32, 1, N * 16, 2), at + N * D
            )
            PagedBuffers(group, [{"key": keys, "value": values}, ...])

        Plain pages move fastest; tiled ones at about half their speed.
    """

    def __init__(self, group: LayerGroup, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self.group = group
        self.layers: tuple[tuple[Segment, ...], ...] = tuple(
            segments_of(group, i, views) for i, views in enumerate(layers)
        )
        shapes = {(s.blocks, s.heads, s.tokens) for layer in self.layers for s in layer}
        if len(shapes) > 1:
            raise InvalidArgument(
                f"the layers' views have different [block, head, token] sizes: {sorted(shapes)}; "
                "layers that differ belong to different layer groups"
            )
        self.blocks, self.heads, self.block_tokens = shapes.pop() if shapes else (0, 0, 0)
        devices = {s.tensor.device for layer in self.layers for s in layer}
        if len(devices) > 1:
            raise InvalidArgument(
                f"the layers lie on different devices: {sorted(map(str, devices))}"
            )
        self.device = devices.pop() if devices else None
        check_layers_apart(group, self.layers)

    def __repr__(self) -> str:
        return (
            f"PagedBuffers({self.group.name!r}, layers={len(self.layers)}, blocks={self.blocks}, "
            f"heads={self.heads}, block_tokens={self.block_tokens}, device={self.device})"
        )

    def require(self, share: Share) -> None:
        """Check that the buffers can hold a rank's share.

        Raises:
            NotCertified: layers or heads differ, or the engine block does not hold whole
                interleaves of tokens.
        """
        reason = None
        if len(self.layers) != len(share.layers):
            reason = f"there are buffers for {len(self.layers)} layers, not {len(share.layers)}"
        elif self.layers and self.heads != len(share.heads):
            reason = f"the buffers have {self.heads} heads, but the rank holds {len(share.heads)}"
        elif (
            self.layers and not share.lattice.whole and self.block_tokens % share.lattice.interleave
        ):
            reason = (
                f"an engine block of {self.block_tokens} tokens is no multiple of the interleave "
                f"{share.lattice.interleave}"
            )
        if reason is not None:
            raise NotCertified(
                f"layer group {self.group.name!r}: {reason}; hand over the rank's own buffers",
                reason=reason,
            )

    @classmethod
    def empty(cls, group: LayerGroup) -> PagedBuffers:
        """No buffers, for a rank whose pipeline stage has no layer of the group."""
        return cls(group, ())

    @classmethod
    def packed(
        cls, group: LayerGroup, layers: Sequence[torch.Tensor], *, order: str = "hnd"
    ) -> PagedBuffers:
        """Key and value next to each other in each token: one tensor a layer.

        Args:
            group: the layer group; its parts share one element type, or the tensors are uint8.
            layers: ``[block, head, token, C]`` for order ``hnd``, ``[block, token, head, C]`` for
                ``nhd``. The order names the axes; strides may be any.
            order: ``hnd`` or ``nhd``.
        """
        return cls(group, [_cut(group, _as_hnd(t, order, "packed", 4)) for t in layers])

    @classmethod
    def split(
        cls, group: LayerGroup, layers: Sequence[torch.Tensor], *, order: str = "nhd"
    ) -> PagedBuffers:
        """Keys and values in two planes of one tensor a layer.

        Args:
            group: a layer group whose two parts have the same size.
            layers: ``[2, block, ...]`` or ``[block, 2, ...]``, then head and token as ``order``
                says, then the element axis.
            order: ``hnd`` or ``nhd``.
        """
        out = []
        for tensor in layers:
            require_axes(tensor, "split", 5)
            if tensor.shape[0] == 2 and tensor.shape[1] == 2:
                raise NotCertified(
                    f"a split tensor of shape {tuple(tensor.shape)} has two axes of size 2, either "
                    "of which may be key/value; hand over views by part instead",
                    reason="the key/value axis is ambiguous",
                )
            axis = 0 if tensor.shape[0] == 2 else 1
            if tensor.shape[axis] != 2 or len(group.parts) != 2:
                raise InvalidArgument(
                    f"a split tensor has a key/value axis of size 2 first or second, for a group "
                    f"of two parts; the shape is {tuple(tensor.shape)}, the group has "
                    f"{len(group.parts)} parts"
                )
            planes = tensor.unbind(axis)
            out.append(
                {
                    p.name: _as_hnd(plane, order, "split", 4)
                    for p, plane in zip(group.parts, planes, strict=True)
                }
            )
        return cls(group, out)

    @classmethod
    def latent(cls, group: LayerGroup, layers: Sequence[torch.Tensor]) -> PagedBuffers:
        """MLA: one tensor ``[block, token, C]`` a layer, latent and rope key in each token."""
        for tensor in layers:
            require_axes(tensor, "latent", 3)
        return cls(group, [_cut(group, t.unsqueeze(1)) for t in layers])

    @classmethod
    def block_outermost(
        cls, group: LayerGroup, pool: torch.Tensor, *, order: str = "hnd"
    ) -> PagedBuffers:
        """All layers of a block together: one tensor ``[block, layer, head, token, C]``.

        ``BLHNC`` for order ``hnd``; ``[block, layer, token, head, C]``, ``BLNHC``, for ``nhd``.
        """
        require_axes(pool, "block-outermost", 5)
        return cls.packed(group, list(pool.unbind(1)), order=order)

    @classmethod
    def token_pools(
        cls,
        group: LayerGroup,
        pools: Sequence[Sequence[torch.Tensor]],
        *,
        block_tokens: int = 1,
    ) -> PagedBuffers:
        """A pool ``[tokens, head, element]`` for each part of each layer (SGLang's layout).

        Args:
            group: the layer group.
            pools: for each layer, the pools of its parts, in the group's order.
            block_tokens: tokens in a row that one block id stands for; 1 for ids of single tokens.
        """
        out = []
        for layer in pools:
            views = {}
            for part, pool in _of_parts(group, layer):
                require_axes(pool, "token pool", 3)
                if pool.shape[0] % block_tokens:
                    raise InvalidArgument(
                        f"a pool of {pool.shape[0]} tokens is not a multiple of {block_tokens}"
                    )
                views[part.name] = pool.view(-1, block_tokens, *pool.shape[1:]).transpose(1, 2)
            out.append(views)
        return cls(group, out)

    @classmethod
    def contiguous(
        cls, group: LayerGroup, layers: Sequence[Sequence[torch.Tensor]]
    ) -> PagedBuffers:
        """Tensors ``[batch, head, tokens, element]`` by part (transformers' layout).

        A whole sequence is one block: the block ids of sequence ``i`` of the batch are ``[i]``.
        """
        return cls(group, [{p.name: t for p, t in _of_parts(group, layer)} for layer in layers])


def _of_parts(
    group: LayerGroup, tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[ContentPart, torch.Tensor]]:
    """The group's parts with a layer's tensor for each."""
    if len(tensors) != len(group.parts):
        raise InvalidArgument(
            f"a layer came with {len(tensors)} tensors; layer group {group.name!r} has "
            f"{len(group.parts)} parts: {', '.join(p.name for p in group.parts)}"
        )
    return zip(group.parts, tensors, strict=True)


def _as_hnd(tensor: torch.Tensor, order: str, what: str, axes: int) -> torch.Tensor:
    if order not in ("hnd", "nhd"):
        raise InvalidArgument(f"order is {order!r}; it is 'hnd' or 'nhd'")
    require_axes(tensor, what, axes)
    return tensor if order == "hnd" else tensor.transpose(1, 2)


def _cut(group: LayerGroup, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of the parts of a tensor ``[block, head, token, C]``."""
    import torch

    size = tensor.element_size()
    wanted = group.token_bytes
    if tensor.shape[-1] * size != wanted:
        parts = ", ".join(f"{p.name} {p.count} x {p.element.name}" for p in group.parts)
        raise InvalidArgument(
            f"a token of one head has {tensor.shape[-1]} x {tensor.dtype} in these tensors, "
            f"{tensor.shape[-1] * size} bytes; layer group {group.name!r} has {parts}, {wanted} "
            "bytes"
        )
    if len({p.element for p in group.parts}) > 1 and tensor.dtype != torch.uint8:
        raise InvalidArgument(
            f"layer group {group.name!r} mixes element types: hand its tensors over as uint8"
        )
    out, start = {}, 0
    for part in group.parts:
        count = part.nbytes // size
        out[part.name] = tensor[..., start : start + count]
        start += count
    return out
