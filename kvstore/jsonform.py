"""JSON as the format uses it: one canonical form to hash, and a strict way to read it back.

Strict means: UTF-8, no duplicate names, no floats, nothing beyond 64-bit integers, and a bounded
depth. A record that leans on a parser's leniency would mean different things to different readers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from kvstore.errors import Corrupt, FormatError

MAX_RECORD_BYTES = 16 << 20
"""Largest ``zarr.json`` that a reader accepts."""

MAX_DEPTH = 32
"""Deepest nesting of objects and arrays; the format's own records have about eight levels."""


def canonical(value: object) -> bytes:
    """The canonical bytes of a JSON value: sorted names, no spaces, ASCII escapes."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def pretty(value: object) -> bytes:
    """The form in which records are stored: indented, because people read them."""
    return (json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")


def compact(value: object) -> bytes:
    """The form in which commit records are stored: there are many, and each load reads some."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode(
        "ascii"
    )


def parse(data: bytes, what: str) -> dict[str, Any]:
    """Read one JSON object strictly.

    Args:
        data: the stored bytes.
        what: what they are, for messages.

    Raises:
        Corrupt: not JSON (cut short, not UTF-8).
        FormatError: JSON that the format does not allow.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise FormatError(f"{what}: {len(data)} bytes; a record has at most {MAX_RECORD_BYTES}")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=_no_float,
            parse_int=_small_int,
            parse_constant=_no_float,
        )
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{what}: not a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise FormatError(f"{what}: a JSON {type(value).__name__} where an object belongs")
    _check_depth(value, what)
    if b"\\u" in data:
        _check_unicode(value, what)
    return value


def _check_depth(value: object, what: str) -> None:
    # Level by level: a check that recursed would meet the very limit it guards.
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)  # type: ignore[attr-defined]  # a list
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise FormatError(f"{what}: nested more than {MAX_DEPTH} levels deep")


def _check_unicode(value: object, what: str) -> None:
    """Half of an escaped surrogate pair is no character: other readers refuse it, so all do."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError(f"{what}: a string holds half of a surrogate pair") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise FormatError("a name appears twice in one object")
    return out


def _no_float(text: str) -> float:
    raise FormatError(f"the number {text} is not an integer")


def _small_int(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (value := int(text)) < 1 << 64:
        raise FormatError(f"the number {text[:24]} does not fit 64 bits")
    return value


class Fields:
    """Typed access to a parsed object: a miss or a wrong type is a clear :class:`FormatError`."""

    __slots__ = ("_map", "what")

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, Mapping):
            raise FormatError(f"{what}: a {type(value).__name__} where an object belongs")
        self._map = value
        self.what = what

    def _get(self, name: str) -> object:
        if name not in self._map:
            raise FormatError(f"{self.what}: the field {name!r} is missing")
        value: object = self._map[name]
        return value

    def value(self, name: str) -> object:
        """A field as it was parsed.

        Raises:
            FormatError: it is missing; so for every other method.
        """
        return self._get(name)

    def _wrong(self, name: str, wanted: str) -> FormatError:
        return FormatError(f"{self.what}: {name!r} is {self._map[name]!r:.80}, not {wanted}")

    def names(self) -> list[str]:
        """Names of all fields."""
        return [str(name) for name in self._map]

    def has(self, name: str) -> bool:
        """Whether a field is there."""
        return name in self._map

    def integer(self, name: str, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``."""
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(name, f"a whole number from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number, or null."""
        return None if self._get(name) is None else self.integer(name, low, high)

    def text(self, name: str, limit: int = 4096) -> str:
        """A string of at most ``limit`` characters."""
        value = self._get(name)
        if not isinstance(value, str) or len(value) > limit:
            raise self._wrong(name, f"a string of at most {limit} characters")
        return value

    def optional_text(self, name: str, limit: int = 4096) -> str | None:
        """A string, or null."""
        return None if self._get(name) is None else self.text(name, limit)

    def boolean(self, name: str) -> bool:
        """True or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def array(self, name: str, limit: int) -> list[Any]:
        """An array of at most ``limit`` items."""
        value = self._get(name)
        if not isinstance(value, list) or len(value) > limit:
            raise self._wrong(name, f"an array of at most {limit} items")
        return value

    def fields(self, name: str) -> Fields:
        """A nested object."""
        return Fields(self._get(name), f"{self.what}, {name!r}")

    def hex_bytes(self, name: str, low: int, high: int) -> bytes:
        """Lower-case hex of ``low`` to ``high`` bytes."""
        return hex_bytes(self._get(name), low, high, f"{self.what}, {name!r}")

    def exactly(self, name: str, wanted: object) -> None:
        """The field must be there and equal to ``wanted``, type and all."""
        value = self._get(name)
        if value != wanted or type(value) is not type(wanted):
            raise self._wrong(name, repr(wanted))


def hex_bytes(value: object, low: int, high: int, what: str) -> bytes:
    """Lower-case hex text as bytes.

    Raises:
        FormatError: other characters, or fewer than ``low`` or more than ``high`` bytes.
    """
    if isinstance(value, str) and low * 2 <= len(value) <= high * 2:
        with contextlib.suppress(ValueError):
            found = bytes.fromhex(value)
            if found.hex() == value:  # fromhex takes capitals and spaces too
                return found
    raise FormatError(f"{what}: {value!r:.80} is not lower-case hex of {low} to {high} bytes")
