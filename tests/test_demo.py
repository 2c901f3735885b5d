"""The demonstration with its real model, in its own process, and the control that must fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvstore.demo.model import NEEDED_PACKAGES, WEIGHTS_PACKAGE

MISSING = [name for name in (*NEEDED_PACKAGES, WEIGHTS_PACKAGE) if find_spec(name) is None]
ROWS = (
    "tp=9,dcp=3@nhd-packed -> tp=3,pp=2,pp_layers=16+14@hnd-split",
    "tp=9,dcp=3@nhd-packed -> tp=1@hnd-packed",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"the demo's packages are missing: {MISSING}"),
]


def demo(*arguments: str, rows: Sequence[str], tmp: Path) -> tuple[int, Any, str]:
    """Exit status, JSON report and what people see, of a run with few rows."""
    configs = [word for row in rows for word in ("--configs", row)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvstore", "demo", "--tokens", "600", "--new-tokens", "8"),
            *(*configs, "--json", "-", *arguments),
        ],
        # Tests run side by side; threads that wait for each other would take minutes.
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_a_real_model_goes_on_from_what_other_ranks_stored(tmp_path: Path):
    root = tmp_path / "store"
    status, report, seen = demo("--root", str(root), rows=ROWS, tmp=tmp_path)
    assert status == 0, seen
    assert report["verified"]
    assert len(report["outcomes"]) == len(ROWS)
    for outcome in report["outcomes"]:
        verdict = outcome["verdict"]
        assert verdict == dict.fromkeys(("pages", "cache", "logits", "tokens"), True) | {
            "largest": 0.0
        }
        # One layer's page bytes: 3 heads, a key and a value of 64 numbers, 4 bytes each.
        assert report["cache_bytes"] == report["prefix_tokens"] * 30 * 3 * 2 * 64 * 4
        assert report["cache_bytes"] <= outcome["load_bytes"]
        assert outcome["warm_seconds"] < report["cold_seconds"] + 60
    assert report["prefix_tokens"] == 592
    assert "Verified: 2 of 2" in seen
    assert report["answer"]
    assert (root / "zarr.json").is_file()
    assert not list(tmp_path.glob("kvstore-demo-*")), "memory of the ranks was left behind"


def test_two_heads_swapped_on_load_are_noticed(tmp_path: Path):
    status, report, seen = demo("--sabotage", rows=ROWS[:1], tmp=tmp_path)
    assert status == 1
    assert not report["verified"]
    for outcome in report["outcomes"]:
        verdict = outcome["verdict"]
        # The store did its part; the cache was spoilt after it, and generation shows it.
        assert verdict["pages"]
        assert (verdict["cache"], verdict["logits"], verdict["tokens"]) == (False, False, False)
        assert verdict["largest"] > 1
    assert "NOT the same" in seen
    assert "Verified" not in seen
    assert not list(tmp_path.glob("kvstore-demo-*")), "a store that nobody asked for was kept"
