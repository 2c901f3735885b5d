"""Edits of stored records, for tests that damage a valid one in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Edit = Callable[[dict[str, Any]], object]


def put(path: str, value: object) -> Edit:
    """Set the field at a dotted path; numbers index arrays."""

    def edit(stored: Any) -> None:
        *folders, last = path.split(".")
        for name in folders:
            stored = stored[int(name)] if name.isdigit() else stored[name]
        stored[int(last) if last.isdigit() else last] = value

    return edit


def drop(path: str) -> Edit:
    """Remove the field or item at a dotted path."""

    def edit(stored: Any) -> None:
        *folders, last = path.split(".")
        for name in folders:
            stored = stored[int(name)] if name.isdigit() else stored[name]
        del stored[int(last) if last.isdigit() else last]

    return edit


def paths_of(value: Any, at: str = "") -> list[str]:
    """Dotted paths of all fields and items."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    out = []
    for name, child in items:
        out.append(f"{at}{name}")
        if isinstance(child, (dict, list)):
            out += paths_of(child, f"{at}{name}.")
    return out


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.sampled_from([0, 1, 4096, 1 << 30, "", "kv", "opaque", "int8", "00" * 32])
    | st.text(max_size=4),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3),
    max_leaves=4,
)
