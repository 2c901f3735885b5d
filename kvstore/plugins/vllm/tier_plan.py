"""What the tier keeps, and in which form, decided once at start out of what the engine says.

Rows that hold canonical pages, which every parallel config shares, are stored canonically. Others
are kept as they are, in opaque layer groups that only the very same config opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.buffers import PagedBuffers
from kvstore.elements import element
from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import MAX_CONTENT, MAX_LAYERS, ContentPart, LayerGroup
from kvstore.identity import Identity
from kvstore.keys import KeyScheme
from kvstore.parallel import ParallelConfig, Rank
from kvstore.plugins.vllm.offload import (
    CacheGroup,
    model_name,
    offload_groups,
    offload_identity,
)
from kvstore.plugins.vllm.rows import RowLayout, content_bytes, opaque_buffers
from kvstore.plugins.vllm.tier_settings import TierSettings

if TYPE_CHECKING:
    import torch

FAMILIES = {"LBNHC": "nhd", "LBHNC": "hnd"}
"""The engine's names of the layouts whose pages are whole, and the family of each."""

_CERTIFIED_PLATFORMS = ("cuda",)
"""Where the engine's own attention backends keep a token's key and value as a page's shape says."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What is stored.

    Attributes:
        identity: of the namespace.
        layout: of canonical rows; None: rows are kept as they are.
        reason: why they are; empty for canonical ones.
        caches: the engine's cache groups by number.
        groups: the store's layer group for each.
        config: the parallel config that the namespace is used with.
    """

    identity: Identity
    layout: RowLayout | None
    reason: str
    caches: Mapping[int, CacheGroup]
    groups: Mapping[int, LayerGroup]
    config: ParallelConfig

    def buffers(self, number: int, memory: torch.Tensor, row_bytes: int) -> PagedBuffers:
        """The tier's memory, for the chunks of one cache group.

        Args:
            number: of the cache group.
            memory: uint8, 1-D, contiguous: whole rows.
            row_bytes: bytes from a row to the next.
        """
        group = self.groups[number]
        if self.layout is None:
            return opaque_buffers(memory, row_bytes, group)
        return self.layout.buffers(memory, row_bytes, self.caches[number], group)

    @property
    def content_bytes(self) -> int:
        """Bytes of a chunk's content."""
        return max(content_bytes(g) for g in self.groups.values())


def plan_tier(
    config: Any, settings: TierSettings, scheme: KeyScheme, *, platform: str, row_bytes: int
) -> TierPlan:
    """Decide.

    Args:
        config: the engine's offloading configuration.
        settings: of the tier.
        scheme: of the engine's block hashes.
        platform: name of the engine's platform: ``cuda``, ``rocm``, ``cpu`` ...
        row_bytes: bytes of a row of the primary tier.

    Raises:
        NotCertified: ``pages`` says that rows are canonical, but they are not; or it says nothing,
            and they may be either of two forms.
        InvalidArgument: something is missing in the settings, or contradicts the engine.
    """
    caches = [
        CacheGroup(g.group_id, g.tokens_per_block, config.cache.blocks_per_chunk, g.layer_names)
        for g in config.groups
    ]
    reason = _not_canonical(config, settings, platform)
    if reason and settings.pages in ("packed", "split"):
        raise NotCertified(
            f"pages is {settings.pages!r}, but {reason}; correct that, or let pages be 'opaque'",
            reason=reason,
        )
    revision, digest = settings.which_weights(config.model.name)
    known = {"revision": revision, "weights_digest": digest, "dtype": config.model.dtype}
    model = settings.model or config.model.name
    by_number = {c.number: c for c in caches}
    if reason:
        groups, parallel, kept = _opaque(config, caches, platform, row_bytes)
        identity = offload_identity(
            model, groups, scheme, variants={**settings.variants, **kept}, **known
        )
        return TierPlan(identity, None, reason, by_number, groups, parallel)
    sizes = settings.sizes(config.model.name)
    groups = offload_groups(caches, sizes, config.model.dtype)
    _check_bytes(config, groups, row_bytes)
    if settings.pages == "auto" and not sizes.latent:
        _check_certain(sizes.heads, config.parallel.tp_size)
    kind = "latent" if sizes.latent else "split" if settings.pages == "split" else "packed"
    layout = RowLayout(FAMILIES[config.kv_cache_layout], kind)
    identity = offload_identity(model, groups, scheme, variants=settings.variants, **known)
    return TierPlan(identity, layout, "", by_number, groups, ParallelConfig())


