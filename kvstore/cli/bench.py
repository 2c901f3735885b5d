"""``kvstore bench``: measure this machine, this library and its peers, as ratios in one run."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]iB|)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes out of ``2GiB``, ``512MiB`` or a plain number.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _rounds(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds from 1 to 1000")
    return value


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure this library, its peers and the machine's limits",
        description="Load, store and look up on this machine, next to raw limits and other "
        "software, in interleaved rounds; print medians of ratios. Takes minutes, needs 7 times "
        "--size on disk, and removes all it wrote. Exit status 1 means that some bytes came out "
        "wrong; timing never fails.",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(),
        help="folder on the file system to measure (default: the current one)",
    )
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="KV bytes (default 1GiB)")
    parser.add_argument("--rounds", type=_rounds, default=7, help="rounds of each section")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the smallest run that has every row: checks the bytes, its figures mean nothing",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    parser.add_argument(
        "--vllm-fs-io",
        type=Path,
        metavar="FILE",
        help="vLLM's fs_io_C extension, to compare with where vllm is not installed",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark.

    Returns:
        0; or 1 when some contender's bytes differ from the source.
    """
    from rich.console import Console

    from kvstore.bench.report import print_report
    from kvstore.bench.suite import Settings, run_suite, to_json

    settings = Settings(args.dir, args.size, args.rounds, vllm_fs_io=args.vllm_fs_io)
    if args.quick:
        settings = settings.smallest()
    with Console(file=sys.stderr).status("starting") as status:
        outcome = run_suite(settings, status.update)
    print_report(outcome, Console())
    if args.json is not None:
        args.json.write_text(json.dumps(to_json(outcome), indent=1) + "\n")
    return 0 if outcome.correct else 1
