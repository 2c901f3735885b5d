from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.bench.floors import FLOORS, judge
from kvstore.bench.scratch import drop_cache, files_below, sync_files
from kvstore.bench.timing import Contender, Samples, measure, ratio
from kvstore.bench.workload import SMOLLM, Workload
from kvstore.cli.bench import parse_size

LOADS = ("limit", "same", "same_unverified", "other_config", "other_layout")
PEERS = ("block_files", "vllm", "vllm_pages", "safetensors", "zarr", "tensorstore", "zarrs")
ROWS = {
    "llama.cold": (*LOADS, *PEERS),
    "llama.hot": ("limit_copy", *LOADS, *PEERS),
    "llama.store": ("limit_durable", "durable", "limit", "not_durable", "vllm"),
    "smollm.cold": LOADS,
    "smollm.hot": ("limit_copy", *LOADS),
    "lookup": ("small", "medium", "large"),
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    folder = tmp_path_factory.mktemp("bench")
    out = folder / "out.json"
    scratch = folder / "scratch"
    scratch.mkdir()
    command = ("bench", "--quick", "--dir", str(scratch), "--json", str(out))
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout, scratch


def test_quick_run_has_every_row_measured_or_not_installed(
    quick: tuple[dict[str, Any], str, Path],
) -> None:
    result, _, _ = quick
    found = {}
    for section in result["sections"]:
        keys = {row["key"] for row in section["rows"]} | section["not_installed"].keys()
        found[section["key"]] = {key.removeprefix(section["key"] + ".") for key in keys}
    assert found == {key: set(names) for key, names in ROWS.items()}


def test_quick_run_proves_the_bytes_of_all_but_raw_limits(
    quick: tuple[dict[str, Any], str, Path],
) -> None:
    result, _, _ = quick
    assert result["bytes_correct"] is True
    for section in result["sections"]:
        for row in section["rows"]:
            is_limit = row["key"].rpartition(".")[2].startswith("limit")
            assert row["bytes_correct"] is (None if is_limit else True), row["key"]
            assert row["amount"] > 0
            assert all(seconds > 0 for seconds in row["seconds"])


def test_quick_run_judges_every_floor_and_describes_the_machine(
    quick: tuple[dict[str, Any], str, Path],
) -> None:
    result, text, _ = quick
    assert [f["key"] for f in result["floors"]] == [f.key for f in FLOORS]
    assert all(f["met"] in (True, False) for f in result["floors"])
    assert "Promises" in text
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["packages"]["torch"]


def test_quick_run_leaves_nothing_behind(quick: tuple[dict[str, Any], str, Path]) -> None:
    assert list(quick[2].iterdir()) == []


def test_wrong_bytes_are_told_apart_in_every_layout() -> None:
    work = Workload(SMOLLM, 1)
    work.poison()
    assert not work.packed_correct()
    for i, layer in enumerate(work.source):
        work.pages[i, work.block_ids] = layer
    assert work.packed_correct()
    work.arena_bytes[12345] ^= 1
    assert not work.packed_correct()
    extent = work.source[:, : work.group.extent_blocks].copy()
    assert work.extent_correct(0, extent)
    extent[-1, -1, -1, -1] ^= 1
    assert not work.extent_correct(0, extent)


def test_split_layout_check_follows_the_shape_it_names() -> None:
    work = Workload(SMOLLM, 1)
    for layer, tensor in enumerate(work.split_tensors()):
        canonical = work.source[layer].reshape(work.blocks, SMOLLM.heads, 16, 2, -1)
        pages = tensor.view(torch.uint8).numpy()
        pages[work.block_ids] = canonical.transpose(0, 3, 2, 1, 4)
    assert work.split_correct()
    work.arena_bytes[-1] ^= 1
    assert not work.split_correct()


def test_ratio_is_taken_within_rounds() -> None:
    fast = Samples("a", "a", 100, {0: 1.0, 1: 10.0, 2: 1.0})
    slow = Samples("b", "b", 100, {0: 2.0, 1: 20.0, 3: 99.0})
    assert ratio(fast, slow) == 2.0
    assert ratio(slow, fast) == 0.5
    with pytest.raises(ValueError, match="no round in common"):
        ratio(fast, Samples("c", "c", 100, {7: 1.0}))


def test_contenders_are_checked_first_then_interleaved() -> None:
    calls: list[str] = []

    def contender(key: str, every: int) -> Contender:
        def run() -> int:
            calls.append(key)
            return 1

        return Contender(key, key, run, correct=lambda: key == "good", every=every)

    found = measure([contender("good", 1), contender("bad", 2)], 3)
    assert calls[:2] == ["good", "bad"]
    assert sorted(calls[2:4]) == ["bad", "good"]
    assert found["good"].correct is True
    assert found["bad"].correct is False
    assert set(found["good"].seconds) == {0, 1, 2}
    assert set(found["bad"].seconds) == {0, 2}


def test_floors_judge_both_ways_and_leave_out_what_was_not_measured() -> None:
    rows = {
        "llama.cold.same": Samples("s", "s", 100, {0: 1.0}),
        "llama.cold.limit": Samples("l", "l", 100, {0: 0.95}),
        "llama.cold.other_config": Samples("o", "o", 100, {0: 1.2}),
    }
    verdicts = {v.floor.key: v for v in judge(rows)}
    assert verdicts["cold"].met is True
    assert verdicts["other_config_cold"].met is False
    assert verdicts["hot_verified"].met is None


def test_sizes_are_read_as_people_write_them() -> None:
    assert parse_size("2GiB") == 2 << 30
    assert parse_size("1.5 mib") == 3 << 19
    assert parse_size("4096") == 4096
    for wrong in ("", "GiB", "-1GiB", "0", "1GB", "1 2"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
            parse_size(wrong)


def test_dropping_a_file_from_the_cache_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "file"
    path.parent.mkdir()
    content = np.random.default_rng(1).bytes(1 << 20)
    path.write_bytes(content)
    assert files_below(tmp_path) == [path]
    sync_files([path])
    drop_cache([path])
    assert path.read_bytes() == content
