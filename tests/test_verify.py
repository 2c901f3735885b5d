"""Verification of a store's names and records: every fault, and nothing else."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.finding import find, findings
from support.made import Made, make_store, padded_group
from tiny import gqa_group, mqa_group

from kvstore.paths import GroupPath


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record as JSON."""
    record = json.loads(path.read_bytes())
    change(record)
    # A new file: the old one may have other names, as hints.
    path.unlink()
    path.write_text(json.dumps(record))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_store(tmp_path / "store", [gqa_group(), mqa_group()])


def digest(root: Path) -> str:
    total = hashlib.sha256()
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        total.update(f"{path} {status.st_mtime_ns} {status.st_nlink} {status.st_size}".encode())
    return total.hexdigest()


def test_a_sound_store_of_every_geometry_has_no_findings(tmp_path: Path) -> None:
    assert find(make_store(tmp_path / "all")) == []
    assert find(make_store(tmp_path / "padded", [padded_group()])) == []


def test_nothing_is_changed(made: Made) -> None:
    shard = made.root / made.extents("kv")[0] / "c.0.0.0.0.0"
    shard.write_bytes(b"short")
    before = digest(made.root)
    assert find(made)
    assert digest(made.root) == before


# -- records --------------------------------------------------------------------------------------


def records_of(made: Made) -> list[tuple[str, str]]:
    """One record of each sort, and the kind of fault that damage to it is."""
    extent = made.extents("kv")[0]
    return [
        ("zarr.json", "record"),
        (f"{made.name}/zarr.json", "record"),
        (f"{made.name}/kv/zarr.json", "record"),
        (f"{Path(extent).parent}/zarr.json", "record"),
        (f"{extent}/zarr.json", "extent"),
    ]


@pytest.mark.parametrize(
    ("which", "damage"),
    [
        (which, damage)
        for which in range(5)
        for damage in ("cut", "empty", "junk", "version", "missing")
        if (which, damage) != (3, "version")  # a fan-out folder's record has no version
    ],
)
def test_each_damaged_record_is_one_fault(made: Made, which: int, damage: str) -> None:
    name, kind = records_of(made)[which]
    path = made.root / name
    data = path.read_bytes()
    path.unlink()  # rather than written over: hints are further names of the file
    if damage == "missing":
        kind = "missing"
    elif damage == "version":
        assert b'"1.0"' in data
        path.write_bytes(data.replace(b'"1.0"', b'"2.0"'))
        kind = "version"
    else:
        path.write_bytes({"cut": data[:-9], "empty": b"", "junk": b"\xff" + data}[damage])
    found = find(made)
    if which == 4 and damage == "missing":
        # Its hints lead nowhere now, and no lookup gets to the extent after it.
        refs = [f for f in found if f[1] == "reference"]
        assert len(refs) == 3
        found = [f for f in found if f not in refs]
        assert (made.extents("kv")[1], "gap") in found
        found.remove((made.extents("kv")[1], "gap"))
    assert found == [(name, kind)]


def test_many_faults_are_all_reported_at_once(made: Made) -> None:
    kv, swa = made.extents("kv"), made.extents("swa")
    wanted = []
    for i, name in enumerate(["stray", f"{made.name}/stray", f"{made.name}/kv/zz", f"{kv[0]}/x"]):
        (made.root / name).write_text(str(i))
        wanted.append((name, "stray"))
    (made.root / kv[0] / "c.0.0.0.0.0").unlink()
    wanted.append((f"{kv[0]}/c.0.0.0.0.0", "missing"))
    shard = made.root / kv[0] / "c.1.0.0.0.0"
    shard.write_bytes(shard.read_bytes()[:-1])
    wanted.append((f"{kv[0]}/c.1.0.0.0.0", "size"))
    shard = made.root / kv[0] / "c.1.0.1.0.0"
    shard.write_bytes(shard.read_bytes() + b"\0")
    wanted.append((f"{kv[0]}/c.1.0.1.0.0", "size"))
    for extent in swa[:2]:
        edit(made.root / extent / "zarr.json", lambda r: r.update(shape=[]))
        wanted.append((f"{extent}/zarr.json", "extent"))
    (made.root / made.name / "kv" / "zarr.json").write_bytes(b"{}")
    wanted.append((f"{made.name}/kv/zarr.json", "record"))
    assert find(made) == sorted(wanted)


