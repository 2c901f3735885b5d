"""``kvstore rm``: remove extents, or a whole namespace."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kvstore.cli.declare import Subparsers, add_command
from kvstore.cli.root import add_root, catalog_of
from kvstore.cli.text import plural, say, say_json, size
from kvstore.errors import FormatError, InvalidArgument, NotFound

if TYPE_CHECKING:
    from kvstore.catalog import Catalog, Found

_JSON = """\
With --json, one object:
  root, namespace  as found
  dry_run          whether nothing was done
  whole            whether the namespace goes with all that is in it
  extents          [{group, key, bytes}], what is removed
  removed          how many of them were removed: others may have been gone already
"""


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "rm",
        summary="remove extents, or a whole namespace",
        description="Remove extents, or with --all a whole namespace, with what is in flight, in "
        "quarantine and hinted at. Each vanishes at once, for everyone. Stop the engines that use "
        "a namespace before you remove it. Asks first, on a terminal; elsewhere it needs --yes.",
        fields=_JSON,
    )
    add_root(parser)
    parser.add_argument("namespace", metavar="NAMESPACE", help="its name, or the start of it")
    parser.add_argument("extents", metavar="EXTENT", nargs="*", help="keys, or the starts of some")
    parser.add_argument("--all", action="store_true", help="the whole namespace")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "-n", "--dry-run", action="store_true", help="say what would be removed, remove nothing"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Remove.

    Returns:
        0; 1 when the answer was no.
    """
    if bool(args.extents) == args.all:
        raise InvalidArgument("name the extents to remove, or give --all for the whole namespace")
    with catalog_of(args.root) as catalog:
        name, found = _chosen(catalog, args)
    what = plural(len(found), "extent") + f" ({size(sum(f.nbytes for f in found))})"
    whole = f"namespace {name} with {what}" if args.all else f"{what} of {name}"
    removed = 0
    if not args.dry_run:
        if not _agreed(whole, args):
            return 1
        removed = _remove(args, name, found)
    if args.json:
        _say_json(args, name, found, removed)
    elif args.dry_run:
        say(f"would remove {whole}")
        for f in found:
            say(f"  {f.group.name}/{f.key}  {size(f.nbytes)}")
    else:
        say(f"removed {whole}")
    return 0


def _chosen(catalog: Catalog, args: argparse.Namespace) -> tuple[str, list[Found]]:
    if not args.all:
        name = catalog.resolve_namespace(args.namespace)
        found = {f.path: f for f in (catalog.resolve_extent(name, e) for e in args.extents)}
        return name, list(found.values())
    try:
        name = catalog.resolve_namespace(args.namespace)
        return name, list(catalog.extents(catalog.namespace(name).identity))
    except (FormatError, NotFound):
        from kvstore.paths import is_namespace

        # Its record is damaged or gone: its whole name is enough to remove it.
        if not is_namespace(args.namespace):
            raise
        return args.namespace, []


def _agreed(whole: str, args: argparse.Namespace) -> bool:
    if args.yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidArgument(f"would remove {whole}; say --yes where nobody can be asked")
    sys.stderr.write(f"Remove {whole}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(args: argparse.Namespace, name: str, found: list[Found]) -> int:
    from kvstore.store import open_store

    with open_store(args.root, create=False) as store:
        if args.all:
            if not store.remove_namespace(name):
                raise NotFound(f"there is no namespace {name} in {args.root}")
            return len(found)
        namespace = store.open_namespace(name)
        return sum(namespace.remove(f.key, group=f.group.name) for f in found)


def _say_json(args: argparse.Namespace, name: str, found: list[Found], removed: int) -> None:
    out: dict[str, Any] = {
        "root": args.root,
        "namespace": name,
        "dry_run": args.dry_run,
        "whole": args.all,
        "extents": [{"group": f.group.name, "key": f.key, "bytes": f.nbytes} for f in found],
        "removed": removed,
    }
    say_json(out)
