"""``kvstore ls``: what a store holds."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvstore.cli.declare import Subparsers, add_command
from kvstore.cli.root import add_root, catalog_of
from kvstore.cli.text import plural, printable, say, say_json, size, table
from kvstore.errors import FormatError

if TYPE_CHECKING:
    from kvstore.catalog import Catalog, Found, Quarantined

_JSON = """\
With --json, one object:
  root           as given
  namespaces     without NAMESPACE: [{name, model, revision, created, groups: [{name, attention,
                 element, extents, tokens, bytes}], extents, tokens, bytes, damaged, problem}];
                 problem is null, or why the namespace's record is not valid
  extents        with NAMESPACE: [{namespace, group, key, path, start_block, blocks, tokens, bytes,
                 created, config, problem}]; problem is null, or why the record is not valid
  quarantined    [{namespace, group, key, path, reason}]
"path" is below the root. "bytes" are of the shards, checksums and padding included. "tokens" of a
namespace are those of the layer group that holds most. "damaged" counts extents whose records are
not valid; only `kvstore verify` reads the shards.
"""


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "ls",
        summary="list namespaces, or the extents of one",
        description="List the namespaces of a store, or the extents of one namespace.",
        fields=_JSON,
    )
    add_root(parser)
    parser.add_argument(
        "namespace", metavar="NAMESPACE", nargs="?", help="its name, or the start of it"
    )
    parser.add_argument(
        "-q",
        "--quarantine",
        action="store_true",
        help="list the extents in quarantine, with reasons",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List.

    Returns:
        0, also where a record is damaged: the listing says so.
    """
    with catalog_of(args.root) as catalog:
        name = None if args.namespace is None else catalog.resolve_namespace(args.namespace)
        held = list(catalog.quarantined(name))
        out: dict[str, Any] = {"root": args.root}
        if args.quarantine and not args.json:
            _say_quarantine(held)
            return 0
        if name is None:
            found = [_namespace(catalog, n) for n in catalog.namespaces()]
            out["namespaces"] = found
        else:
            extents = catalog.extents(catalog.namespace(name).identity)
            found = [_extent(f) for f in extents]
            out["extents"] = found
        if args.json:
            say_json({**out, "quarantined": [_quarantined(q) for q in held]})
            return 0
    if name is None:
        _say_namespaces(args.root, found)
    else:
        _say_extents(name, found)
    if held:
        say()
        verb = "is" if len(held) == 1 else "are"
        say(f"{plural(len(held), 'extent')} {verb} in quarantine; see kvstore ls --quarantine")
    return 0


def _namespace(catalog: Catalog, name: str) -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(("model", "revision", "created"))
    out = {"name": name, **empty, "groups": [], "extents": 0, "tokens": 0, "bytes": 0, "damaged": 0}
    try:
        record = catalog.namespace(name)
    except FormatError as error:
        return {**out, "problem": str(error)}
    identity = record.identity
    counts: dict[str, Counter[str]] = {g.name: Counter() for g in identity.groups}
    for found in catalog.extents(identity):
        counts[found.group.name] += Counter(
            extents=1,
            tokens=found.tokens,
            bytes=found.nbytes,
            damaged=int(found.record is None),
        )
    groups = [
        {
            "name": g.name,
            "attention": g.attention,
            "element": "+".join(dict.fromkeys(p.element.name for p in g.parts)),
            **{field: counts[g.name][field] for field in ("extents", "tokens", "bytes")},
        }
        for g in identity.groups
    ]
    fields = ("extents", "tokens", "bytes", "damaged")
    totals = {field: sum(c[field] for c in counts.values()) for field in fields}
    # Every group caches the same tokens, for its own layers.
    totals["tokens"] = max(c["tokens"] for c in counts.values())
    given = {"model": identity.model, "revision": identity.revision, "created": record.created}
    return {**out, **given, "groups": groups, **totals, "problem": None}


def _extent(found: Found) -> dict[str, Any]:
    record = found.record
    return {
        "namespace": found.namespace,
        "group": found.group.name,
        "key": found.key,
        "path": found.path,
        "start_block": None if record is None else record.start_block,
        "blocks": None if record is None else len(record.blocks),
        "tokens": found.tokens,
        "bytes": found.nbytes,
        "created": None if record is None else record.created,
        "config": None if record is None else record.writer.config,
        "problem": found.problem,
    }


def _quarantined(item: Quarantined) -> dict[str, str]:
    names = ("namespace", "group", "key", "path", "reason")
    return {name: getattr(item, name) for name in names}


def _say_namespaces(root: str, found: list[dict[str, Any]]) -> None:
    if not found:
        say(f"{root} is a store without namespaces")
        return
    rows = [
        [
            f"{n['extents']:,}",
            f"{n['tokens']:,}",
            size(n["bytes"]),
            " ".join(f"{g['name']}:{g['element']}" for g in n["groups"]),
            n["model"] or "(damaged record)",
            n["name"],
        ]
        for n in found
    ]
    heads = ("EXTENTS", "TOKENS", "SIZE", "GROUPS", "MODEL", "NAMESPACE")
    for line in table(heads, rows, ">>><<<"):
        say(line)
    for n in found:
        if n["problem"]:
            say(f"damaged: {printable(n['problem'])}")
        elif n["damaged"]:
            say(f"{plural(n['damaged'], 'damaged record')} in {n['name']}; see kvstore verify")


def _say_extents(name: str, found: list[dict[str, Any]]) -> None:
    if not found:
        say(f"{name} holds no extents")
        return
    found = sorted(found, key=lambda e: (e["group"], e["start_block"] or 0, e["key"]))
    rows = [
        [
            e["group"],
            e["key"][:16],
            *(
                ("-", "-", "-", "-", "-", "(damaged record)")
                if e["problem"]
                else (
                    f"{e['start_block']:,}",
                    f"{e['blocks']:,}",
                    f"{e['tokens']:,}",
                    size(e["bytes"]),
                    e["created"],
                    e["config"],
                )
            ),
        ]
        for e in found
    ]
    heads = ("GROUP", "KEY", "FROM BLOCK", "BLOCKS", "TOKENS", "SIZE", "CREATED", "WRITTEN BY")
    for line in table(heads, rows, "<<>>>><<"):
        say(line)
    whole = [e for e in found if not e["problem"]]
    total = size(sum(e["bytes"] for e in whole))
    tokens = sum(e["tokens"] for e in whole)
    say(f"{plural(len(found), 'extent')}, {plural(tokens, 'token')}, {total}")


def _say_quarantine(held: list[Quarantined]) -> None:
    if not held:
        say("nothing is in quarantine")
    for item in held:
        say(f"{item.namespace}/{item.group}/{item.key}")
        say(f"  why    {printable(item.reason)}")
        say(f"  where  {item.path}")
