"""Opening stores and namespaces: what is made, what is refused, and what the refusal names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.world import files_below, make_world, small_group

import kvstore
from kvstore import Identity, KeyScheme
from kvstore.errors import (
    Corrupt,
    FormatError,
    GeometryMismatch,
    InvalidArgument,
    NotFound,
    StorageError,
    UnsupportedVersion,
)


def _identity(**changes: Any) -> Identity:
    options: dict[str, Any] = {
        "model": "Org/Model",
        "model_layers": 4,
        "groups": (small_group(),),
        "revision": "r1",
    }
    return Identity(**{**options, **changes})


def _edit(path: Path, change: Callable[[Any], object]) -> None:
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))


def test_a_store_is_made_once_and_found_again(tmp_path: Path) -> None:
    root = tmp_path / "new" / "store"
    with kvstore.open(root, durable=False) as store:
        assert list(store.namespaces()) == []
        assert repr(store) == f"Store({str(root)!r}, engine='posix')"
        name = store.namespace(_identity()).name
    before = {p: p.read_bytes() for p in files_below(root)}
    with kvstore.open(f"file://{root}", durable=False) as store:
        assert list(store.namespaces()) == [name]
        assert store.namespace(_identity()).name == name
    assert {p: p.read_bytes() for p in files_below(root)} == before
    assert json.loads((root / "zarr.json").read_text())["attributes"]["kvstore"] == {
        "format": "kvstore",
        "version": "1.0",
        "must_understand": [],
    }


def test_nothing_is_made_when_not_asked(tmp_path: Path) -> None:
    for options in ({"create": False}, {"read_only": True}):
        for place in (tmp_path, tmp_path / "none"):
            with pytest.raises(NotFound):
                kvstore.open(place, **options)
    assert not list(tmp_path.iterdir())
    with kvstore.open(tmp_path, durable=False) as store:
        with pytest.raises(NotFound, match="no namespace org-model-"):
            store.namespace(_identity(), create=False)
        assert not list(store.namespaces())


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidArgument, match=r"holds other things \(thesis.tex"):
        kvstore.open(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is a file"):
        kvstore.open(tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"version": "2.0"}, UnsupportedVersion, "format version 2.0"),
        ({"version": "0.9"}, UnsupportedVersion, "format version 0.9"),
        ({"version": "1"}, FormatError, "not <major>.<minor>"),
        ({"must_understand": ["x"]}, UnsupportedVersion, "needs the feature 'x'"),
        ({"format": "other"}, FormatError, "format is not 'kvstore'"),
    ],
)
@pytest.mark.parametrize("record", ["store", "namespace"])
def test_versions(
    tmp_path: Path, record: str, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    name = kvstore.open(tmp_path, durable=False).namespace(_identity()).name
    path = tmp_path / "zarr.json" if record == "store" else tmp_path / name / "zarr.json"
    _edit(path, lambda stored: stored["attributes"]["kvstore"].update(change))
    with pytest.raises(error, match=words) as caught:
        kvstore.open(tmp_path, durable=False).namespace(_identity())
    assert type(caught.value) is error


def test_newer_minor_versions_are_read(tmp_path: Path) -> None:
    name = kvstore.open(tmp_path, durable=False).namespace(_identity()).name
    for path in (tmp_path / "zarr.json", tmp_path / name / "zarr.json"):
        _edit(path, lambda s: s["attributes"]["kvstore"].update(version="1.9", later=[1]))
    assert kvstore.open(tmp_path, durable=False).namespace(_identity()).name == name


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"{}", b'{"zarr_format": 3}'])
def test_broken_records(tmp_path: Path, data: bytes) -> None:
    name = kvstore.open(tmp_path, durable=False).namespace(_identity()).name
    good = (tmp_path / "zarr.json").read_bytes()
    (tmp_path / "zarr.json").write_bytes(data)
    with pytest.raises(FormatError):
        kvstore.open(tmp_path, durable=False)
    (tmp_path / "zarr.json").write_bytes(good)
    (tmp_path / name / "zarr.json").write_bytes(data)
    with pytest.raises(FormatError, match=name):
        kvstore.open(tmp_path, durable=False).namespace(_identity())


CHANGES: dict[str, dict[str, Any]] = {
    "revision": {"revision": "r2"},
    "weights_digest": {"weights_digest": "abc"},
    "model_layers": {"model_layers": 5},
    "variants.rope": {"variants": {"rope": "yarn"}},
    "key_scheme.root": {"key_scheme": KeyScheme.sha256(b"tenant")},
    "groups[0].heads": {"groups": (small_group(heads=2),)},
    "groups[0].parts[1].count": {"groups": (small_group(value_size=4),)},
    "groups[0].parts[0].element": {"groups": (small_group(element="float16"),)},
    "groups[0].extent_blocks": {"groups": (small_group(extent_blocks=4),)},
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_identity_is_another_namespace_and_a_mismatch_names_the_field(
    tmp_path: Path, field: str
) -> None:
    store = kvstore.open(tmp_path, durable=False)
    one, other = _identity(), _identity(**CHANGES[field])
    assert store.namespace(one).name != store.namespace(other).name
    with pytest.raises(GeometryMismatch, match=field.replace("[", r"\[")) as caught:
        store.open_namespace(one.namespace, expect=other)
    assert field in caught.value.fields
    stored, given = caught.value.fields[field]
    assert stored != given
    top = field.partition("[")[0]
    assert not [f for f in caught.value.fields if not f.startswith(top)]


def test_a_namespace_under_another_ones_name_is_refused(tmp_path: Path) -> None:
    store = kvstore.open(tmp_path, durable=False)
    one, other = _identity(), _identity(revision="r2")
    store.namespace(one)
    (tmp_path / one.namespace).rename(tmp_path / other.namespace)
    with pytest.raises(Corrupt, match="renamed or copied"):
        store.namespace(other)


def test_namespaces_by_the_start_of_their_name(tmp_path: Path) -> None:
    store = kvstore.open(tmp_path, durable=False)
    one = store.namespace(_identity()).name
    assert store.open_namespace("org-model-").name == one
    assert store.open_namespace(one[:15]).identity == _identity()
    two = store.namespace(_identity(revision="r2")).name
    with pytest.raises(InvalidArgument, match="may be any of"):
        store.open_namespace("org-model-")
    with pytest.raises(NotFound, match="there are: org-model"):
        store.open_namespace("nothing")
    assert list(store.namespaces()) == sorted((one, two))


def test_a_read_only_store_loads_and_writes_nothing(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.store_all()
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files_below(tmp_path)}
    reader = world.reopen(read_only=True)
    reader.load_all()
    assert reader.namespace.match_prefix(world.keys[:3]).blocks == 3
    one = reader.seat()
    other = world.sequence(2, 5)[0]
    for call in (
        lambda: one.worker.store(other, one.table),
        lambda: reader.namespace.remove(world.keys[1]),
    ):
        with pytest.raises(InvalidArgument, match="read-only"):
            call()
    with pytest.raises(NotFound):
        reader.store.namespace(_identity(revision="other"))
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files_below(tmp_path)} == before


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.store_all()
    one = world.seat()
    world.store.close()
    world.store.close()
    with pytest.raises(StorageError, match="was closed"):
        one.worker.load(world.keys, one.table)


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no option colour"):
        kvstore.open(tmp_path, colour="blue")
    with pytest.raises(InvalidArgument, match="not s3"):
        kvstore.open("s3://bucket/x")


def test_two_processes_that_create_at_once_agree(tmp_path: Path) -> None:
    """The loser of the race reads what the winner wrote."""
    first = kvstore.open(tmp_path, durable=False)
    second = kvstore.open(tmp_path, durable=False)
    one = first.namespace(_identity())
    record = (tmp_path / one.record_path).read_bytes()
    second._create(_identity())
    assert (tmp_path / one.record_path).read_bytes() == record
    assert second.namespace(_identity()).name == one.name
    assert one.keys(np.arange(8)) == second.namespace(_identity()).keys(list(range(8)))
