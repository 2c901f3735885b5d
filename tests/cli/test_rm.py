"""``kvstore rm``."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from support.commands import Run
from support.made import Made


class Terminal(io.StringIO):
    """Something to answer from."""

    def isatty(self) -> bool:
        return True


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> io.StringIO:
    monkeypatch.setattr("sys.stdin", Terminal(text))
    asked = Terminal()
    monkeypatch.setattr("sys.stderr", asked)
    return asked


def left(made: Made, group: str) -> list[str]:
    return [e for e in made.extents(group) if (made.root / e).exists()]


def test_some_extents(run: Run, two: Made) -> None:
    kv = two.extents("kv")
    keys = [Path(e).name for e in kv]
    ran = run("rm", two.root, "tiny", keys[0][:8], keys[2], "--yes")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("removed 2 extents (")
    assert left(two, "kv") == [kv[1]]
    assert left(two, "swa") == two.extents("swa")
    assert run("verify", two.root).status == 0
    # Its hints are gone too; the other namespace has an extent of the same key.
    assert run("verify", two.root, "--json").json["notes"] == [
        {
            "path": kv[1],
            "kind": "gap",
            "message": f"starts at block 4; the extent before it, {keys[0]}, is gone",
        }
    ]
    assert run("show", two.root, f"other/{keys[0]}").status == 0


def test_the_same_extent_twice_is_removed_once(run: Run, made: Made) -> None:
    key = Path(made.extents("kv")[0]).name
    ran = run("rm", made.root, "tiny", key, key[:8], "--yes", "--json")
    assert ran.json["removed"] == 1
    assert [e["key"] for e in ran.json["extents"]] == [key]


def test_a_whole_namespace(run: Run, two: Made) -> None:
    for folder in ("inflight", "quarantine"):
        (two.root / "__kvstore__" / folder / two.name / "kv").mkdir(parents=True)
    ran = run("rm", two.root, "tiny", "--all", "--yes")
    assert ran.status == 0
    assert ran.out.startswith(f"removed namespace {two.name} with 8 extents (")
    assert not list(two.root.rglob(two.name))
    assert "Other-2B" in run("ls", two.root).out
    assert run("verify", two.root).out.startswith("no faults; ")


@pytest.mark.parametrize("record", [b"{}", None])
def test_a_namespace_without_a_good_record(run: Run, two: Made, record: bytes | None) -> None:
    path = two.root / two.name / "zarr.json"
    path.unlink() if record is None else path.write_bytes(record)
    assert run("rm", two.root, "tin", "--all", "--yes").status in (1, 2)
    assert run("rm", two.root, two.name, "--all", "--yes").status == 0
    assert not (two.root / two.name).exists()


def test_a_dry_run_removes_nothing(run: Run, made: Made) -> None:
    key = Path(made.extents("kv")[0]).name
    ran = run("rm", made.root, "tiny", key, "--dry-run")
    assert ran.status == 0
    assert "would remove 1 extent (" in ran.out
    assert f"  kv/{key}  " in ran.out
    found = run("rm", made.root, "tiny", "--all", "-n", "--json").json
    assert found["dry_run"]
    assert found["whole"]
    assert (len(found["extents"]), found["removed"]) == (8, 0)
    assert left(made, "kv") == made.extents("kv")


@pytest.mark.parametrize(("text", "removed"), [("y\n", True), ("n\n", False), ("", False)])
def test_it_asks_on_a_terminal(
    run: Run, made: Made, monkeypatch: pytest.MonkeyPatch, text: str, *, removed: bool
) -> None:
    asked = answer(monkeypatch, text)
    key = Path(made.extents("kv")[0]).name
    ran = run("rm", made.root, "tiny", key)
    assert asked.getvalue().startswith("Remove 1 extent (")
    assert asked.getvalue().endswith("? [y/N] ")
    assert ran.status == (0 if removed else 1)
    assert (len(left(made, "kv")) == 2) is removed


def test_it_needs_yes_where_nobody_can_be_asked(
    run: Run, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    ran = run("rm", made.root, "tiny", "--all")
    assert ran.status == 2
    assert "say --yes" in ran.err
    assert left(made, "kv") == made.extents("kv")


@pytest.mark.parametrize("args", [["tiny"], ["tiny", "abcd", "--all"], ["tiny", "abcd"], ["no"]])
def test_a_wrong_call_removes_nothing(run: Run, made: Made, args: list[str]) -> None:
    ran = run("rm", made.root, *args, "--yes")
    assert ran.status == 2
    assert left(made, "kv") == made.extents("kv")
    assert run("rm", made.root.parent / "none", "tiny", "--all", "--yes").status == 2
