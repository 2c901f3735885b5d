"""``kvstore gc``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support.commands import Run
from support.made import Made

from kvstore.cli.gc import duration


@pytest.fixture
def flight(made: Made) -> Path:
    """What a dead writer left two hours ago: 7 bytes."""
    key = Path(made.extents("kv")[0]).name
    below = f"__kvstore__/inflight/{made.name}/kv/{key}-0123456789abcdef"
    folder = made.root / below
    (folder / "array").mkdir(parents=True)
    (folder / "array" / "c.0.0.0.0.0").write_bytes(b"1234567")
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - 7200,) * 2)
    return folder


def test_what_is_old_is_freed(run: Run, made: Made, flight: Path) -> None:
    path = str(flight.relative_to(made.root))
    for options, verb in ((["--dry-run"], "would free"), ([], "freed")):
        assert flight.exists()
        ran = run("gc", made.root, *options)
        assert (ran.status, ran.err) == (0, "")
        assert ran.out == f"inflight            7 B  {path}\n{verb} 1 thing, 7 B: 1 inflight\n"
    assert not flight.exists()
    assert run("gc", made.root).out == "freed 0 things, 0 B\n"
    assert run("verify", made.root).status == 0


def test_json(run: Run, made: Made, flight: Path) -> None:
    found = run("gc", made.root, "-n", "--json").json
    (entry,) = found.pop("freed")
    assert found == {"root": str(made.root), "dry_run": True, "bytes": 7, "failed": []}
    assert entry.pop("age") == pytest.approx(7200, abs=60)
    path = str(flight.relative_to(made.root))
    assert entry == {"path": path, "kind": "inflight", "bytes": 7}


def test_what_is_young_stays(run: Run, made: Made, flight: Path) -> None:
    assert run("gc", made.root, "--grace", "3h").out == "freed 0 things, 0 B\n"
    assert flight.exists()
    assert "1 inflight" in run("gc", made.root, "--grace", "90m").out


def test_what_cannot_be_freed(
    run: Run, made: Made, flight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    ran = run("gc", made.root)
    assert (ran.status, ran.out) == (1, "freed 0 things, 0 B\n")
    assert ran.err.startswith("kvstore gc: ")
    assert str(flight) in ran.err
    ran = run("gc", made.root, "--json")
    assert ran.status == 1
    assert [entry["kind"] for entry in ran.json["failed"]] == ["inflight"]


def test_no_store(run: Run, tmp_path: Path) -> None:
    assert run("gc", tmp_path / "none").status == 2
    (tmp_path / "other").mkdir()
    ran = run("gc", tmp_path / "other")
    assert (ran.status, ran.out) == (2, "")
    assert "no store" in ran.err
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1h", 3600), ("7d", 604800), ("0s", 0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "-1h", "1.5h", "h", "1w", "1 h", "1h30m"])
def test_no_durations(run: Run, made: Made, text: str) -> None:
    ran = run("gc", made.root, f"--grace={text}")
    assert ran.status == 2
    assert "is no duration" in ran.err
