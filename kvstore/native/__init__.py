"""The package's few C functions, where it was installed with a C compiler at hand.

They know nothing of Python and are called through ctypes, which lets the interpreter's lock go. For
each there is another way in Python, two or three times as slow, that is taken where they are not.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

SWITCH = "KVSTORE_NATIVE"
"""Environment variable: ``0`` leaves the C functions alone."""


class Sink(NamedTuple):
    """A C function that takes bytes as they are read; ``sink_t`` of ``native.h``.

    Attributes:
        function: its address.
        context: address of what it is called with.
        owner: what keeps both alive.
    """

    function: int
    context: int
    owner: object


@cache
def library() -> ctypes.CDLL | None:
    """The C functions; None where they were not built, or are not wanted."""
    if os.environ.get(SWITCH) == "0":
        return None
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_native" + suffix)
        if not path.is_file():
            continue
        try:
            found = ctypes.CDLL(str(path))
            for name in ("kvstore_move", "kvstore_pump", "kvstore_sink", "kvstore_sink_checked"):
                getattr(found, name)
        except (OSError, AttributeError):
            continue  # for another machine, or of another version
        return found
    return None
