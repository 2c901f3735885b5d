"""Caches that vLLM's own file system tier wrote, imported.

``vllm_engine/make_fs_caches.py`` made them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import kvstore
from kvstore import FormatError, InvalidArgument, NotCertified, NotFound, StorageError
from kvstore.plugins.vllm.checkpoint import AttentionSizes
from kvstore.plugins.vllm.fs_cache import FsChunk, check_size, chunks_of, find_caches, read_cache
from kvstore.plugins.vllm.fs_import import ImportOptions, ImportReport, import_cache
from kvstore.plugins.vllm.roots import DEFAULT_SEED, key_scheme, root_of
from kvstore.plugins.vllm.tier_moves import Mover

DATA = Path(__file__).resolve().parents[1] / "data" / "vllm_fs"
TRUTH: dict[str, Any] = json.loads((DATA / "truth.json").read_text())["caches"]
SCHEME = key_scheme("sha256", root_of("sha256", DEFAULT_SEED))
GQA, MLA = AttentionSizes(heads=2, head_size=4), AttentionSizes(latent=3, rope=1)


def truth(name: str) -> np.ndarray:
    """What was stored: bits [layer, block, head, token, content]."""
    shape = TRUTH[name]["shape"]
    data = (DATA / "truth.bin").read_bytes()[TRUTH[name]["offset"] :]
    return np.frombuffer(data, "<u2", count=int(np.prod(shape))).reshape(shape)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The caches, to be damaged."""
    shutil.copytree(DATA, tmp_path / "caches")
    return tmp_path / "caches"


def brought(
    tmp_path: Path, source: Path, sizes: AttentionSizes = GQA, **options: Any
) -> tuple[ImportReport, Any]:
    """The report of an import, and the namespace."""
    store = kvstore.open(tmp_path / "store", durable=False)
    (folder,) = find_caches(source)
    given = ImportOptions(SCHEME, sizes, revision="r", threads=2, **options)
    report = import_cache(read_cache(folder), store, given)
    return report, store.open_namespace(report.namespace)


@pytest.mark.parametrize("name", ["nhd", "hnd", "split", "latent"])
def test_each_head_and_token_is_where_it_was(tmp_path: Path, name: str) -> None:
    sizes = MLA if name == "latent" else GQA
    report, space = brought(tmp_path, DATA / name, sizes, split=name == "split")
    wanted, chunk_blocks = truth(name), TRUTH[name]["chunk_blocks"]
    hashes = TRUTH[name]["hashes"]
    assert (report.imported, report.present, report.refused) == (len(hashes), 0, [])
    for number, block_hash in enumerate(hashes):
        array = zarr.open_array(tmp_path / "store" / space.path(block_hash), mode="r")[:]
        blocks = wanted[:, number * chunk_blocks : (number + 1) * chunk_blocks]
        assert array.shape[1] == 1
        for layer in range(array.shape[0]):
            for head in range(array.shape[2]):
                tokens = np.concatenate(list(blocks[layer, :, head]))  # the chunk's blocks in a row
                np.testing.assert_array_equal(array[layer, 0, head], tokens)
    assert list(space.verify()) == []


def test_taken_for_another_layout_the_bytes_would_differ(tmp_path: Path) -> None:
    """The layout is what the test above depends on."""
    _, space = brought(tmp_path, DATA / "nhd", split=True)
    array = zarr.open_array(tmp_path / "store" / space.path(TRUTH["nhd"]["hashes"][0]), mode="r")
    assert not np.array_equal(array[:][:, 0], truth("nhd")[:, 0])


def test_an_import_goes_on_where_it_was(tmp_path: Path) -> None:
    first, space = brought(tmp_path, DATA / "nhd")
    space.remove(TRUTH["nhd"]["hashes"][1])
    again, _ = brought(tmp_path, DATA / "nhd")
    assert (first.imported, again.imported, again.present) == (2, 1, 1)


