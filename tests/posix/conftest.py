"""Fixtures of the posix engine's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.reads import CONTENT, Open
from support.syncs import Log

from kvstore.io.posix import PosixEngine


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens engines on one folder, closes them."""
    engines: list[PosixEngine] = []

    def open_one(**options: Any) -> PosixEngine:
        engines.append(PosixEngine(tmp_path, **{"durable": False, **options}))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An object named ``file`` of 20 MiB and a bit, on the disk."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)
    return path


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PosixEngine]:
    """A durable engine on ``tmp_path``."""
    opened = PosixEngine(tmp_path, durable=True)
    yield opened
    opened.close()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(tmp_path, monkeypatch)
