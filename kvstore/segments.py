"""Segments: where the content parts of one layer lie in memory, and that they do not overlap.

A content part is handed over as a strided tensor ``[block, head, token, element]``. Parts that lie
next to each other, in memory and in canonical content, become one segment, which moves as one.

Some backends keep a page in another order inside: keys transposed, or tokens and elements in tiles
of a matrix unit. Such a part is handed over as ``[block, head, token tile, token in tile, element
tile, element in tile]``, or with four axes of which the last has another step than one. It becomes
a segment of its own, with a :class:`Tiling`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import ContentPart, LayerGroup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Tiling:
    """Where one head of one block has each element of each token, where that is not in a row.

    Item ``e`` of token ``t`` is at ``(t // tile_tokens) * tile_stride + (t % tile_tokens) *
    token_stride + (e // tile_items) * outer_stride + (e % tile_items) * inner_stride`` bytes.

    Attributes:
        item: bytes of an item: an element, or several in a row.
        items: items of a token.
    """

    item: int
    items: int
    tile_tokens: int
    tile_stride: int
    token_stride: int
    tile_items: int
    outer_stride: int
    inner_stride: int

    def axes(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """(step, count) along each of the four axes."""
        return (
            (self.tile_stride, tokens // self.tile_tokens),
            (self.token_stride, self.tile_tokens),
            (self.outer_stride, self.items // self.tile_items),
            (self.inner_stride, self.tile_items),
        )


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
        tiling: how tokens and elements lie within a head's page; None: each token's bytes in a row,
            ``token_stride`` from one to the next.
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
    tiling: Tiling | None = None

    @property
    def start(self) -> int:
        """Where block 0, head 0, token 0 is in memory."""
        return int(self.tensor.untyped_storage().data_ptr()) + self.address

    @property
    def axes(self) -> tuple[tuple[int, int], ...]:
        """(step, count) along every axis that repeats a run of bytes."""
        outer = ((self.block_stride, self.blocks), (self.head_stride, self.heads))
        if self.tiling is None:
            return (*outer, (self.token_stride, self.tokens))
        return outer + self.tiling.axes(self.tokens)

    @property
    def run(self) -> int:
        """Bytes that are always in a row."""
        return self.nbytes if self.tiling is None else self.tiling.item

    @property
    def reach(self) -> int:
        """Bytes from the start to the end of the last block's last element."""
        return sum((count - 1) * step for step, count in self.axes) + self.run


def require_axes(tensor: torch.Tensor, what: str, axes: int) -> None:
    """Refuse a tensor with another number of axes.

    Raises:
        InvalidArgument: as said; the message names the tensor as ``what``.
    """
    if tensor.ndim != axes:
        raise InvalidArgument(
            f"a {what} tensor has {axes} axes; this one has the shape {tuple(tensor.shape)}"
        )


def _check_view(part: ContentPart, view: torch.Tensor, where: str) -> None:
    import torch

    require_axes(
        view, f"{where}, part {part.name!r}:", TILED_AXES if view.ndim == TILED_AXES else 4
    )
    count = view.shape[-1] * (view.shape[-2] if view.ndim == TILED_AXES else 1)
    raw = view.dtype in (torch.uint8, torch.int8) and count == part.nbytes
    if not raw and (view.dtype != part.element.torch_dtype() or count != part.count):
        raise InvalidArgument(
            f"{where}, part {part.name!r}: {count} elements of {view.dtype}, not "
            f"{part.count} of {part.element.name} (or {part.nbytes} of uint8)"
        )
    if view.is_neg() or view.is_conj():
        raise NotCertified(
            f"{where}, part {part.name!r}: a view whose values are computed when read (negated); "
            "hand over the tensor that holds the bytes",
            reason="the memory does not hold the view's values",
        )
    if view.numel() == 0:
        raise InvalidArgument(
            f"{where}, part {part.name!r}: the shape {tuple(view.shape)} is empty"
        )
    step, count = _levels(view).inner
    apart = count > 1 and step != 1
    if view.element_size() != part.element.itemsize and (
        apart or count * view.element_size() % part.element.itemsize
    ):
        raise NotCertified(
            f"{where}, part {part.name!r}: a view of {view.dtype} whose items are apart does not "
            f"show where the elements of {part.element.name} are; hand over a view of that type",
            reason="the elements of a tiled page are not its own",
        )
    steps = sorted((s, n) for s, n in zip(view.stride(), view.shape, strict=True) if n > 1)
    reach = 1
    for stride, count in steps:
        if stride < reach:
            raise NotCertified(
                f"{where}, part {part.name!r}: shape {tuple(view.shape)} with strides "
                f"{tuple(view.stride())} overlaps itself, or cannot be shown not to",
                reason="elements of the view overlap",
            )
        reach += stride * (count - 1)


def segments_of(
    group: LayerGroup, layer: int, views: Mapping[str, torch.Tensor]
) -> tuple[Segment, ...]:
    """The segments of one layer, out of its parts' views, in order of content.

    Raises:
        InvalidArgument: a view is missing, or its shape or dtype is not the part's.
        NotCertified: elements overlap or cannot be shown not to, the memory does not hold the
            view's values, or a view of bytes cuts elements apart.
    """
    where = f"layer group {group.name!r}, layer {layer} of the rank"
    names = [p.name for p in group.parts]
    if sorted(views) != sorted(names):
        raise InvalidArgument(f"{where}: views of parts {sorted(views)}, not {sorted(names)}")
    out: list[Segment] = []
    offset = 0
    for part in group.parts:
        view = views[part.name]
        _check_view(part, view, where)
        segment = _segment(part, view, offset)
        offset += part.nbytes
        joined = _join(out[-1], segment) if out else None
        if joined is None:
            out.append(segment)
        else:
            out[-1] = joined
    _check_apart(out, where)
    return tuple(out)


TILED_AXES = 6

Axis = tuple[int, int]
"""Step and count."""


@dataclass(frozen=True, slots=True)
class _Levels:
    """A view's token and element axes in two levels each, as few as there really are.

    Axes that are one in memory are one here, so a plain page handed over in tiles is plain.
    """

    tile: Axis
    token: Axis
    outer: Axis
    inner: Axis

    @property
    def tiled(self) -> bool:
        """Whether tokens are at more than one step, or a token's elements not in a row."""
        step, count = self.inner
        return self.tile[1] > 1 or self.outer[1] > 1 or (count > 1 and step != 1)


def _levels(view: torch.Tensor) -> _Levels:
    axes: list[Axis] = list(zip(view.stride(), view.shape, strict=True))[2:]
    if view.ndim == TILED_AXES:
        return _Levels(*_merged(*axes[:2]), *_merged(*axes[2:]))
    return _Levels((0, 1), axes[0], (0, 1), axes[1])


def _merged(outer: Axis, inner: Axis) -> tuple[Axis, Axis]:
    if inner[1] == 1:
        return (0, 1), outer
    if outer[1] == 1 or outer[0] == inner[0] * inner[1]:
        return (0, 1), (inner[0], inner[1] * outer[1])
    return outer, inner


def _segment(part: ContentPart, view: torch.Tensor, offset: int) -> Segment:
    size = view.element_size()
    levels = _levels(view)
    return Segment(
        tensor=view,
        address=int(view.storage_offset()) * size,
        nbytes=part.nbytes,
        content_offset=offset,
        blocks=view.shape[0],
        heads=view.shape[1],
        tokens=levels.tile[1] * levels.token[1],
        block_stride=view.stride(0) * size,
        head_stride=view.stride(1) * size,
        token_stride=levels.token[0] * size,
        tiling=_tiling(levels, size) if levels.tiled else None,
    )


def _tiling(levels: _Levels, size: int) -> Tiling:
    (outer_step, outer), (inner_step, inner) = levels.outer, levels.inner
    tile, token = levels.tile[0] * size, levels.token[0] * size
    tokens = levels.token[1]
    if inner == 1 or inner_step == 1:
        # The elements of a tile are in a row: they move as one.
        return Tiling(size * inner, outer, tokens, tile, token, 1, outer_step * size, size * inner)
    return Tiling(
        size, outer * inner, tokens, tile, token, inner, outer_step * size, inner_step * size
    )


def _same_memory(a: Segment, b: Segment) -> bool:
    return a.tensor.untyped_storage().data_ptr() == b.tensor.untyped_storage().data_ptr()


def _join(a: Segment, b: Segment) -> Segment | None:
    """One segment for two parts that follow each other in memory, in every token; else None."""
    alike = (
        a.tiling is None
        and b.tiling is None
        and all(
            getattr(a, f) == getattr(b, f)
            for f in ("blocks", "heads", "tokens", "block_stride", "head_stride", "token_stride")
        )
    )
    if not alike or not _same_memory(a, b) or a.address + a.nbytes != b.address:
        return None
    if not _disjoint(a, b):
        return None  # next to each other within a token, and on top of each other across tokens
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


def check_layers_apart(group: LayerGroup, layers: Sequence[Sequence[Segment]]) -> None:
    """Layers must not share a byte: one tensor handed over twice would be overwritten in silence.

    Raises:
        NotCertified: they do, or cannot be shown not to.
    """
    storages: dict[int, list[tuple[int, int, Segment]]] = {}
    for i, segments in enumerate(layers):
        for s in segments:
            pointer = s.tensor.untyped_storage().data_ptr()
            storages.setdefault(pointer, []).append((s.address, i, s))
    for entries in storages.values():
        entries.sort(key=lambda entry: entry[:2])
        for at, (address, i, s) in enumerate(entries):
            end = address + s.reach
            for other, j, t in entries[at + 1 :]:
                if other >= end:
                    break
                if i != j and not _disjoint(s, t):
                    raise NotCertified(
                        f"layer group {group.name!r}: the views of layers {min(i, j)} and "
                        f"{max(i, j)} of the rank share memory, or cannot be shown not to; hand "
                        "over each layer's own tensor",
                        reason="layers overlap",
                    )


def _disjoint(a: Segment, b: Segment) -> bool:
    low, high = sorted((a, b), key=lambda s: s.address)
    gap = high.address - low.address
    if gap >= low.reach:
        return True
    # Interleaved: along the axes that both have, the gap must fit in between some axis' steps, with
    # all that is along other axes taken as one box.
    own, theirs = Counter(low.axes), Counter(high.axes)
    shared = own & theirs
    inner_low, inner_high = (
        s.run + sum(step * (count - 1) for step, count in (axes - shared).elements())
        for s, axes in ((low, own), (high, theirs))
    )
    return _between(gap, inner_low, inner_high, list(shared.elements()))


def _between(gap: int, inner_low: int, inner_high: int, steps: Sequence[tuple[int, int]]) -> bool:
    """Whether boxes ``gap`` apart, both repeated along the same steps, never meet."""
    axes = sorted((s, n) for s, n in steps if n > 1)
    for i, (stride, count) in enumerate(axes):
        if inner_low <= gap and _fits(gap + inner_high, axes[i:]):
            return True
        inner_low += stride * (count - 1)
        inner_high += stride * (count - 1)
    return False


def _fits(reach: int, axes: Sequence[tuple[int, int]]) -> bool:
    """Whether something of ``reach`` bytes, repeated along axes (stride, count), keeps apart."""
    for stride, count in axes:
        if stride < reach:
            return False
        reach += stride * (count - 1)
    return True