def test_an_extent_under_another_key_is_a_fault(made: Made) -> None:
    extent = made.extents("kv")[2]
    key = "5f" * 32
    fake = f"{made.name}/kv/5f/{key}"
    fanout = (made.root / fake).parent
    fanout.mkdir()
    shutil.copy((made.root / extent).parent / "zarr.json", fanout)
    shutil.copytree(made.root / extent, made.root / fake)
    assert find(made) == [(f"{fake}/zarr.json", "extent")]


def test_a_namespace_under_another_name_is_a_fault(made: Made) -> None:
    other = "other-" + "0" * 32
    (made.root / made.name).rename(made.root / other)
    found = find(made)
    assert (f"{other}/zarr.json", "record") in found
    assert {kind for _, kind in found} == {"record", "reference"}


def test_a_layer_group_that_is_not_there_or_not_known(made: Made) -> None:
    folder = made.root / made.name
    (folder / "swa").rename(folder / "swb")
    found = [f for f in find(made) if f[1] != "reference"]
    assert found == [(f"{made.name}/swa", "missing"), (f"{made.name}/swb", "stray")]


def test_a_group_record_in_the_wrong_folder(made: Made) -> None:
    folder = made.root / made.name
    shutil.copy(folder / "swa/zarr.json", folder / "kv/zarr.json")
    assert find(made) == [(f"{made.name}/kv/zarr.json", "record")]


@pytest.mark.parametrize("change", [{"node_type": "array"}, {"zarr_format": 2}])
def test_a_fanout_folder_that_is_no_zarr_group(made: Made, change: dict[str, Any]) -> None:
    path = (made.root / made.extents("kv")[0]).parent / "zarr.json"
    edit(path, lambda r: r.update(change))
    assert find(made) == [(str(path.relative_to(made.root)), "record")]


def test_names_that_are_almost_right_are_strays(made: Made) -> None:
    extent = made.extents("kv")[0]
    fanout = str(Path(extent).parent)
    key = Path(extent).name
    other = "00" if key[:2] != "00" else "01"
    wanted = []
    for name in (
        f"{fanout}/{key.upper()}",
        f"{fanout}/{key[:-2]}",  # a key, but not one of this namespace's length
        f"{fanout}/{other}{key[2:]}",  # under another fan-out
        f"{made.name}/kv/0",
        f"{made.name}/kv/ABC",
        f"{extent}/c.0.0.0.0",
        f"{extent}/c.9.0.0.0.0",
        f"{extent}/c.0.0.0.0.0.part",
        "Model-" + "0" * 32,
        "__kvstore__/other",
        "__kvstore__/inflight/UP",
        f"__kvstore__/inflight/{made.name}/kv/{key}",
        f"__kvstore__/inflight/{made.name}/9",
        f"__kvstore__/quarantine/{made.name}/kv/{key}-123",
        f"__kvstore__/refs/{made.name}/kv/{other}/{key}",
        f"__kvstore__/refs/{made.name}/kv/xyz",
    ):
        (made.root / name).mkdir(parents=True)
        wanted.append((name, "stray"))
    assert find(made) == sorted(wanted)


def test_other_programs_things_at_the_root_are_let_be(made: Made) -> None:
    (made.root / "lost+found").mkdir()
    (made.root / ".snapshot").mkdir()
    (made.root / made.name / ".tmp-0123456789abcdef").write_text("being written")
    assert find(made) == []


# -- the chain ------------------------------------------------------------------------------------


def test_an_extent_that_contradicts_the_one_before_it(made: Made) -> None:
    kv = made.extents("kv")
    made.rewrite(kv[2], start_block=12)
    found = findings(made, group="kv", namespace=made.name)
    assert [(f.path, f.kind) for f in found] == [(kv[2], "chain")]
    assert "starts at block 12" in found[0].message
    assert "holds 4 from 4 on" in found[0].message


