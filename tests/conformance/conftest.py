from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import CASES, EngineCase

from kvstore.io.protocol import Engine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        reading = "read" in metafunc.module.__name__
        cases = [case for case in CASES if reading or not case.only_reads]
        metafunc.parametrize("case", cases, ids=lambda case: case.name)


@pytest.fixture
def location(case: EngineCase, tmp_path: Path) -> str:
    return case.locate(tmp_path)


@pytest.fixture
def engine(case: EngineCase, location: str) -> Iterator[Engine]:
    opened = case.open(location)
    yield opened
    opened.close()
