"""Damaged bytes, everywhere: never a wrong byte as a hit, always a reason, always a way back."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from support.world import Seat, World, make_world, seats, small_group

from kvstore import LoadResult, ParallelConfig
from kvstore.paths import QUARANTINE

CONTEXT = ParallelConfig(tp=2, dcp=2, interleave=2)


@pytest.fixture
def world(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> World:
    """One head, two layers in one shard; two extents. Small enough to damage every byte of."""
    caplog.set_level(logging.CRITICAL, "kvstore")  # thousands of lines otherwise
    group = small_group(layers=2, heads=1, head_size=2, shard_layers=2, shard_heads=1)
    made = make_world(tmp_path, group, blocks=4, extra_tokens=0)
    made.store_all()
    return made


def _load(world: World, config: ParallelConfig | None = None) -> list[tuple[Seat, LoadResult]]:
    """Load under a config; what counts as loaded must be right, whatever happened."""
    out = []
    for one in seats(world.namespace, config or ParallelConfig(), total=16, session=None):
        result = one.worker.load(world.keys, one.table)
        hit = [b for b in range(4) if b not in result.misses]
        assert result.blocks == next((b for b in range(4) if b in result.misses), 4)
        for block in hit if result.misses else ():
            clean = world.seat(one.worker.config, one.rank, session=None)
            part = clean.worker.load(world.keys[block : block + 1], clean.table)
            assert part.blocks == 1
            clean.expect(world.truth, 4 * block, 4 * block + 4)
        if not result.misses:
            one.expect(world.truth, 0, 16)
        out.append((one, result))
    return out


def _restore(world: World, end: int, files: dict[str, bytes]) -> None:
    """Put an extent back that was moved away, as a new store would."""
    folder = world.folder(end)
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_every_byte_of_a_shard(world: World) -> None:
    """Chunks and checksums: a miss. The index, which a fixed stride makes needless: no harm."""
    good = _files(world.folder(1))
    (name,) = [n for n in good if n != "zarr.json"]
    size = 2 * (2 * 4 * 8 + 4)
    assert len(good[name]) == size + 2 * 16 + 4
    for at in range(len(good[name])):
        bad = bytearray(good[name])
        bad[at] ^= 1 << (at % 8)
        _restore(world, 1, {**good, name: bytes(bad)})
        ((_, result),) = _load(world)
        if at < size:
            assert sorted(result.misses) == [0, 1], at
            layer = at // (size // 2)
            assert f"layer {layer}, head 0: the chunk does not match" in result.misses[0]
        else:
            assert not result.misses
            assert [f.kind for f in world.namespace.verify()] == ["index"]
    _restore(world, 1, good)
    assert world.namespace.counters["quarantined"] == size
    assert not _load(world)[0][1].misses


def test_bytes_all_over_a_record(world: World) -> None:
    """A bit of every third: noticed, or nothing that a load depends on."""
    good = _files(world.folder(1))
    harmless = 0
    for at in range(0, len(good["zarr.json"]), 3):
        bad = bytearray(good["zarr.json"])
        bad[at] ^= 1 << (at % 8)
        _restore(world, 1, {**good, "zarr.json": bytes(bad)})
        ((_, result),) = _load(world)
        harmless += not result.misses
        if result.misses:
            assert sorted(result.misses) == [0, 1]
            assert world.keys[1].hex() in result.misses[0]
    # Texts that no reader depends on: who wrote it, when, and under which write id.
    assert harmless < 60


@pytest.mark.parametrize("config", [CONTEXT, ParallelConfig(pp=2)], ids=str)
def test_a_rank_notices_damage_in_its_own_share(world: World, config: ParallelConfig) -> None:
    """And a rank whose chunks are whole loads them, until the extent is moved away."""
    good = _files(world.folder(1))
    (name,) = [n for n in good if n != "zarr.json"]
    bad = bytearray(good[name])
    bad[1] ^= 2  # layer 0
    _restore(world, 1, {**good, name: bytes(bad)})
    reader = world.reopen(read_only=True)
    for one, result in _load(reader, config):
        assert bool(result.misses) == (0 in one.held.layers)


@pytest.mark.parametrize("which", ["shard", "zarr.json"])
def test_cut_short_at_every_length(world: World, which: str) -> None:
    good = _files(world.folder(1))
    name = which if which in good else next(n for n in good if n != "zarr.json")
    step = 7 if which == "shard" else 37
    needed = 2 * (2 * 4 * 8 + 4)
    for length in range(0, len(good[name]), step):
        _restore(world, 1, {**good, name: good[name][:length]})
        ((_, result),) = _load(world)
        if which == "shard" and length >= needed:
            assert not result.misses  # all that is asked for is there
            continue
        assert sorted(result.misses) == [0, 1], length
        wanted = "cut short" if which == "shard" else "zarr.json"
        assert wanted in result.misses[0]
        assert not world.folder(1).exists()


def test_bytes_after_the_end_do_no_harm(world: World) -> None:
    good = _files(world.folder(1))
    (name,) = [n for n in good if n != "zarr.json"]
    _restore(world, 1, {**good, name: good[name] + b"more"})
    assert not _load(world)[0][1].misses
    assert [f.kind for f in world.namespace.verify()] == ["size"]


def test_zeroed_and_swapped_halves(world: World) -> None:
    good = _files(world.folder(1))
    (name,) = [n for n in good if n != "zarr.json"]
    data = good[name]
    for bad in (bytes(len(data)), data[64:] + data[:64], data[:30] + bytes(30) + data[60:]):
        _restore(world, 1, {**good, name: bad})
        assert sorted(_load(world)[0][1].misses) == [0, 1]


def test_without_verification_damage_would_be_handed_over(world: World) -> None:
    """The control: the checks above are what keeps wrong bytes out, not luck."""
    good = _files(world.folder(1))
    (name,) = [n for n in good if n != "zarr.json"]
    bad = bytearray(good[name])
    bad[3] ^= 0x40
    _restore(world, 1, {**good, name: bytes(bad)})
    trusting = world.reopen(verify=False)
    one = trusting.seat()
    assert one.worker.load(world.keys, one.table).blocks == 4
    with pytest.raises(AssertionError, match=r"1 of .* bytes differ"):
        one.expect(world.truth, 0, 16)
    assert not (world.root / QUARANTINE).exists()


def test_a_chain_that_does_not_fit_is_refused(world: World) -> None:
    """A record that is valid in itself, of other blocks than the sequence asks for."""
    path = world.folder(3) / "zarr.json"
    stored = json.loads(path.read_text())
    record = stored["attributes"]["kvstore"]
    good = json.dumps(stored)
    for field, value in (
        ("parent", "11" * 32),
        ("blocks", ["22" * 32, record["blocks"][1]]),
        ("start_block", 4),
    ):
        changed = json.loads(good)
        changed["attributes"]["kvstore"][field] = value
        _restore(
            world, 3, {**_quarantined_files(world, 3), "zarr.json": json.dumps(changed).encode()}
        )
        ((_, result),) = _load(world)
        assert sorted(result.misses) == [2, 3]
        assert "holds other blocks than its name stands for" in result.misses[2]


def _quarantined_files(world: World, end: int) -> dict[str, bytes]:
    if world.folder(end).exists():
        return _files(world.folder(end))
    newest = max(
        (world.root / QUARANTINE).glob(f"*/*/{world.keys[end].hex()}-*"),
        key=lambda p: p.stat().st_mtime_ns,
    )
    return _files(newest / "extent")


def test_what_was_lost_is_stored_again(world: World) -> None:
    for round_ in range(3):
        for path in world.folder(1).iterdir():
            if path.name != "zarr.json":
                path.write_bytes(b"\0" * path.stat().st_size)
        assert sorted(_load(world)[0][1].misses) == [0, 1]
        assert world.namespace.match_prefix(world.keys).blocks == 0
        _, report = world.store_all(CONTEXT, session=f"again {round_}", tokens=2)
        assert [len(report.committed), len(report.already)] == [1, 1]
        assert not _load(world)[0][1].misses
