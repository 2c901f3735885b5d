"""``kvstore show``: one extent or one namespace in full."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from kvstore.cli.declare import Subparsers, add_command
from kvstore.cli.root import add_root, read_only_engine
from kvstore.cli.text import pairs, plural, printable, say, say_json, size, table
from kvstore.errors import FormatError, KVStoreError

if TYPE_CHECKING:
    from kvstore.catalog import Catalog, Found
    from kvstore.extent import CommitRecord
    from kvstore.faults import Fault
    from kvstore.geometry import LayerGroup
    from kvstore.inspect import ValueStats
    from kvstore.io.protocol import Engine

_UNCHECKED = {"missing", "size", "unreadable"}
"""Faults of a shard after which its chunks are not looked at."""

_JSON = """\
With --json, of a namespace: the identity object of the format, and
  namespace, fingerprint, created
Of an extent:
  path, namespace, group, key, parent, start_block, blocks (keys), tokens, created, write_id,
  parallel_invariant, writer {software, config, session}
  array       {shape, dimensions, data_type, chunk_shape, shard_shape}
  parts       [{name, element, count}]
  shards      [{name, bytes, faults}], faults as those of `kvstore verify`
  checksums   {chunks, damaged, unchecked}: chunks of the extent; those that do not match their
              checksum; those that could not be checked
  faults      [{path, kind, message}], all of them
  statistics  null with --no-stats, or where a shard cannot be read; else [{layer, part, element,
              count, minimum, maximum, mean, std, nan, inf, zeros}], of the values in their true
              element type, with null where no value is finite
"""


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "show",
        summary="show one extent, or one namespace, in full",
        description="Show an extent: its record, its array, its shards, how many checksums match, "
        "and statistics of its values in each layer. Or show a namespace's identity. Exit status "
        "1 means that the extent has faults.",
        fields=_JSON,
    )
    add_root(parser)
    parser.add_argument(
        "what",
        metavar="EXTENT|NAMESPACE",
        help="a key, a namespace, NAMESPACE/KEY, or the start of one where that is unambiguous",
    )
    parser.add_argument(
        "extent", metavar="EXTENT", nargs="?", help="a key, or its start, after a namespace"
    )
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="statistics of the values, which reads every byte once more (default: yes)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show.

    Returns:
        0; 1 when the extent has faults.
    """
    from kvstore.catalog import Catalog

    with read_only_engine(args.root) as engine:
        catalog = Catalog(engine)
        what = args.what if args.extent is None else f"{args.what}/{args.extent}"
        found = catalog.resolve(what)
        if isinstance(found, str):
            _show_namespace(catalog, found, as_json=args.json)
            return 0
        return _show_extent(engine, found, stats=args.stats, as_json=args.json)


def _show_namespace(catalog: Catalog, name: str, *, as_json: bool) -> None:
    record = catalog.namespace(name)
    identity = record.identity
    if as_json:
        extra = {
            "namespace": name,
            "fingerprint": identity.fingerprint,
            "created": record.created,
        }
        say_json({**extra, **identity.to_json()})
        return
    scheme = identity.key_scheme
    keys = scheme.scheme if scheme.name is None else f"{scheme.name} ({scheme.algorithm})"
    items = [
        ("model", identity.model),
        ("layers", str(identity.model_layers)),
        ("revision", identity.revision or "-"),
        ("weights digest", identity.weights_digest or "-"),
        ("keys", f"{keys}, {scheme.key_bytes} bytes, root {scheme.root.hex()[:16]}"),
        *((f"variant {k}", v) for k, v in sorted(identity.variants.items())),
        ("fingerprint", identity.fingerprint),
        ("created", record.created),
    ]
    say(f"namespace {name}")
    for line in pairs(items):
        say(line)
    rows = [
        [
            g.name,
            g.attention if g.window is None else f"{g.attention} ({g.window})",
            f"{g.num_layers}",
            f"{g.heads}",
            f"{g.block_tokens}",
            f"{g.extent_blocks}",
            f"{g.shard_layers} x {g.shard_heads}",
            " ".join(f"{p.name}:{p.element.name}[{p.count}]" for p in g.parts),
        ]
        for g in identity.groups
    ]
    heads = ("GROUP", "ATTENTION", "LAYERS", "HEADS", "TOKENS/BLOCK", "BLOCKS/EXTENT")
    say()
    for line in table((*heads, "SHARD (LAYERS X HEADS)", "CONTENT"), rows, "<<>>>>><"):
        say(line)


