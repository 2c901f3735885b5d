"""``kvstore``: the commands, and what an error of any of them looks like.

Exit status, for every command: 0 done and nothing found wrong; 1 faults were found, or something
failed; 2 the call was wrong, or what it names is not there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvstore.cli import bench, convert, demo, doctor, gc, ls, rm, show, verify
from kvstore.cli.text import printable
from kvstore.errors import InvalidArgument, KVStoreError, NotFound
from kvstore.version import __version__

COMMANDS = (ls, show, verify, rm, gc, convert, doctor, demo, bench)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Each sets ``run``, which takes the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="kvstore",
        description="Look into, check and clean up a KV-cache store; try it and measure it.",
        epilog="Exit status: 0 all well; 1 faults found, or something failed; 2 a wrong call, or "
        "nothing of that name.",
    )
    parser.add_argument("--version", action="version", version=f"kvstore {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None: this process's own.

    Returns:
        The exit status.
    """
    if hasattr(sys.stdout, "reconfigure"):
        # Names in a store are Unicode; a terminal that cannot show one must not stop the command.
        sys.stdout.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except KVStoreError as error:
        return _fail(args, error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough. The interpreter must not try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _fail(args, error)
    return status


def _fail(args: argparse.Namespace, error: Exception) -> int:
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        message = f"{error.strerror}{where}"
    sys.stderr.write(f"kvstore {args.command}: {printable(message)}\n")
    return 2 if isinstance(error, (InvalidArgument, NotFound)) else 1


if __name__ == "__main__":
    sys.exit(main())
