"""Collection: what is of no use goes, once it is old enough, and no extent is touched."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.made import Made, make_store
from support.processes import together
from support.world import ONE, World, files_below, make_world, seats
from tiny import gqa_group, mqa_group

import kvstore
from kvstore import ParallelConfig
from kvstore.errors import InvalidArgument
from kvstore.leavings import KINDS, Leaving
from kvstore.paths import GroupPath

HOUR = 3600.0
SHARED = ParallelConfig(tp=8, dcp=2, interleave=2)


def age(path: Path, seconds: float) -> None:
    """Have a folder, and all in it, last changed so long ago."""
    for each in (path, *path.rglob("*")):
        os.utime(each, (time.time() - seconds,) * 2, follow_symlinks=False)


def inflight(world: World) -> list[Path]:
    """Folders of extents in flight."""
    return sorted((world.root / "__kvstore__" / "inflight").glob("*/*/*"))


def store(world: World, config: ParallelConfig) -> None:
    for one in seats(world.namespace, config, total=23, session="s"):
        one.fill(world.truth)
        one.worker.store(world.keys, one.table, tail=True)


def collect(root: Path, **options: object) -> list[Leaving]:
    with kvstore.open(root, create=False) as opened:
        return opened.collect(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [ONE, SHARED], ids=["whole", "shared"])
def test_what_dead_writers_left_goes_once_it_is_old(tmp_path: Path, config: ParallelConfig) -> None:
    world = make_world(tmp_path)
    store(world, config)
    dead = inflight(world)
    assert len(dead) == 3
    for folder in dead:
        age(folder, HOUR + 60)
    # One file that was written since is enough: its writer lives.
    alive = next(p for p in files_below(dead[1]))
    os.utime(alive, (time.time() - HOUR + 60,) * 2)
    sizes = {f: sum(p.stat().st_size for p in files_below(f)) for f in dead}
    wanted = [(dead[i], sizes[dead[i]]) for i in (0, 2)]
    for dry in (True, False):
        found = collect(world.root, dry_run=dry)
        assert [(world.root / f.path, f.nbytes) for f in found] == wanted
        assert {f.kind for f in found} == {"inflight"}
        assert all(f.age == pytest.approx(HOUR + 60, abs=30) for f in found)
        assert inflight(world) == (dead if dry else [dead[1]])
    assert collect(world.root) == []
    # Those that were collected are stored again; nothing false is served meanwhile.
    report = world.namespace.commit(world.keys, config, session="s")
    assert (len(report.committed), len(report.missing)) == (1, 2)
    world.store_all(config)
    world.load_all(config)


def test_a_writer_that_is_hit_stores_again(tmp_path: Path) -> None:
    """The spec's promise: its commit reports what is missing, and no wrong byte comes of it."""
    world = make_world(tmp_path)
    ranks = seats(world.namespace, SHARED, total=23, session="s")
    for number, one in enumerate(ranks):
        one.fill(world.truth)
        if number == 4:
            assert len(collect(world.root, grace=0)) == 3
        one.worker.store(world.keys, one.table, tail=True)
    report = world.namespace.commit(world.keys, SHARED, session="s")
    assert not report.committed
    assert len(report.missing) == 3
    world.store_all(SHARED)
    world.load_all(SHARED)


def test_trash_temporaries_and_hints(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [gqa_group(), mqa_group()])
    private = made.root / "__kvstore__"
    before = set(files_below(made.root))
    (private / "trash" / "0123456789abcdef").mkdir(parents=True)
    (private / "trash" / "0123456789abcdef" / "c.0.0.0.0.0").write_bytes(b"x" * 100)
    (private / "trash" / "file").write_bytes(b"x")
    old = made.root / made.extents("kv")[0] / ".tmp-0123456789abcdef"
    new = made.root / ".tmp-0123456789abcdee"
    for path in (old, new):
        path.write_bytes(b"12")
    age(old, HOUR + 60)
    gone = made.extents("kv")[1]
    shutil.rmtree(made.root / gone)
    hints = [
        p for p in files_below(private / "refs") if p.stat().st_nlink == 3 and p.parts[-3] == "kv"
    ]
    assert len(hints) == 3
    invalid = private / "refs" / made.name / "swa" / "ab" / ("ab" * 32)
    invalid.parent.mkdir(parents=True, exist_ok=True)
    invalid.write_text("no record")
    found = {(f.kind, f.path): f.nbytes for f in collect(made.root)}
    expected = {("reference", str(h.relative_to(made.root))) for h in (*hints, invalid)}
    expected |= {("trash", f"__kvstore__/trash/{n}") for n in ("0123456789abcdef", "file")}
    expected |= {("temporary", str(old.relative_to(made.root)))}
    assert found.keys() == expected
    assert found["trash", "__kvstore__/trash/0123456789abcdef"] == 100
    left = set(files_below(made.root))
    assert left - {new} == {p for p in before if gone not in str(p)} - set(hints)
    assert collect(made.root) == []


def quarantined(made: Made, extent: str) -> Path:
    """Move an extent into quarantine, as a load does that finds it damaged."""
    group, _, key = extent.split("/")[1:]
    folder = made.root / GroupPath(made.name, group).quarantine(key, "01234567")
    folder.parent.mkdir(parents=True, exist_ok=True)
    (made.root / extent).rename(folder)
    return folder


