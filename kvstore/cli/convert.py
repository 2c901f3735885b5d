"""``kvstore convert``: bring a cache that another program wrote into a store."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli.declare import Subparsers, add_command
from kvstore.cli.text import plural, printable, say, say_json, size
from kvstore.errors import FormatError, InvalidArgument, NotCertified, NotFound

if TYPE_CHECKING:
    from kvstore.plugins.vllm.fs_cache import FsCache
    from kvstore.plugins.vllm.fs_import import ImportOptions, ImportReport, Tick

_JSON = """\
With --json, one object:
  root      the store, as given
  caches    [{path, namespace, imported, present, bytes, refused: [{path, reason}]}]
  refused   [{path, reason}]: caches of which nothing was taken
Exit status 1 means that something was refused. What the engine's tier finds afterwards
is what agrees in model, weights, variants, and how the engine hashes blocks: the options
here have the names of the tier's settings.
"""
_SHOWN = 10


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "convert",
        summary="import the cache of another program",
        description="Import the cache folder of vLLM's fs tier (written with canonical_layout) "
        "into a store, where kvstore's tier for vLLM finds it. vLLM need not be installed. What is "
        "in the store already is skipped, so an import goes on where it was interrupted. The "
        "files have no checksums: what was damaged before is not noticed.",
        fields=_JSON,
    )
    parser.add_argument("source", metavar="SRC", help="the tier's root_dir, or one cache in it")
    parser.add_argument("root", metavar="DST", help="the store; made if it is not there")
    weights = parser.add_argument_group("which model (the cache does not say)")
    weights.add_argument("--weights", metavar="FOLDER", help="the checkpoint: digest, and sizes")
    weights.add_argument("--revision", help="the weights' revision, instead of a digest")
    weights.add_argument("--model", default="", help="name in the store (default: the engine's)")
    sizes = parser.add_argument_group("sizes, where there is no checkpoint with a config.json")
    for name, what in (
        ("heads", "KV heads of the whole model"),
        ("head-size", "elements of a key"),
        ("value-size", "elements of a value, if not the same"),
        ("latent", "MLA: elements of the latent"),
        ("rope", "MLA: elements of the rotary part"),
    ):
        sizes.add_argument(f"--{name}", type=int, default=0, metavar="N", help=what)
    form = parser.add_argument_group("form")
    form.add_argument(
        "--pages",
        choices=("packed", "split"),
        default="packed",
        help="each token's key and value together, as vLLM's own backends have it, or apart",
    )
    form.add_argument("--hash-algorithm", default="sha256", help="as the engine's (%(default)s)")
    form.add_argument("--hash-seed", help="the engine's PYTHONHASHSEED, if it was set")
    form.add_argument("--hash-root", metavar="HEX", help="the engine's root hash, for xxhash")
    form.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what else changes the bytes; kv_scales=checkpoint for FP8",
    )
    parser.add_argument("--threads", type=int, default=4, metavar="N", help="(%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert.

    Returns:
        0; 1 when something was refused.
    """
    from kvstore.plugins.vllm.fs_cache import find_caches, read_cache
    from kvstore.store import open_store

    refused: list[tuple[Path, str]] = []
    caches: list[FsCache] = []
    for folder in find_caches(Path(args.source)):
        try:
            caches.append(read_cache(folder))
        except (FormatError, NotCertified) as error:
            refused.append((folder, str(error)))
    models = sorted({cache.model for cache in caches})
    if len(models) > 1:
        raise InvalidArgument(
            f"{args.source} holds caches of several models ({', '.join(models)}); convert one at a "
            "time, by the folder with its config.json"
        )
    reports: list[tuple[FsCache, ImportReport]] = []
    if caches:
        options = _options(args)
        with open_store(args.root) as store, _progress(shown=not args.json) as tick:
            from kvstore.plugins.vllm.fs_import import import_cache

            for cache in caches:
                try:
                    reports.append((cache, import_cache(cache, store, options, tick=tick)))
                except (NotCertified, NotFound) as error:
                    refused.append((cache.folder, str(error)))
    _tell(args, reports, refused)
    return 1 if refused or any(report.refused for _, report in reports) else 0


