"""Geometry: what one page holds, and how extents of pages are cut into shards.

A *page* is one block of one layer, ``[head, token, content]``. Layers whose pages look the same and
that the same kind of attention reads form a *layer group*. Axis letters are ``L B H N C``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.elements import ElementType, element
from kvstore.errors import InvalidArgument

ATTENTION_KINDS = ("full", "sliding_window", "chunked", "mla", "linear", "opaque")
"""The attention kinds of format version 1. ``opaque`` pages belong to one rank of one config."""

MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_BLOCK_TOKENS = 65536
MAX_CONTENT = 1 << 20
MAX_EXTENT_BLOCKS = 4096
MAX_PARTS = 16
MAX_CHUNK_BYTES = 1 << 30
MAX_CHUNKS = 1 << 20
"""Inner chunks of one shard: 16 MiB of index."""

MAX_SHARDS = 1 << 16
"""Shards of one extent: its record lists each."""

MAX_SHARD_BYTES = 1 << 40
"""Bytes of one stored shard."""

EXTENT_TOKENS = 256
"""Default token span of an extent: measured, see the README's section on defaults."""

MIN_SHARD_BYTES = 1 << 20
"""Heads are grouped into one shard until it is at least this large."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_PARALLEL = re.compile(r"[ -~]{1,4096}")
GROUP_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
"""A layer group's name is a folder's. Without a dot, so that it can be no file of the format."""


def _check_count(what: str, value: object, limit: int, low: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= limit:
        raise InvalidArgument(f"{what} must be a whole number from {low} to {limit}, not {value!r}")


@dataclass(frozen=True, slots=True)
class ContentPart:
    """One part of what a head stores for one token: ``count`` elements of one type.

    Usual names: ``key``, ``value``, ``key_scale``, ``value_scale``; for MLA ``latent``,
    ``rope_key``.
    """

    name: str
    element: ElementType
    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidArgument(
                f"content part name {self.name!r} must match {_NAME.pattern}, for instance 'key'"
            )
        object.__setattr__(self, "element", element(self.element))
        _check_count(f"count of content part {self.name!r}", self.count, MAX_CONTENT)

    @property
    def nbytes(self) -> int:
        """Bytes of this part, for one token of one head."""
        return self.count * self.element.itemsize


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same heads, block, content and attention kind: one array geometry.

    Attributes:
        name: directory name of the group.
        layers: indices in the model of the group's layers, ascending. Position in this tuple is the
            index on the array's ``layer`` axis.
        heads: ``H``, KV heads of the whole model (never one rank's). 1 for MLA.
        block_tokens: ``N``, tokens of one block, the unit that has a key.
        parts: what one head stores for one token, in order.
        attention: one of :data:`ATTENTION_KINDS`.
        window: tokens that a sliding window or a chunk spans; None for other kinds.
        extent_blocks: ``B``, blocks of a full extent. Default: as many as make 256 tokens.
        shard_layers: ``Ls``, layers of one shard; divides the number of layers. Default: all.
        shard_heads: ``Hs``, heads of one shard; divides ``heads``. Default: the fewest that make a
            shard of a full extent at least 1 MiB.
        parallel: for ``opaque`` groups, the parallel config and rank that alone may use it.

    Raises:
        InvalidArgument: a field is out of range; the message names it.
    """

    name: str
    layers: tuple[int, ...]
    heads: int
    block_tokens: int
    parts: tuple[ContentPart, ...]
    attention: str = "full"
    window: int | None = None
    extent_blocks: int = 0
    shard_layers: int = 0
    shard_heads: int = 0
    parallel: str | None = None
    content: int = field(init=False, compare=False, repr=False, default=0)
    carrier: ElementType = field(init=False, compare=False, repr=False, default=element("uint8"))

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "parts", tuple(self.parts))
        self._check_shape()
        self._check_attention()
        elements = {p.element for p in self.parts}
        if len(elements) == 1 and self.attention != "opaque":
            carrier = next(iter(elements))
            content = sum(p.count for p in self.parts)
        else:
            carrier = element("uint8")
            content = self.token_bytes
        object.__setattr__(self, "carrier", carrier)
        object.__setattr__(self, "content", content)
        _check_count(f"content of layer group {self.name!r}", content, MAX_CONTENT)
        self._set_extent_shape()

    def _check_shape(self) -> None:
        if not isinstance(self.name, str) or not GROUP_NAME.fullmatch(self.name):
            raise InvalidArgument(f"layer group name {self.name!r} must match {GROUP_NAME.pattern}")
        where = f"of layer group {self.name!r}"
        _check_count(f"number of layers {where}", len(self.layers), MAX_LAYERS)
        for layer in self.layers:
            _check_count(f"layer index {where}", layer, MAX_LAYERS - 1, 0)
        if list(self.layers) != sorted(set(self.layers)):
            raise InvalidArgument(f"layers {where} must be ascending, without repeats")
        _check_count(f"heads {where}", self.heads, MAX_HEADS)
        _check_count(f"block_tokens {where}", self.block_tokens, MAX_BLOCK_TOKENS)
        _check_count(f"number of content parts {where}", len(self.parts), MAX_PARTS)
        if len({p.name for p in self.parts}) != len(self.parts):
            raise InvalidArgument(f"content parts {where} must have different names")

    def _check_attention(self) -> None:
        where = f"of layer group {self.name!r}"
        if self.attention not in ATTENTION_KINDS:
            known = ", ".join(ATTENTION_KINDS)
            raise InvalidArgument(f"attention {self.attention!r} {where} must be one of: {known}")
        if self.window is not None:
            _check_count(f"window {where}", self.window, 1 << 31)
        if (self.window is not None) != (self.attention in ("sliding_window", "chunked")):
            raise InvalidArgument(
                f"window {where} goes with sliding_window or chunked attention, and only with it"
            )
        opaque = self.attention == "opaque"
        if opaque != (self.parallel is not None):
            raise InvalidArgument(
                f"parallel {where} goes with opaque attention, and only with it: it names the one "
                "config and rank that may use the pages"
            )
        if opaque and not (isinstance(self.parallel, str) and _PARALLEL.fullmatch(self.parallel)):
            raise InvalidArgument(f"parallel {where} must be text that matches {_PARALLEL.pattern}")
        page = [(p.name, p.element.name) for p in self.parts]
        if opaque and (self.heads != 1 or page != [("page", "uint8")]):
            raise InvalidArgument(
                f"an opaque group {where} has one head and one part, 'page', of uint8"
            )

    def _set_extent_shape(self) -> None:
        where = f"of layer group {self.name!r}"
        if self.extent_blocks == 0:
            object.__setattr__(self, "extent_blocks", max(1, EXTENT_TOKENS // self.block_tokens))
        _check_count(f"extent_blocks {where}", self.extent_blocks, MAX_EXTENT_BLOCKS)
        if self.shard_layers == 0:
            object.__setattr__(self, "shard_layers", len(self.layers))
        _check_count(f"shard_layers {where}", self.shard_layers, len(self.layers))
        _check_count(f"chunk bytes {where}", self.chunk_bytes(), MAX_CHUNK_BYTES)
        if self.shard_heads == 0:
            object.__setattr__(self, "shard_heads", self._default_shard_heads())
        for axis, whole, part in (
            ("layers", len(self.layers), self.shard_layers),
            ("heads", self.heads, self.shard_heads),
        ):
            _check_count(f"shard_{axis} {where}", part, whole)
            if whole % part:
                raise InvalidArgument(
                    f"shard_{axis} {where} is {part}, which does not divide its {whole} {axis}"
                )
        _check_count(f"number of shards {where}", math.prod(self.shard_grid()), MAX_SHARDS)
        chunks = chunk_count(self)
        _check_count(f"chunks of a shard {where}", chunks, MAX_CHUNKS)
        # Half, which leaves room for checksums, padding and the index.
        _check_count(f"shard bytes {where}", chunks * self.chunk_bytes(), MAX_SHARD_BYTES // 2)

    def _default_shard_heads(self) -> int:
        one_head = self.shard_layers * self.chunk_bytes()
        for heads in range(1, self.heads):
            if self.heads % heads == 0 and heads * one_head >= MIN_SHARD_BYTES:
                return heads
        return self.heads

    @property
    def num_layers(self) -> int:
        """``L``, the length of the array's layer axis."""
        return len(self.layers)

    @property
    def page_tokens(self) -> int:
        """Length of the array's token axis: ``N``, or 1 for opaque pages."""
        return 1 if self.attention == "opaque" else self.block_tokens

    @property
    def token_bytes(self) -> int:
        """Bytes of all parts, for one step of the token axis of one head."""
        return sum(p.nbytes for p in self.parts)

    @property
    def page_bytes(self) -> int:
        """Bytes of one canonical page: one block of one layer, all heads."""
        return self.heads * self.page_tokens * self.token_bytes

    def chunk_bytes(self, blocks: int | None = None) -> int:
        """Bytes of one inner chunk: one layer, one head, ``blocks`` blocks (default: all)."""
        count = self.extent_blocks if blocks is None else blocks
        return count * self.page_tokens * self.token_bytes

    def shape(self, blocks: int) -> tuple[int, int, int, int, int]:
        """Shape ``[L, blocks, H, N, C]`` of an extent of that many blocks."""
        return (self.num_layers, blocks, self.heads, self.page_tokens, self.content)

    def shard_grid(self) -> tuple[int, int]:
        """Number of shards along the layer axis and along the head axis."""
        return (self.num_layers // self.shard_layers, self.heads // self.shard_heads)

    def part_offset(self, name: str) -> int:
        """Bytes from the start of a token's content to the part of that name.

        Raises:
            InvalidArgument: the group has no such part.
        """
        offset = 0
        for part in self.parts:
            if part.name == name:
                return offset
            offset += part.nbytes
        known = ", ".join(p.name for p in self.parts)
        raise InvalidArgument(f"layer group {self.name!r} has no part {name!r}; it has: {known}")

    @classmethod
    def attention_kv(
        cls,
        *,
        layers: int | Sequence[int],
        heads: int,
        head_size: int,
        value_size: int | None = None,
        block_tokens: int = 16,
        element: str = "bfloat16",
        name: str = "kv",
        window: int | None = None,
        extent_blocks: int = 0,
        shard_layers: int = 0,
        shard_heads: int = 0,
    ) -> LayerGroup:
        """A group of ordinary attention layers (MHA, GQA, MQA): a key and a value for each head.

        Args:
            layers: number of layers, or their indices in the model.
            heads: KV heads of the whole model.
            head_size: elements of a key.
            value_size: elements of a value, where it differs from the key's.
            block_tokens: tokens a block.
            element: element type of keys and values.
            name: the group's name.
            window: sliding window in tokens; None for full attention.
            extent_blocks: blocks of a full extent; 0 for the default, likewise below.
            shard_layers: layers of a shard.
            shard_heads: heads of a shard.
        """
        value = head_size if value_size is None else value_size
        return cls(
            name=name,
            layers=_layer_indices(layers),
            heads=heads,
            block_tokens=block_tokens,
            parts=(_part("key", element, head_size), _part("value", element, value)),
            attention="full" if window is None else "sliding_window",
            window=window,
            extent_blocks=extent_blocks,
            shard_layers=shard_layers,
            shard_heads=shard_heads,
        )

    @classmethod
    def mla(
        cls,
        *,
        layers: int | Sequence[int],
        latent: int = 512,
        rope: int = 64,
        block_tokens: int = 64,
        element: str = "bfloat16",
        name: str = "mla",
        extent_blocks: int = 0,
    ) -> LayerGroup:
        """A group of multi-head latent attention layers: one latent and rope key a token."""
        parts = [_part("latent", element, latent)]
        if rope:
            parts.append(_part("rope_key", element, rope))
        return cls(
            name=name,
            layers=_layer_indices(layers),
            heads=1,
            block_tokens=block_tokens,
            parts=tuple(parts),
            attention="mla",
            extent_blocks=extent_blocks,
        )

    @classmethod
    def opaque(
        cls,
        *,
        name: str,
        layers: Sequence[int],
        page_bytes: int,
        block_tokens: int,
        parallel: str,
    ) -> LayerGroup:
        """Pages that could not be certified, kept as one rank holds them, for that rank alone.

        Args:
            name: the group's name; one rank, one group.
            layers: indices in the model of the layers that this rank holds.
            page_bytes: bytes of one layer's page of one block on this rank.
            block_tokens: tokens a block has a key for.
            parallel: text that names config and rank, see ``ParallelConfig.describe``.
        """
        return cls(
            name=name,
            layers=tuple(layers),
            heads=1,
            block_tokens=block_tokens,
            parts=(_part("page", "uint8", page_bytes),),
            attention="opaque",
            parallel=parallel,
        )


def _layer_indices(layers: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(layers, int):
        _check_count("number of layers", layers, MAX_LAYERS)
        return tuple(range(layers))
    return tuple(layers)


def _part(name: str, of: str, count: int) -> ContentPart:
    return ContentPart(name, element(of), count)


def chunk_count(group: LayerGroup) -> int:
    """Inner chunks of one shard."""
    return math.prod((group.shard_layers, group.shard_heads))