def test_quarantine_goes_only_when_asked(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [gqa_group()])
    folder = quarantined(made, made.extents("kv")[-1])
    age(folder, 100)

    def kinds(**options: float) -> list[str]:
        return [f.kind for f in collect(made.root, **options) if f.kind != "reference"]

    assert kinds() == kinds(quarantine=HOUR) == []
    assert kinds(quarantine=50.0) == ["quarantined"]
    assert not folder.exists()


def test_hints_of_a_newer_release_stay(tmp_path: Path) -> None:
    """They are no leavings, only unknown; and a namespace that cannot be read keeps its own."""
    made = make_store(tmp_path / "store", [gqa_group()])
    hint = next(iter(files_below(made.root / "__kvstore__" / "refs")))
    data = hint.read_bytes()
    hint.unlink()
    newer = data.replace(b'"format_version": "1.0"', b'"format_version": "2.0"')
    newer = newer if newer != data else data.replace(b'"1.0"', b'"2.0"')
    assert newer != data
    hint.write_bytes(newer)
    assert collect(made.root) == []
    shutil.rmtree(made.root / made.extents("kv")[0])
    (made.root / made.name / "zarr.json").write_text("{}")
    assert collect(made.root, grace=0) == []


def test_a_removed_namespace_leaves_nothing(tmp_path: Path) -> None:
    """Also what is in flight for it, and the hints that a crash of the removal left."""
    world = make_world(tmp_path)
    world.store_all()
    shutil.rmtree(world.folder(1))
    store(world, ONE)
    shutil.rmtree(world.root / world.namespace.name)
    kinds = {f.kind for f in collect(world.root, grace=0)}
    assert kinds == {"inflight", "reference"}
    assert not [p for p in files_below(world.root) if p.name != "zarr.json"]


@pytest.mark.parametrize("option", ["grace", "quarantine"])
@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_durations_are_checked(tmp_path: Path, option: str, seconds: float) -> None:
    make_store(tmp_path / "store", [gqa_group()])
    with pytest.raises(InvalidArgument, match=option):
        collect(tmp_path / "store", **{option: seconds})


def test_a_store_opened_for_reading_is_only_looked_at(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [gqa_group()])
    (made.root / "__kvstore__" / "trash" / "a").mkdir(parents=True)
    with kvstore.open(made.root, read_only=True) as opened:
        assert [f.kind for f in opened.collect(dry_run=True)] == ["trash"]
        with pytest.raises(InvalidArgument, match="read-only"):
            opened.collect()


def test_a_symbolic_link_is_freed_and_not_followed(tmp_path: Path) -> None:
    world = make_world(tmp_path / "store")
    store(world, ONE)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("stays")
    folder = inflight(world)[0]
    (folder / "array" / "link").symlink_to(outside)
    (world.root / "__kvstore__" / "trash").mkdir(exist_ok=True)
    (world.root / "__kvstore__" / "trash" / "link").symlink_to(outside)
    kinds = [f.kind for f in collect(world.root, grace=0)]
    assert sorted(kinds) == ["inflight"] * 3 + ["trash"]
    assert (outside / "precious").read_text() == "stays"
    assert not inflight(world)


def test_every_kind_is_explained() -> None:
    assert set(KINDS) >= {"inflight", "reference", "quarantined", "trash", "temporary"}


def test_what_cannot_be_freed_is_told_and_the_rest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(tmp_path)
    store(world, ONE)
    stuck = inflight(world)[1]
    rename = os.rename

    def refuse(old: str, new: str) -> None:
        if str(old) == str(stuck):
            raise PermissionError(1, "Operation not permitted")
        rename(old, new)

    monkeypatch.setattr(os, "rename", refuse)
    found = collect(world.root, grace=0)
    assert [(f.kind, f.error is None) for f in found] == [
        ("inflight", True),
        ("inflight", False),
        ("inflight", True),
    ]
    assert "not permitted" in str(found[1].error)
    assert inflight(world) == [stuck]


def test_trash_that_cannot_be_freed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_store(tmp_path / "store", [gqa_group()])
    trash = made.root / "__kvstore__" / "trash"
    (trash / "a").mkdir(parents=True)
    with monkeypatch.context() as patched:

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        patched.setattr(os, "rmdir", refuse)
        (found,) = collect(made.root)
        assert "ermission denied" in str(found.error)
    assert (trash / "a").is_dir()
    assert [f.error for f in collect(made.root)] == [None]
    assert not list(trash.iterdir())


def collect_all(start: Callable[[], None], root: str) -> list[str]:
    start()
    return [f"{f.kind} {f.error}" for _ in range(3) for f in collect(Path(root), grace=0)]


def test_several_collections_at_once(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [gqa_group(), mqa_group()])
    key = Path(made.extents("kv")[0]).name
    for number in range(60):
        names = GroupPath(made.name, "kv").inflight(key, f"{number:016x}")
        (made.root / names.array).mkdir(parents=True)
        (made.root / names.array / "c.0.0.0.0.0").write_bytes(b"1" * 100)
        (made.root / "__kvstore__" / "trash" / f"{number:016x}" / "b").mkdir(parents=True)
    found = together([(collect_all, (str(made.root),))] * 4)
    everything = [one for each in found for one in each]
    assert sum(one.startswith("inflight") for one in everything) == 60
    assert {one.rpartition(" ")[2] for one in everything} == {"None"}
    assert collect(made.root, grace=0) == []
    with kvstore.open(made.root) as opened:
        assert not [f for f in opened.open_namespace(made.name).verify() if not f.is_note]
