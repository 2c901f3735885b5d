"""Shared by all tests: how hard hypothesis tries, and fixtures of tiny groups."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from tiny import GROUPS, tiny_identity

from kvstore.geometry import LayerGroup
from kvstore.identity import Identity

# "ci" is the default: the same examples on every run, and no deadlines, since machines differ.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60, database=None)
settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=1000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--full-matrix``: every pair of parallel configs, not a sample of them."""
    parser.addoption("--full-matrix", action="store_true", help="every pair of configs")


@pytest.fixture(params=sorted(GROUPS))
def any_group(request: pytest.FixtureRequest) -> LayerGroup:
    """Each tiny group in turn."""
    return GROUPS[request.param]()


@pytest.fixture
def gqa() -> LayerGroup:
    """The tiny GQA group."""
    return GROUPS["gqa"]()


@pytest.fixture
def identity() -> Identity:
    """A namespace of every tiny group."""
    return tiny_identity()
