"""``kvstore ls``."""

from __future__ import annotations

from pathlib import Path

from support.commands import Run
from support.made import Made

import kvstore


def bytes_of(made: Made, group: str) -> int:
    return sum(sum(made.records[e].shards.values()) for e in made.extents(group))


def test_namespaces(run: Run, two: Made) -> None:
    ran = run("ls", two.root)
    assert (ran.status, ran.err) == (0, "")
    heads, *rows = [line.split() for line in ran.out.splitlines()]
    assert heads == ["EXTENTS", "TOKENS", "SIZE", "GROUPS", "MODEL", "NAMESPACE"]
    assert len(rows) == 2
    assert rows[0][0] == "1"
    assert rows[0][-2] == "Other-2B"
    assert rows[1][:2] == ["8", "40"]
    assert rows[1][-1] == two.name
    assert "kv:bfloat16 swa:float16" in ran.out


def test_namespaces_as_json(run: Run, two: Made) -> None:
    ran = run("ls", two.root, "--json")
    assert ran.json["root"] == str(two.root)
    assert ran.json["quarantined"] == []
    found = {n["name"]: n for n in ran.json["namespaces"]}
    assert found[two.name] == {
        "name": two.name,
        "model": "Tiny/Model-1.5B (test)",
        "revision": "0123abc",
        "created": "2026-12-01T03:21:18Z",
        "groups": [
            {
                "name": "kv",
                "attention": "full",
                "element": "bfloat16",
                "extents": 3,
                "tokens": 40,
                "bytes": bytes_of(two, "kv"),
            },
            {
                "name": "swa",
                "attention": "sliding_window",
                "element": "float16",
                "extents": 5,
                "tokens": 20,
                "bytes": bytes_of(two, "swa"),
            },
        ],
        "extents": 8,
        "tokens": 40,
        "bytes": bytes_of(two, "kv") + bytes_of(two, "swa"),
        "damaged": 0,
        "problem": None,
    }


def test_extents_of_a_namespace(run: Run, two: Made) -> None:
    ran = run("ls", two.root, "tiny")
    lines = ran.out.splitlines()
    assert lines[0].split()[:4] == ["GROUP", "KEY", "FROM", "BLOCK"]
    kv = [line.split() for line in lines[1:4]]
    assert [row[0] for row in kv] == ["kv"] * 3
    assert [row[1] for row in kv] == [Path(e).name[:16] for e in two.extents("kv")]
    assert [row[2:5] for row in kv] == [["0", "4", "16"], ["4", "4", "16"], ["8", "2", "8"]]
    assert all(row[-2:] == ["2026-12-01T03:21:18Z", "tp=1"] for row in kv)
    assert lines[-1].startswith("8 extents, ")
    assert len(lines) == 10


def test_extents_as_json(run: Run, two: Made) -> None:
    ran = run("ls", two.root, two.name[:9], "--json")
    extents = {e["path"]: e for e in ran.json["extents"]}
    assert set(extents) == set(two.records)
    path = two.extents("kv")[2]
    assert extents[path] == {
        "namespace": two.name,
        "group": "kv",
        "key": Path(path).name,
        "path": path,
        "start_block": 8,
        "blocks": 2,
        "tokens": 8,
        "bytes": sum(two.records[path].shards.values()),
        "created": "2026-12-01T03:21:18Z",
        "config": "tp=1",
        "problem": None,
    }


def test_damaged_records_are_shown_and_counted(run: Run, two: Made) -> None:
    (two.root / two.extents("kv")[0] / "zarr.json").write_bytes(b"{}")
    ran = run("ls", two.root)
    assert ran.status == 0
    assert f"1 damaged record in {two.name}" in ran.out
    assert run("ls", two.root, "--json").json["namespaces"][1]["damaged"] == 1
    assert "(damaged record)" in run("ls", two.root, "tiny").out
    problems = [e["problem"] for e in run("ls", two.root, "tiny", "--json").json["extents"]]
    assert sum(p is not None for p in problems) == 1
    (two.root / two.name / "zarr.json").write_bytes(b"{}")
    ran = run("ls", two.root)
    assert (ran.status, ran.out.count("damaged")) == (0, 2)
    assert run("ls", two.root, "tiny").status == 1


def test_quarantine(run: Run, made: Made) -> None:
    assert run("ls", made.root, "-q").out == "nothing is in quarantine\n"
    key = Path(made.extents("kv")[1]).name
    with kvstore.open(made.root) as store:
        store.open_namespace(made.name).quarantine(key, "head 3\x1b[31m was damaged", group="kv")
    assert "1 extent is in quarantine; see" in run("ls", made.root).out
    ran = run("ls", made.root, "--quarantine")
    assert f"{made.name}/kv/{key}" in ran.out
    assert r"head 3\x1b[31m was damaged" in ran.out
    (held,) = run("ls", made.root, "--json").json["quarantined"]
    assert (held["group"], held["key"]) == ("kv", key)
    assert held["reason"] == "head 3\x1b[31m was damaged"
    assert (made.root / held["path"] / "extent" / "zarr.json").exists()


def test_empty_places(run: Run, tmp_path: Path) -> None:
    kvstore.open(tmp_path / "new").close()
    ran = run("ls", tmp_path / "new")
    assert (ran.status, ran.out) == (0, f"{tmp_path / 'new'} is a store without namespaces\n")
    (tmp_path / "empty").mkdir()
    for place in ("nowhere", "empty"):
        ran = run("ls", tmp_path / place)
        assert ran.status == 2
        assert "there is no store at" in ran.err
    assert not (tmp_path / "nowhere").exists()
    assert list((tmp_path / "empty").iterdir()) == []


def test_names_that_fit_several_or_none(run: Run, two: Made) -> None:
    ran = run("ls", two.root, "")
    assert ran.status == 2
    assert "may be any of" in ran.err
    assert run("ls", two.root, "zzz").status == 2
