"""Reading a range of a file into a sink, by ``native/pump.c``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from kvstore.native import Sink, library

PIECE_BYTES = 256 << 10
"""Bytes read at once: read, checked and copied, they stay in a core's own cache (half of a small
one's 512 KiB)."""


@cache
def pump() -> Callable[..., int] | None:
    """The C function; None where it was not built."""
    found = library()
    if found is None:
        return None
    function: Any = found.kvstore_pump
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.restype = number
    function.argtypes = (ctypes.c_int, number, number, pointer, number, pointer, pointer)
    typed: Callable[..., int] = function
    return typed


def pumped(fd: int, position: int, nbytes: int, staging: memoryview, piece: int, to: Sink) -> int:
    """Read a range and hand it to a sink; returns the bytes that the sink took.

    Fewer than ``nbytes`` mean that something is wrong with the next piece. The caller goes on from
    there in its own way, and finds out what.

    Args:
        fd: the file, not opened for direct I/O.
        position: where the range starts.
        nbytes: its length.
        staging: writable memory of ``piece`` bytes at least.
        piece: bytes to read at once.
        to: the sink.
    """
    function = pump()
    if function is None or piece < 1 or len(staging) < piece:
        return 0
    memory = ctypes.c_char.from_buffer(staging)
    return function(fd, position, nbytes, ctypes.addressof(memory), piece, to.function, to.context)
