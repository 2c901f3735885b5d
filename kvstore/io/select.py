"""Which engine serves a location."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from kvstore.errors import InvalidArgument, NotFound, require_kind
from kvstore.io.oserrors import translated
from kvstore.io.posix import PosixEngine
from kvstore.io.protocol import Engine

# fsspec's form too: "simplecache::s3://bucket".
_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:://|::)")


def open_engine(
    location: str | os.PathLike[str],
    *,
    read_only: bool = False,
    create: bool = True,
    **options: object,
) -> Engine:
    """Open the engine that serves a location.

    Args:
        location: a path, or a ``file://`` URL.
        read_only: refuse every writing call; nothing is created.
        create: make the root when it is not there.
        options: of the engine, see :class:`~kvstore.io.posix.PosixEngine`.

    Raises:
        InvalidArgument: a protocol that no engine serves, or an option that the engine has not.
        NotFound: no such root, and it was not to be created.
        StorageError: the root cannot be made.
    """
    give = "the path of a folder, as text or a Path"
    require_kind("location", location, (str, os.PathLike), give)
    text = os.fspath(location)
    require_kind("location", text, str, give)
    if not text or "\0" in text:
        raise InvalidArgument(f"{text!r} is not a location; give the path of a folder")
    match = _PROTOCOL.match(text)
    protocol = match.group(1).lower() if match else ""
    opener = _ENGINES.get(protocol)
    if opener is None:
        raise InvalidArgument(
            f"{text}: this release serves local and shared file systems, not {protocol}; "
            f"give a path or a file:// URL"
        )
    return opener(text, read_only, create, options)


def _open_path(text: str, read_only: bool, create: bool, options: dict[str, object]) -> Engine:
    make = create and not read_only
    if os.path.exists(text) and not os.path.isdir(text):
        raise InvalidArgument(f"{text} is a file; a store needs a folder")
    if make:
        with translated("make the folder", text):
            os.makedirs(text, exist_ok=True)
    elif not os.path.isdir(text):
        hint = "open it writable once" if create else "use create=True, or correct the path"
        raise NotFound(f"there is no store at {text}: no such folder; {hint}")
    try:
        return PosixEngine(text, read_only=read_only, **options)  # type: ignore[arg-type]
    except TypeError as error:
        known = sorted(set(PosixEngine.__init__.__kwdefaults__ or {}) - {"read_only"})
        unknown = sorted(set(options) - set(known))
        if not unknown:
            raise
        raise InvalidArgument(
            f"the posix engine has no option {', '.join(unknown)}; it has {', '.join(known)}"
        ) from error


def _open_file_url(text: str, read_only: bool, create: bool, options: dict[str, object]) -> Engine:
    url = urlsplit(text)
    if url.netloc not in ("", "localhost") or not url.path or url.query or url.fragment:
        raise InvalidArgument(f"{text} does not name a local folder; write file:///absolute/path")
    return _open_path(unquote(url.path), read_only, create, options)


# One entry for each protocol; "" is a plain path. A further engine adds its protocols here, and its
# factory to tests/conformance.
_ENGINES: dict[str, Callable[[str, bool, bool, dict[str, object]], Engine]] = {
    "": _open_path,
    "file": _open_file_url,
}
