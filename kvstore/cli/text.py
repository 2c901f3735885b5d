"""How the commands write: tables, sizes, and nothing that a terminal would obey."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def say(line: str = "") -> None:
    """Write a line to standard output."""
    sys.stdout.write(line + "\n")


def say_json(value: object) -> None:
    """Write a JSON document to standard output."""
    say(json.dumps(value, indent=2))


def printable(text: str) -> str:
    """Text out of a store on one line, its control characters shown instead of obeyed."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: int) -> str:
    """Bytes as people read them: ``1.5 MiB``."""
    value, unit = float(nbytes), 0
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{nbytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def plural(count: int, noun: str) -> str:
    """``1 extent``, ``2,000 extents``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> list[str]:
    """Lines of a table.

    Args:
        headings: one a column.
        rows: cells.
        right: for each column ``>`` (numbers) or ``<``; default all ``<``.
    """
    sides = right.ljust(len(headings), "<")
    cells = [list(headings), *[[printable(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in cells
    ]


def pairs(items: Sequence[tuple[str, str]], indent: str = "  ") -> list[str]:
    """Lines of names and values."""
    width = max((len(name) for name, _ in items), default=0)
    return [f"{indent}{name:<{width}}  {printable(value)}".rstrip() for name, value in items]
