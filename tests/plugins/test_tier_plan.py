"""What the tier keeps, out of what the engine says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import InvalidArgument, NotCertified
from kvstore.plugins.vllm.checkpoint import AttentionSizes, checkpoint_sizes
from kvstore.plugins.vllm.roots import key_scheme, root_of
from kvstore.plugins.vllm.tier_plan import TierPlan, describe, plan_tier
from kvstore.plugins.vllm.tier_settings import tier_settings

SCHEME = key_scheme("sha256", root_of("sha256", "s"))
GIVEN = {"root": "/r", "revision": "r", "heads": 8, "head_size": 64}
PAGE = 16 * 2 * 64 * 2  # one head


def engine(groups: int = 1, layers: int = 3, **given: Any) -> Any:
    """An offloading configuration of the engine."""
    tp = given.pop("tp", 2)
    parallel = SimpleNamespace(
        tp_size=tp,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        world_size=tp,
        is_parallelism_agnostic=given.pop("agnostic", True),
    )
    names = [
        tuple(f"model.layers.{g + i * groups}.attn" for i in range(layers)) for g in range(groups)
    ]
    config = {
        "groups": [
            SimpleNamespace(group_id=g, tokens_per_block=16, layer_names=n)
            for g, n in enumerate(names)
        ],
        "model": SimpleNamespace(name="org/m", dtype=given.pop("dtype", "bfloat16")),
        "cache": SimpleNamespace(blocks_per_chunk=2),
        "worker_kv_bytes_per_block": layers * 8 // tp * PAGE,
        "canonical_layout": True,
        "kv_cache_layout": "LBNHC",
        "replicated_layout": False,
    }
    return SimpleNamespace(**{**config, **given}, parallel=parallel)


def plan(config: Any = None, platform: str = "cuda", **given: Any) -> TierPlan:
    settings = tier_settings({**GIVEN, **given})
    return plan_tier(
        config or engine(), settings, SCHEME, platform=platform, row_bytes=2 * 3 * 8 * PAGE
    )


def test_canonical_rows_do_not_tell_configs_or_families_apart() -> None:
    plans = [
        plan(),
        plan(engine(tp=1)),
        plan(engine(tp=8)),
        plan(engine(kv_cache_layout="LBHNC")),
        plan(pages="packed", platform="rocm"),
        plan(pages="split"),
    ]
    assert len({p.identity.fingerprint for p in plans}) == 1
    group = plans[0].groups[0]
    assert (group.block_tokens, group.extent_blocks, group.heads) == (32, 1, 8)
    assert "for any parallel config" in describe(plans[0])


def test_cache_groups_become_layer_groups() -> None:
    found = plan(engine(groups=2)).groups
    assert [found[n].layers for n in (0, 1)] == [(0, 2, 4), (1, 3, 5)]


@pytest.mark.parametrize(
    ("config", "platform", "words"),
    [
        ({"canonical_layout": False}, "cuda", "canonical_layout"),
        ({"agnostic": False}, "cuda", "could not certify"),
        ({"kv_cache_layout": "BLHNC"}, "cuda", "whole pages"),
        ({"kv_cache_layout": None}, "cuda", "whole pages"),
        ({}, "cpu", "order of their own"),
        ({}, "rocm", "order of their own"),
    ],
)
def test_other_rows_are_kept_for_their_config(
    config: dict[str, Any], platform: str, words: str
) -> None:
    found = plan(engine(**config), platform)
    assert found.layout is None
    assert words in describe(found)
    assert found.groups[0].attention == "opaque"
    assert found.groups[0].page_bytes * found.groups[0].num_layers == 2 * 3 * 8 * PAGE
    other = plan(engine(tp=4, **config), platform)
    assert other.identity.fingerprint != found.identity.fingerprint
    if words != "order of their own":
        with pytest.raises(NotCertified, match=words):
            plan(engine(**config), platform, pages="packed")


def test_sizes_that_contradict_the_engine_are_refused() -> None:
    for given in ({"heads": 4}, {"head_size": 32}, {"latent": 500}):
        with pytest.raises(InvalidArgument, match="the engine says 98304"):
            plan(**given)


def test_fp8_needs_to_say_where_its_scales_are_from() -> None:
    config = engine(dtype="fp8", worker_kv_bytes_per_block=3 * 4 * PAGE // 2)
    with pytest.raises(InvalidArgument, match="kv_scales"):
        plan(config)
    found = plan(config, variants={"kv_scales": "checkpoint"})
    assert found.groups[0].parts[0].element.name == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"root": ""}, "needs 'root'"),
        ({"nothing": 1}, "unknown keys nothing"),
        ({"threads": 0}, "threads"),
        ({"heads": True}, "heads"),
        ({"variants": {"a": 1}}, "variants"),
        ({"pages": "odd"}, "one of auto, packed"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        tier_settings({**GIVEN, **given})


def test_weights_and_sizes_come_out_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.safetensors").write_bytes(b"w")
    config = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {"root": "/r", "weights": str(tmp_path)}
    found = plan_tier(
        engine(), tier_settings(given), SCHEME, platform="cuda", row_bytes=2 * 3 * 8 * PAGE
    )
    assert found.identity.weights_digest is not None
    with pytest.raises(InvalidArgument, match="cannot tell which weights 'org/m'"):
        plan_tier(
            engine(),
            tier_settings({"root": "/r", "heads": 8, "head_size": 64}),
            SCHEME,
            platform="cuda",
            row_bytes=1 << 20,
        )


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"num_attention_heads": 12, "hidden_size": 768}, AttentionSizes(heads=12, head_size=64)),
        (
            {"text_config": {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "hidden_size": 1},
            AttentionSizes(latent=512, rope=64),
        ),
    ],
)
def test_checkpoints(tmp_path: Path, config: dict[str, Any], sizes: AttentionSizes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint_sizes(tmp_path) == sizes


def test_checkpoints_that_do_not_say(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        checkpoint_sizes(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidArgument, match="does not say"):
        checkpoint_sizes(tmp_path)
