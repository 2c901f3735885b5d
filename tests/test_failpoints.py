from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kvstore.errors import InvalidArgument, StorageError
from kvstore.io import failpoints


@pytest.fixture(autouse=True)
def none_armed() -> Iterator[None]:
    failpoints.disarm()
    yield
    failpoints.disarm()


def test_a_point_that_is_not_armed_does_nothing():
    failpoints.reach("here")
    with failpoints.armed("there", "error"):
        failpoints.reach("here")


def test_the_given_error_is_raised():
    error = ValueError("mine")
    with failpoints.armed("here", error) as point:
        with pytest.raises(ValueError, match="mine") as caught:
            failpoints.reach("here")
        assert caught.value is error
        assert point.reached == 1
    failpoints.reach("here")
    assert point.reached == 1


def test_an_error_by_name_is_a_storage_error_that_names_the_point():
    failpoints.arm("here", "error")
    with pytest.raises(StorageError, match="here"):
        failpoints.reach("here")


def test_a_function_is_called_after_the_skipped_times():
    calls: list[int] = []
    point = failpoints.arm("here", lambda: calls.append(point.reached), skip=2)
    for _ in range(4):
        failpoints.reach("here")
    assert calls == [3, 4]


def test_pause_sleeps():
    failpoints.arm("here", "pause:0.05")
    started = time.monotonic()
    failpoints.reach("here")
    assert time.monotonic() - started >= 0.05


def test_disarm_one_or_all():
    for name in ("a", "b", "c"):
        failpoints.arm(name, "error")
    failpoints.disarm("a")
    failpoints.disarm("never armed")
    failpoints.reach("a")
    with pytest.raises(StorageError):
        failpoints.reach("b")
    failpoints.disarm()
    failpoints.reach("b")
    failpoints.reach("c")


def test_text_arms_several():
    failpoints.arm_from(" a=error ; b=error@3;")
    with pytest.raises(StorageError):
        failpoints.reach("a")
    failpoints.reach("b")
    failpoints.reach("b")
    for _ in range(2):
        with pytest.raises(StorageError):
            failpoints.reach("b")


@pytest.mark.parametrize(
    "text", ["a", "a=", "=error", "a=explode", "a=error@x", "a=pause:soon", "a=pause"]
)
def test_text_that_means_nothing_is_refused(text: str):
    with pytest.raises(InvalidArgument):
        failpoints.arm_from(text)


def test_the_environment_arms_a_child_which_dies_at_once():
    script = (
        "import atexit; atexit.register(print, 'cleaned up')\n"
        "from kvstore.io import failpoints\n"
        "failpoints.reach('x.first'); print('passed', flush=True)\n"
        "failpoints.reach('x.second'); print('survived', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, failpoints.ENVIRONMENT: "x.second=kill"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (failpoints.KILLED, "passed\n"), done.stderr
