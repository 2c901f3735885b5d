"""Paged buffers: one rank's KV cache as an engine holds it, seen through one shape.

Whatever an engine's page layout, each content part of each layer can be looked at as a strided
tensor ``[block, head, token, element]``. The constructors of :class:`PagedBuffers` make these views
out of the tensors of common layouts; nothing is copied, and memory order stays the engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import ContentPart, LayerGroup
from kvstore.share import Share

if TYPE_CHECKING:
    import torch

View = "torch.Tensor"


@dataclass(frozen=True, slots=True)
class Segment:
    """Content parts of one layer that lie next to each other, in memory and in canonical content.

    Attributes:
        tensor: the first part's view ``[block, head, token, element]``; keeps the memory alive.
        address: bytes from the start of the tensor's storage to block 0, head 0, token 0.
        nbytes: bytes for one token of one head.
        content_offset: bytes into a token's canonical content.
        blocks: engine blocks.
        heads: local heads.
        tokens: local tokens of one engine block.
        block_stride: bytes from block to block; likewise for heads and tokens.
    """

    tensor: torch.Tensor
    address: int
    nbytes: int
    content_offset: int
    blocks: int
    heads: int
    tokens: int
    block_stride: int
    head_stride: int
    token_stride: int


class PagedBuffers:
    """One rank's buffers for one layer group.

    Args:
        group: the layer group.
        layers: for each layer that the rank holds, in order: content part name -> view
            ``[block, head, token, element]`` of that part, of any strides. All views agree on the
            number of blocks, heads and tokens.

    Raises:
        InvalidArgument: a view is missing, or its shape or dtype is not the part's.
        NotCertified: elements of a view overlap, or an element's bytes are apart.
    """

    def __init__(self, group: LayerGroup, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self.group = group
        self.layers: tuple[tuple[Segment, ...], ...] = tuple(
            _segments(group, i, views) for i, views in enumerate(layers)
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
            _require_axes(tensor, "split", 5)
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
            _require_axes(tensor, "latent", 3)
        return cls(group, [_cut(group, t.unsqueeze(1)) for t in layers])

    @classmethod
    def block_outermost(
        cls, group: LayerGroup, pool: torch.Tensor, *, order: str = "hnd"
    ) -> PagedBuffers:
        """All layers of a block together: one tensor ``[block, layer, head, token, C]``.

        ``BLHNC`` for order ``hnd``; ``[block, layer, token, head, C]``, ``BLNHC``, for ``nhd``.
        """
        _require_axes(pool, "block-outermost", 5)
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
            for part, pool in zip(group.parts, layer, strict=True):
                _require_axes(pool, "token pool", 3)
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
        return cls(
            group,
            [{p.name: t for p, t in zip(group.parts, layer, strict=True)} for layer in layers],
        )


def _require_axes(tensor: torch.Tensor, what: str, axes: int) -> None:
    if tensor.ndim != axes:
        raise InvalidArgument(
            f"a {what} tensor has {axes} axes; this one has the shape {tuple(tensor.shape)}"
        )


def _as_hnd(tensor: torch.Tensor, order: str, what: str, axes: int) -> torch.Tensor:
    if order not in ("hnd", "nhd"):
        raise InvalidArgument(f"order is {order!r}; it is 'hnd' or 'nhd'")
    _require_axes(tensor, what, axes)
    return tensor if order == "hnd" else tensor.transpose(1, 2)


def _cut(group: LayerGroup, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of the parts of a tensor ``[block, head, token, C]``."""
    import torch

    size = tensor.element_size()
    wanted = group.token_bytes
    if tensor.shape[-1] * size != wanted:
        raise InvalidArgument(
            f"a token of one head has {tensor.shape[-1]} elements of {size} bytes; layer group "
            f"{group.name!r} has {wanted} bytes"
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


def _check_view(part: ContentPart, view: torch.Tensor, where: str) -> None:
    import torch

    _require_axes(view, f"{where}, part {part.name!r}:", 4)
    raw = view.dtype in (torch.uint8, torch.int8) and view.shape[-1] == part.nbytes
    if not raw and (view.dtype != part.element.torch_dtype() or view.shape[-1] != part.count):
        raise InvalidArgument(
            f"{where}, part {part.name!r}: {view.shape[-1]} elements of {view.dtype}, not "
            f"{part.count} of {part.element.name} (or {part.nbytes} of uint8)"
        )
    if view.numel() == 0:
        raise InvalidArgument(
            f"{where}, part {part.name!r}: the shape {tuple(view.shape)} is empty"
        )
    if view.stride(-1) != 1 and view.shape[-1] > 1:
        raise NotCertified(
            f"{where}, part {part.name!r}: elements of one token are {view.stride(-1)} apart; only "
            "pages whose content is contiguous within a token can be mapped. Convert them first",
            reason="a token's elements are not contiguous",
        )
    steps = sorted(
        ((s, n) for s, n in zip(view.stride()[:3], view.shape[:3], strict=True) if n > 1),
    )
    reach = view.shape[-1]
    for stride, count in steps:
        if stride < reach:
            raise NotCertified(
                f"{where}, part {part.name!r}: shape {tuple(view.shape)} with strides "
                f"{tuple(view.stride())} overlaps itself, or cannot be shown not to",
                reason="elements of the view overlap",
            )
        reach += stride * (count - 1)


def _segments(
    group: LayerGroup, layer: int, views: Mapping[str, torch.Tensor]
) -> tuple[Segment, ...]:
    where = f"layer group {group.name!r}, layer {layer} of the rank"
    names = [p.name for p in group.parts]
    if sorted(views) != sorted(names):
        raise InvalidArgument(f"{where}: views of parts {sorted(views)}, not {sorted(names)}")
    out: list[Segment] = []
    offset = 0
    for part in group.parts:
        view = views[part.name]
        _check_view(part, view, where)
        size = view.element_size()
        segment = Segment(
            tensor=view,
            address=int(view.storage_offset()) * size,
            nbytes=part.nbytes,
            content_offset=offset,
            blocks=view.shape[0],
            heads=view.shape[1],
            tokens=view.shape[2],
            block_stride=view.stride(0) * size,
            head_stride=view.stride(1) * size,
            token_stride=view.stride(2) * size,
        )
        offset += part.nbytes
        joined = _join(out[-1], segment) if out else None
        if joined is None:
            out.append(segment)
        else:
            out[-1] = joined
    _check_apart(out, where)
    return tuple(out)


def _same_memory(a: Segment, b: Segment) -> bool:
    return a.tensor.untyped_storage().data_ptr() == b.tensor.untyped_storage().data_ptr()


def _join(a: Segment, b: Segment) -> Segment | None:
    """One segment for two parts that follow each other in memory, in every token; else None."""
    alike = all(
        getattr(a, f) == getattr(b, f)
        for f in ("blocks", "heads", "tokens", "block_stride", "head_stride", "token_stride")
    )
    if not alike or not _same_memory(a, b) or a.address + a.nbytes != b.address:
        return None
    return Segment(
        a.tensor,
        a.address,
        a.nbytes + b.nbytes,
        a.content_offset,
        a.blocks,
        a.heads,
        a.tokens,
        a.block_stride,
        a.head_stride,
        a.token_stride,
    )


def _check_apart(segments: Sequence[Segment], where: str) -> None:
    """Parts must not share a byte: not even two views taken of one tensor by mistake."""
    for i, a in enumerate(segments):
        for b in segments[:i]:
            if _same_memory(a, b) and not _disjoint(a, b):
                raise NotCertified(
                    f"{where}: the views of two content parts share memory, or cannot be shown not "
                    "to; check how they were cut",
                    reason="content parts overlap",
                )


def _disjoint(a: Segment, b: Segment) -> bool:
    low, high = sorted((a, b), key=lambda s: s.address)
    gap = high.address - low.address
    if gap >= _reach(low):
        return True
    # Interleaved: with equal strides, the gap must fit in between some axis' steps on both sides.
    steps = [
        (a.block_stride, a.blocks),
        (a.head_stride, a.heads),
        (a.token_stride, a.tokens),
    ]
    if steps != [(b.block_stride, b.blocks), (b.head_stride, b.heads), (b.token_stride, b.tokens)]:
        return False
    inner_low, inner_high = low.nbytes, high.nbytes
    for stride, count in sorted((s, n) for s, n in steps if n > 1):
        if inner_low <= gap and gap + inner_high <= stride:
            return True
        inner_low += stride * (count - 1)
        inner_high += stride * (count - 1)
    return False


def _reach(s: Segment) -> int:
    return (
        (s.blocks - 1) * s.block_stride
        + (s.heads - 1) * s.head_stride
        + (s.tokens - 1) * s.token_stride
        + s.nbytes
    )
