"""kvstore: an on-disk, canonical KV-cache store for LLM inference engines.

An engine saves the KV cache of a prompt once, in canonical pages that know nothing of any parallel
config. Any engine under any config loads exactly its share, straight into its paged buffers. The
format is laid down in ``spec/`` and is plain Zarr v3.

Importing this package imports neither torch nor zarr nor NumPy: what needs them imports them when
it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvstore.version import __version__

if TYPE_CHECKING:
    from kvstore.array import LazyArray, open_array
    from kvstore.buffers import PagedBuffers
    from kvstore.detect import detect_buffers
    from kvstore.errors import (
        Corrupt,
        FormatError,
        GeometryMismatch,
        InvalidArgument,
        KVStoreError,
        NotCertified,
        NotFound,
        StorageError,
        UnsupportedVersion,
    )
    from kvstore.faults import Fault
    from kvstore.geometry import ContentPart, LayerGroup
    from kvstore.identity import Identity
    from kvstore.keys import BlockKeys, KeyScheme
    from kvstore.lookup import Match
    from kvstore.namespace import ExtentInfo, Namespace
    from kvstore.parallel import ParallelConfig, Rank
    from kvstore.report import CommitReport, LoadResult, Missing, StoreReport
    from kvstore.share import Share
    from kvstore.store import Store
    from kvstore.store import open_store as open  # noqa: A004 - kvstore.open reads as it should
    from kvstore.worker import Worker

__all__ = [
    "BlockKeys",
    "CommitReport",
    "ContentPart",
    "Corrupt",
    "ExtentInfo",
    "Fault",
    "FormatError",
    "GeometryMismatch",
    "Identity",
    "InvalidArgument",
    "KVStoreError",
    "KeyScheme",
    "LayerGroup",
    "LazyArray",
    "LoadResult",
    "Match",
    "Missing",
    "Namespace",
    "NotCertified",
    "NotFound",
    "PagedBuffers",
    "ParallelConfig",
    "Rank",
    "Share",
    "StorageError",
    "Store",
    "StoreReport",
    "UnsupportedVersion",
    "Worker",
    "__version__",
    "detect_buffers",
    "open",
    "open_array",
]

_HOME = {
    name: home
    for home, names in {
        "array": "LazyArray open_array",
        "buffers": "PagedBuffers",
        "detect": "detect_buffers",
        "errors": "Corrupt FormatError GeometryMismatch InvalidArgument KVStoreError NotCertified "
        "NotFound StorageError UnsupportedVersion",
        "faults": "Fault",
        "geometry": "ContentPart LayerGroup",
        "identity": "Identity",
        "keys": "BlockKeys KeyScheme",
        "lookup": "Match",
        "namespace": "ExtentInfo Namespace",
        "parallel": "ParallelConfig Rank",
        "report": "CommitReport LoadResult Missing StoreReport",
        "share": "Share",
        "store": "Store open",
        "worker": "Worker",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """A public name, from the module that it lives in, which is imported when first asked for.

    So ``kvstore --help`` and ``kvstore ls`` answer at once.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME[name]}")
    value = getattr(module, "open_store" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
