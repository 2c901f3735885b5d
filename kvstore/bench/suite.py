"""One whole run: all sections, on scratch files that are removed at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.bench.floors import Verdict, judge
from kvstore.bench.limits import DirectFiles, RawFile, make_raw_file
from kvstore.bench.loads import Stored, load_contenders, store_workload
from kvstore.bench.lookups import lookup_contenders
from kvstore.bench.machine import cores, describe
from kvstore.bench.peer_vllm import ROWS as VLLM_ROWS
from kvstore.bench.peer_vllm import STORE_ROW, find_fs_io, vllm_peers, vllm_store_peer
from kvstore.bench.peers_files import (
    block_files_peer,
    safetensors_peer,
    write_block_files,
    write_safetensors,
)
from kvstore.bench.peers_zarr import zarr_peers
from kvstore.bench.scratch import direct_flag, drop_cache, files_below, sync_files, warm_cache
from kvstore.bench.stores import store_contenders
from kvstore.bench.timing import Contender, Samples, measure
from kvstore.bench.workload import LLAMA, SMOLLM, Workload
from kvstore.errors import StorageError
from kvstore.paths import RECORD

QUICK_BYTES = 32 << 20
QUICK_ROUNDS = 1
SECOND_MODEL_SHARE = 4
"""The second model runs on this fraction of the bytes."""

COPIES = 7
"""Scratch space, in sizes: extents, raw file, two peers' files, three stores that are written."""

MAX_HOT_THREADS = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run.

    Attributes:
        folder: on the file system to measure; a scratch folder is made in it, and removed.
        nbytes: KV cache bytes of the large workload.
        rounds: rounds of each section.
        quick: small lookup stores, for tests; see :meth:`smallest`.
        vllm_fs_io: vLLM's extension file, where vllm is not installed.
    """

    folder: Path
    nbytes: int = 1 << 30
    rounds: int = 7
    quick: bool = False
    vllm_fs_io: Path | None = None

    def smallest(self) -> Settings:
        """The smallest run that has every row, for tests; its figures mean nothing."""
        return replace(self, nbytes=QUICK_BYTES, rounds=QUICK_ROUNDS, quick=True)


@dataclass(slots=True)
class Section:
    """Rows that do the same job, and what they are compared with.

    Attributes:
        key: short name, for instance ``llama.cold``.
        title: what a person reads.
        reference: row key that the others are divided by.
        unit: ``B/s``, or ``keys/s``.
        rows: what was measured.
        absent: key -> title of peers that are not installed.
    """

    key: str
    title: str
    reference: str
    unit: str
    rows: list[Samples] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a run found."""

    settings: Settings
    machine: dict[str, object]
    sections: list[Section]
    verdicts: list[Verdict]

    @property
    def correct(self) -> bool:
        """Whether every contender that could be checked had the right bytes."""
        return all(row.correct is not False for s in self.sections for row in s.rows)


