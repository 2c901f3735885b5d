"""Page layouts: where the bytes of one rank's local page are in the engine's own memory.

A local page is ``[head, token, part]``: the rank's heads, the ``block_tokens`` local tokens of one
engine block, and the content parts of the layer group. Every step is a byte stride, so HND and NHD,
packed and split, padded and shared tensors are all the same few numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import LayerGroup

ORDERS = ("hnd", "nhd")
"""Whether a page goes through its heads (``hnd``) or its tokens (``nhd``) first."""

_MAX_BYTES = 1 << 60  # far beyond any memory, and sums of a few stay within 64 bits


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where one content part lies. Byte ``i`` of it, for one head of one token of one block, is at
    ``offset + block * block_stride + head * head_stride + token * token_stride + i``.

    Attributes:
        name: the content part.
        nbytes: its contiguous bytes, for one token of one head.
        offset: bytes from the start of the tensor to the first of them.
        block_stride: bytes from an engine block to the next.
        head_stride: bytes from a head to the next.
        token_stride: bytes from a token to the next within a block.
        buffer: which of a layer's tensors it lies in; 0 where there is only one.
    """  # noqa: D205 - the formula is the summary

    name: str
    nbytes: int
    offset: int
    block_stride: int
    head_stride: int
    token_stride: int
    buffer: int = 0


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Layout of one rank's local pages.

    Attributes:
        parts: one place for each content part of the group.
        heads: heads of the local page.
        block_tokens: local tokens of one engine block. Under context parallelism an engine block
            spans ``block_tokens * cp`` tokens of the sequence.
        layers: layers in one tensor.
        layer_stride: bytes from a layer's page to the next layer's, where ``layers`` is above 1; 0
            where every layer has tensors of its own.

    Raises:
        InvalidArgument: a number is out of range.
        NotCertified: two elements overlap, or cannot be shown not to.
    """

    parts: tuple[PartPlace, ...]
    heads: int
    block_tokens: int
    layers: int = 1
    layer_stride: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        for what in ("heads", "block_tokens", "layers"):
            _check(what, getattr(self, what), 1)
        _check("layer_stride", self.layer_stride, 0)
        if not self.parts or len({p.name for p in self.parts}) != len(self.parts):
            raise InvalidArgument("a page layout needs one or more parts, with different names")
        for part in self.parts:
            _check(f"nbytes of part {part.name!r}", part.nbytes, 1)
            for what in ("offset", "block_stride", "head_stride", "token_stride", "buffer"):
                _check(f"{what} of part {part.name!r}", getattr(part, what), 0)
        for buffer in sorted({p.buffer for p in self.parts}):
            self._check_overlap(buffer)

    @property
    def page_bytes(self) -> int:
        """Content bytes of one local page, padding left out."""
        return self.heads * self.block_tokens * sum(p.nbytes for p in self.parts)

    @property
    def buffers(self) -> int:
        """Number of tensors of one layer."""
        return max(p.buffer for p in self.parts) + 1

    def part(self, name: str) -> PartPlace:
        """The place of the content part of that name.

        Raises:
            InvalidArgument: the layout has no such part.
        """
        for part in self.parts:
            if part.name == name:
                return part
        known = ", ".join(p.name for p in self.parts)
        raise InvalidArgument(f"the page layout has no part {name!r}; it has: {known}")

    def offsets(self, name: str) -> npt.NDArray[np.int64]:
        """Byte offsets ``[head, token]`` of a part within the page of layer 0, block 0.

        Raises:
            InvalidArgument: the layout has no such part.
        """
        part = self.part(name)
        heads = np.arange(self.heads, dtype=np.int64)[:, None] * part.head_stride
        tokens = np.arange(self.block_tokens, dtype=np.int64)[None, :] * part.token_stride
        result: npt.NDArray[np.int64] = part.offset + heads + tokens
        return result

    def _check_overlap(self, buffer: int) -> None:
        parts = [p for p in self.parts if p.buffer == buffer]
        boxes = []
        for part in parts:
            axes = (
                (self.layer_stride, self.layers),
                (part.head_stride, self.heads),
                (part.token_stride, self.block_tokens),
            )
            steps = sorted((axis for axis in axes if axis[1] > 1), reverse=True)
            boxes.append(_Box(part.offset, tuple(steps), part.nbytes))
        # How many blocks there are is not known here, so blocks must be the outermost step.
        strides = {p.block_stride for p in parts}
        if len(strides) > 1 or _span(boxes) > strides.pop() or not _disjoint(boxes):
            names = ", ".join(p.name for p in parts)
            raise NotCertified(
                f"page layout of {self.heads} heads and {self.block_tokens} tokens: {names} "
                "overlap, or cannot be shown not to; check strides, offsets and counts",
                reason="elements of the page layout overlap",
            )

    @classmethod
    def packed(
        cls,
        group: LayerGroup,
        *,
        heads: int | None = None,
        block_tokens: int | None = None,
        order: str = "hnd",
        token_padding: int = 0,
        block_stride: int | None = None,
    ) -> PageLayout:
        """Each head of each token holds all its parts in a row: ``HNC`` or ``NHC``.

        Args:
            group: the layer group.
            heads: local heads; default all of the group's.
            block_tokens: local tokens of an engine block; default the group's.
            order: ``hnd`` or ``nhd``.
            token_padding: unused bytes after the parts of each head of each token.
            block_stride: bytes from a block to the next; default no gap.

        Raises:
            InvalidArgument: a number is out of range, or ``order`` is unknown.
            NotCertified: ``block_stride`` is too small.
        """
        count, tokens = _sizes(group, heads, block_tokens)
        content = group.token_bytes + token_padding
        head_stride, token_stride = _strides(order, count, tokens, content)
        parts = [
            PartPlace(
                name=p.name,
                nbytes=p.nbytes,
                offset=group.part_offset(p.name),
                block_stride=count * tokens * content if block_stride is None else block_stride,
                head_stride=head_stride,
                token_stride=token_stride,
            )
            for p in group.parts
        ]
        return cls(tuple(parts), count, tokens)

    @classmethod
    def split(
        cls,
        group: LayerGroup,
        *,
        heads: int | None = None,
        block_tokens: int | None = None,
        order: str = "hnd",
        block_stride: int | None = None,
    ) -> PageLayout:
        """One plane for each part, one after the other in the page: all keys, then all values.

        Args and errors as :meth:`packed`.
        """
        count, tokens = _sizes(group, heads, block_tokens)
        size = count * tokens * group.token_bytes if block_stride is None else block_stride
        parts = []
        offset = 0
        for p in group.parts:
            head_stride, token_stride = _strides(order, count, tokens, p.nbytes)
            parts.append(PartPlace(p.name, p.nbytes, offset, size, head_stride, token_stride))
            offset += count * tokens * p.nbytes
        return cls(tuple(parts), count, tokens)

    @classmethod
    def latent(
        cls,
        group: LayerGroup,
        *,
        block_tokens: int | None = None,
        token_padding: int = 0,
        block_stride: int | None = None,
    ) -> PageLayout:
        """MLA: one head, each token its latent and then its rope key.

        Args and errors as :meth:`packed`; the group must have one head.
        """
        if group.heads != 1:
            raise InvalidArgument(
                f"a latent page has one head, but layer group {group.name!r} has {group.heads}; "
                "use packed or split"
            )
        return cls.packed(
            group,
            block_tokens=block_tokens,
            token_padding=token_padding,
            block_stride=block_stride,
        )

    @classmethod
    def block_outermost(
        cls,
        group: LayerGroup,
        *,
        layers: int,
        heads: int | None = None,
        block_tokens: int | None = None,
        order: str = "hnd",
        block_stride: int | None = None,
    ) -> PageLayout:
        """One tensor for all layers, whose blocks hold every layer: ``BLHNC`` or ``BLNHC``.

        Other arguments and errors are those of :meth:`packed`; ``layers`` is the number of layers
        in the tensor.
        """
        one = cls.packed(group, heads=heads, block_tokens=block_tokens, order=order)
        _check("layers", layers, 1)
        page = one.page_bytes
        stride = layers * page if block_stride is None else block_stride
        return cls(_restride(one.parts, stride), one.heads, one.block_tokens, layers, page)

    @classmethod
    def token_pool(
        cls, group: LayerGroup, *, heads: int | None = None, page_tokens: int = 1
    ) -> PageLayout:
        """A pool ``[tokens, heads, part]`` of its own for each part; part ``i`` is in buffer ``i``.

        Args:
            group: the layer group.
            heads: local heads; default all of the group's.
            page_tokens: tokens in a row that an engine block stands for.

        Raises:
            InvalidArgument: a number is out of range.
        """
        count, tokens = _sizes(group, heads, page_tokens)
        parts = [
            PartPlace(p.name, p.nbytes, 0, tokens * count * p.nbytes, p.nbytes, count * p.nbytes, i)
            for i, p in enumerate(group.parts)
        ]
        return cls(tuple(parts), count, tokens)

    @classmethod
    def contiguous(
        cls, group: LayerGroup, *, tokens: int, heads: int | None = None, capacity: int = 0
    ) -> PageLayout:
        """A tensor ``[sequence, heads, tokens, part]`` of its own for each part.

        An engine block is a whole sequence; part ``i`` is in buffer ``i``.

        Args:
            group: the layer group.
            tokens: tokens of the sequence.
            heads: local heads; default all of the group's.
            capacity: tokens that the tensors have room for; 0 for just ``tokens``.

        Raises:
            InvalidArgument: a number is out of range.
            NotCertified: ``capacity`` is below ``tokens``.
        """
        count, held = _sizes(group, heads, tokens)
        room = capacity or held
        parts = [
            PartPlace(p.name, p.nbytes, 0, count * room * p.nbytes, room * p.nbytes, p.nbytes, i)
            for i, p in enumerate(group.parts)
        ]
        return cls(tuple(parts), count, held)


class _Box(NamedTuple):
    """Pieces of ``nbytes`` at every combination of steps from ``start``; longest stride first."""

    start: int
    steps: tuple[tuple[int, int], ...]
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + sum(s * (n - 1) for s, n in self.steps) + self.nbytes


def _span(boxes: Sequence[_Box]) -> int:
    return max(b.end for b in boxes) - min(b.start for b in boxes)


def _disjoint(boxes: list[_Box]) -> bool:
    """Whether it can be shown that no two pieces overlap.

    Boxes whose outlines are apart are looked at separately. Those that interleave must take the
    same longest step, and that step must clear all that is within it; then the same again inside.
    """
    boxes = sorted(boxes)
    cluster: list[_Box] = []
    for box in boxes:
        if cluster and box.start >= max(b.end for b in cluster):
            if not _cluster_disjoint(cluster):
                return False
            cluster = []
        cluster.append(box)
    return _cluster_disjoint(cluster)


def _cluster_disjoint(boxes: list[_Box]) -> bool:
    steps = {box.steps[:1] for box in boxes}
    if len(steps) > 1:
        return False
    (outer,) = steps
    if not outer:
        return len(boxes) == 1
    inner = [_Box(b.start, b.steps[1:], b.nbytes) for b in boxes]
    return _span(inner) <= outer[0][0] and _disjoint(inner)


def _restride(parts: tuple[PartPlace, ...], block_stride: int) -> tuple[PartPlace, ...]:
    return tuple(
        PartPlace(p.name, p.nbytes, p.offset, block_stride, p.head_stride, p.token_stride)
        for p in parts
    )


def _sizes(group: LayerGroup, heads: int | None, block_tokens: int | None) -> tuple[int, int]:
    count = group.heads if heads is None else heads
    tokens = group.page_tokens if block_tokens is None else block_tokens
    _check("heads", count, 1)
    _check("block_tokens", tokens, 1)
    return count, tokens


def _strides(order: str, heads: int, tokens: int, nbytes: int) -> tuple[int, int]:
    """Head stride and token stride of ``nbytes`` a head and token."""
    if order not in ORDERS:
        raise InvalidArgument(f"order is {order!r}; it must be one of: {', '.join(ORDERS)}")
    return (tokens * nbytes, nbytes) if order == "hnd" else (nbytes, heads * nbytes)


def _check(what: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MAX_BYTES:
        raise InvalidArgument(
            f"{what} of a page layout must be a whole number from {low}, not {value!r}"
        )
