"""``kvstore demo``: a real model's KV cache, stored by one parallel config, used by others."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def _count(text: str) -> int:
    value = int(text) if text.isascii() and text.isdecimal() and len(text) <= 6 else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999999")
    return value


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "demo",
        help="store a real model's KV cache under one parallel config, load it under others",
        description="Compute the KV cache of a document with SmolLM2-135M-Instruct, lay it out as "
        "the ranks of an engine would hold it, and store it with one process a rank. Then load it "
        "in fresh processes as the ranks of another config, in another page layout; go on "
        "generating from what they hold, and compare with the run that computed it: pages, cache, "
        "logits and tokens must be the same to the last bit. Takes about a minute on two cores, "
        "and 1 GB of disk. Exit status 1 means that something differed or failed.",
    )
    parser.add_argument(
        "--configs",
        action="append",
        default=[],
        metavar="'WRITER -> READER'",
        help="a row to run in place of the usual ones, such as 'tp=3 -> tp=9,dcp=3'; a page layout "
        "may follow a config, as in tp=3@nhd-split (hnd or nhd, packed or split); may be repeated",
    )
    parser.add_argument(
        "--tokens", type=_count, help="length of the prompt (default: the document, about 2,180)"
    )
    parser.add_argument(
        "--new-tokens", type=_count, default=24, help="tokens to generate (default 24)"
    )
    parser.add_argument(
        "--block-tokens", type=_count, default=16, help="tokens of a block (default 16)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="keep the store there (default: remove it)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write all figures there; - for standard output"
    )
    parser.add_argument(
        "--model-cache",
        type=Path,
        metavar="DIR",
        help="where to keep the converted weights, 540 MB (default: in the virtual environment)",
    )
    parser.add_argument(
        "--no-model-cache", action="store_true", help="convert the weights anew, keep nothing"
    )
    parser.add_argument(
        "--start-method",
        choices=("forkserver", "spawn"),
        default="forkserver",
        help="how ranks' processes start: forked from a clean server, or each from nothing, which "
        "costs each the import of torch (default forkserver)",
    )
    parser.add_argument(
        "--sabotage",
        action="store_true",
        help="swap two heads of everything that is loaded: the demo must then fail",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demonstration.

    Returns:
        0; or 1 when something differed.

    Raises:
        KVStoreError: something failed.
    """
    # Read when transformers and tqdm are imported, by whatever comes first: nothing is to be
    # fetched, and one progress display is enough.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from rich.console import Console

    from kvstore.demo.matrix import parse_rows
    from kvstore.demo.model import default_cache
    from kvstore.demo.report import print_report
    from kvstore.demo.show import Options, run_demo

    options = Options(
        rows=parse_rows(args.configs),
        tokens=args.tokens,
        new_tokens=args.new_tokens,
        block_tokens=args.block_tokens,
        dtype=args.dtype,
        root=args.root,
        model_cache=None if args.no_model_cache else args.model_cache or default_cache(),
        start_method=args.start_method,
        sabotage=args.sabotage,
    )
    progress = Console(stderr=True)
    report = run_demo(options, progress)
    to_stdout = args.json == "-"
    # A table that goes to a file or a pipe is to be as wide as it needs.
    width = None if sys.stdout.isatty() else 144
    print_report(report, progress if to_stdout else Console(width=width))
    if args.json is not None:
        text = json.dumps(report.to_json(), indent=1) + "\n"
        if to_stdout:
            sys.stdout.write(text)
        else:
            Path(args.json).write_text(text, encoding="utf-8")
    return 0 if report.good else 1