class _Suite:
    def __init__(self, settings: Settings, scratch: Path, progress: Callable[[str], None]) -> None:
        self.settings = settings
        self.scratch = scratch
        self.progress = progress
        self.flag = direct_flag(scratch)
        self.threads = min(cores(), MAX_HOT_THREADS)
        self.fs_io = find_fs_io(settings.vllm_fs_io)
        self.sections: list[Section] = []

    def add(self, section: Section, contenders: list[Contender]) -> None:
        results = measure(
            contenders, self.settings.rounds, lambda what: self.progress(f"{section.title}: {what}")
        )
        section.rows = list(results.values())
        self.sections.append(section)

    def run(self) -> list[Section]:
        nbytes = self.settings.nbytes
        for model, share in ((LLAMA, nbytes), (SMOLLM, nbytes // SECOND_MODEL_SHARE)):
            self.progress(f"making the bytes of {model.title}")
            workload = Workload(model, share)
            _ModelRun(self, workload, self.scratch / model.key).run(full=model is LLAMA)
            shutil.rmtree(self.scratch / model.key)
        folder = self.scratch / "lookup"
        folder.mkdir()
        contenders = lookup_contenders(folder, quick=self.settings.quick, progress=self.progress)
        self.add(Section("lookup", "Prefix lookup", "lookup.small", "keys/s"), contenders)
        return self.sections


class _ModelRun:
    """The sections of one model."""

    def __init__(self, suite: _Suite, workload: Workload, folder: Path) -> None:
        self.suite = suite
        self.workload = workload
        self.key = workload.model.key
        folder.mkdir()
        self.folder = folder
        suite.progress(f"writing the files of {workload.model.title}")
        size = make_raw_file(folder / "raw", workload.source_bytes)
        self.raw = RawFile(folder / "raw", size, suite.threads)
        self.stored: Stored = store_workload(workload, folder / "store")
        self.block_files: list[Path] = []
        self.tensor_files: list[Path] = []

    def run(self, *, full: bool) -> None:
        """Measure.

        Args:
            full: with peers, and with stores.
        """
        if full:
            self.block_files = write_block_files(self.workload, self.folder / "blocks")
            self.tensor_files = write_safetensors(self.workload, self.folder / "safetensors")
        files = files_below(self.folder)
        sync_files(files)
        self._section("cold", lambda: drop_cache(files), full=full)
        warm_cache(files)
        self._section("hot", lambda: None, full=full)
        if full:
            self._stores()

    def _section(self, kind: str, before: Callable[[], None], *, full: bool) -> None:
        prefix = f"{self.key}.{kind}"
        title = f"{self.workload.model.title}: {kind} load into paged buffers"
        reference = f"{prefix}.limit" if kind == "cold" else f"{prefix}.limit_copy"
        section = Section(prefix, title, reference, "B/s")
        contenders = self._limits(kind, prefix, before)
        contenders += load_contenders(self.workload, self.stored, prefix, before)
        if full:
            contenders += self._peers(section, before, direct=kind == "cold")
        self.suite.add(section, contenders)

    def _limits(self, kind: str, prefix: str, before: Callable[[], None]) -> list[Contender]:
        raw, flag, threads = self.raw, self.suite.flag, self.suite.threads
        if kind == "cold":
            how = "O_DIRECT" if flag else "buffered (no O_DIRECT here)"
            title = f"limit: {how} of the shards, 8 MiB x 4 threads"
            shards = [path for path in files_below(self.stored.root) if path.name != RECORD]
            return [Contender(f"{prefix}.limit", title, DirectFiles(shards, flag).read, before)]
        arena = self.workload.arena_bytes
        return [
            Contender(f"{prefix}.limit", f"limit: preadv, {threads} threads", raw.read_hot),
            Contender(
                f"{prefix}.limit_copy",
                f"limit: preadv plus one copy, {threads} threads",
                lambda: raw.read_hot(arena),
            ),
        ]

    def _peers(
        self, section: Section, before: Callable[[], None], *, direct: bool
    ) -> list[Contender]:
        workload, prefix = self.workload, section.key
        peers = [block_files_peer(workload, self.block_files, prefix, before)]
        if self.suite.fs_io is None:
            section.absent |= {f"{prefix}.{name}": title for name, title in VLLM_ROWS.items()}
        else:
            use_direct = direct and bool(self.suite.flag)
            peers += vllm_peers(
                self.suite.fs_io, workload, self.block_files, prefix, before, direct=use_direct
            )
        if self.tensor_files:
            peers.append(safetensors_peer(workload, self.tensor_files, prefix, before))
        else:
            section.absent[f"{prefix}.safetensors"] = "safetensors, one file an extent"
        zarr, absent = zarr_peers(workload, self.stored.extents, prefix, before)
        section.absent |= absent
        return peers + zarr

    def _stores(self) -> None:
        prefix = f"{self.key}.store"
        title = f"{self.workload.model.title}: store and commit"
        section = Section(prefix, title, f"{prefix}.limit", "B/s")
        flag, fs_io = self.suite.flag, self.suite.fs_io
        contenders = store_contenders(self.workload, self.raw, self.folder, prefix, flag)
        if fs_io is None:
            section.absent = {f"{prefix}.{name}": title for name, title in STORE_ROW.items()}
        else:
            folder = self.folder / "vllm"
            contenders.append(
                vllm_store_peer(fs_io, self.workload, folder, prefix, direct=bool(flag))
            )
        self.suite.add(section, contenders)


def run_suite(settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Run everything.

    Args:
        settings: what to run.
        progress: told what is going on, a line at a time.

    Raises:
        StorageError: too little space for the scratch files.
        ImportError: ``vllm_fs_io`` was given and does not load.
    """
    need = COPIES * settings.nbytes
    free = shutil.disk_usage(settings.folder).free
    if free < need:
        raise StorageError(
            f"the benchmark needs {need >> 20} MiB in {settings.folder}, where {free >> 20} MiB "
            "are free; give a smaller --size or another --dir"
        )
    machine = describe(settings.folder)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=settings.folder) as scratch:
        sections = _Suite(settings, Path(scratch), progress).run()
    rows = {row.key: row for section in sections for row in section.rows}
    return Outcome(settings, machine, sections, judge(rows))


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain values, for ``--json``."""
    from kvstore.bench.report import ratio_to

    return {
        "machine": outcome.machine,
        "settings": {
            "folder": str(outcome.settings.folder),
            "bytes": outcome.settings.nbytes,
            "rounds": outcome.settings.rounds,
            "quick": outcome.settings.quick,
        },
        "bytes_correct": outcome.correct,
        "sections": [
            {
                "key": section.key,
                "title": section.title,
                "reference": section.reference,
                "unit": section.unit,
                "rows": [
                    {
                        "key": row.key,
                        "title": row.title,
                        "amount": row.nbytes,
                        "seconds": list(row.seconds.values()),
                        "rate": row.rate,
                        "ratio": ratio_to(section, row),
                        "bytes_correct": row.correct,
                    }
                    for row in section.rows
                ],
                "not_installed": section.absent,
            }
            for section in outcome.sections
        ],
        "floors": [
            {
                "key": v.floor.key,
                "title": v.floor.title,
                "limit": v.floor.limit,
                "at_most": v.floor.at_most,
                "value": v.value,
                "ceiling": v.ceiling,
                "met": v.met,
            }
            for v in outcome.verdicts
        ],
    }