def _show_extent(engine: Engine, found: Found, *, stats: bool, as_json: bool) -> int:
    from kvstore.extent import shard_layout
    from kvstore.verify import verify_store

    faults = [
        fault
        for fault in verify_store(
            engine, namespace=found.namespace, group=found.group.name, key=found.key
        )
        if fault.path.startswith(found.path)
    ]
    record = found.record
    if record is None:
        raise FormatError(str(found.problem))
    values: list[ValueStats] | None = None
    problem = None
    if stats:
        try:
            values = _statistics(engine, found, record)
        except KVStoreError as error:
            problem = str(error)
    per_shard = shard_layout(found.group, len(record.blocks)).chunks
    chunks = len(record.shards) * per_shard
    damaged = sum(f.kind == "checksum" for f in faults)
    unchecked = per_shard * sum(
        bool(_UNCHECKED & kinds) for kinds in _by_shard(found, record, faults)
    )
    wrong = [f for f in faults if not f.is_note]
    checksums = {"chunks": chunks, "damaged": damaged, "unchecked": unchecked}
    if as_json:
        say_json(_to_json(found, record, faults, checksums, values))
        return 1 if wrong else 0
    _say_record(found, record)
    _say_shards(found, record, faults)
    say()
    checked = "all match" if not unchecked and not damaged else f"{damaged:,} damaged"
    if unchecked:
        checked += f", {unchecked:,} not checked"
    each = size(found.group.chunk_bytes(len(record.blocks)))
    say(f"checksums: {plural(chunks, 'chunk')} of {each}, {checked}")
    for fault in faults:
        say(f"{'note' if fault.is_note else 'FAULT'}  {fault.kind}  {_fault_text(found, fault)}")
    if values is not None:
        say()
        _say_statistics(values)
    elif problem is not None:
        say(f"no statistics: {printable(problem)}")
    return 1 if wrong else 0


def _by_shard(found: Found, record: CommitRecord, faults: list[Fault]) -> list[set[str]]:
    """Kinds of faults of each shard."""
    kinds: dict[str, set[str]] = {f"{found.path}/{name}": set() for name in record.shards}
    for fault in faults:
        kinds.get(fault.path, set()).add(fault.kind)
    return list(kinds.values())


def _fault_text(found: Found, fault: Fault) -> str:
    return printable(f"{fault.path.removeprefix(found.path + '/')}: {fault.message}")


def _statistics(engine: Engine, found: Found, record: CommitRecord) -> list[ValueStats]:
    from kvstore.inspect import extent_statistics
    from kvstore.paths import GroupPath

    names = GroupPath(found.namespace, found.group.name)
    return extent_statistics(engine, found.group, names, record)


def _array(group: LayerGroup, blocks: int) -> dict[str, Any]:
    from kvstore.extent import DIMENSIONS

    shape = group.shape(blocks)
    return {
        "shape": list(shape),
        "dimensions": list(DIMENSIONS),
        "data_type": group.carrier.carrier,
        "chunk_shape": [1, blocks, 1, *shape[3:]],
        "shard_shape": [group.shard_layers, blocks, group.shard_heads, *shape[3:]],
    }


