"""A digest of a model's weights, as identity: two fine-tunes of one name must not share a cache.

The whole content counts. Digests of files are kept in the user's cache folder, by the file's
identity, size and time of change, so that only the first start has to read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.errors import InvalidArgument, StorageError

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TAG = b"kvstore/weights/v1\0"
_HEX = re.compile(r"[0-9a-f]{64}")
_THREADS = 4


def weights_digest(model: str | Path) -> str:
    """SHA-256, as hex, of the weight files of a model or an adapter.

    Args:
        model: a weight file, or a folder with weight files in it or in its subfolders.

    Raises:
        InvalidArgument: there are no weights at that path. StorageError: one cannot be read.
    """
    root = Path(model)
    files = [root] if root.is_file() else _weight_files(root)
    if not files:
        raise InvalidArgument(
            f"there are no weights in {str(root)!r} (files that end in {', '.join(SUFFIXES)}); "
            "give the folder that the engine loads them from"
        )
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(_file_digest, files))
    whole = hashlib.sha256(_TAG)
    for file, digest in zip(files, digests, strict=True):
        name = "" if file == root else file.relative_to(root).as_posix()
        whole.update(f"{len(name.encode())} {name} {digest}\n".encode())
    return whole.hexdigest()


def _weight_files(root: Path) -> Sequence[Path]:
    if not root.is_dir():
        return ()
    # Hidden folders hold an editor's or a downloader's own copies.
    found = (p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    visible = (p for p in found if not any(x.startswith(".") for x in p.relative_to(root).parts))
    return sorted(visible, key=lambda p: p.relative_to(root).as_posix())


def _file_digest(file: Path) -> str:
    try:
        status = file.stat()
        identity = [str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]
        entry = _cache_folder() / hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        known = _cached(entry)
        if known is not None:
            return known
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(
            error.errno or 0, f"cannot read weights: {error}; check the model's path", str(file)
        ) from error
    _remember(entry, digest)
    return digest


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvstore" / "digests"


def _cached(entry: Path) -> str | None:
    try:
        text = entry.read_bytes()[:65].decode("ascii")
    except (OSError, ValueError):
        return None
    return text if _HEX.fullmatch(text) else None


def _remember(entry: Path, digest: str) -> None:
    # Whole or not at all, and no failure where there is no place for it.
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=entry.parent, prefix=".")
        with os.fdopen(handle, "w") as opened:
            opened.write(digest)
        Path(name).replace(entry)
