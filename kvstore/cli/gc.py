"""``kvstore gc``: free what dead writers, removals and damage left."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvstore.cli.declare import Subparsers, add_command
from kvstore.cli.root import add_root
from kvstore.cli.text import plural, printable, say, say_json, size

if TYPE_CHECKING:
    from kvstore.leavings import Leaving

_JSON = """\
With --json, one object:
  root     as given
  dry_run  whether nothing was done
  freed    [{path, kind, bytes, age}], path relative to ROOT, age in seconds
  bytes    of all of it
  failed   [{path, kind, bytes, age, error}], what could not be freed
"""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "gc",
        summary="free what dead writers, removals and damage left",
        description="Free what is of no use any more: extents whose writers died, old damaged "
        "extents, hints that lead nowhere, bytes that a removal did not get to. No stored extent "
        "is touched, and engines may run meanwhile. Durations are like 90s, 30m, 1h or 7d.",
        fields=_JSON + _kinds(),
    )
    add_root(parser)
    parser.add_argument(
        "--grace",
        metavar="DURATION",
        type=duration,
        default="1h",
        help="what is in flight must have been left alone for so long; longer than any store takes "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--quarantine",
        metavar="DURATION",
        type=duration,
        default="7d",
        help="damaged extents go after so long (default %(default)s)",
    )
    parser.add_argument(
        "-n", "--dry-run", action="store_true", help="say what would be freed, free nothing"
    )
    parser.set_defaults(run=run)


def duration(text: str) -> float:
    """Seconds of a duration that a person wrote.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write it like 90s, 30m, 1h, 7d")
    return float(match[1]) * _UNITS[match[2]]


def _kinds() -> str:
    from kvstore.leavings import KINDS

    return "\n".join(["\nKinds:", *(f"  {kind:<12} {what}" for kind, what in KINDS.items())])


def run(args: argparse.Namespace) -> int:
    """Collect.

    Returns:
        0; 1 when something could not be freed.
    """
    from kvstore.store import open_store

    with open_store(args.root, create=False, read_only=args.dry_run) as store:
        found = store.collect(grace=args.grace, quarantine=args.quarantine, dry_run=args.dry_run)
    freed = [leaving for leaving in found if leaving.error is None]
    failed = [leaving for leaving in found if leaving.error is not None]
    total = sum(leaving.nbytes for leaving in freed)
    if args.json:
        out = {"root": args.root, "dry_run": args.dry_run, "bytes": total}
        out["freed"] = [_entry(f) for f in freed]
        out["failed"] = [{**_entry(f), "error": f.error} for f in failed]
        say_json(out)
        return 1 if failed else 0
    for f in freed:
        say(printable(f"{f.kind:<11}  {size(f.nbytes):>10}  {f.path}"))
    for f in failed:
        sys.stderr.write(f"kvstore gc: {printable(str(f.error))}\n")
    counts = Counter(leaving.kind for leaving in freed)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
    verb = "would free" if args.dry_run else "freed"
    say(f"{verb} {plural(len(freed), 'thing')}, {size(total)}" + (f": {kinds}" if kinds else ""))
    return 1 if failed else 0


def _entry(leaving: Leaving) -> dict[str, Any]:
    return {
        "path": leaving.path,
        "kind": leaving.kind,
        "bytes": leaving.nbytes,
        "age": round(leaving.age, 3),
    }
