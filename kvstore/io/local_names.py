"""Names below one root folder, and what happens to them at once: rename, publish, discard.

Nothing outside the root is touched: a path that is absolute, empty, or has ``.``, ``..``, an empty
part or a NUL is refused before the file system sees it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat

from kvstore.errors import InvalidArgument, NotFound, StorageError
from kvstore.io.failpoints import reach
from kvstore.io.oserrors import translate

TEMPORARY = ".tmp-"
"""Prefix of a name that is still being written; such names are never listed."""

TRASH = "__kvstore__/trash"
"""Where a discarded folder waits for its bytes to be freed."""

_REFUSED = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|\0")
# Some file systems (FUSE, SMB) cannot sync a folder, and say so in one of these ways.
_CANNOT_SYNC_FOLDER = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


class LocalNames:
    """The name operations of one root.

    Attributes:
        root: the folder, absolute, without a final ``/``.
        durable: sync folders after their entries changed.
    """

    def __init__(self, root: str, *, durable: bool) -> None:
        self.root = root
        self.durable = durable
        self._prefix = root.rstrip("/") + "/"

    def full(self, path: str) -> str:
        """The path below the root as the file system wants it.

        Raises:
            InvalidArgument: the path could name something outside the root.
        """
        if _REFUSED.search(path):
            raise InvalidArgument(
                f"{path!r} is not a path below a store's root: use non-empty parts joined by '/', "
                f"none of them '.' or '..', without NUL"
            )
        return self._prefix + path

    def folder(self, path: str) -> str:
        """The same for a folder, where the empty path means the root itself."""
        return self.full(path) if path else self.root

    # -- looking ----------------------------------------------------------------------------------

    def size(self, path: str) -> int:
        """Bytes of a plain file."""
        full = self.full(path)
        try:
            status = os.lstat(full)
        except OSError as error:
            raise absent_or(error, "look at", full) from error
        if not stat.S_ISREG(status.st_mode):
            raise NotFound(f"{full} is not a plain file, so no object of a store")
        return status.st_size

    def list_dir(self, path: str) -> list[str]:
        """Names directly below a folder, sorted, without those still being written."""
        full = self.folder(path)
        try:
            names = os.listdir(full)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise translate(error, "list", full) from error
        return sorted(name for name in names if not name.startswith(TEMPORARY))

    # -- folders ----------------------------------------------------------------------------------

    def make_parents(self, full: str, *, settle: bool = True) -> None:
        """Make the folders that a file needs, up to the root, which must be there."""
        self._make_folder(os.path.dirname(full), settle=settle)

    def _make_folder(self, full: str, *, settle: bool) -> None:
        if len(full) < len(self._prefix):
            raise NotFound(
                f"{self.root} is gone: it was removed, or its file system is not mounted; "
                f"mount it, or open the store anew"
            )
        try:
            try:
                os.mkdir(full)
            except FileNotFoundError:
                self._make_folder(os.path.dirname(full), settle=settle)
                os.mkdir(full)
        except FileExistsError:
            return
        except OSError as error:
            raise translate(error, "make the folder", full) from error
        if settle:
            self.sync_folder(os.path.dirname(full))

    def sync_folder(self, full: str) -> None:
        """Make a folder's entries durable, if this engine is durable at all."""
        if not self.durable:
            return
        try:
            fd = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC_FOLDER:
                raise translate(error, "sync the folder", full) from error

    def sync(self, path: str) -> None:
        """Make a file's bytes, or a folder's entries, durable, if this engine is durable at all."""
        full = self.folder(path)
        if os.path.isdir(full):
            self.sync_folder(full)
        else:
            self.sync_file(full)

    def sync_file(self, full: str) -> None:
        """Make a file's bytes durable, if this engine is durable at all."""
        try:
            fd = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if self.durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise absent_or(error, "sync", full) from error

    # -- changes ----------------------------------------------------------------------------------

    def rename(self, source: str, target: str, *, settle: bool = True) -> None:
        """Give a file its final name; its bytes are durable first, its name after."""
        old, new = self.full(source), self.full(target)
        self.sync_file(old)
        reach("posix.rename.before_rename")
        try:
            try:
                os.rename(old, new)
            except FileNotFoundError:
                self.make_parents(new, settle=settle)
                os.rename(old, new)
        except OSError as error:
            raise absent_or(error, "rename", old) from error
        reach("posix.rename.after_rename")
        if settle:
            self._sync_parents(new, old)

    def link(self, source: str, target: str) -> bool:
        """Give a file a second name, unless that is taken. Not durable: it is for hints."""
        old, new = self.full(source), self.full(target)
        try:
            try:
                os.link(old, new, follow_symlinks=False)
            except FileNotFoundError:
                if not os.path.lexists(old):
                    raise
                os.makedirs(os.path.dirname(new), exist_ok=True)
                os.link(old, new, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            raise absent_or(error, "link", old) from error
        return True

    def publish(self, source: str, target: str) -> bool:
        """Move a finished folder to a name that no other one has. See ``Engine.publish``."""
        old, new = self.full(source), self.full(target)
        if self.durable and os.path.isdir(old):
            self.sync_folder(old)
        reach("posix.publish.before_rename")
        try:
            try:
                _rename_folder(old, new)
            except FileNotFoundError:
                if not os.path.lexists(old):
                    raise
                self.make_parents(new)
                _rename_folder(old, new)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return False
            raise translate(error, "publish", old) from error
        reach("posix.publish.after_rename")
        # Not the old parent: should its entry come back, it leads to a folder of no more use.
        self.sync_folder(os.path.dirname(new))
        return True

    def discard(self, path: str) -> bool:
        """Remove a file, or a folder with all in it. See ``Engine.discard``."""
        full = self.full(path)
        try:
            os.unlink(full)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            # Linux answers EISDIR for a folder, POSIX allows EPERM.
            folder = error.errno == errno.EISDIR or (
                error.errno == errno.EPERM and os.path.isdir(full) and not os.path.islink(full)
            )
            if not folder:
                raise translate(error, "remove", full) from error
        else:
            return True
        if path.startswith(f"{TRASH}/"):
            return _free(full)
        trash = self.full(f"{TRASH}/{os.urandom(8).hex()}")
        reach("posix.discard.before_rename")
        try:
            try:
                os.rename(full, trash)
            except FileNotFoundError:
                self.make_parents(trash, settle=False)
                os.rename(full, trash)
        except FileNotFoundError:
            return False  # another process was quicker
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise InvalidArgument(f"cannot discard {full}: the trash is inside it") from error
            raise translate(error, "remove", full) from error
        reach("posix.discard.after_rename")
        # It has vanished. What cannot be freed now is freed by a later collection.
        shutil.rmtree(trash, ignore_errors=True)
        return True

    def _sync_parents(self, new: str, old: str) -> None:
        """The new name first: losing the old one's removal costs nothing."""
        parent = os.path.dirname(new)
        self.sync_folder(parent)
        other = os.path.dirname(old)
        if other != parent:
            # Another process may have discarded the old folder, now that it is of no use.
            with contextlib.suppress(NotFound):
                self.sync_folder(other)


def absent_or(error: OSError, action: str, full: str) -> NotFound | StorageError:
    """Like :func:`translate`, for names that are looked up: below a plain file nothing exists."""
    if error.errno == errno.ENOTDIR:
        error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full)
    return translate(error, action, full)


def _rename_folder(old: str, new: str) -> None:
    # The final slash makes the kernel refuse anything but a folder: rename(2) of a plain file would
    # replace a plain file.
    os.rename(old + "/", new + "/")


def _free(full: str) -> bool:
    """Free the bytes of a folder that was discarded before."""
    try:
        shutil.rmtree(full)
    except FileNotFoundError:
        # Another process frees it too.
        shutil.rmtree(full, ignore_errors=True)
    except OSError as error:
        raise translate(error, "remove", full) from error
    return True
