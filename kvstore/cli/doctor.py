"""``kvstore doctor``: what this machine and a folder can do for a store."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstore.cli.declare import Subparsers, add_command
from kvstore.cli.text import printable, say, say_json

if TYPE_CHECKING:
    from kvstore.cli.findings import Check

_JSON = """\
With --json, one object:
  directory  as given
  ready      whether a store can work there
  engine     {name, reason}: the I/O engine that a store there would use, and why
  checks     [{name, state, detail, advice}]; state is ok, lacking (a store works, with less),
             failed (no store can work there) or info; advice is null or what to do. Names:
             python kernel cores memory native filesystem space writable publish links sync
             direct cachestat torch gpu cufile gpudirect kvikio
"""
_MARKS = {"ok": "ok", "lacking": "--", "failed": "FAILED", "info": ""}


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "doctor",
        summary="what this machine and a folder can do, and what to do about it",
        description="Try, in a folder with or without a store, what a store needs and what makes "
        "it fast; look at the machine and its software. Leaves nothing behind. Takes seconds: "
        "torch and kvikio are imported in processes of their own, so that a broken driver hurts "
        "nobody. Exit status 1 means that no store can work there.",
        fields=_JSON,
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="default: here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine.

    Returns:
        0; 1 when no store can work in that folder.
    """
    from kvstore.cli.probes import examine

    report = examine(args.directory)
    if args.json:
        out: dict[str, Any] = {"directory": args.directory, "ready": report.ready}
        engine = {"name": report.engine, "reason": report.reason}
        say_json({**out, "engine": engine, "checks": [asdict(c) for c in report.checks]})
    else:
        _say(report.checks)
        say()
        say(f"I/O engine: {report.engine}. {report.reason}")
        if not report.ready:
            say("No store can work here.")
    return 0 if report.ready else 1


def _say(checks: list[Check]) -> None:
    names = max(len(c.name) for c in checks)
    marks = max(map(len, _MARKS.values()))
    for check in checks:
        mark = _MARKS[check.state]
        say(f"{mark:<{marks}}  {check.name:<{names}}  {printable(check.detail)}")
        if check.advice is not None:
            say(f"{'':<{marks + names + 4}}-> {printable(check.advice)}")
