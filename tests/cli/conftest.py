"""Running a command in this process, and stores for it to look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import Ran, Run
from support.made import Made, make_store
from tiny import gqa_group, mqa_group

from kvstore.cli.main import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Call a command with arguments, as a shell would."""

    def call(*args: object) -> Ran:
        try:
            status = main([str(a) for a in args])
        except SystemExit as stop:  # argparse
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Ran(status, captured.out, captured.err)

    return call


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A store of one namespace with two layer groups."""
    return make_store(tmp_path / "store", [gqa_group(), mqa_group()])


@pytest.fixture
def two(made: Made) -> Made:
    """The same with a second namespace, whose extents have the same keys."""
    other = make_store(made.root.parent / "other", [gqa_group()], model="Other-2B", blocks=4)
    (other.root / other.name).rename(made.root / other.name)
    return made