def _not_canonical(config: Any, settings: TierSettings, platform: str) -> str:
    """Why rows do not hold canonical pages; empty where they do."""
    layout = config.kv_cache_layout
    reasons = {
        "pages is set to 'opaque'": settings.pages == "opaque",
        "'canonical_layout' is not set in kv_connector_extra_config": not config.canonical_layout,
        "the engine could not certify its caches for any parallel config": (
            not config.parallel.is_parallelism_agnostic
        ),
        f"the engine's KV cache layout {layout} does not have whole pages": layout not in FAMILIES,
        f"attention backends of platform {platform!r} may keep keys and values in an order of "
        "their own ('pages' can state which it is)": (
            settings.pages == "auto" and platform not in _CERTIFIED_PLATFORMS
        ),
        "the engine's cache groups have different numbers of layers": (
            len({len(g.layer_names) for g in config.groups}) > 1
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _check_bytes(config: Any, groups: Mapping[int, LayerGroup], row_bytes: int) -> None:
    """Hold the sizes against what a rank's block really takes."""
    blocks, tp = config.cache.blocks_per_chunk, config.parallel.tp_size
    for group in groups.values():
        share = max(1, group.heads // tp)
        wanted = content_bytes(group) // group.heads * share
        found = config.worker_kv_bytes_per_block * blocks
        if wanted != found or content_bytes(group) > row_bytes:
            raise InvalidArgument(
                f"a chunk of layer group {group.name!r} takes {wanted} bytes on each of {tp} ranks "
                f"({group.num_layers} layers, {group.block_tokens} tokens, {share} of "
                f"{group.heads} heads, {group.token_bytes} bytes each), but the engine says "
                f"{found}; set the sizes of the cache in the tier's configuration, or pages to "
                "'opaque'"
            )


def _check_certain(heads: int, tp: int) -> None:
    """Two heads of a rank may be a plane of keys and one of values: the shapes are the same.

    The engine's B12X backend keeps such planes. With any other number of heads the engine itself
    sees that they are none, and does not start.
    """
    if max(1, heads // tp) == 2:
        raise NotCertified(
            "each rank holds two heads, which the engine cannot tell from one plane of keys and "
            "one of values; set pages in the tier's configuration to 'packed', or to 'opaque' if "
            "the attention backend is B12X",
            reason="two heads may be two planes",
        )


def _opaque(
    config: Any, caches: Sequence[CacheGroup], platform: str, row_bytes: int
) -> tuple[dict[int, LayerGroup], ParallelConfig, dict[str, str]]:
    """Layer groups that keep rows whole, the config they are for, and what tells them apart."""
    sizes = config.parallel
    parallel = ParallelConfig(
        tp=sizes.tp_size, pp=sizes.pp_size, dcp=sizes.dcp_size, pcp=sizes.pcp_size
    )
    slices = next(
        (
            n
            for n in range(1, MAX_LAYERS + 1)
            if not row_bytes % n and row_bytes // n <= MAX_CONTENT
        ),
        0,
    )
    if not slices:
        raise NotCertified(
            f"rows of {row_bytes} bytes are too large to keep whole; set fewer blocks_per_chunk",
            reason="rows are too large",
        )
    part = ContentPart("page", element("uint8"), row_bytes // slices)
    groups = {
        c.number: LayerGroup(
            name=f"opaque-{c.number}",
            layers=tuple(range(slices)),
            heads=1,
            block_tokens=c.chunk_tokens,
            parts=(part,),
            attention="opaque",
            extent_blocks=1,
            parallel=parallel.describe(Rank()),
        )
        for c in caches
    }
    layers = ";".join(",".join(c.layers) for c in caches)
    kept = {
        "vllm_platform": platform,
        "vllm_layout": str(config.kv_cache_layout),
        "vllm_row": (
            f"{'canonical' if config.canonical_layout else 'direct'}, "
            f"{config.worker_kv_bytes_per_block} bytes a block of {sizes.world_size} ranks, "
            f"{config.cache.blocks_per_chunk} blocks, replicated {config.replicated_layout}"
        ),
        "vllm_layers": layers if len(layers) < 4096 else _digest(layers),
        "vllm_dtype": str(config.model.dtype),
    }
    return groups, parallel, kept


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def describe(plan: TierPlan) -> str:
    """Words for the log."""
    names = ", ".join(g.name for g in plan.groups.values())
    if plan.layout is None:
        return f"layer groups {names} kept as they are, for {plan.config} only: {plan.reason}"
    return (
        f"layer groups {names} in canonical form, for any parallel config; the tier's pages are "
        f"{plan.layout.family} {plan.layout.kind}, of {model_name(plan.identity.model)}"
    )
