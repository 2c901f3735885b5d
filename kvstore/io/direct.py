"""Whether reads pass by the page cache (``O_DIRECT``), and whether the file system lets them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import Literal, get_args

from kvstore.errors import InvalidArgument
from kvstore.io.local_names import TEMPORARY

ALIGNMENT = 4096
"""Offsets and lengths of direct reads are multiples of this, whatever less a device would take."""

DirectMode = Literal["auto", "always", "never"]


class DirectPolicy:
    """When to read directly below one root.

    The file system is asked once, when it first matters, with a real aligned write and read; an
    answer by its name or type would be a guess. If it refuses a direct read later all the same
    (a root can span mounts), it is not asked again.
    """

    def __init__(self, root: str, mode: DirectMode, *, read_only: bool) -> None:
        """Keep the choice.

        Raises:
            InvalidArgument: a mode that is none of the three, or ``always`` where it cannot be.
        """
        if mode not in get_args(DirectMode):
            raise InvalidArgument(
                f"direct is {mode!r}; use one of {', '.join(get_args(DirectMode))}"
            )
        self.mode = mode
        self._root = root
        self._read_only = read_only
        self._works: bool | None = None
        if mode == "always" and not self.works:
            raise InvalidArgument(
                f"direct='always', but the file system of {root} does not take O_DIRECT; "
                f"use direct='auto' or 'never'"
            )

    @property
    def works(self) -> bool:
        """Whether the file system takes direct reads."""
        if self._works is None:
            self._works = _probe_reading(self._root) if self._read_only else _probe(self._root)
        return self._works

    def refused(self) -> None:
        """Remember that a direct read was refused as invalid."""
        self._works = False


def _probe(root: str) -> bool:
    """Write a page directly, read it directly, compare."""
    path = f"{root}/{TEMPORARY}{os.urandom(8).hex()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            _clean(path)  # some file systems make the file and then refuse the flag
            return False
        return _probe_reading(root)  # no space, no permission: that says nothing about reading
    view = memoryview(mmap.mmap(-1, 2 * ALIGNMENT))
    view[:ALIGNMENT] = os.urandom(ALIGNMENT)
    try:
        wrote = os.pwritev(fd, [view[:ALIGNMENT]], 0)
        read = os.preadv(fd, [view[ALIGNMENT:]], 0)
    except OSError:
        return False
    finally:
        os.close(fd)
        _clean(path)
    return wrote == read == ALIGNMENT and view[:ALIGNMENT] == view[ALIGNMENT:]


def _clean(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _probe_reading(root: str) -> bool:
    """Where nothing can be written: read the first plain file of the root, or hope.

    Hoping is safe: a refused read falls back to a buffered one.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_DIRECT
    try:
        with os.scandir(root) as entries:
            path = next((e.path for e in entries if e.is_file(follow_symlinks=False)), None)
        if path is None:
            return True
        fd = os.open(path, flags)
        try:
            os.preadv(fd, [mmap.mmap(-1, ALIGNMENT)], 0)
        finally:
            os.close(fd)
    except OSError:
        return False
    return True
