"""A rank's registered caches as paged buffers of the store's layer groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.buffers import PagedBuffers
from kvstore.elements import element
from kvstore.errors import NotCertified
from kvstore.geometry import LayerGroup
from kvstore.placement import Ints
from kvstore.plugins.vllm.encoding import Axis, PartEncoding, Write, probe
from kvstore.plugins.vllm.layers import LayerFacts

# Cells of one token that are contiguous by their definition, though no writer can show it.
_TRUSTED_PACKED = ("packed_fp8_ds_mla",)


class RegisteredPages:
    """The caches that the engine registered on this rank, each with its encoding found out.

    Args:
        modules: the engine's attention layers by name, whose backends write the caches.
        layers: the rank's layers.
        caches: the registered tensors by layer, ``[block, head, token, content]``.
        blocks: the engine's KV blocks.

    Raises:
        NotCertified: a cache cannot be mapped; the message says which and why.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        layers: Sequence[LayerFacts],
        caches: Mapping[str, torch.Tensor],
        blocks: int,
    ) -> None:
        self._caches: dict[str, torch.Tensor] = {}
        self._encodings: dict[str, tuple[PartEncoding, ...]] = {}
        self.ratios: dict[str, int] = {}
        known: dict[tuple[object, ...], tuple[PartEncoding, ...]] = {}
        for layer in layers:
            cache = caches.get(layer.name)
            if not isinstance(cache, torch.Tensor) or cache.ndim != 4:
                raise NotCertified(
                    f"layer {layer.name!r} registered no tensor [block, head, token, content]; "
                    "run the engine without the connector",
                    reason="an unknown kind of cache",
                )
            ratio = cache.shape[0] // blocks
            if ratio < 1 or cache.shape[0] % blocks or layer.block_tokens % ratio:
                raise NotCertified(
                    f"layer {layer.name!r} registered {cache.shape[0]} blocks, the engine has "
                    f"{blocks}; run the engine without the connector",
                    reason="blocks do not match the engine's",
                )
            module = modules.get(layer.name)
            kind = (type(getattr(module, "impl", None)), cache.dtype, cache.shape, cache.stride())
            key = (*kind, layer.parts, getattr(module, "isa", None), ratio)
            if key not in known:
                known[key] = _encoding(module, layer, cache, layer.block_tokens // ratio)
            self._caches[layer.name] = cache
            self._encodings[layer.name] = known[key]
            self.ratios[layer.group_name] = ratio

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return next(iter(self._caches.values())).device

    def buffers(self, group: LayerGroup, members: Sequence[LayerFacts]) -> PagedBuffers:
        """Paged buffers of the rank's layers of one group.

        Raises:
            NotCertified, InvalidArgument: the pages do not hold what the group says.
        """
        views = []
        for layer in members:
            cache = self._caches[layer.name]
            per_part = {}
            for part, encoding in zip(group.parts, self._encodings[layer.name], strict=True):
                typed = cache
                if cache.dtype == torch.uint8 and part.element.itemsize == 1:
                    typed = cache.view(part.element.torch_dtype())
                per_part[part.name] = encoding.view(typed, layer.heads)
            views.append(per_part)
        return PagedBuffers(group, views)

    def table(self, group: LayerGroup, block_ids: Sequence[int]) -> Ints:
        """Block ids of a group's buffers, which may be parts of the engine's blocks."""
        ids = np.asarray(block_ids, dtype=np.int64)
        ratio = self.ratios.get(group.name, 1)
        if ratio == 1:
            return ids
        parts: Ints = (ids[:, None] * ratio + np.arange(ratio)).ravel()
        return parts

    def describe(self, name: str) -> str:
        """Words for how a group's pages are encoded, for the log."""
        parts = self._encodings[name]
        tiled = any(e.tokens.outer > 1 or e.elements.outer > 1 for e in parts)
        turned = any(e.elements.inner_step > 1 for e in parts)
        return "tiled" if tiled else "transposed" if turned else "plain"


def _encoding(
    module: Any, layer: LayerFacts, cache: torch.Tensor, tokens: int
) -> tuple[PartEncoding, ...]:
    what = f"layer {layer.name!r}"
    if layer.parts[0][0] in _TRUSTED_PACKED:
        if cache.stride(-1) != 1 or cache.shape[-1] != layer.parts[0][2]:
            raise NotCertified(f"{what}: its cells are not contiguous", reason="cells in pieces")
        steps = (Axis(1, 0, tokens, cache.stride(2)), Axis(1, 0, cache.shape[-1], 1))
        return (PartEncoding(0, cache.stride(1), *steps),)
    impl = getattr(module, "impl", None)
    if not hasattr(impl, "do_kv_cache_update"):
        raise NotCertified(
            f"{what}: its attention backend {type(impl).__name__} has no writer of its own to find "
            "the page encoding with; use another attention backend, or run without the connector",
            reason="the page encoding cannot be found out",
        )
    types = {element(name).torch_dtype() for _, name, _ in layer.parts}
    kept = types.pop()
    source = kept if kept.itemsize > 1 else torch.bfloat16
    return probe(
        _writer(module, layer),
        cache,
        heads=layer.heads,
        tokens=tokens,
        counts=[count for _, _, count in layer.parts],
        source=source,
        element=kept,
        what=f"{what}, backend {type(impl).__name__}",
    )


def _writer(module: Any, layer: LayerFacts) -> Write:
    plain = _Unscaled(module)
    impl = module.impl

    def attention(cache: torch.Tensor, parts: list[torch.Tensor], slots: torch.Tensor) -> None:
        impl.do_kv_cache_update(plain, parts[0], parts[1], cache, slots)

    def latent(cache: torch.Tensor, parts: list[torch.Tensor], slots: torch.Tensor) -> None:
        first, second = (part[:, 0] for part in parts)
        dtype = getattr(module, "kv_cache_dtype", "auto")
        impl.do_kv_cache_update(
            first, second.unsqueeze(1), cache.squeeze(1), slots, dtype, plain.key_scale
        )

    return latent if layer.attention == "mla" else attention


class _Unscaled:
    """An attention layer with scales of one, so that numbers are written as they are."""

    def __init__(self, module: Any) -> None:
        self._module = module
        for name in ("_k_scale", "_v_scale"):
            scale = getattr(module, name, None)
            one = torch.ones_like(scale) if isinstance(scale, torch.Tensor) else torch.ones(())
            setattr(self, name, one)
            setattr(self, f"{name}_float", 1.0)

    @property
    def key_scale(self) -> Any:
        return self._k_scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
