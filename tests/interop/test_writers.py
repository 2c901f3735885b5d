"""Extents written by other implementations, with our metadata, load as our own do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from support.world import World, make_world, seats, small_group
from tiny import GROUPS

from kvstore import LayerGroup, ParallelConfig
from kvstore.extent import CommitRecord, Writer, encode_extent
from kvstore.records import encode_plain_group

Write = Callable[[Path, dict[str, Any], Any], None]


def _zarr_python(folder: Path, metadata: dict[str, Any], data: Any) -> None:
    outer = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    inner = metadata["codecs"][0]["configuration"]
    array = zarr.create_array(
        store=str(folder),
        shape=metadata["shape"],
        dtype=data.dtype,
        chunks=inner["chunk_shape"],
        shards=outer,
        compressors=[zarr.codecs.Crc32cCodec()],
        filters=None,
        serializer=zarr.codecs.BytesCodec(endian="little"),
        fill_value=0,
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=metadata["dimension_names"],
        overwrite=True,
    )
    array[...] = data


def _tensorstore(folder: Path, metadata: dict[str, Any], data: Any) -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(folder)},
        "metadata": {k: v for k, v in metadata.items() if k not in ("zarr_format", "node_type")},
    }
    ts.open(spec, create=True, delete_existing=True).result()[...].write(data).result()


WRITERS: dict[str, Write] = {"zarr-python": _zarr_python, "tensorstore": _tensorstore}
GROUPS_WRITTEN: dict[str, LayerGroup] = {
    "bfloat16": small_group(),
    "float32": small_group(element="float32", shard_heads=4),
    "fp8": GROUPS["fp8"](),
    "int8": small_group(element="int8"),
    "mla": GROUPS["mla"](),
    "mixed": GROUPS["mixed"](),
}


def _foreign(world: World, write: Write, *, own_metadata: bool) -> None:
    """Put every extent of the sequence there as another implementation writes it."""
    group, n = world.group, world.group.page_tokens
    for end in world.ends():
        first = end - end % group.extent_blocks
        blocks = end + 1 - first
        raw = world.truth[:, :, first * n : (end + 1) * n]
        shape = (group.num_layers, group.heads, blocks, n, group.token_bytes)
        data = np.ascontiguousarray(raw.reshape(shape).transpose(0, 2, 1, 3, 4))
        data = data.view(group.carrier.numpy_carrier)
        record = CommitRecord(
            namespace=world.namespace.name,
            group=group.name,
            blocks=tuple(world.keys[first : end + 1]),
            parent=world.keys.parent_of(first),
            start_block=first,
            chunk_stride=None,
            shards={"c.0.0.0.0.0": 1},
            parallel_invariant=True,
            writer=Writer("another", "tp=1", "s"),
            write_id="00" * 16,
            created="2026-12-01T00:00:00Z",
        )
        ours = json.loads(encode_extent(group, record))
        folder = world.folder(end)
        attributes = ours.pop("attributes")
        write(folder, ours, data)
        (folder.parent / "zarr.json").write_bytes(encode_plain_group())
        sizes = {p.name: p.stat().st_size for p in folder.iterdir() if p.name != "zarr.json"}
        grid = [
            f"c.{row}.0.{column}.0.0"
            for row in range(group.num_layers // group.shard_layers)
            for column in range(group.heads // group.shard_heads)
        ]
        assert sorted(sizes) == sorted(grid)
        attributes["kvstore"]["shards"] = [{"name": s, "bytes": sizes[s]} for s in grid]
        written = json.loads((folder / "zarr.json").read_text())
        final = ours if own_metadata else written
        (folder / "zarr.json").write_text(json.dumps({**final, "attributes": attributes}))


@pytest.mark.parametrize(
    ("name", "own_metadata"),
    # A float array's fill value is spelt 0.0 by others, and the format's records hold no floats:
    # then the metadata must be written as the specification has it.
    [(name, True) for name in GROUPS_WRITTEN]
    + [(name, False) for name in GROUPS_WRITTEN if name != "float32"],
)
@pytest.mark.parametrize("writer", WRITERS)
def test_loads_through_our_reader(
    tmp_path: Path, name: str, writer: str, own_metadata: bool
) -> None:
    world = make_world(tmp_path, GROUPS_WRITTEN[name])
    _foreign(world, WRITERS[writer], own_metadata=own_metadata)
    assert world.namespace.match_prefix(world.keys).blocks == 5
    heads = world.group.heads
    for config in (
        ParallelConfig(),
        ParallelConfig(tp=heads * 2, dcp=2, interleave=2),
        ParallelConfig(tp=heads),
    ):
        world.load_all(config, layout="by-part")
    one = world.seat()
    assert [r.blocks for _, r in one.worker.load_layers(world.keys, one.table)][-1] == 5
    one.expect(world.truth, 0, 20)
    assert not [f for f in world.namespace.verify() if not f.is_note]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_float_in_the_metadata_is_a_miss_with_a_reason(tmp_path: Path, writer: str) -> None:
    world = make_world(tmp_path, GROUPS_WRITTEN["float32"])
    _foreign(world, WRITERS[writer], own_metadata=False)
    one = world.seat()
    result = one.worker.load(world.keys, one.table)
    assert result.blocks == 0
    assert "the number 0.0 is not an integer" in result.misses[0]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("where", ["chunk", "index"])
def test_damage_in_a_foreign_shard_is_noticed(tmp_path: Path, writer: str, where: str) -> None:
    """Without a fixed stride the index is used, so it is checked too."""
    world = make_world(tmp_path)
    _foreign(world, WRITERS[writer], own_metadata=True)
    path = world.folder(1) / "c.0.0.0.0.0"
    data = bytearray(path.read_bytes())
    data[{"chunk": 11, "index": -25}[where]] ^= 0x20
    path.write_bytes(data)
    for one in seats(world.namespace, ParallelConfig(), total=23):
        result = one.worker.load(world.keys, one.table)
        assert sorted(result.misses) == [0, 1]
        assert "checksum" in result.misses[0]
    world.store_all(session="again")
    world.load_all()
