"""Layers as an engine registered them, and the layer groups of the store that they make.

The engine's *cache groups* share a block table. Layers of one cache group whose pages look alike
make one layer group of the store. All of it follows from what each layer's rank registered, so
every rank and the scheduler come to the same groups on their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.elements import element
from kvstore.errors import NotCertified
from kvstore.geometry import ContentPart, LayerGroup


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer's cache on one rank.

    Attributes:
        name: the engine's name of the layer.
        index: the layer's number in the model.
        cache_group: number of the engine's cache group, whose block table it uses.
        attention: attention kind, as in :data:`kvstore.geometry.ATTENTION_KINDS`.
        role: word for what is cached, in the group's name: ``kv``, ``mla``, ``indexer``.
        window: tokens of a sliding window or chunk; None otherwise.
        block_tokens: local tokens of an engine block.
        heads: KV heads on this rank.
        total_heads: KV heads of the whole model.
        parts: what one head holds for one token: name, element type, count.
    """

    name: str
    index: int
    cache_group: int
    attention: str
    role: str
    window: int | None
    block_tokens: int
    heads: int
    total_heads: int
    parts: tuple[tuple[str, str, int], ...]

    @property
    def group_name(self) -> str:
        """Name of the store's layer group that the layer belongs to."""
        kind = {"full": "", "mla": ""}.get(self.attention, f"{self.attention}-")
        return f"{self.role}-{kind}{self.cache_group}"

    @property
    def alike(self) -> tuple[object, ...]:
        """What all layers of a group have in common, on every rank."""
        return (
            self.cache_group,
            self.attention,
            self.window,
            self.block_tokens,
            self.heads,
            self.total_heads,
            self.parts,
        )


def by_group(layers: Iterable[LayerFacts]) -> dict[str, list[LayerFacts]]:
    """Layers by the name of their group, ascending in the model.

    Raises:
        NotCertified: layers of one group differ, or two of them have one number.
    """
    found: dict[str, dict[int, LayerFacts]] = {}
    for layer in layers:
        members = found.setdefault(layer.group_name, {})
        other = next(iter(members.values()), layer)
        if other.alike != layer.alike:
            raise NotCertified(
                f"layers {other.name!r} and {layer.name!r} share a cache group but their pages "
                f"differ ({other.alike} and {layer.alike}); this model cannot be stored yet. Run "
                "the engine without the connector",
                reason="pages of one cache group differ",
            )
        if layer.index in members and members[layer.index].name != layer.name:
            raise NotCertified(
                f"layers {members[layer.index].name!r} and {layer.name!r} have the same number in "
                "the model; this model cannot be stored yet. Run the engine without the connector",
                reason="two layers have one number",
            )
        members[layer.index] = layer
    return {name: [members[i] for i in sorted(members)] for name, members in sorted(found.items())}


def block_tokens_of(layers: Iterable[LayerFacts], wanted: int, shards: int) -> int:
    """Tokens of a stored block, see :class:`kvstore.plugins.vllm.settings.Settings`.

    Args:
        layers: all layers.
        wanted: the setting; 0 for the default.
        shards: ranks that a block's tokens are spread over: an engine block is so many times as
            long as its local one.

    Raises:
        NotCertified: an engine block is no multiple of it.
    """
    spans = {layer.block_tokens * shards for layer in layers}
    tokens = wanted or next(n for n in (16, 8, 4, 2, 1) if not any(s % n for s in spans))
    bad = sorted(s for s in spans if s % tokens)
    if bad:
        raise NotCertified(
            f"block_tokens is {tokens}, but engine blocks span {bad[0]} tokens, which is no "
            "multiple of it; set block_tokens to a divisor, or the engine's --block-size",
            reason="an engine block does not hold whole stored blocks",
        )
    return tokens


def layer_groups(
    layers: Sequence[LayerFacts], *, block_tokens: int, extent_tokens: int
) -> tuple[LayerGroup, ...]:
    """The store's layer groups, out of all layers of the whole model.

    Raises:
        NotCertified: as :func:`by_group`.
    """
    groups = []
    for name, members in by_group(layers).items():
        first = members[0]
        groups.append(
            LayerGroup(
                name=name,
                layers=tuple(m.index for m in members),
                heads=first.total_heads,
                block_tokens=block_tokens,
                parts=tuple(ContentPart(n, element(e), count) for n, e, count in first.parts),
                attention=first.attention,
                window=first.window,
                extent_blocks=max(1, extent_tokens // block_tokens),
            )
        )
    return tuple(groups)
