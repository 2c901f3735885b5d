"""From the engine's cache specs to :class:`LayerFacts`: what each layer keeps for each token.

Only what is understood is described. Anything else is refused at start-up, by name: pages whose
meaning is not certain must never be handed to an engine that reads them another way.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1 import kv_cache_interface as kv

from kvstore.errors import NotCertified
from kvstore.plugins.vllm.layers import LayerFacts

FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def describe_layers(vllm_config: Any, kv_cache_config: Any) -> tuple[LayerFacts, ...]:
    """Every layer that this rank has a cache for.

    Raises:
        NotCertified: a layer keeps something that cannot be stored; the message says what.
    """
    out = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            spec = specs.get(name, group.kv_cache_spec)
            out.append(_describe(vllm_config, name, number, spec))
    return tuple(out)


def _describe(vllm_config: Any, name: str, cache_group: int, spec: Any) -> LayerFacts:
    attention, window = _attention(name, spec)
    if spec.tokens_per_state != 1:
        raise _refusal(name, f"it keeps one state for {spec.tokens_per_state} tokens")
    if spec.num_head_slots not in (None, spec.num_kv_heads):
        raise _refusal(name, f"it packs {spec.num_kv_heads} heads in {spec.num_head_slots} slots")
    role, parts = _parts(vllm_config, name, spec)
    return LayerFacts(
        name=name,
        index=extract_layer_index(name),
        cache_group=cache_group,
        attention=attention,
        role=role,
        window=window,
        block_tokens=spec.block_size,
        heads=spec.num_kv_heads,
        total_heads=_total_heads(vllm_config, name, spec),
        parts=parts,
    )


def _attention(name: str, spec: Any) -> tuple[str, int | None]:
    if isinstance(spec, kv.MLAAttentionSpec):
        return "mla", None
    if type(spec) is kv.SlidingWindowSpec:
        return "sliding_window", int(spec.sliding_window)
    if isinstance(spec, kv.ChunkedLocalAttentionSpec):
        return "chunked", int(spec.attention_chunk_size)
    if type(spec) is kv.FullAttentionSpec:
        # With a window too, where the engine keeps all blocks of a windowed layer.
        return "full", None
    raise _refusal(name, f"its cache is a {type(spec).__name__}")


def _parts(vllm_config: Any, name: str, spec: Any) -> tuple[str, tuple[tuple[str, str, int], ...]]:
    if spec.kv_quant_mode.name not in ("NONE", "FP8_PER_TENSOR"):
        raise _refusal(name, f"its cache is quantised as {spec.kv_quant_mode.name}")
    mla = isinstance(spec, kv.MLAAttentionSpec)
    if spec.state_content_bytes is not None:
        dense = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
        if spec.state_content_bytes != dense:
            if mla and spec.cache_dtype_str:
                # A packed form of the backend's own: bytes, under its name, for those that know it.
                word = "".join(c if c.isalnum() else "_" for c in spec.cache_dtype_str.lower())
                role = _mla_role(spec)
                return role, ((f"packed_{word}"[:32], "uint8", spec.state_content_bytes),)
            raise _refusal(name, f"a token takes {spec.state_content_bytes} bytes, not {dense}")
    element = _element(vllm_config, name, spec)
    if not mla:
        return "kv", (("key", element, spec.head_size), ("value", element, spec.head_size_v))
    role = _mla_role(spec)
    config = vllm_config.model_config.hf_text_config
    latent = getattr(config, "kv_lora_rank", None)
    rope = getattr(config, "qk_rope_head_dim", None)
    if role == "mla" and latent and rope and latent + rope == spec.head_size:
        return role, (("latent", element, latent), ("rope_key", element, rope))
    return role, ((f"{role}_key", element, spec.head_size),)


def _mla_role(spec: Any) -> str:
    role = getattr(getattr(spec, "cache_role", None), "name", "SPARSE").lower()
    return "mla" if role in ("sparse", "main", "dense") else role[:16]


def _element(vllm_config: Any, name: str, spec: Any) -> str:
    word = str(spec.dtype).removeprefix("torch.")
    if word != "uint8":
        return word
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in FP8:
        raise _refusal(name, f"its cache dtype {cache_dtype!r} is not known")
    return FP8[cache_dtype]


def _total_heads(vllm_config: Any, name: str, spec: Any) -> int:
    """KV heads of the whole model, out of what one of its tensor parallel ranks holds."""
    if isinstance(spec, kv.MLAAttentionSpec):
        if spec.num_kv_heads != 1:
            raise _refusal(name, f"a latent cache with {spec.num_kv_heads} heads")
        return 1
    tp = vllm_config.parallel_config.tensor_parallel_size
    heads: int = spec.num_kv_heads
    if tp == 1:
        return heads
    if spec.max_tp_shards is not None:
        shards: int = min(tp, spec.max_tp_shards)
        return heads * shards
    total: int = int(vllm_config.model_config.get_total_num_kv_heads())
    if max(1, total // tp) != heads:
        raise _refusal(name, f"a rank holds {heads} of its heads, the model has {total}, TP {tp}")
    return total


def _refusal(name: str, reason: str) -> NotCertified:
    return NotCertified(
        f"kvstore cannot store layer {name!r}: {reason}. Run the engine without the connector, or "
        "with another cache dtype or attention backend",
        reason=reason,
    )
