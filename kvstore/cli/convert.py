"""``kvstore convert``: a cache of vLLM's own file system tier, into a store."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli.declare import Subparsers, add_command
from kvstore.cli.text import plural, printable, say, say_json, size
from kvstore.errors import InvalidArgument

if TYPE_CHECKING:
    from kvstore.identity import Identity
    from kvstore.plugins.vllm.fs_import import ImportPlan, ImportReport, Progress
    from kvstore.plugins.vllm.fs_layout import FsCache

_JSON = """\
With --json, one object:
  source     folder of the cache
  root       DST as given
  namespace  directory name of the namespace
  imported   files that are extents of the store now; with --dry-run, that could be
  present    files whose extent was in the store already; null with --dry-run
  bytes      content bytes of those imported
  refused    {reason: number of files}
  files      [{path, reason}]: refused files, the first 1000

What the cache does not say has to be given: which weights it is of (--weights or
--revision, unless the model is a local folder), the sizes of a token's cell (out
of the config.json in that folder, or by options), and how keys and values lie in
a page (--pages; backends on NVIDIA GPUs pack them, except B12X, whose caches
cannot be converted). KVStoreTier finds what is imported when all of these are
those of its own configuration.
"""


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "convert",
        summary="import a cache of vLLM's fs tier",
        description="Import the cache that vLLM's file system tier has written with "
        "canonical_layout into a store, where KVStoreTier finds it. What is imported already is "
        "skipped, so an interrupted import is called again. SRC is not changed. Exit status 1 "
        "means that files were refused.",
        fields=_JSON,
    )
    parser.add_argument("source", metavar="SRC", help="root_dir of the tier, or one cache in it")
    parser.add_argument("root", metavar="DST", help="the store; made when it is not there")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--weights", metavar="DIR", help="folder of the model's weights")
    weights.add_argument("--revision", metavar="NAME", help="revision of the weights")
    parser.add_argument("--model", metavar="NAME", help="the model's name in the store")
    for name, what in (
        ("heads", "KV heads of the whole model"),
        ("head-size", "elements of a key"),
        ("value-size", "elements of a value, where they are not those of a key"),
        ("latent", "latent attention (MLA): elements of the latent"),
        ("rope", "latent attention: elements of the key's rotary part"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=int, default=0, help=what)
    parser.add_argument(
        "--pages", choices=("packed", "split"), help="a token's key and value together, or apart"
    )
    parser.add_argument(
        "--hash-algorithm",
        metavar="NAME",
        default="sha256",
        help="the engine's --prefix-caching-hash-algo (default sha256)",
    )
    root = parser.add_mutually_exclusive_group()
    root.add_argument(
        "--hash-seed", metavar="TEXT", help="the engine's PYTHONHASHSEED, if it set it"
    )
    root.add_argument(
        "--hash-root", metavar="HEX", help="root of its hashes, for algorithms that are not SHA-256"
    )
    parser.add_argument(
        "--variant",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="what else changes the bytes, as in the tier's 'variants'; may be repeated",
    )
    parser.add_argument("--threads", metavar="N", type=int, default=4, help="files at once")
    parser.add_argument("--no-sync", action="store_true", help="leave syncing to the system")
    parser.add_argument("--dry-run", action="store_true", help="only check the files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Import.

    Returns:
        0; 1 when files were refused.
    """
    from kvstore.plugins.vllm.fs_import import import_cache
    from kvstore.plugins.vllm.fs_layout import find_cache, read_cache
    from kvstore.store import open_store

    if args.threads < 1:
        raise InvalidArgument(f"--threads is {args.threads}; it is at least 1")
    cache = read_cache(find_cache(Path(args.source)))
    plan = _plan(args, cache)
    identity = _identity(args, plan)
    with _progress(shown=not args.json) as progress:
        if args.dry_run:
            report = import_cache(plan, None, identity, threads=args.threads, progress=progress)
        else:
            with open_store(args.root, durable=not args.no_sync) as store:
                report = import_cache(
                    plan, store, identity, threads=args.threads, progress=progress
                )
    _say(args, cache, identity, report)
    return 1 if report.refusals else 0


def _plan(args: argparse.Namespace, cache: FsCache) -> ImportPlan:
    from kvstore.plugins.vllm.checkpoint import AttentionSizes, checkpoint_sizes
    from kvstore.plugins.vllm.fs_import import ImportPlan

    given = AttentionSizes(args.heads, args.head_size, args.value_size, args.latent, args.rope)
    sizes = given if given.known else checkpoint_sizes(Path(args.weights or cache.model))
    if not sizes.latent and args.pages is None:
        raise InvalidArgument(
            "the cache does not say how keys and values lie in its pages; give --pages packed "
            "(next to each other in each token, as backends on NVIDIA GPUs have it) or --pages "
            "split (all keys of a page, then all values)"
        )
    return ImportPlan.of(cache, sizes, args.pages or "packed")


def _identity(args: argparse.Namespace, plan: ImportPlan) -> Identity:
    from kvstore.plugins.vllm.offload import offload_identity
    from kvstore.plugins.vllm.roots import SEED_VARIABLE, key_scheme, root_of, seed_of
    from kvstore.plugins.weights import weights_digest

    if args.hash_root is None:
        # The environment of this process is not that of the engine.
        seed = {} if args.hash_seed is None else {SEED_VARIABLE: args.hash_seed}
        root = root_of(args.hash_algorithm, seed_of(args.hash_algorithm, seed))
    else:
        root = _bytes(args.hash_root)
    cache = plan.cache
    folder = args.weights or cache.model
    if not args.revision and not Path(folder).exists():
        raise InvalidArgument(
            f"there is no telling which weights {folder!r} stands for; give --weights (their "
            "folder) or --revision (the commit that was loaded)"
        )
    return offload_identity(
        args.model or cache.model,
        plan.groups,
        key_scheme(args.hash_algorithm, root),
        dtype=cache.dtype,
        revision=args.revision,
        weights_digest=None if args.revision else weights_digest(folder),
        variants=dict(_variant(text) for text in args.variant),
    )


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidArgument(f"--hash-root is {text!r:.160}, which is not hexadecimal") from None


def _variant(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise InvalidArgument(f"--variant is {text!r:.160}; it is NAME=VALUE")
    return name, value


def _say(
    args: argparse.Namespace, cache: FsCache, identity: Identity, report: ImportReport
) -> None:
    if args.json:
        out: dict[str, Any] = {
            "source": str(cache.folder),
            "root": args.root,
            "namespace": identity.namespace,
            "imported": report.imported,
            "present": None if args.dry_run else report.present,
            "bytes": report.bytes,
            "refused": dict(report.reasons.most_common()),
            "files": [{"path": p, "reason": r} for p, r in report.refused],
        }
        say_json(out)
        return
    for path, reason in report.refused:
        say(f"REFUSED  {printable(path)}")
        say(f"         {reason}")
    unnamed = report.refusals - len(report.refused)
    if unnamed:
        say(f"         and {plural(unnamed, 'file')} more")
    files = plural(report.imported, "file")
    if args.dry_run:
        say(f"{files} could be imported into namespace {identity.namespace} ({size(report.bytes)})")
    else:
        say(f"imported {files} into namespace {identity.namespace} ({size(report.bytes)})")
        say(f"{report.present:,} were there already")
    for reason, count in report.reasons.most_common():
        say(f"refused {count:,}: {reason}")


@contextmanager
def _progress(*, shown: bool) -> Iterator[Progress]:
    """A bar on a terminal, nothing elsewhere."""
    if not (shown and sys.stderr.isatty()):
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("convert", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
