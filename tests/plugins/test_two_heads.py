"""Two heads of a rank look like a plane of keys and one of values: that is not guessed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstore import NotCertified
from kvstore.plugins.vllm.roots import key_scheme, root_of
from kvstore.plugins.vllm.tier_plan import TierPlan, plan_tier
from kvstore.plugins.vllm.tier_settings import tier_settings

SCHEME = key_scheme("sha256", root_of("sha256", "seed"))
HEADS, SIZE, TOKENS = 8, 16, 16
RANK_HEAD = TOKENS * 2 * SIZE * 2


def plan(tp: int, pages: str) -> TierPlan:
    """Of a model of one layer."""
    config = SimpleNamespace(
        groups=[SimpleNamespace(group_id=0, tokens_per_block=TOKENS, layer_names=("layers.0.x",))],
        worker_kv_bytes_per_block=max(1, HEADS // tp) * RANK_HEAD,
        model=SimpleNamespace(name="org/tiny", dtype="bfloat16"),
        cache=SimpleNamespace(blocks_per_chunk=1),
        parallel=SimpleNamespace(
            tp_size=tp,
            pp_size=1,
            dcp_size=1,
            pcp_size=1,
            world_size=tp,
            is_parallelism_agnostic=True,
        ),
        canonical_layout=True,
        kv_cache_layout="LBNHC",
        replicated_layout=False,
    )
    sizes = {"root": "/r", "revision": "r", "heads": HEADS, "head_size": SIZE, "pages": pages}
    row = max(HEADS, tp) * RANK_HEAD
    return plan_tier(config, tier_settings(sizes), SCHEME, platform="cuda", row_bytes=row)


def test_it_has_to_be_said() -> None:
    with pytest.raises(NotCertified, match="set pages in the tier's configuration to 'packed'"):
        plan(4, "auto")
    assert plan(4, "packed").identity == plan(2, "auto").identity == plan(16, "auto").identity
    assert plan(4, "opaque").layout is None
