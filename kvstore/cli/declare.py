"""Declaring a command."""

from __future__ import annotations

import argparse
import textwrap

Subparsers = argparse._SubParsersAction  # noqa: SLF001 - argparse has no public name for it


def add_command(
    subparsers: Subparsers[argparse.ArgumentParser],
    name: str,
    *,
    summary: str,
    description: str,
    fields: str,
) -> argparse.ArgumentParser:
    """Declare a command that prints data, with ``--json``.

    Args:
        subparsers: of the main parser.
        name: the command's.
        summary: one line for ``kvstore --help``.
        description: what it does, in full.
        fields: what ``--json`` prints, laid out.
    """
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, 79),
        epilog=fields,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON; fields below")
    return parser
