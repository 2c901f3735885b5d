"""``kvstore verify``."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Run
from support.made import Made, flip


def test_a_sound_store(run: Run, two: Made) -> None:
    ran = run("verify", two.root)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("no faults; ")
    nbytes = sum(p.stat().st_size for p in two.root.rglob("c.*"))
    assert run("verify", two.root, "--json").json == {
        "root": str(two.root),
        "ok": True,
        "bytes": nbytes,
        "faults": [],
        "notes": [],
    }


def test_every_fault_is_listed(run: Run, two: Made) -> None:
    extent = two.extents("kv")[1]
    flip(two.root / extent / "c.0.0.0.0.0", 8)
    (two.root / "stray\x1b[31m").write_text("")
    (two.root / "__kvstore__/trash/0123456789abcdef").mkdir(parents=True)
    ran = run("verify", two.root)
    assert ran.status == 1
    assert f"FAULT  checksum  {extent}/c.0.0.0.0.0\n       layer 0, head 0: the chunk" in ran.out
    assert r"FAULT  stray  stray\x1b[31m" in ran.out
    assert "note   trash  " in ran.out
    assert ran.out.splitlines()[-1].startswith("2 faults, 1 note; ")
    found = run("verify", two.root, "--json")
    assert found.status == 1
    assert found.json["ok"] is False
    assert [f["kind"] for f in found.json["faults"]] == ["stray", "checksum"]
    assert found.json["faults"][1]["path"] == f"{extent}/c.0.0.0.0.0"
    assert [f["kind"] for f in found.json["notes"]] == ["trash"]


def test_one_namespace_or_extent(run: Run, two: Made) -> None:
    extent = two.extents("kv")[1]
    flip(two.root / extent / "c.0.0.0.0.0", 8)
    assert run("verify", two.root, "other").status == 0
    assert run("verify", two.root, "tiny").status == 1
    assert run("verify", two.root, "tiny", Path(extent).name[:8]).status == 1
    assert run("verify", two.root, "tiny", Path(two.extents("kv")[0]).name).status == 0
    assert run("verify", two.root, "none").status == 2
    assert run("verify", two.root, "tiny", "0000").status == 2


def test_damaged_records_do_not_stop_it(run: Run, two: Made) -> None:
    extent = Path(two.extents("kv")[1]).name
    (two.root / "zarr.json").write_bytes(b"{}")
    (two.root / two.name / "zarr.json").write_bytes(b"{}")
    found = run("verify", two.root, "--json")
    assert found.status == 1
    paths = [f["path"] for f in found.json["faults"]]
    assert paths == ["zarr.json", f"{two.name}/zarr.json"]
    for args in ([two.name], [two.name, extent]):
        ran = run("verify", two.root, *args)
        assert (ran.status, ran.err) == (1, "")
        assert ran.out.count("FAULT  record") == 2
    ran = run("verify", two.root, "tiny")
    assert ran.status == 1
    assert "kvstore verify: store" in ran.err


def test_no_store(run: Run, tmp_path: Path) -> None:
    ran = run("verify", tmp_path)
    assert (ran.status, ran.out) == (2, "")
    assert "there is no store" in ran.err


@pytest.mark.parametrize("out_is_terminal", [False, True])
def test_the_bar_is_on_the_terminal_alone(two: Made, *, out_is_terminal: bool) -> None:
    """Standard error is a terminal: the bar goes there; results go to standard output only."""
    (two.root / "stray").write_text("")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore", "verify", str(two.root)],
        stdout=slave if out_is_terminal else subprocess.PIPE,
        stderr=slave,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(slave)
    seen = b""
    try:
        while part := os.read(master, 4096):
            seen += part
    except OSError:
        pass  # the other end was closed
    os.close(master)
    out, _ = process.communicate()
    assert process.returncode == 1
    assert "\u2501" in seen.decode()
    text = seen.decode() if out_is_terminal else out
    assert "FAULT  stray  stray" in text
    assert "1 fault; " in text
    if not out_is_terminal:
        assert b"FAULT" not in seen
        assert "\x1b" not in out
