"""A power failure: what a disk holds of a tree of which only what was synced has reached it.

The strictest reading of POSIX: a file has the bytes of its last ``fsync``, none before the first;
a folder has the names of its own last ``fsync``. Renames and links reach the disk only with the
folders that they touch.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Names = dict[str, tuple[int, bool]]
"""Name -> inode, and whether it is a folder."""

State = tuple[dict[int, Names], dict[int, bytes]]


@dataclass
class Disk:
    """Follows every ``fsync`` below a root."""

    root: Path
    folders: dict[int, Names] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)
    syncs: int = 0
    crashed: State | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def attach(self, patch: pytest.MonkeyPatch) -> None:
        """Listen to ``os.fsync``; what is below the root now is on the disk."""
        for folder, _, names in os.walk(self.root):
            self._keep_folder(folder)
            for name in names:
                path = Path(folder, name)
                self.files[path.stat().st_ino] = path.read_bytes()
        real = os.fsync

        def fsync(fd: int) -> None:
            real(fd)
            with self._lock:
                self.syncs += 1
                status = os.fstat(fd)
                if stat.S_ISDIR(status.st_mode):
                    self._keep_folder(f"/proc/self/fd/{fd}")
                else:
                    self.files[status.st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

        patch.setattr(os, "fsync", fsync)
        # Inodes stand for files here, so none may be freed and given to another file.
        patch.setattr(shutil, "rmtree", lambda *_args, **_options: None)

    def _keep_folder(self, path: str) -> None:
        with os.scandir(path) as entries:
            names = {e.name: (e.inode(), e.is_dir()) for e in entries}
        self.folders[Path(path).stat().st_ino] = names

    def cut(self) -> None:
        """The power goes: keep what the disk holds at this moment (the first time only)."""
        with self._lock:
            if self.crashed is None:
                self.crashed = ({i: dict(n) for i, n in self.folders.items()}, dict(self.files))

    def rebuild(self, target: Path) -> None:
        """Make the tree that comes up again after the power failure."""
        self.cut()
        assert self.crashed is not None
        folders, files = self.crashed

        def build(inode: int, at: Path) -> None:
            at.mkdir()
            for name, (child, is_folder) in folders.get(inode, {}).items():
                if is_folder:
                    build(child, at / name)
                else:
                    (at / name).write_bytes(files.get(child, b""))

        build(self.root.stat().st_ino, target)


def cutting(disk: Disk) -> Callable[[], None]:
    """An action for a failpoint: the power goes, and the process with it."""

    def act() -> None:
        disk.cut()
        raise PowerCut

    return act


class PowerCut(BaseException):
    """Ends the work in progress. No error of the store's: nothing may handle it."""
