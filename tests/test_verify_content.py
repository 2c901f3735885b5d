"""Verification of shards: one changed bit anywhere is one fault, named by layer and head."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made import Made, flip, layout_of, make_store, padded_group, shuffle_chunks
from tiny import gqa_group

from kvstore.faults import Fault
from kvstore.geometry import LayerGroup
from kvstore.io.posix import PosixEngine
from kvstore.paths import GroupPath, parse_shard_name
from kvstore.shard import MISSING, ShardLayout, checksum
from kvstore.verify import verify_store
from kvstore.verify_content import ContentCheck


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """A store with slots packed, one with slots aligned. Tests undo what they do to them."""
    root = tmp_path_factory.mktemp("stores")
    groups = {"packed": gqa_group(), "aligned": padded_group()}
    return {name: make_store(root / name, [g], blocks=4) for name, g in groups.items()}


def findings(made: Made, **options: int) -> list[Fault]:
    engine = PosixEngine(made.root, read_only=True, **options)  # type: ignore[arg-type]
    found = list(verify_store(engine))
    engine.close()
    return found


def place(group: LayerGroup, shard: str, chunk: int) -> str:
    row, column = parse_shard_name(shard)
    layer = group.layers[row * group.shard_layers + chunk // group.shard_heads]
    return f"layer {layer}, head {column * group.shard_heads + chunk % group.shard_heads}: "


def kind_at(layout: ShardLayout, byte: int) -> str:
    if byte >= layout.index_offset:
        return "index"
    return "checksum" if byte % layout.stride < layout.chunk_bytes + 4 else "padding"


@pytest.mark.parametrize("name", ["packed", "aligned"])
@given(data=st.data())
def test_one_changed_bit_is_one_fault(
    stores: dict[str, Made], name: str, data: st.DataObject
) -> None:
    made = stores[name]
    (group,) = made.identity.groups
    extent = made.extents(group.name)[0]
    layout = layout_of(made, extent)
    shard = data.draw(st.sampled_from(sorted(made.records[extent].shards)))
    slot = data.draw(st.integers(0, layout.chunks))
    near = data.draw(st.sampled_from([0, layout.chunk_bytes, layout.chunk_bytes + 4]))
    byte = min(layout.shard_bytes - 1, slot * layout.stride + near + data.draw(st.integers(0, 3)))
    byte = data.draw(st.sampled_from([byte, data.draw(st.integers(0, layout.shard_bytes - 1))]))
    path = made.root / extent / shard
    bit = 8 * byte + data.draw(st.integers(0, 7))
    flip(path, bit)
    try:
        found = findings(made)
    finally:
        flip(path, bit)
    kind = kind_at(layout, byte)
    assert [(f.path, f.kind) for f in found] == [(f"{extent}/{shard}", kind)]
    if kind != "index":
        assert found[0].message.startswith(place(group, shard, byte // layout.stride))


def test_padding_and_chunk_at_once_are_two_faults(stores: dict[str, Made]) -> None:
    made = stores["aligned"]
    extent = made.extents("padded")[0]
    path = made.root / extent / "c.0.0.0.0.0"
    layout = layout_of(made, extent)
    assert layout.stride == 4096
    bits = [8 * (layout.offset(1) + 5), 8 * (layout.offset(2) - 1), 8 * (layout.offset(3) - 1)]
    for bit in bits:
        flip(path, bit)
    found = findings(made)
    for bit in bits:
        flip(path, bit)
    assert [(f.kind, f.message.partition(":")[0]) for f in found] == [
        ("checksum", "layer 0, head 1"),
        ("padding", "layer 0, head 1"),
        ("padding", "layer 1, head 0"),
    ]
    assert "itself is whole" not in found[1].message
    assert "itself is whole" in found[2].message


def test_the_checksums_are_named(stores: dict[str, Made]) -> None:
    made = stores["packed"]
    extent = made.extents("kv")[0]
    path = made.root / extent / "c.0.0.0.0.0"
    whole = path.read_bytes()
    flip(path, 0)
    (fault,) = findings(made)
    flip(path, 0)
    size = layout_of(made, extent).chunk_bytes
    stored, computed = re.findall(r"[0-9a-f]{8}", fault.message)
    assert int(stored, 16) == checksum(whole[:size])
    assert int(computed, 16) == checksum(bytes([whole[0] ^ 1]) + whole[1:size])


def rewrite_index(path: Path, layout: ShardLayout, chunk: int, offset: int) -> None:
    """An index with one offset changed and a checksum that fits."""
    data = bytearray(path.read_bytes())
    at = layout.index_offset + 16 * chunk
    data[at : at + 8] = offset.to_bytes(8, "little")
    data[-4:] = checksum(data[layout.index_offset : -4]).to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize("offset", [7, 1 << 40, MISSING])
def test_an_index_that_names_other_places(stores: dict[str, Made], offset: int) -> None:
    made = stores["packed"]
    extent = made.extents("kv")[0]
    path = made.root / extent / "c.0.0.1.0.0"
    whole = path.read_bytes()
    rewrite_index(path, layout_of(made, extent), 0, offset)
    found = findings(made)
    path.write_bytes(whole)
    assert [(f.path, f.kind) for f in found] == [(f"{extent}/c.0.0.1.0.0", "index")]


def test_an_index_that_is_valid_but_contradicts_the_stride(stores: dict[str, Made]) -> None:
    """Chunks that swapped places in the index: Zarr tools would read the wrong heads."""
    made = stores["packed"]
    extent = made.extents("kv")[0]
    layout = layout_of(made, extent)
    path = made.root / extent / "c.0.0.0.0.0"
    whole = path.read_bytes()
    rewrite_index(path, layout, 1, layout.offset(2))
    rewrite_index(path, layout, 2, layout.offset(1))
    (fault,) = findings(made)
    path.write_bytes(whole)
    assert fault.kind == "index"
    assert fault.message.startswith("2 of 4 chunks are not where")
    assert f"chunk 1: {layout.offset(2)}, not {layout.offset(1)}" in fault.message


def test_a_shard_that_is_a_folder_or_a_link_is_missing(stores: dict[str, Made]) -> None:
    made = stores["packed"]
    extent = made.extents("kv")[0]
    path = made.root / extent / "c.0.0.0.0.0"
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)
    found = findings(made)
    path.unlink()
    aside.rename(path)
    assert [(Path(f.path).name, f.kind) for f in found] == [
        ("aside", "stray"),
        ("c.0.0.0.0.0", "missing"),
    ]


def test_chunks_in_any_order_with_an_index_alone(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [gqa_group()], blocks=4)
    (extent,) = made.extents("kv")
    shuffle_chunks(made, extent)
    assert findings(made) == []
    path = made.root / extent / "c.1.0.0.0.0"
    data = path.read_bytes()
    at = int.from_bytes(data[-4 - 16 :][:8], "little")  # of the last chunk
    flip(path, 8 * at)
    flip(path, 8 * 1)  # between chunks anything may stand
    assert [(f.kind, f.message[:15]) for f in findings(made)] == [("checksum", "layer 3, head 1")]
    flip(path, 8 * (len(data) - 1))
    # Without an index there is no telling where chunks are.
    assert [f.kind for f in findings(made)] == ["index"]


def test_chunks_larger_than_all_staging_memory(tmp_path: Path) -> None:
    group = LayerGroup.attention_kv(
        layers=2, heads=1, head_size=1000, block_tokens=16, extent_blocks=8
    )
    made = make_store(tmp_path / "store", [group], blocks=8)
    (extent,) = made.extents("kv")
    assert layout_of(made, extent).chunk_bytes == 512_000
    small = {"threads": 2, "max_staging_bytes": 128 << 10}
    assert findings(made, **small) == []
    flip(made.root / extent / "c.0.0.0.0.0", 8 * 511_999)
    assert [f.kind for f in findings(made, **small)] == ["checksum"]


def test_progress_and_batches_of_many_ranges(
    stores: dict[str, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ranges and batches of one slot, the same is found."""
    monkeypatch.setattr("kvstore.verify_content.RANGE_BYTES", 1)
    monkeypatch.setattr("kvstore.verify_content.BATCH_BYTES", 1)
    made = stores["packed"]
    (group,) = made.identity.groups
    extent = made.extents("kv")[0]
    record, path = made.records[extent], made.root / extent / "c.1.0.1.0.0"
    layout = layout_of(made, extent)
    flip(path, 8 * layout.offset(3))
    steps: list[int] = []
    engine = PosixEngine(made.root, read_only=True)
    names = GroupPath(made.name, "kv")
    found = list(ContentCheck(engine, group, names, record, steps.append).faults())
    flip(path, 8 * layout.offset(3))
    assert [f.message[:15] for f in found] == ["layer 3, head 3"]
    assert sum(steps) == sum(record.shards.values())
    assert steps.count(layout.stride) == 16