def test_files_that_are_not_chunks_are_refused_each_with_a_reason(
    tmp_path: Path, copied: Path
) -> None:
    (folder,) = find_caches(copied / "nhd")
    chunks = read_cache(folder).folder
    paths = [c.path for c in chunks_of(read_cache(folder)) if isinstance(c, FsChunk)]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    (paths[1].parent / "notes.txt").write_text("x")
    (paths[1].parent / (paths[1].name + "_123.tmp")).write_bytes(b"half")
    other = chunks / "abc" / "de_g7"
    other.mkdir(parents=True)
    (other / ("abcde" + "0" * 59 + ".bin")).write_bytes(b"x")
    (other / ("fffff" + "0" * 59 + ".bin")).write_bytes(b"x")
    (chunks / "abc" / "de_g0").mkdir()
    (chunks / "abc" / "de_g0" / ("abcde" + "1" * 59 + ".bin")).symlink_to(paths[1])
    (chunks / "abc" / "de_g0" / ("abcde" + "2" * 27 + ".bin")).write_bytes(paths[1].read_bytes())
    report, _ = brought(tmp_path, copied / "nhd")
    assert report.imported == 1
    reasons = {path.name[:6]: reason for path, reason in report.refused}
    assert "4095 bytes, but a chunk has 384" in reasons[paths[0].name[:6]]
    assert "not that of a chunk" in reasons["notes."]
    assert "not that of a chunk" in reasons["fffff0"]
    assert "no cache group 7" in reasons["abcde0"]
    assert "not a plain file" in reasons["abcde1"]
    assert "another algorithm" in reasons["abcde2"]
    assert len(report.refused) == 6


def rewritten(folder: Path, **fields: Any) -> Path:
    """A cache whose configuration says something else, named accordingly."""
    import hashlib

    config = {**json.loads((folder / "config.json").read_text()), **fields}
    config = {k: v for k, v in config.items() if v is not ...}
    encoded = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    other = folder.with_name(f"x_{hashlib.sha256(encoded).hexdigest()[:12]}")
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    return other


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"canonical_format": ...}, NotCertified, "not in canonical form"),
        ({"parallel_agnostic": False}, NotCertified, "not in canonical form"),
        ({"canonical_format": "v2-nhd"}, NotCertified, "v2-nhd"),
        ({"canonical_format": "v1-blhnc"}, NotCertified, "v1-blhnc"),
        ({"inference_engine": "other"}, NotCertified, "not vllm"),
        ({"tp_size": 2}, FormatError, "names a parallel config"),
        ({"blocks_per_file": 0}, FormatError, "blocks_per_file"),
        ({"kv_cache_groups": []}, NotCertified, "cache groups"),
        ({"kv_cache_groups": [{"tokens_per_block": 4, "layer_names": [1]}]}, FormatError, "names"),
    ],
)
def test_caches_that_are_not_canonical_are_refused(
    copied: Path, fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    (folder,) = find_caches(copied / "nhd")
    with pytest.raises(error, match=words):
        read_cache(rewritten(folder, **fields))


def test_the_engines_own_direct_cache_is_refused() -> None:
    (folder,) = find_caches(DATA / "direct")
    with pytest.raises(NotCertified, match="canonical_layout"):
        read_cache(folder)


def test_a_changed_configuration_is_noticed(copied: Path) -> None:
    (folder,) = find_caches(copied / "nhd")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"v1-nhd"', '"v1-hnd"'))
    with pytest.raises(FormatError, match="named after"):
        read_cache(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(FormatError, match="not JSON"):
        read_cache(folder)


def test_nothing_there(tmp_path: Path, copied: Path) -> None:
    with pytest.raises(NotFound, match="no cache of vLLM's fs tier"):
        find_caches(tmp_path)
    (folder,) = find_caches(copied / "nhd")
    shutil.rmtree(read_cache(folder).folder)
    with pytest.raises(NotFound, match="holds no chunks"):
        brought(tmp_path, copied / "nhd")


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    report, _ = brought(tmp_path, DATA / "nhd", AttentionSizes(heads=200, head_size=4))
    assert report.imported == 0
    assert "4096 bytes, but a chunk has" in report.refused[0][1]


@pytest.mark.parametrize(
    ("size", "fits"), [(8192, True), (12288, True), (4096, False), (8193, False)]
)
def test_heads_held_by_several_ranks_take_room_for_each(size: int, fits: bool) -> None:
    if fits:
        check_size(size, 6000)
    else:
        with pytest.raises(InvalidArgument, match="6000"):
            check_size(size, 6000)


def test_a_full_disk_ends_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any) -> int:
        raise StorageError(28, "no space left")

    monkeypatch.setattr(Mover, "store", full)
    with pytest.raises(StorageError, match="no space left"):
        brought(tmp_path, DATA / "nhd")
