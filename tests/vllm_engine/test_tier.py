"""The tier, driven by the engine's own tiering managers."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiering import SIZE, Model, Tiered, key_of, truth_of

import kvstore
from kvstore import InvalidArgument, NotCertified

KEYS = [key_of(n) for n in range(1, 4)]
GQA = {"heads": 4, "head_size": SIZE, "pages": "packed"}
MLA = {"latent": SIZE - 4, "rope": 4, "pages": "packed"}


@pytest.fixture
def engines() -> Iterator[list[Tiered]]:
    """Engines to be shut down at the end."""
    found: list[Tiered] = []
    yield found
    for engine in found:
        engine.close()


@pytest.fixture
def start(tmp_path: Path, engines: list[Tiered]) -> Any:
    def started(model: Model, sizes: dict[str, Any] = GQA, **given: Any) -> Tiered:
        tier = {
            "type": "KVStoreTier",
            "module_path": "kvstore.plugins.vllm",
            "root": str(tmp_path / "store"),
            "revision": "r1",
            "threads": 2,
            **sizes,
            **given.pop("tier", {}),
        }
        engine = Tiered(model, tier, **given)
        engines.append(engine)
        return engine

    return started


def namespaces(tmp_path: Path) -> list[str]:
    with kvstore.open(tmp_path / "store", read_only=True) as store:
        return list(store.namespaces())


def records(tmp_path: Path) -> list[Path]:
    """Records of all extents, by key."""
    found = (tmp_path / "store").glob("*-*/*/*/*/zarr.json")
    return sorted((p for p in found if "__kvstore__" not in p.parts), key=lambda p: p.parent.name)


WRITERS = [
    (Model(4, 1, "LBNHC"), "packed"),
    (Model(4, 2, "LBHNC"), "packed"),
    (Model(4, 1, "LBHNC", backwards=True), "packed"),
    (Model(4, 1, "LBNHC", split=True), "split"),
    (Model(4, 2, "LBHNC", split=True), "split"),
    (Model(4, 8, "LBNHC"), "packed"),
]


@pytest.mark.parametrize("chunk_blocks", [1, 3])
@pytest.mark.parametrize("writer", range(len(WRITERS)))
def test_all_layouts_and_configs_share_one_namespace(
    start: Any, tmp_path: Path, writer: int, chunk_blocks: int
) -> None:
    model, pages = WRITERS[writer]
    truth = truth_of(model, 3 * chunk_blocks)
    start(model, tier={"pages": pages}, chunk_blocks=chunk_blocks).store(KEYS, truth)
    for other, kind in WRITERS:
        reader = start(other, tier={"pages": kind}, chunk_blocks=chunk_blocks)
        for rank in {0, other.tp - 1}:
            first = other.first_head(rank)
            got = reader.load(KEYS, rank)
            assert torch.equal(got, truth[:, :, first : first + other.local])
    assert len(namespaces(tmp_path)) == 1
    assert len(records(tmp_path)) == 3


def test_the_stored_array_is_the_canonical_one(start: Any, tmp_path: Path) -> None:
    model = Model(4, 2, "LBHNC")
    truth = truth_of(model, 3)
    start(model).store(KEYS, truth)
    import zarr

    for number, record in enumerate(records(tmp_path)):
        array = torch.from_numpy(zarr.open_array(record.parent, mode="r")[:]).view(torch.bfloat16)
        assert torch.equal(array[:, 0], truth[:, number])


def test_latent_attention(start: Any, tmp_path: Path) -> None:
    truth = truth_of(Model(0), 3)
    start(Model(0, 2, "LBNHC"), MLA).store(KEYS, truth)
    for model in (Model(0, 1, "LBHNC"), Model(0, 4, "LBNHC")):
        assert torch.equal(start(model, MLA).load(KEYS), truth)
    assert len(namespaces(tmp_path)) == 1


@pytest.mark.parametrize("why", ["direct", "not certified", "stated", "platform"])
def test_rows_that_are_not_canonical_are_kept_for_their_config(
    start: Any, tmp_path: Path, why: str
) -> None:
    given: dict[str, Any] = {"tier": {"pages": "opaque" if why == "stated" else "auto"}}
    if why == "direct":
        given |= {"canonical": False}
    if why == "not certified":
        given |= {"agnostic": False}
    model = Model(4, 2, "LBNHC")
    truth = truth_of(model, 3)
    start(model, **given).store(KEYS, truth)
    for rank in (0, 1):
        got = start(model, **given).load(KEYS, rank)
        assert torch.equal(got, truth[:, :, 2 * rank : 2 * rank + 2])
    other = start(Model(4, 1, "LBNHC"), **given)
    assert other.find(KEYS, other.request()) == ["MISS"] * 3
    assert len(namespaces(tmp_path)) == 2
    group = kvstore.open(tmp_path / "store").open_namespace(namespaces(tmp_path)[0]).groups[0]
    assert group.attention == "opaque"


def test_refusals_at_start(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotCertified, match="canonical_layout"):
        start(Model(), canonical=False)
    with pytest.raises(NotCertified, match="could not certify"):
        start(Model(), agnostic=False)
    with pytest.raises(NotCertified, match="BLHNC does not have whole pages"):
        start(Model(layout="BLHNC"))
    with pytest.raises(InvalidArgument, match="the engine says"):
        start(Model(), {**GQA, "heads": 2})
    with pytest.raises(InvalidArgument, match="'revision'"):
        start(Model(), tier={"revision": ""})
    with pytest.raises(InvalidArgument, match="give the sizes"):
        start(Model(), {"pages": "packed"})
    with pytest.raises(InvalidArgument, match="unknown keys rooot"):
        start(Model(), tier={"rooot": "x"})
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(InvalidArgument, match="set PYTHONHASHSEED"):
        start(Model(), tier={"hash_algorithm": "xxhash"})


def test_another_hash_than_the_engines_is_refused(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.utils.hashing import sha256, sha256_cbor
    from vllm.v1.core import kv_cache_utils

    engine = start(Model())
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
    kv_cache_utils.init_none_hash(sha256_cbor)
    with pytest.raises(InvalidArgument, match="prefix-caching-hash-algo"):
        engine.request()
    kv_cache_utils.init_none_hash(sha256)
    engine.request()


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("how", ["corrupt", "vanished"])
def test_a_chunk_that_fails_is_a_miss_and_the_others_are_kept(
    start: Any, tmp_path: Path, how: str
) -> None:
    model = Model()
    truth = truth_of(model, 3)
    engine = start(model)
    engine.store(KEYS, truth)
    engine.evict()
    request = engine.request()
    record = records(tmp_path)[1]
    if how == "corrupt":
        damage(next(record.parent.glob("c.*")))
        assert engine.find(KEYS, request) == ["HIT", "MISS", "HIT"]
    else:
        # It goes between the lookup and the load.
        while engine.tier.lookup(KEYS[1], request).name == "RETRY":
            engine.tier.on_schedule_end(None)
            time.sleep(0.002)
        record.rename(record.with_name("away"))
        assert engine.find(KEYS, request) == ["HIT", "MISS", "HIT"]
    # For this request it stays a miss, and the engine does not ask for it for ever.
    assert engine.find([KEYS[1]], request) == ["MISS"]
    engine.manager.on_request_finished(request)
    if how == "corrupt":
        # Stored anew, it is there again.
        engine.store([KEYS[1]], truth[:, 1:2])
        engine.evict()
        assert torch.equal(engine.load(KEYS), truth)


def test_another_chunks_extent_in_its_place_is_no_hit(start: Any, tmp_path: Path) -> None:
    engine = start(Model())
    engine.store(KEYS[:2], truth_of(Model(), 2))
    first, second = (r.parent for r in records(tmp_path))
    for file in second.iterdir():
        file.unlink()
    for file in first.iterdir():
        (second / file.name).write_bytes(file.read_bytes())
    engine.evict()
    assert engine.find(KEYS[:2], engine.request()) == ["HIT", "MISS"]


def test_a_full_queue_drops_jobs_and_says_so(start: Any, tmp_path: Path) -> None:
    engine = start(Model(), tier={"max_queued": 2, "threads": 1}, rows=8)
    engine.store(KEYS, truth_of(Model(), 3))
    assert records(tmp_path) == []
    engine.evict()
    engine.store(KEYS[:2], truth_of(Model(), 2))
    assert len(records(tmp_path)) == 2


def test_a_full_disk_fails_the_job_and_leaves_nothing(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(Model())
    real = os.pwritev

    def full(*_args: Any) -> int:
        raise OSError(28, "No space left on device")

    for name in ("pwritev", "pwrite", "write", "writev"):
        monkeypatch.setattr(os, name, full)
    engine.store(KEYS, truth_of(Model(), 3))
    monkeypatch.undo()
    assert os.pwritev is real
    assert records(tmp_path) == []
    assert list((tmp_path / "store" / "__kvstore__").rglob("c.*")) == []
    engine.evict()
    engine.store(KEYS, truth_of(Model(), 3))
    assert len(records(tmp_path)) == 3


def test_reset_waits_for_what_runs(start: Any, tmp_path: Path) -> None:
    model = Model()
    truth = truth_of(model, 3)
    engine = start(model)
    request = engine.request()
    output = engine.manager.prepare_store(KEYS, request)
    engine._copy(output.store_spec.block_ids, truth, 0, to_rows=True)
    engine.manager.complete_store(KEYS, request)
    engine.evict()  # asserts itself that no job is left
    assert len(records(tmp_path)) == 3
    engine.manager.on_request_finished(request)
    assert torch.equal(engine.load(KEYS), truth)


def test_shutdown_leaves_nothing_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    files = len(list(Path("/proc/self/fd").iterdir()))
    tier = {"type": "KVStoreTier", "module_path": "kvstore.plugins.vllm", "revision": "r1", **GQA}
    for _ in range(2):
        engine = Tiered(Model(), {**tier, "root": str(tmp_path / "store")})
        engine.store(KEYS, truth_of(Model(), 3))
        engine.evict()
        engine.load(KEYS)
        request = engine.request()
        engine.manager.lookup(key_of(99), request)
        region = engine.spec._scheduler_mmap
        name = region.mmap_path
        mapped = region.mmap_obj
        engine.close()
        engine.tier.shutdown()  # twice is once
        assert mapped.closed
        assert not Path(name).exists()
    assert set(threading.enumerate()) - before == set()
    del engine, region, mapped
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    assert list((tmp_path / "store" / "__kvstore__" / "inflight").rglob("c.*")) == []


def test_shutdown_with_jobs_that_wait(start: Any) -> None:
    engine = start(Model(), tier={"threads": 1}, rows=64)
    keys = [key_of(n) for n in range(1, 41)]
    request = engine.request()
    output = engine.manager.prepare_store(keys, request)
    engine.manager.complete_store(keys, request)
    assert len(output.keys_to_store) == 40
    engine.close()
    (result,) = engine.tier.get_finished_jobs()
    assert not result.success
    engine.manager.shutdown = lambda: None


def test_read_only(start: Any, tmp_path: Path) -> None:
    truth = truth_of(Model(), 3)
    start(Model()).store(KEYS[:1], truth[:, :1])
    reader = start(Model(), tier={"read_only": True})
    reader.store(KEYS[1:], truth[:, 1:])
    assert len(records(tmp_path)) == 1
    assert torch.equal(reader.load(KEYS[:1]), truth[:, :1])


def test_expedited_loads_go_first_and_events_are_emitted(start: Any) -> None:
    from vllm.v1.kv_offload.base import Medium
    from vllm.v1.kv_offload.tiering.base import TransferJob

    truth = truth_of(Model(), 3)
    tier = {"enable_kv_events": True, "threads": 1, "locality": "LOCAL"}
    engine = start(Model(), tier=tier, events=True)
    engine.store(KEYS, truth)
    events = [e for e in engine.manager.take_events() if e.medium is Medium.STORAGE]
    assert sorted(k for e in events for k in e.keys) == sorted(KEYS)
    context = engine.request()
    import numpy as np

    job = TransferJob(900, KEYS, np.array([0, 1, 2]), is_promotion=True, req_context=context)
    engine.tier.submit_load(job, expedited=True)
    engine.tier.drain_jobs()
    (result,) = engine.tier.get_finished_jobs()
    assert (result.job_id, result.success) == (900, True)
