"""The identity of a namespace, out of an engine's configuration and what its ranks registered.

In it: the model, its weights, the layer groups with their true element types, and whatever else
changes what a cache means. Not in it, on purpose: parallel sizes, the executor, the attention
backend's page encoding and the engine's release, none of which change canonical bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.keys import KeyScheme
from kvstore.parallel import ParallelConfig, Rank
from kvstore.plugins.vllm.layers import LayerFacts, block_tokens_of, layer_groups
from kvstore.plugins.vllm.settings import Settings
from kvstore.plugins.weights import weights_digest


def parallel_config(vllm_config: Any, pcp_kv: str, pp_layers: tuple[int, ...]) -> ParallelConfig:
    """The engine's parallel sizes.

    Args:
        vllm_config: the engine's configuration.
        pcp_kv: see :class:`Settings`.
        pp_layers: layers of each pipeline stage.

    Raises:
        NotCertified: prefill context parallelism without ``pcp_kv``.
    """
    sizes = vllm_config.parallel_config
    pcp = sizes.prefill_context_parallel_size
    if pcp > 1 and not pcp_kv:
        raise NotCertified(
            f"the engine has {pcp} prefill context parallel ranks; set pcp_kv in "
            "kv_connector_extra_config to what they hold: 'sharded' (each its tokens) or "
            "'replicated' (each all of them)",
            reason="what PCP ranks hold is not known",
        )
    return ParallelConfig(
        tp=sizes.tensor_parallel_size,
        pp=sizes.pipeline_parallel_size,
        dcp=sizes.decode_context_parallel_size,
        pcp=pcp,
        interleave=sizes.cp_kv_cache_interleave_size,
        pcp_kv=pcp_kv or "sharded",
        pp_layers=pp_layers if sizes.pipeline_parallel_size > 1 else None,
    )


def rank_of(vllm_config: Any) -> Rank:
    """This worker's rank; the engine numbers them by stage, then PCP, then TP."""
    sizes = vllm_config.parallel_config
    tp, pcp = sizes.tensor_parallel_size, sizes.prefill_context_parallel_size
    stage, within = divmod(sizes.rank % sizes.world_size, tp * pcp)
    return Rank(stage, within // tp, within % tp)


def stage_layers(vllm_config: Any, layers: Sequence[LayerFacts]) -> tuple[int, ...]:
    """Layers of the model on each pipeline stage; draft layers come with the last."""
    from vllm.distributed.utils import get_pp_indices

    sizes = vllm_config.parallel_config
    stages = sizes.pipeline_parallel_size
    config = vllm_config.model_config.hf_text_config
    own = int(getattr(config, "num_hidden_layers", 0))
    every = max(own, 1 + max(layer.index for layer in layers))
    if stages == 1:
        return (every,)
    spans = [get_pp_indices(own, stage, stages) for stage in range(stages)]
    counts = [stop - start for start, stop in spans]
    counts[-1] += every - own
    return tuple(counts)


def identity_of(
    vllm_config: Any, settings: Settings, layers: Sequence[LayerFacts], model_layers: int
) -> Identity:
    """The identity of the namespace that this engine reads and writes.

    Raises:
        NotCertified: something in the model's cache cannot be stored.
        InvalidArgument: there is no telling which weights these are.
    """
    config = vllm_config.model_config
    sizes = vllm_config.parallel_config
    shards = sizes.decode_context_parallel_size
    if settings.pcp_kv == "sharded":
        shards *= sizes.prefill_context_parallel_size
    tokens = block_tokens_of(layers, settings.block_tokens, shards)
    groups: tuple[LayerGroup, ...] = layer_groups(
        layers, block_tokens=tokens, extent_tokens=settings.extent_tokens
    )
    revision, digest = _weights(vllm_config, settings)
    return Identity(
        model=settings.model or _name(config),
        model_layers=model_layers,
        groups=groups,
        revision=revision,
        weights_digest=digest,
        key_scheme=KeyScheme.sha256(settings.salt.encode()),
        variants=_variants(vllm_config),
    )


def _name(config: Any) -> str:
    served = str(config.model)
    return Path(served).resolve().name if Path(served).exists() else served


def _weights(vllm_config: Any, settings: Settings) -> tuple[str | None, str | None]:
    """Revision, or digest of the weights."""
    if settings.revision:
        return settings.revision, None
    config = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        raise InvalidArgument(
            "the engine runs on random weights (load_format dummy), which no other run has; set "
            "'revision' in kv_connector_extra_config to name them, or load real weights"
        )
    if Path(config.model).exists():
        return None, weights_digest(config.model)
    commit = getattr(config.hf_config, "_commit_hash", None) or config.revision
    if not commit:
        raise InvalidArgument(
            f"cannot tell which revision of {config.model!r} was loaded; start the engine with "
            "--revision, or set 'revision' in kv_connector_extra_config"
        )
    return str(commit), None


def _variants(vllm_config: Any) -> dict[str, str]:
    """What else changes the meaning of a cache's bytes."""
    config, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise NotCertified(
            "the engine computes the scales of its FP8 cache from the first tokens it sees "
            "(calculate_kv_scales), so no other run can read it; use scales out of the checkpoint",
            reason="KV scales differ from run to run",
        )
    found = {"compute_dtype": str(config.dtype).removeprefix("torch.")}
    text = config.hf_text_config
    rope = {
        name: getattr(text, name, None)
        for name in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    }
    encoded = json.dumps(rope, sort_keys=True, default=str).encode()
    found["rope"] = hashlib.sha256(encoded).hexdigest()[:32]
    if config.quantization:
        found["quantization"] = str(config.quantization)
    if cache.cache_dtype != "auto":
        found["cache_dtype"] = str(cache.cache_dtype)
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None:
        local = Path(draft.model).exists()
        found["draft"] = weights_digest(draft.model) if local else f"{draft.model}@{draft.revision}"
    return found
