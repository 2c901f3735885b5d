"""Writing files: whole and at once, only if absent, or run by run together with others."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from kvstore.errors import Corrupt, InvalidArgument
from kvstore.io.failpoints import reach
from kvstore.io.fallocate import allocate
from kvstore.io.local_names import TEMPORARY, LocalNames
from kvstore.io.oserrors import translated
from kvstore.io.protocol import Buffer

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_VECTORS = max(16, os.sysconf("SC_IOV_MAX"))
# What a file system answers that has no hard links (FAT, some FUSE and SMB).
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)


def write_whole(
    names: LocalNames, path: str, pieces: Sequence[Buffer], *, settle: bool = True
) -> int:
    """Write a file under a temporary name, then rename it. Returns the bytes written."""
    full = names.full(path)
    views = _bytes_of(pieces)
    with translated("write", full):
        temporary, written = _write_temporary(names, full, views, settle=settle)
        try:
            reach("posix.write.before_rename")
            os.rename(temporary, full)
        except BaseException:
            _forget(temporary)
            raise
        reach("posix.write.after_rename")
        if settle:
            names.sync_folder(os.path.dirname(full))
    return written


def create(names: LocalNames, path: str, data: bytes, *, settle: bool = True) -> bool:
    """Make a file with all its bytes, unless one is there. Returns whether this call did."""
    full = names.full(path)
    if os.path.lexists(full):
        return False
    with translated("create", full):
        temporary, _ = _write_temporary(names, full, _bytes_of([data]), settle=settle)
        try:
            reach("posix.create.before_link")
            made = _link(temporary, full, data, durable=names.durable)
            reach("posix.create.after_link")
        finally:
            _forget(temporary)
        if made and settle:
            names.sync_folder(os.path.dirname(full))
    return made


def write_runs(
    names: LocalNames,
    path: str,
    size: int,
    pieces: Sequence[tuple[int, Buffer]],
    *,
    make: bool = True,
) -> int:
    """Write runs into a file of ``size`` bytes that several processes fill. Returns the bytes."""
    full = names.full(path)
    views = _bytes_of([data for _, data in pieces])
    offsets = [offset for offset, _ in pieces]
    for offset, view in zip(offsets, views, strict=True):
        if offset < 0 or offset + len(view) > size:
            raise InvalidArgument(
                f"a run of {len(view)} bytes at {offset} does not fit {path} of {size} bytes"
            )
    with translated("write", full):
        if make:
            fd = _open(names, full, os.O_RDWR, settle=False)
        else:
            fd = os.open(full, _FLAGS | os.O_RDWR)
        try:
            _settle_size(fd, full, size)
            reach("posix.write_into.before_write")
            for start, run in _coalesced(offsets, views):
                _write_at(fd, run, start)
            reach("posix.write_into.after_write")
        finally:
            os.close(fd)
    return sum(map(len, views))


def _settle_size(fd: int, full: str, size: int) -> None:
    """Give a new file its size. Several processes may be here at once, all with the same size."""
    found = os.fstat(fd).st_size
    if found == 0 and size:
        # One step, so that nobody meets a size in between; it never shrinks what another made.
        os.ftruncate(fd, size)
        allocate(fd, size)
        found = os.fstat(fd).st_size
    if found != size:
        raise Corrupt(
            f"{full} has {found} bytes and its writers agreed on {size}: two formats or two stores "
            f"meet under one name; discard it"
        )


def _coalesced(offsets: list[int], views: list[memoryview]) -> list[tuple[int, list[memoryview]]]:
    """Runs in ascending order, neighbours joined: one system call for each."""
    runs: list[tuple[int, list[memoryview]]] = []
    end = -1
    for offset, view in sorted(zip(offsets, views, strict=True), key=lambda pair: pair[0]):
        if offset == end:
            runs[-1][1].append(view)
        else:
            runs.append((offset, [view]))
        end = offset + len(view)
    return runs


def _write_temporary(
    names: LocalNames, full: str, views: list[memoryview], *, settle: bool
) -> tuple[str, int]:
    """A new file in the folder of ``full`` that holds the views, durable if asked."""
    temporary = f"{os.path.dirname(full)}/{TEMPORARY}{os.urandom(8).hex()}"
    fd = _open(names, temporary, os.O_WRONLY | os.O_EXCL, settle=settle)
    try:
        written = _write_at(fd, views, 0)
        reach("posix.write.before_sync")
        if names.durable:
            os.fsync(fd)
    except BaseException:
        _forget(temporary)
        raise
    finally:
        os.close(fd)
    return temporary, written


def _open(names: LocalNames, full: str, mode: int, *, settle: bool) -> int:
    """Open for writing; the folders are made only when they turn out to be missing."""
    try:
        return os.open(full, _FLAGS | os.O_CREAT | mode, 0o666)
    except FileNotFoundError:
        names.make_parents(full, settle=settle)
        return os.open(full, _FLAGS | os.O_CREAT | mode, 0o666)


def _link(temporary: str, full: str, data: bytes, *, durable: bool) -> bool:
    try:
        os.link(temporary, full, follow_symlinks=False)
    except FileExistsError:
        # On NFS the reply to a link that worked may be lost and the repeated one refused; then our
        # file has two names.
        return os.stat(temporary).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        return True
    # No links here: whole-at-once is lost, only-if-absent is kept.
    try:
        fd = os.open(full, _FLAGS | os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    try:
        _write_at(fd, [memoryview(data)], 0)
        if durable:
            os.fsync(fd)
    except BaseException:
        _forget(full)
        raise
    finally:
        os.close(fd)
    return True


def _write_at(fd: int, views: list[memoryview], position: int) -> int:
    """Write all views one after the other, in as few system calls as the kernel takes."""
    total = 0
    pending = [view for view in views if len(view)]
    first = 0
    while first < len(pending):
        written = os.pwritev(fd, pending[first : first + _MOST_VECTORS], position)
        if written <= 0:
            raise OSError(errno.EIO, "the file system took no byte of a write")
        total += written
        position += written
        while first < len(pending) and written >= len(pending[first]):
            written -= len(pending[first])
            first += 1
        if written:
            pending[first] = pending[first][written:]
    return total


def _bytes_of(pieces: Sequence[Buffer]) -> list[memoryview]:
    views = []
    for piece in pieces:
        try:
            view = memoryview(piece)
            # A view with a 0 in its shape cannot be cast.
            views.append(view.cast("B") if view.nbytes else memoryview(b""))
        except TypeError as error:
            raise InvalidArgument(
                f"cannot write a {type(piece).__name__}: {error}; give C-contiguous memory with "
                f"the buffer protocol"
            ) from error
    return views


def _forget(temporary: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary)
