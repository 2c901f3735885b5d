"""Operating-system errors as kvstore errors: the thing, the cause, the remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import KVStoreError, NotFound, StorageError

_REMEDY = {
    errno.ENOSPC: "free space on that file system",
    errno.EDQUOT: "free space under that quota, or raise it",
    errno.EROFS: "mount it writable, or open the store with read_only=True",
    errno.EACCES: "give this user access to that folder, or run as its owner",
    errno.EPERM: "give this user access to that folder, or run as its owner",
    errno.EIO: "look at the kernel log and the health of that disk",
    errno.ELOOP: "a symbolic link stands where the store keeps its own; remove the link",
    errno.EMFILE: "raise the limit of open files of this process (ulimit -n)",
    errno.ENFILE: "raise the limit of open files of this machine (fs.file-max)",
    errno.ESTALE: "the network file system lost that file; try again, or mount it anew",
    errno.ENOTDIR: "a file stands where the store needs a folder; move it away",
    errno.EISDIR: "a folder stands where the store needs a file; move it away",
    errno.EXDEV: "keep the whole store on one file system",
    errno.ENAMETOOLONG: "put the store under a shorter path",
    errno.EBUSY: "another program holds it (a mount point?); release it",
}


def translate(error: OSError, action: str, path: str) -> NotFound | StorageError:
    """What to raise for an :class:`OSError`.

    Args:
        error: what the operating system said.
        action: what was being done, as an infinitive: ``read``, ``write``.
        path: the file, as the user can find it.

    Returns:
        :class:`NotFound` for an absent name, else :class:`StorageError` with ``errno`` and
        ``filename`` set.
    """
    code = error.errno or errno.EIO
    if code == errno.ENOENT:
        return NotFound(f"cannot {action} {path}: there is no such file or folder")
    cause = error.strerror or os.strerror(code)
    remedy = _REMEDY.get(code, "look at the kernel log and at that file system")
    return StorageError(code, f"cannot {action}: {cause}; {remedy}", path)


@contextmanager
def translated(action: str, path: str) -> Iterator[None]:
    """Raise what :func:`translate` says for any :class:`OSError` of a ``with`` block."""
    try:
        yield
    except KVStoreError:
        raise  # a StorageError is an OSError too
    except OSError as error:
        raise translate(error, action, path) from error