def _to_json(
    found: Found,
    record: CommitRecord,
    faults: list[Fault],
    checksums: dict[str, int],
    values: list[ValueStats] | None,
) -> dict[str, Any]:
    from dataclasses import asdict

    as_items = [{"path": f.path, "kind": f.kind, "message": f.message} for f in faults]
    shards = [
        {
            "name": name,
            "bytes": nbytes,
            "faults": [i for i in as_items if i["path"] == f"{found.path}/{name}"],
        }
        for name, nbytes in record.shards.items()
    ]
    statistics = None if values is None else [_finite(asdict(v)) for v in values]
    return {
        "path": found.path,
        "namespace": found.namespace,
        "group": found.group.name,
        "key": found.key,
        "parent": record.parent.hex(),
        "start_block": record.start_block,
        "blocks": [k.hex() for k in record.blocks],
        "tokens": found.tokens,
        "created": record.created,
        "write_id": record.write_id,
        "parallel_invariant": record.parallel_invariant,
        "writer": asdict(record.writer),
        "array": _array(found.group, len(record.blocks)),
        "parts": [
            {"name": p.name, "element": p.element.name, "count": p.count} for p in found.group.parts
        ],
        "shards": shards,
        "checksums": checksums,
        "faults": as_items,
        "statistics": statistics,
    }


def _finite(item: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in item.items()
    }


def _say_record(found: Found, record: CommitRecord) -> None:
    group, array = found.group, _array(found.group, len(record.blocks))
    last = record.start_block + len(record.blocks) - 1
    first = record.start_block * group.block_tokens
    content = " ".join(f"{p.name}:{p.element.name}[{p.count}]" for p in group.parts)
    axes = ", ".join(f"{d} {n}" for d, n in zip(array["dimensions"], array["shape"], strict=True))
    say(f"extent {found.key}")
    items = [
        ("namespace", found.namespace),
        ("group", f"{group.name} ({group.attention} attention)"),
        ("follows", f"{record.parent.hex()}{'' if record.start_block else ' (a root)'}"),
        ("blocks", f"{record.start_block} to {last}, of {group.block_tokens} tokens"),
        ("tokens", f"{first} to {first + found.tokens - 1} of the sequence"),
        ("array", axes),
        ("stored as", f"{array['data_type']}, content {content}"),
        ("shard", " x ".join(map(str, array["shard_shape"]))),
        ("chunk", " x ".join(map(str, array["chunk_shape"]))),
        ("written by", f"{record.writer.software}, {record.writer.config}"),
        ("session", record.writer.session),
        ("write id", record.write_id),
        ("created", record.created),
        ("folder", found.path),
    ]
    if not record.parallel_invariant:
        items.insert(2, ("only for", str(group.parallel)))
    for line in pairs(items):
        say(line)


def _say_shards(found: Found, record: CommitRecord, faults: list[Fault]) -> None:
    rows = []
    by_shard = _by_shard(found, record, faults)
    for (name, nbytes), kinds in zip(record.shards.items(), by_shard, strict=True):
        absent = kinds & _UNCHECKED
        state = "not checked" if absent else "DAMAGED" if "index" in kinds else "ok"
        chunks = "not checked" if absent else "DAMAGED" if "checksum" in kinds else "ok"
        there = ", ".join(sorted(absent)) or "ok"
        rows.append([name, size(nbytes), there.upper() if absent else there, state, chunks])
    say()
    for line in table(("SHARD", "SIZE", "FILE", "INDEX", "CHUNKS"), rows, "<><<<"):
        say(line)


def _say_statistics(values: list[ValueStats]) -> None:
    rows = [
        [
            f"{v.layer}",
            v.part,
            v.element,
            *(f"{x:.4g}" for x in (v.minimum, v.maximum, v.mean, v.std)),
            f"{v.nan:,}",
            f"{v.inf:,}",
            f"{100 * v.zero_fraction:.1f}%",
        ]
        for v in values
    ]
    heads = ("LAYER", "PART", "TYPE", "MIN", "MAX", "MEAN", "STD", "NAN", "INF", "ZEROS")
    for line in table(heads, rows, "><<>>>>>>>"):
        say(line)
