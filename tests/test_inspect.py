"""Statistics of values, against torch and NumPy on the whole array."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.made import Made, chunks_of, make_store, padded_group, shuffle_chunks
from tiny import GROUPS, gqa_group, mixed_group

from kvstore.elements import ELEMENT_TYPES, element
from kvstore.errors import Corrupt, NotFound
from kvstore.extent import CommitRecord, shard_layout
from kvstore.inspect import ValueStats, decode_values, extent_statistics
from kvstore.io.posix import PosixEngine
from kvstore.paths import GroupPath
from kvstore.shard import join_chunks


@pytest.mark.parametrize("name", sorted(ELEMENT_TYPES))
def test_every_bit_pattern_decodes_as_torch_does(name: str) -> None:
    kind = element(name)
    if kind.itemsize == 1:
        raw = np.arange(256, dtype=np.uint8)
    elif kind.itemsize == 2:
        raw = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    else:
        raw = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
    truth = torch.from_numpy(raw.copy()).view(kind.torch_dtype())
    truth = truth.float() if truth.is_floating_point() else truth
    found = decode_values(raw.reshape(2, -1), kind)
    assert found.shape == (2, len(raw) // kind.itemsize // 2)
    np.testing.assert_array_equal(found.ravel(), truth.numpy())
    number = ~np.isnan(truth.numpy().astype(np.float32))
    assert np.array_equal(np.signbit(found.ravel())[number], np.signbit(truth.numpy())[number])


def statistics(made: Made, extent: str, **options: int) -> list[ValueStats]:
    record: CommitRecord = made.records[extent]
    group = made.identity.group(record.group)
    engine = PosixEngine(made.root, read_only=True, **options)  # type: ignore[arg-type]
    try:
        return extent_statistics(engine, group, GroupPath(made.name, group.name), record)
    finally:
        engine.close()


def check(made: Made, extent: str, found: list[ValueStats]) -> None:
    """Compare with float64 arithmetic on the whole extent at once, decoded by torch."""
    group = made.identity.group(made.records[extent].group)
    assert [(s.layer, s.part) for s in found] == [
        (layer, part.name) for layer in group.layers for part in group.parts
    ]
    for s in found:
        part = next(p for p in group.parts if p.name == s.part)
        at = group.part_offset(part.name)
        raw = made.values[extent][group.layers.index(s.layer), ..., at : at + part.nbytes]
        true = torch.from_numpy(raw.copy()).view(part.element.torch_dtype()).double().numpy()
        finite = true[np.isfinite(true)]
        assert s.element == part.element.name
        assert s.count == true.size
        assert s.nan == np.isnan(true).sum()
        assert s.inf == np.isinf(true).sum()
        assert s.zeros == (true == 0).sum()
        assert s.zero_fraction == s.zeros / true.size
        assert (s.minimum, s.maximum) == (finite.min(), finite.max())
        assert s.mean == pytest.approx(finite.mean(), rel=1e-9)
        assert s.std == pytest.approx(finite.std(), rel=1e-9)


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_against_the_whole_array(tmp_path: Path, name: str) -> None:
    group = GROUPS[name]()
    made = make_store(tmp_path / "store", [group], blocks=3)
    for extent in made.extents(group.name):
        check(made, extent, statistics(made, extent))


def test_chunks_in_any_order(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [gqa_group()], blocks=4)
    (extent,) = made.extents("kv")
    before = statistics(made, extent)
    shuffle_chunks(made, extent)
    assert statistics(made, extent) == before
    check(made, extent, before)


def test_pieces_of_a_chunk_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that hands over a token or two at a time."""
    monkeypatch.setattr("kvstore.io.posix.HOT_BYTES", 600)
    made = make_store(tmp_path / "store", [padded_group()], blocks=4)
    (extent,) = made.extents("padded")
    check(made, extent, statistics(made, extent, direct="never"))  # type: ignore[arg-type]


def test_a_layer_of_nothing_finite(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [mixed_group()], blocks=2)
    (extent,) = made.extents("mixed")
    values = made.values[extent]
    group = made.identity.group("mixed")
    at = group.part_offset("value_scale")
    nan = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    values[0, ..., at : at + 4] = nan
    for name in made.records[extent].shards:
        shard = join_chunks(shard_layout(group, 2), chunks_of(group, values, name))
        (made.root / extent / name).write_bytes(shard)
    found = {(s.layer, s.part): s for s in statistics(made, extent)}
    lost = found[0, "value_scale"]
    assert lost.nan == lost.count
    assert all(math.isnan(x) for x in (lost.minimum, lost.maximum, lost.mean, lost.std))
    assert found[2, "value_scale"].nan < lost.count


def test_a_shard_that_is_missing_or_short(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [gqa_group()], blocks=4)
    (extent,) = made.extents("kv")
    path = made.root / extent / "c.1.0.1.0.0"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(Corrupt):
        statistics(made, extent)
    path.unlink()
    with pytest.raises(NotFound):
        statistics(made, extent)
