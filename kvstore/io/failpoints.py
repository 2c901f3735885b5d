"""Named points at which a test can make the code fail, either side of every step that matters.

The code calls ``reach("posix.write.before_rename")``; while nothing is armed that costs one test
of an empty dictionary. A test arms a point to raise an error, to run a function, or to end the
process on the spot (``os._exit``, as a power cut would: no clean-up runs). Child processes of tests
are armed through the environment variable ``KVSTORE_FAILPOINTS``::

    KVSTORE_FAILPOINTS="posix.write.before_rename=kill;posix.publish.after_rename=error@3"

which kills the process when it first reaches the one point, and raises when it reaches the other
for the third time and after. ``pause:0.5`` sleeps for that many seconds, so that another process
can look.

The idea is bbolt's (its failpoints stand around each sync).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.errors import InvalidArgument, StorageError

ENVIRONMENT = "KVSTORE_FAILPOINTS"
"""Environment variable read when this module is imported."""

KILLED = 86
"""Exit status of a process that a failpoint ended, so that a test can tell it from a crash."""

Action = Callable[[], None]


@dataclass(slots=True)
class Armed:
    """One armed point.

    Attributes:
        action: what happens when the point is reached.
        skip: how many times the point passes before the action runs (then it runs every time).
        reached: how many times the point was reached. A test that armed a point and finds 0 here
            tests nothing: the name is wrong, or the code never came by.
    """

    action: Action
    skip: int = 0
    reached: int = 0


_armed: dict[str, Armed] = {}


def reach(name: str) -> None:
    """Say that the code is at a point; does nothing unless a test armed it."""
    if _armed and (point := _armed.get(name)) is not None:
        point.reached += 1
        if point.reached > point.skip:
            point.action()


def arm(name: str, action: Action | Exception | str, *, skip: int = 0) -> Armed:
    """Arm a point until :func:`disarm`.

    Args:
        name: the point, such as ``posix.write.before_rename``.
        action: a function to call, an exception to raise, or ``"kill"``, ``"error"``,
            ``"pause:<seconds>"``.
        skip: let it pass this many times first.

    Raises:
        InvalidArgument: an action that is none of these.
    """
    point = Armed(_action(name, action), skip)
    _armed[name] = point
    return point


def disarm(name: str | None = None) -> None:
    """Disarm one point, or all of them."""
    if name is None:
        _armed.clear()
    else:
        _armed.pop(name, None)


@contextmanager
def armed(name: str, action: Action | Exception | str, *, skip: int = 0) -> Iterator[Armed]:
    """Arm a point for the length of a ``with`` block."""
    point = arm(name, action, skip=skip)
    try:
        yield point
    finally:
        disarm(name)


def arm_from(text: str) -> None:
    """Arm points as ``name=action[@n];name=action[@n]``: at the n-th time and every one after.

    Raises:
        InvalidArgument: the text does not have that form.
    """
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, separator, action = entry.partition("=")
        action, _, nth = action.partition("@")
        if not (separator and name and action) or (nth and not nth.isdigit()):
            raise InvalidArgument(f"{ENVIRONMENT}: {entry!r} is not name=action or name=action@n")
        arm(name, action, skip=max(0, int(nth or 1) - 1))


def _action(name: str, action: Action | Exception | str) -> Action:
    if isinstance(action, Exception):
        error = action

        def fail() -> None:
            raise error

        return fail
    if not isinstance(action, str):
        return action
    kind, _, value = action.partition(":")
    if kind == "kill":
        return lambda: os._exit(KILLED)
    if kind == "error":
        return lambda: _raise_io_error(name)
    if kind == "pause":
        try:
            seconds = float(value)
        except ValueError:
            raise InvalidArgument(f"failpoint {name}: {value!r} is not seconds") from None
        return lambda: time.sleep(seconds)
    raise InvalidArgument(f"failpoint {name}: {action!r} is not kill, error or pause:<seconds>")


def _raise_io_error(name: str) -> None:
    raise StorageError(errno.EIO, f"injected at failpoint {name}; no remedy, a test did this")


arm_from(os.environ.get(ENVIRONMENT, ""))
