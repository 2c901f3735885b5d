"""Import of a cache of vLLM's file system tier: where it stops, and what it leaves."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from support.fs_caches import SIZE, named, unpack

import kvstore
from kvstore import NotCertified, StorageError
from kvstore.plugins.vllm import fs_import
from kvstore.plugins.vllm.checkpoint import AttentionSizes
from kvstore.plugins.vllm.fs_import import ImportPlan, import_cache, survey
from kvstore.plugins.vllm.fs_layout import find_cache, read_cache
from kvstore.plugins.vllm.offload import offload_identity
from kvstore.plugins.vllm.roots import key_scheme, root_of
from kvstore.worker import Worker

NHD = named("nhd")


@pytest.fixture
def plan(tmp_path: Path) -> ImportPlan:
    cache = read_cache(find_cache(unpack(NHD.name, tmp_path)))
    return ImportPlan.of(cache, AttentionSizes(heads=NHD.heads, head_size=SIZE), "packed")


@pytest.fixture
def identity(plan: ImportPlan) -> kvstore.Identity:
    return offload_identity(
        plan.cache.model,
        plan.groups,
        key_scheme("sha256", root_of("sha256", "seed")),
        dtype=plan.cache.dtype,
        revision="r",
        weights_digest=None,
        variants={},
    )


def test_progress_reaches_the_total(plan: ImportPlan, identity: kvstore.Identity) -> None:
    seen: list[tuple[int, int]] = []
    report = import_cache(plan, None, identity, progress=lambda d, t: seen.append((d, t)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert (report.imported, report.present, report.refusals) == (3, 0, 0)


@pytest.mark.parametrize("step", ["store", "commit"])
def test_a_store_that_cannot_be_written_ends_it_and_another_call_goes_on(
    plan: ImportPlan,
    identity: kvstore.Identity,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    real = getattr(Worker, step)
    calls = []

    def full(self: Worker, *args: object) -> object:
        calls.append(step)
        if len(calls) == 2:
            raise StorageError(errno.ENOSPC, "no space left", "disk")
        return real(self, *args)

    with kvstore.open(tmp_path / "store", durable=False) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Worker, step, full)
            with pytest.raises(StorageError, match="no space left"):
                import_cache(plan, store, identity, threads=1)
        inflight = tmp_path / "store" / "__kvstore__" / "inflight"
        assert not [p for p in inflight.rglob("*") if p.is_file()]
        space = store.namespace(identity)
        before = len(list(space.extents()))
        assert before < 3
        report = import_cache(plan, store, identity)
        assert (report.imported, report.present) == (3 - before, before)
        assert not list(space.verify())


def test_files_of_groups_that_are_not_listed(plan: ImportPlan) -> None:
    twig = next(Path(f"{plan.cache.folder}_r0").glob("*/*_g0"))
    twig.rename(twig.with_name(twig.name.replace("_g0", "_g1")))
    with pytest.raises(NotCertified, match=r"of cache groups 0, 1, but .* lists 1"):
        survey(plan)


def test_only_so_many_refused_files_are_named(
    plan: ImportPlan, identity: kvstore.Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_import, "MOST_REFUSALS", 2)
    for file in plan.cache.files():
        Path(file.path).write_bytes(b"")
    report = import_cache(plan, None, identity)
    assert report.refusals == 3
    assert len(report.refused) == 2