def test_an_extent_that_follows_a_short_one(made: Made) -> None:
    swa, kv = made.extents("swa"), made.extents("kv")
    last = made.records[kv[2]]
    assert len(last.blocks) == 2
    record = made.records[kv[0]]
    made.rewrite(kv[0], start_block=12, parent=last.key)
    assert [f for f in find(made) if f[1] == "chain"] == [(kv[0], "chain"), (kv[1], "chain")]
    assert record.start_block == 0
    assert len(swa) == 5


def test_an_extent_whose_predecessor_is_gone_is_a_note(made: Made) -> None:
    kv = made.extents("kv")
    shutil.rmtree(made.root / kv[1])
    found = findings(made)
    assert {f.kind for f in found} == {"gap", "reference"}
    assert all(f.is_note for f in found)
    assert [f.path for f in found if f.kind == "gap"] == [kv[2]]


# -- what lies beside -----------------------------------------------------------------------------


def test_hints_that_lead_nowhere_are_notes(made: Made) -> None:
    kv = made.extents("kv")
    names = GroupPath(made.name, "kv")
    blocks = [k.hex() for k in made.keys["kv"]]
    wanted = []
    # One is not valid, one is of another extent, one of a namespace that is gone.
    path = made.root / names.ref(blocks[0])
    path.unlink()
    path.write_bytes(b"{")
    wanted.append((names.ref(blocks[0]), "reference"))
    path = made.root / names.ref(blocks[1])
    path.unlink()
    shutil.copy(made.root / kv[1] / "zarr.json", path)
    wanted.append((names.ref(blocks[1]), "reference"))
    gone = "__kvstore__/refs/gone-" + "0" * 32
    (made.root / gone / "kv" / "00").mkdir(parents=True)
    wanted.append((f"{gone}/kv", "reference"))
    assert find(made) == sorted(wanted)


def test_leftovers_are_notes_that_say_what_they_are(made: Made) -> None:
    key = "ab" * 32
    private = made.root / "__kvstore__"
    flight = f"__kvstore__/inflight/{made.name}/kv/{key}-0123456789abcdef"
    (made.root / flight / "array").mkdir(parents=True)
    (made.root / flight / "done").mkdir()
    for name in ("array/c.0.0.0.0.0", "array/c.1.0.0.0.0.part", "done/0-0-1"):
        (made.root / flight / name).write_bytes(b"")
    (private / "trash" / "0123456789abcdef").mkdir(parents=True)
    held = private / "quarantine" / made.name / "kv" / f"{key}-01234567"
    held.mkdir(parents=True)
    (held / "reason.json").write_text('{"reason": "head 3 was damaged"}')
    (private / "quarantine" / made.name / "kv" / f"{key}-76543210").mkdir()
    half = "half-" + "0" * 32
    (made.root / half / "kv").mkdir(parents=True)
    xx = next(
        f"{i:02x}" for i in range(256) if not (made.root / made.name / f"kv/{i:02x}").exists()
    )
    (made.root / made.name / "kv" / xx).mkdir()
    found = findings(made)
    assert all(f.is_note for f in found)
    messages = {(f.kind, Path(f.path).name): f.message for f in found}
    assert sorted(messages) == [
        ("inflight", f"{key}-0123456789abcdef"),
        ("quarantined", f"{key}-01234567"),
        ("quarantined", f"{key}-76543210"),
        ("trash", "0123456789abcdef"),
        ("unfinished", xx),
        ("unfinished", half),
    ]
    assert "1 shards and 1 partly; finished ranks: 0.0.1" in next(
        m for (kind, _), m in messages.items() if kind == "inflight"
    )
    assert messages["quarantined", f"{key}-01234567"] == "head 3 was damaged"


def test_a_namespace_without_a_record_but_with_extents_is_a_fault(made: Made) -> None:
    (made.root / made.name / "zarr.json").unlink()
    assert find(made) == [(f"{made.name}/zarr.json", "missing")]
