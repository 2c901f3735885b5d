from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import InvalidArgument, NotFound, StorageError
from kvstore.io.posix import PosixEngine
from kvstore.io.select import open_engine


def test_a_path_is_served_by_posix_and_made(tmp_path: Path):
    for location in (str(tmp_path / "a" / "b"), tmp_path / "c"):
        engine = open_engine(location)
        assert isinstance(engine, PosixEngine)
        assert Path(location).is_dir()
        assert engine.location == str(location)
        engine.close()


def test_a_file_url_names_the_same_folder(tmp_path: Path):
    root = tmp_path / "with space"
    for url in (root.as_uri(), root.as_uri().replace("file:///", "file://localhost/")):
        engine = open_engine(url)
        engine.write("x", [b"1"])
        assert (root / "x").read_bytes() == b"1"
        engine.close()


def test_options_reach_the_engine(tmp_path: Path):
    engine = open_engine(tmp_path, read_only=True, threads=3, durable=False, direct="never")
    assert isinstance(engine, PosixEngine)
    assert engine.read_only
    assert not engine.durable
    engine.close()


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"direct": "maybe"}, {"deadline": 0.0}, {"max_staging_bytes": 10}],
    ids=str,
)
def test_an_option_out_of_range_is_refused(tmp_path: Path, options: dict[str, object]):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        open_engine(tmp_path, **options)


def test_an_unknown_option_is_named_with_the_known(tmp_path: Path):
    with pytest.raises(InvalidArgument, match=r"threds.*max_staging_bytes.*threads"):
        open_engine(tmp_path, threds=3)


@pytest.mark.parametrize(
    "location",
    ["s3://bucket/x", "gs://b", "memory://", "simplecache::s3://b", "S3://b", "http://h/"],
)
def test_other_protocols_are_refused_by_name(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    protocol = location.partition(":")[0].lower()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=rf"local and shared file systems, not {protocol}"):
        open_engine(location)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "location", ["", "a\0b", "file://host/x", "file://", "file:///x?y", "file:///x#y"]
)
def test_what_names_no_folder_is_refused(location: str):
    with pytest.raises(InvalidArgument):
        open_engine(location)


def test_nothing_is_made_when_not_asked(tmp_path: Path):
    absent = tmp_path / "absent"
    with pytest.raises(NotFound, match=r"absent.*create=True"):
        open_engine(absent, create=False)
    with pytest.raises(NotFound, match="absent"):
        open_engine(absent, read_only=True)
    assert not absent.exists()


def test_a_file_is_no_root(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidArgument, match="is a file"):
        open_engine(tmp_path / "file")
    with pytest.raises(StorageError):
        open_engine(tmp_path / "file" / "below")


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    engine = open_engine("here")
    monkeypatch.chdir("/")
    engine.write("x", [b"1"])
    assert (tmp_path / "here" / "x").exists()
    engine.close()
