"""What a cache of vLLM's file system tier says of itself, and which of it is believed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.fs_caches import LAYERS, MODEL, TOKENS, named, unpack

from kvstore import InvalidArgument, NotCertified, NotFound
from kvstore.plugins.vllm.fs_layout import find_cache, read_cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache's folder."""
    return find_cache(unpack("nhd", tmp_path))


def remade(folder: Path, **changes: Any) -> Path:
    """The same with another configuration, under the name that the engine would give it."""
    fields = json.loads((folder / "config.json").read_text())
    fields.update(changes)
    fields = {name: value for name, value in fields.items() if value is not ...}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    out = folder.with_name(f"m_{digest}")
    out.mkdir()
    (out / "config.json").write_text(json.dumps(fields, indent=2))
    return out


def test_all_of_it(folder: Path) -> None:
    cache = read_cache(folder)
    assert (cache.model, cache.dtype, cache.family) == (MODEL, "bfloat16", "nhd")
    (group,) = cache.groups
    assert (group.number, group.block_tokens, group.chunk_blocks) == (0, TOKENS, 1)
    assert group.indices == tuple(range(LAYERS))
    assert sorted(f.block_hash for f in cache.files()) == sorted(named("nhd").hashes())
    assert not any(f.stray or f.group for f in cache.files())
    assert read_cache(find_cache(unpack("hnd", folder.parent))).family == "hnd"


def test_a_cache_by_any_of_its_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = folder.with_name(folder.name + "_r0")
    assert find_cache(folder.parent) == find_cache(blocks) == find_cache(folder) == folder
    monkeypatch.chdir(folder)
    assert find_cache(Path()) == folder


def test_no_cache_or_several(folder: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "none", folder / "config.json", tmp_path):
        with pytest.raises(NotFound, match="there is no cache"):
            find_cache(place)
    remade(folder, dtype="float16")
    with pytest.raises(InvalidArgument, match="holds 2 caches; give the one"):
        find_cache(folder.parent)


def test_no_blocks_yet(folder: Path) -> None:
    assert list(read_cache(remade(folder, dtype="float16")).files()) == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"canonical_format": ...}, NotCertified, "without 'canonical_layout'"),
        ({"canonical_format": "v2-nhd"}, NotCertified, "format 'v2-nhd'"),
        ({"canonical_format": "v1-lbntc"}, NotCertified, "format 'v1-lbntc'"),
        ({"canonical_format": ["v1-nhd"]}, InvalidArgument, "of another kind"),
        (
            {"parallel_agnostic": False, "tp_size": 2},
            NotCertified,
            "one parallel config.*tp_size 2",
        ),
        ({"tp_size": 2}, NotCertified, "one parallel config"),
        ({"inference_engine": "other"}, InvalidArgument, "not a configuration of vLLM"),
        ({"compression": "zip"}, NotCertified, r"says more than is understood here \(compression"),
        ({"dtype": 5}, InvalidArgument, "lacks fields"),
        ({"blocks_per_file": 0}, InvalidArgument, "lacks fields"),
        ({"blocks_per_file": True}, InvalidArgument, "lacks fields"),
        ({"kv_cache_groups": []}, InvalidArgument, "lacks fields"),
        ({"kv_cache_groups": [{"tokens_per_block": 8}]}, InvalidArgument, "lacks fields"),
        ({"tokens_per_hash": 3}, InvalidArgument, "whole hashed spans"),
        (
            {
                "kv_cache_groups": [
                    {"tokens_per_block": 8, "layer_names": ["l.0"]},
                    {"tokens_per_block": 8, "layer_names": ["l.1", "l.2"]},
                ]
            },
            NotCertified,
            "cache groups of different sizes",
        ),
    ],
)
def test_what_is_not_believed(
    folder: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_cache(remade(folder, **changes))


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"inference_engine": "vllm"}'])
def test_a_damaged_configuration(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(InvalidArgument):
        read_cache(folder)


def test_a_configuration_that_was_changed(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("v1-nhd", "v1-hnd"))
    with pytest.raises(InvalidArgument, match="one of them was changed"):
        read_cache(folder)
