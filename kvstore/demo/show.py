"""The demonstration from start to end."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvstore.demo.bits import Bits
from kvstore.demo.check import compare
from kvstore.demo.generation import Reference, prefill, resume
from kvstore.demo.job import CacheFacts
from kvstore.demo.matrix import Row, Side, certify_rows
from kvstore.demo.model import MODEL_NAME, LoadedModel, load_model
from kvstore.demo.prompt import QUESTION, prompt_tokens
from kvstore.demo.report import Outcome, Report
from kvstore.demo.stage import Stage, Stored, load_as, store_as
from kvstore.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose.

    Attributes:
        rows: who stores, who loads.
        tokens: length of the prompt; None for the document's own.
        new_tokens: tokens to generate in every run.
        block_tokens: tokens of a block.
        dtype: element type of weights and cache.
        root: where to keep the store; None for a temporary folder.
        model_cache: where converted weights are kept; None for nowhere.
        start_method: how ranks' processes start.
        sabotage: swap two heads of every cache that is loaded, to see that this is noticed.
    """

    rows: list[Row]
    tokens: int | None = None
    new_tokens: int = 24
    block_tokens: int = 16
    dtype: str = "float32"
    root: Path | None = None
    model_cache: Path | None = None
    start_method: str = "forkserver"
    sabotage: bool = False


def run_demo(options: Options, console: Console) -> Report:
    """Run it.

    Args:
        options: what the user chose.
        console: for progress.

    Raises:
        KVStoreError: something failed, as opposed to came out different.
    """
    begun = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    scratch = Path(tempfile.mkdtemp(prefix="kvstore-demo-"))
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(f"loading {MODEL_NAME}", total=None)
            loaded = load_model(options.dtype, options.model_cache)
            progress.update(task, total=1, completed=1)
            report = _Show(options, loaded, progress, scratch).run()
        return replace(report, seconds=time.perf_counter() - begun)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Show:
    """The part of the run in which the model is loaded."""

    def __init__(
        self, options: Options, loaded: LoadedModel, progress: Progress, scratch: Path
    ) -> None:
        self._options = options
        self._loaded = loaded
        self._progress = progress
        self._scratch = scratch
        prompt = prompt_tokens(loaded, options.tokens, options.new_tokens)
        # Only full blocks have keys, and the model needs one token to go on from.
        whole = (len(prompt) - 1) // options.block_tokens * options.block_tokens
        self._prefix, self._rest = prompt[:whole], prompt[whole:]
        if not self._prefix:
            raise InvalidArgument(
                f"a prompt of {len(prompt)} tokens has no full block of {options.block_tokens}; "
                "choose a longer one with --tokens, or a smaller --block-tokens"
            )

    def run(self) -> Report:
        options, loaded = self._options, self._loaded
        length = len(self._prefix) + len(self._rest)
        facts = self._facts()
        certify_rows(options.rows, facts.identity("none").group(), facts.layers)
        tick = self._bar(f"computing {length:,} tokens", 1 + options.new_tokens)
        computed = prefill(loaded, self._prefix, self._rest, options.new_tokens, tick)
        stage = Stage(
            root=options.root or self._scratch / "store",
            work=self._scratch,
            facts=facts,
            cache=computed.cache,
            tokens=self._prefix,
            start_method=options.start_method,
            tick=lambda: None,
        )
        outcomes: list[Outcome] = []
        written: dict[Side, Stored] = {}
        for row in options.rows:
            if row.writer not in written:
                tick = self._bar(f"{row.writer} stores", row.writer.config.world_size)
                written[row.writer] = store_as(replace(stage, tick=tick), row.writer)
            outcomes.append(self._row(stage, row, written[row.writer], computed))
        answer = loaded.tokenizer.decode(computed.continuation.tokens)
        return Report(
            model=MODEL_NAME,
            weights_digest=loaded.digest,
            dtype=options.dtype,
            prompt_tokens=length,
            prefix_tokens=len(self._prefix),
            cache_bytes=computed.cache.nbytes,
            new_tokens=options.new_tokens,
            cold_seconds=computed.prefill_seconds + computed.continuation.first_seconds,
            question=QUESTION,
            answer=answer.split(loaded.tokenizer.eos_token)[0].strip(),
            outcomes=outcomes,
        )

    def _facts(self) -> CacheFacts:
        loaded = self._loaded
        return CacheFacts(
            model=MODEL_NAME,
            weights_digest=loaded.digest,
            layers=loaded.layers,
            heads=loaded.heads,
            head_size=loaded.head_size,
            element=self._options.dtype,
            block_tokens=self._options.block_tokens,
        )

    def _row(self, stage: Stage, row: Row, stored: Stored, computed: Reference) -> Outcome:
        steps = self._options.new_tokens
        tick = self._bar(f"{row.writer} -> {row.reader}", row.reader.config.world_size + steps)
        read = load_as(replace(stage, tick=tick), row.writer, row.reader)
        cache = swap_heads(read.cache) if self._options.sabotage else read.cache
        resumed = resume(self._loaded, cache, self._rest, steps, tick)
        reference = (computed.cache, computed.continuation)
        return Outcome(
            row=row,
            stored=stored,
            load_seconds=read.seconds,
            load_bytes=read.nbytes,
            warm_seconds=read.seconds + resumed.first_seconds,
            verdict=compare(reference, (cache, resumed), pages=read.pages),
        )

    def _bar(self, what: str, total: int) -> Callable[[], None]:
        task = self._progress.add_task(what, total=total)
        return lambda: self._progress.advance(task)


def swap_heads(cache: Bits) -> Bits:
    """The cache with KV heads 0 and 1 exchanged in every layer: all bytes are there, and wrong."""
    swapped = cache.copy()
    swapped[:, [0, 1]] = cache[:, [1, 0]]
    return swapped