def _options(args: argparse.Namespace) -> ImportOptions:
    from kvstore.plugins.vllm.checkpoint import AttentionSizes, checkpoint_sizes
    from kvstore.plugins.vllm.fs_import import ImportOptions
    from kvstore.plugins.vllm.roots import key_scheme, root_of, seed_of
    from kvstore.plugins.weights import weights_digest

    if args.weights is None and args.revision is None:
        raise InvalidArgument(
            "which weights the cache is of is not in it; give --weights, their folder, or "
            "--revision, as it is in the tier's configuration"
        )
    if args.threads < 1:
        raise InvalidArgument(f"--threads is {args.threads}; at least 1 is needed")
    sizes = AttentionSizes(args.heads, args.head_size, args.value_size, args.latent, args.rope)
    if not sizes.known:
        if args.weights is None:
            raise InvalidArgument(
                "the sizes of the cache are not in it; give --heads and --head-size, or --latent "
                "and --rope, or --weights, a checkpoint with a config.json"
            )
        sizes = checkpoint_sizes(Path(args.weights))
    if args.hash_root is not None:
        root = _bytes(args.hash_root)
    else:
        environment = {} if args.hash_seed is None else {"PYTHONHASHSEED": args.hash_seed}
        root = root_of(args.hash_algorithm, seed_of(args.hash_algorithm, environment))
    return ImportOptions(
        scheme=key_scheme(args.hash_algorithm, root),
        sizes=sizes,
        revision=args.revision,
        weights_digest=None if args.revision is not None else weights_digest(args.weights),
        model=args.model,
        split=args.pages == "split",
        variants=dict(map(_variant, args.variant)),
        threads=args.threads,
    )


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidArgument(f"--hash-root {text!r:.80} is not hexadecimal") from None


def _variant(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"--variant {text!r:.80} is not NAME=VALUE")
    return name, value


def _tell(
    args: argparse.Namespace,
    reports: list[tuple[FsCache, ImportReport]],
    refused: list[tuple[Path, str]],
) -> None:
    if args.json:
        caches: list[dict[str, Any]] = [
            {
                "path": str(cache.folder),
                "namespace": report.namespace,
                "imported": report.imported,
                "present": report.present,
                "bytes": report.nbytes,
                "refused": _items(report.refused),
            }
            for cache, report in reports
        ]
        say_json({"root": args.root, "caches": caches, "refused": _items(refused)})
        return
    for cache, report in reports:
        say(f"{printable(str(cache.folder))} -> {report.namespace}")
        say(
            f"  {plural(report.imported, 'chunk')} imported ({size(report.nbytes)}), "
            f"{report.present:,} there already, {len(report.refused):,} refused"
        )
        _list(report.refused)
    for path, reason in refused:
        say(f"refused  {printable(str(path))}")
        say(f"         {printable(reason)}")


def _items(refused: list[tuple[Path, str]]) -> list[dict[str, str]]:
    return [{"path": str(path), "reason": reason} for path, reason in refused]


def _list(refused: list[tuple[Path, str]]) -> None:
    for path, reason in refused[:_SHOWN]:
        say(f"  refused  {printable(path.name)}: {printable(reason)}")
    if len(refused) > _SHOWN:
        say(f"  and {len(refused) - _SHOWN:,} more; --json lists all")


@contextmanager
def _progress(*, shown: bool) -> Iterator[Tick]:
    """A counter on a terminal, nothing elsewhere."""
    if not (shown and sys.stderr.isatty()):
        yield lambda _done: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed:,} chunks"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("convert", total=None)
        yield lambda done: bar.update(task, completed=done)
