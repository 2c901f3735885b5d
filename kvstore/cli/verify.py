"""``kvstore verify``: every fault of a store, a namespace or an extent."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvstore.cli.declare import Subparsers, add_command
from kvstore.cli.root import add_root, read_only_engine
from kvstore.cli.text import plural, printable, say, say_json, size
from kvstore.errors import FormatError, NotFound

if TYPE_CHECKING:
    from kvstore.faults import Fault
    from kvstore.io.protocol import Engine
    from kvstore.verify import Progress

_JSON = """\
With --json, one object:
  root    as given
  ok      whether there are no faults
  bytes   bytes of shards that were checked
  faults  [{path, kind, message}], path relative to ROOT
  notes   the same: worth knowing, nothing wrong
"""


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "verify",
        summary="check every name, record and byte",
        description="Check a whole store, a namespace or an extent, and report every fault. "
        "Changes nothing. Exit status 1 means that there are faults.",
        fields=_JSON + _kinds(),
    )
    add_root(parser)
    parser.add_argument("namespace", metavar="NAMESPACE", nargs="?", help="only this one")
    parser.add_argument("extent", metavar="EXTENT", nargs="?", help="only the extent of this key")
    parser.set_defaults(run=run)


def _kinds() -> str:
    from kvstore.faults import FAULTS, NOTES

    out = ["\nKinds of faults:"]
    out += [f"  {kind:<12} {what}" for kind, what in FAULTS.items()]
    out += ["Kinds of notes:"]
    out += [f"  {kind:<12} {what}" for kind, what in NOTES.items()]
    return "\n".join(out)


def run(args: argparse.Namespace) -> int:
    """Verify.

    Returns:
        0; 1 when there are faults.
    """
    from kvstore.verify import verify_store

    faults: list[Fault] = []
    notes: list[Fault] = []
    checked = 0
    with read_only_engine(args.root) as engine, _progress(shown=not args.json) as show:
        namespace, key = _resolve(engine, args.namespace, args.extent)

        def progress(done: int, total: int) -> None:
            nonlocal checked
            checked = done
            show(done, total)

        for fault in verify_store(engine, namespace=namespace, key=key, progress=progress):
            (notes if fault.is_note else faults).append(fault)
            if not args.json:
                _say_fault(fault)
    if args.json:
        out: dict[str, Any] = {"root": args.root, "ok": not faults, "bytes": checked}
        say_json({**out, "faults": _items(faults), "notes": _items(notes)})
    else:
        outcome = plural(len(faults), "fault") if faults else "no faults"
        extra = f", {plural(len(notes), 'note')}" if notes else ""
        say(f"{outcome}{extra}; {size(checked)} checked")
    return 1 if faults else 0


def _resolve(
    engine: Engine, namespace: str | None, extent: str | None
) -> tuple[str | None, str | None]:
    """Names out of the starts of names, as far as records allow."""
    from kvstore.catalog import Catalog
    from kvstore.paths import is_key, is_namespace

    if namespace is None:
        return None, None
    try:
        catalog = Catalog(engine)
        name = catalog.resolve_namespace(namespace)
        return name, None if extent is None else catalog.resolve_extent(name, extent).key
    except (FormatError, NotFound):
        # A damaged record must not keep it from being verified: whole names need no record.
        if not is_namespace(namespace) or (extent is not None and not is_key(extent)):
            raise
        return namespace, extent


def _items(faults: list[Fault]) -> list[dict[str, str]]:
    return [{"path": f.path, "kind": f.kind, "message": f.message} for f in faults]


def _say_fault(fault: Fault) -> None:
    say(f"{'note ' if fault.is_note else 'FAULT'}  {fault.kind}  {printable(fault.path) or '.'}")
    say(f"       {printable(fault.message)}")


@contextmanager
def _progress(*, shown: bool) -> Iterator[Progress]:
    """A bar on a terminal, nothing elsewhere."""
    if not (shown and sys.stderr.isatty()):
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    # Lines that are written meanwhile go above the bar.
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()
    ) as bar:
        task = bar.add_task("verify", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
