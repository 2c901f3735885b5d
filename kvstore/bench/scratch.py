"""Scratch files on the file system under test, and what of them the page cache holds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

DIRECT_ALIGNMENT = 4096
"""Offsets, lengths and addresses of direct I/O are multiples of this, on every disk of today."""


def files_below(*folders: Path) -> list[Path]:
    """All regular files below some folders, sorted."""
    return sorted(p for folder in folders for p in folder.rglob("*") if p.is_file())


def sync_files(paths: Iterable[Path]) -> None:
    """Write files' dirty pages back: then they can be dropped, and disturb nothing later."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def drop_cache(paths: Iterable[Path]) -> None:
    """Ask the kernel to forget files' cached pages (clean ones: call :func:`sync_files` first).

    Needs no privilege, and touches nothing but these files.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm_cache(paths: Iterable[Path]) -> None:
    """Read files once, so that the page cache holds them."""
    buffer = bytearray(1 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def direct_flag(folder: Path) -> int:
    """``O_DIRECT`` where the file system takes it, else 0."""
    flag = getattr(os, "O_DIRECT", 0)
    probe = folder / ".direct-probe"
    probe.write_bytes(bytes(DIRECT_ALIGNMENT))
    try:
        os.close(os.open(probe, os.O_RDONLY | flag))
    except OSError:
        return 0
    else:
        return flag
    finally:
        probe.unlink()
