"""The digest of a model's weights: all of the content, read once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgument
from kvstore.plugins import weights
from kvstore.plugins.weights import weights_digest


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.safetensors").write_bytes(b"one")
    (folder / "sub" / "b.bin").write_bytes(b"two")
    (folder / "config.json").write_text("{}")
    return folder


def test_known_value(model: Path) -> None:
    lines = b"kvstore/weights/v1\0"
    for name, data in (("a.safetensors", b"one"), ("sub/b.bin", b"two")):
        lines += f"{len(name)} {name} {hashlib.sha256(data).hexdigest()}\n".encode()
    assert weights_digest(model) == hashlib.sha256(lines).hexdigest()


def test_content_and_names_count_and_nothing_else(model: Path) -> None:
    first = weights_digest(model)
    (model / "config.json").write_text("other")
    (model / ".hidden").mkdir()
    (model / ".hidden" / "c.bin").write_bytes(b"x")
    assert weights_digest(model) == first
    (model / "a.safetensors").write_bytes(b"One")
    changed = weights_digest(model)
    assert changed != first
    (model / "a.safetensors").rename(model / "c.safetensors")
    assert weights_digest(model) not in (first, changed)


def test_a_second_start_reads_no_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights_digest(model)

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(weights.hashlib, "file_digest", refuse)
    assert weights_digest(model) == first


def test_a_damaged_or_unwritable_cache_is_no_harm(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = weights_digest(model)
    entries = list((tmp_path / "cache" / "kvstore" / "digests").iterdir())
    assert len(entries) == 2
    for entry, junk in zip(entries, (b"", b"\xff" * 64), strict=True):
        entry.write_bytes(junk)
    assert weights_digest(model) == first
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert weights_digest(model) == first


def test_a_file_changed_in_place_is_read_again(model: Path) -> None:
    first = weights_digest(model)
    file = model / "a.safetensors"
    status = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert weights_digest(model) != first


def test_one_file_stands_for_itself(model: Path) -> None:
    assert weights_digest(model / "a.safetensors") != weights_digest(model)


@pytest.mark.parametrize("name", ["missing", "empty", "notes.txt"])
def test_no_weights_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match="no weights"):
        weights_digest(tmp_path / name)
