"""Space for a whole file at once: one run of blocks on the disk, and a full disk known early."""

from __future__ import annotations

import ctypes
import errno
import os

# Not os.posix_fallocate: where the file system cannot do it, the C library imitates it by reading
# and writing back a byte of every block, which undoes what others wrote there in between.
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
if _fallocate is not None:
    _fallocate.restype = ctypes.c_int
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)


def allocate(fd: int, size: int) -> None:
    """Reserve ``size`` bytes for a file from its start; where that is not possible, do nothing.

    Bytes that are there already are kept, also those written meanwhile.

    Raises:
        OSError: no space, or over quota.
    """
    if _fallocate is None:
        return
    while _fallocate(fd, 0, 0, size):
        code = ctypes.get_errno()
        if code in _CANNOT:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
