"""The errors of kvstore, grouped by what a handler would do.

========================  =====================================================================
class                     what the caller does
========================  =====================================================================
:class:`InvalidArgument`  fix the call: nothing was read or written
:class:`NotFound`         create it, or treat it as a miss
:class:`FormatError`      treat it as a miss; the bytes are not what the specification allows
:class:`StorageError`     look at the medium (space, permissions, hardware), then try again
========================  =====================================================================
"""

from __future__ import annotations

from collections.abc import Mapping


class KVStoreError(Exception):
    """Root of every error that kvstore raises on purpose."""


class InvalidArgument(KVStoreError, ValueError):
    """The call itself is wrong; nothing was read or written."""


class NotCertified(InvalidArgument):
    """A parallel config or page layout that cannot be mapped onto canonical pages safely.

    Attributes:
        reason: why, in one sentence, without the names of the config.
    """

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason


class GeometryMismatch(InvalidArgument):
    """A namespace was opened with an identity other than the one it was made with.

    Attributes:
        fields: dotted field name -> (stored value, given value), for every field that differs.
    """

    def __init__(
        self, message: str, fields: Mapping[str, tuple[object, object]] | None = None
    ) -> None:
        # A default, because copying an exception calls its class with the message alone.
        super().__init__(message)
        self.fields = dict(fields or {})


class NotFound(KVStoreError, LookupError):
    """No such store, namespace, layer group or extent."""


class FormatError(KVStoreError):
    """Bytes read from storage are not valid under the format specification."""


class UnsupportedVersion(FormatError):
    """A newer major version, or a must-understand feature that this release does not know."""


class Corrupt(FormatError):
    """Damage: a checksum that does not match, a short object, an index out of range."""


class StorageError(KVStoreError, OSError):
    """The medium failed: no space, no permission, read-only, an I/O error, a deadline passed."""


def require_kind(what: str, value: object, kinds: type | tuple[type, ...], give: str) -> None:
    """Refuse an argument of the wrong kind by name, before something deeper trips over it.

    Args:
        what: name of the argument.
        value: what was given for it.
        kinds: what it may be an instance of.
        give: what to give, for the message.

    Raises:
        InvalidArgument: it is none of these.
    """
    if not isinstance(value, kinds):
        raise InvalidArgument(f"{what} is {value!r:.80}; give {give}")
