"""Settings, versions and layers of the vLLM plugin, as far as they need no engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import InvalidArgument, NotCertified
from kvstore.plugins.vllm.layers import LayerFacts, block_tokens_of, by_group, layer_groups
from kvstore.plugins.vllm.settings import Settings, settings
from kvstore.plugins.vllm.versions import require_supported


def test_defaults_and_every_kind() -> None:
    assert settings({"root": "/x"}) == Settings(root="/x")
    chosen = settings({"root": "/x", "verify": False, "lookup_wait_ms": 3, "load": "layerwise"})
    assert (chosen.verify, chosen.lookup_wait_ms, chosen.load) == (False, 3, "layerwise")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "needs 'root'"),
        ({"root": ""}, "root is empty"),
        ({"root": "/x", "rot": 1}, "unknown keys rot; those of kvstore are: root, load"),
        ({"root": "/x", "verify": 1}, "verify in kv_connector_extra_config is 1, not of kind bool"),
        ({"root": "/x", "min_load_tokens": True}, "not of kind int"),
        ({"root": "/x", "min_load_tokens": -1}, "from 0 to"),
        ({"root": "/x", "load": "sync"}, "one of 'async', 'layerwise'"),
        ({"root": "/x", "save": "some"}, "one of 'prompt', 'all', 'none'"),
        ({"root": "/x", "max_pending_fraction": 2.0}, "from 0.001 to 1"),
    ],
)
def test_wrong_settings_are_named(extra: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        settings(extra)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1rc1"])
def test_supported_versions(version: str) -> None:
    require_supported(version)


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.0", "0.3"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(InvalidArgument, match=r"0\.32 and 0\.33, not " + version):
        require_supported(version)


def layer(index: int, **changes: object) -> LayerFacts:
    facts = LayerFacts(
        name=f"model.layers.{index}.self_attn.attn",
        index=index,
        cache_group=0,
        attention="full",
        role="kv",
        window=None,
        block_tokens=32,
        heads=2,
        total_heads=4,
        parts=(("key", "bfloat16", 64), ("value", "bfloat16", 64)),
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def test_groups_are_the_same_whichever_rank_tells_of_them() -> None:
    windowed = {"cache_group": 1, "attention": "sliding_window", "window": 128}
    first = [layer(0), layer(1, **windowed)]
    second = [layer(2), layer(3, **windowed)]
    whole = by_group([*second, *first, *first])
    assert {name: [m.index for m in members] for name, members in whole.items()} == {
        "kv-0": [0, 2],
        "kv-sliding_window-1": [1, 3],
    }
    assert set(by_group(first)) == set(whole)
    groups = layer_groups([*first, *second], block_tokens=16, extent_tokens=256)
    assert [(g.name, g.layers, g.heads, g.extent_blocks, g.window) for g in groups] == [
        ("kv-0", (0, 2), 4, 16, None),
        ("kv-sliding_window-1", (1, 3), 4, 16, 128),
    ]


def test_layers_that_differ_are_refused() -> None:
    with pytest.raises(NotCertified, match="their pages differ"):
        by_group([layer(0), layer(1, heads=1)])
    with pytest.raises(NotCertified, match="same number"):
        by_group([layer(0), layer(0, name="draft.layers.0.attn")])


def test_stored_blocks_divide_the_engines() -> None:
    assert block_tokens_of([layer(0), layer(1, block_tokens=48)], 0, 1) == 16
    assert block_tokens_of([layer(0, block_tokens=24)], 0, 1) == 8
    assert block_tokens_of([layer(0, block_tokens=8)], 0, 2) == 16
    assert block_tokens_of([layer(0)], 32, 1) == 32
    with pytest.raises(NotCertified, match="no multiple"):
        block_tokens_of([layer(0)], 64, 1)
