"""Changes to the tiny store, from which the spoilt and varied vectors are made.

A change is one of the operations that spec/vectors/README.md lists.
"""

from __future__ import annotations

from typing import Any

from vector_stores import Files, Json, tiny

Vector = dict[str, Any]
FILES: Files = tiny().files
FOUND = tiny().expected[0]
NAMESPACE, KEY = str(FOUND["namespace"]), str(FOUND["key"])
EXTENT = f"{NAMESPACE}/kv/{KEY[:2]}/{KEY}"
RECORD, SHARD = f"{EXTENT}/zarr.json", f"{EXTENT}/c.0.0.0.0.0"
CHUNK, STRIDE, COUNT = 32, 36, 2
INDEX = STRIDE * COUNT


def replace(path: str, old: str, new: str) -> Json:
    """Replace the text, which occurs once."""
    if FILES[path].decode().count(old) != 1:
        raise ValueError(f"{old!r} is in {path} {FILES[path].decode().count(old)} times, not once")
    return {"op": "replace", "path": path, "from": old, "to": new}


def write(path: str, text: str | bytes) -> Json:
    """Write a whole file."""
    return {"op": "write", "path": path, "text": text if isinstance(text, str) else text.decode()}


def splice(path: str, at: int, data: bytes) -> Json:
    """Overwrite bytes."""
    return {"op": "splice", "path": path, "at": at, "hex": data.hex()}


def bad(name: str, rule: str, at: str, *changes: Json, error: str = "FormatError") -> Vector:
    """A vector that must be refused."""
    return {
        "name": name,
        "base": "tiny",
        "rule": rule,
        "error": error,
        "at": at,
        "changes": changes,
    }


def corrupt(name: str, rule: str, at: str, *changes: Json) -> Vector:
    """A vector that must be refused as damage."""
    return bad(name, rule, at, *changes, error="Corrupt")
