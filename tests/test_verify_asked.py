"""Verification: what is asked for, how far it is, and a medium that fails under it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.finding import find
from support.made import Made, make_store
from tiny import gqa_group, mqa_group

import kvstore
from kvstore.errors import NotFound, StorageError
from kvstore.io.posix import PosixEngine
from kvstore.io.protocol import ByteRange, Consume
from kvstore.verify import verify_store


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_store(tmp_path / "store", [gqa_group(), mqa_group()])


# -- a medium that fails --------------------------------------------------------------------------


class Failing(PosixEngine):
    """Fails on some paths."""

    folders: Sequence[str] = ()
    objects: Sequence[str] = ()

    def list_dir(self, path: str) -> list[str]:
        if path in self.folders:
            raise StorageError(f"cannot list {path}: permission denied")
        return super().list_dir(path)

    def get(self, path: str, limit: int) -> bytes:
        if path in self.objects:
            raise StorageError(f"cannot read {path}: input/output error")
        return super().get(path, limit)

    def read(self, ranges: Sequence[ByteRange], consume: Consume) -> list[Exception | None]:
        outcomes = super().read(ranges, consume)
        # What lies at the start of an object, not the index at its end.
        failed = StorageError("cannot read: input/output error")
        return [
            failed if r.path in self.objects and r.offset == 0 else o
            for r, o in zip(ranges, outcomes, strict=True)
        ]


def test_what_cannot_be_read_is_a_fault_and_the_rest_is_still_checked(made: Made) -> None:
    kv = made.extents("kv")
    (made.root / kv[1] / "stray").write_text("")
    engine = Failing(made.root, read_only=True)
    engine.folders = [f"{made.name}/swa", "__kvstore__/refs", str(Path(kv[0]).parent)]
    engine.objects = [f"{kv[1]}/c.0.0.0.0.0", f"{kv[2]}/zarr.json"]
    found = sorted((f.path, f.kind) for f in verify_store(engine))
    wanted = [(p, "unreadable") for p in (*engine.folders, *engine.objects)]
    assert found == sorted([*wanted, (f"{kv[1]}/stray", "stray")])


def test_an_extent_removed_meanwhile_is_no_fault(made: Made) -> None:
    extent = made.extents("kv")[2]

    class Removing(PosixEngine):
        def size(self, path: str) -> int:
            shutil.rmtree(made.root / extent, ignore_errors=True)
            return super().size(path)

    engine = Removing(made.root, read_only=True)
    key = Path(extent).name
    assert list(verify_store(engine, namespace=made.name, group="kv", key=key)) == []
    assert not (made.root / extent).exists()


# -- what is asked for ----------------------------------------------------------------------------


def test_only_what_is_asked_for_is_looked_at(made: Made) -> None:
    kv, swa = made.extents("kv"), made.extents("swa")
    for extent in (kv[0], kv[1], swa[0]):
        (made.root / extent / "stray").write_text("")
    other = make_store(made.root.parent / "other", [gqa_group()], model="other")
    (other.root / other.name).rename(made.root / other.name)
    (made.root / other.name / "stray").write_text("")
    # In the very folder of the extent that is asked for, an extent without a record.
    lost = f"{Path(kv[1]).parent}/{Path(kv[1]).name[:2]}{'00' * 31}"
    (made.root / lost).mkdir()
    strays = {
        "all": [f"{kv[0]}/stray", f"{kv[1]}/stray", f"{swa[0]}/stray", f"{other.name}/stray"],
        "namespace": [f"{kv[0]}/stray", f"{kv[1]}/stray", f"{swa[0]}/stray"],
        "group": [f"{kv[0]}/stray", f"{kv[1]}/stray"],
        "key": [f"{kv[1]}/stray"],
    }
    filters: dict[str, str] = {}
    given = {"namespace": made.name, "group": "kv", "key": Path(kv[1]).name}
    for level, paths in strays.items():
        if level in given:
            filters[level] = given[level]
        wanted = [(p, "stray") for p in paths]
        if level != "key":
            wanted.append((f"{lost}/zarr.json", "missing"))
        assert find(made, **filters) == sorted(wanted)


def test_asking_for_what_is_not_there(made: Made, tmp_path: Path) -> None:
    for options in (
        {"namespace": "none-" + "0" * 32},
        {"namespace": "../store"},
        {"namespace": made.name, "group": "none"},
        {"namespace": made.name, "key": "00" * 32},
        {"namespace": made.name, "key": "../.."},
    ):
        with pytest.raises(NotFound):
            find(made, **options)
    engine = PosixEngine(tmp_path, read_only=True)
    with pytest.raises(NotFound, match="no store"):
        verify_store(engine)


def test_progress_ends_at_the_bytes_of_all_shards(made: Made) -> None:
    whole = sum(p.stat().st_size for p in made.root.rglob("c.*"))
    (made.root / made.extents("kv")[0] / "zarr.json").write_bytes(b"{}")
    seen: list[tuple[int, int]] = []
    assert find(made, progress=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {whole}
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, whole)
    assert len(set(done)) > 5
    # Of what cannot be looked at, too.
    (made.root / made.name / "zarr.json").write_bytes(b"{}")
    assert find(made, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (whole, whole)


def test_namespace_verify_yields_faults_and_notes_when_asked(made: Made) -> None:
    kv = made.extents("kv")
    shutil.rmtree(made.root / kv[0])
    (made.root / kv[1] / "stray").write_text("")
    with kvstore.open(made.root, read_only=True) as store:
        namespace = store.open_namespace(made.name)
        assert [f.kind for f in namespace.verify()] == ["stray"]
        assert {f.kind for f in namespace.verify(notes=True)} == {"stray", "gap", "reference"}
        found = list(namespace.verify(group="kv", key=bytes.fromhex(Path(kv[1]).name)))
        assert [f.path for f in found] == [f"{kv[1]}/stray"]
        assert list(namespace.verify(group="swa")) == []
