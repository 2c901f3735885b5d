"""Extents read by three other implementations of Zarr v3, and refused by all when damaged."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from support.pools import Bytes
from support.world import World, make_world, small_group
from tiny import GROUPS

from kvstore import ContentPart, LayerGroup, ParallelConfig, open_array
from kvstore.elements import ELEMENT_TYPES
from kvstore.errors import FormatError

Region = tuple[slice, ...]
Read = Callable[[Path, Region], Any]


def _zarr_python(folder: Path, region: Region) -> Any:
    return zarr.open_array(folder, mode="r")[region]


def _zarrs(folder: Path, region: Region) -> Any:
    pipeline = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}
    with zarr.config.set(pipeline), warnings.catch_warnings():
        # zarrs says that it falls back where a request is not its kind; then it proves nothing.
        warnings.simplefilter("error")
        return zarr.open_array(folder, mode="r")[region]


def _tensorstore(folder: Path, region: Region) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder)}}
    return ts.open(spec, read=True, open=True).result()[region].read().result()


READERS: dict[str, Read] = {
    "zarr-python": _zarr_python,
    "zarrs": _zarrs,
    "tensorstore": _tensorstore,
}


def _typed(element: str, tokens: int = 4) -> LayerGroup:
    return small_group(layers=2, heads=2, shard_layers=1, element=element, block_tokens=tokens)


GROUPS_READ: dict[str, LayerGroup] = {
    **{name: _typed(name) for name in ELEMENT_TYPES},
    # 2 x 256 x 64 x 2 bytes a chunk: slots on 4096-byte boundaries, with zeros between them.
    "aligned": small_group(
        layers=2, heads=2, shard_layers=2, shard_heads=2, head_size=64, block_tokens=256
    ),
    "mla": GROUPS["mla"](),
    "mixed": GROUPS["mixed"](),
    "odd": LayerGroup(
        "odd", (0, 1), 3, 3, (ContentPart("key", ELEMENT_TYPES["float8_e5m2"], 5),),
        extent_blocks=2, shard_layers=1, shard_heads=1,
    ),
}  # fmt: skip


@contextmanager
def _stored(root: Path, group: LayerGroup) -> Iterator[World]:
    world = make_world(root, group, blocks=group.extent_blocks + 1, extra_tokens=0)
    config = ParallelConfig(tp=2) if group.heads % 2 == 0 else ParallelConfig()
    world.store_all(config, tokens=group.block_tokens)
    yield world


def _array(world: World, start: int, stop: int) -> Any:
    """The extent of those blocks as the specification lays it out, in the carrier type."""
    group, n = world.group, world.group.page_tokens
    raw: Bytes = world.truth[:, :, start * n : stop * n]
    shape = (group.num_layers, group.heads, stop - start, n, group.token_bytes)
    order = np.ascontiguousarray(raw.reshape(shape).transpose(0, 2, 1, 3, 4))
    return order.view(group.carrier.numpy_carrier)


def _regions(shape: tuple[int, ...]) -> list[Region]:
    whole = tuple(slice(0, n) for n in shape)
    one_head = (slice(0, 1), slice(0, shape[1]), slice(shape[2] - 1, shape[2]), *whole[3:])
    inside = (
        slice(shape[0] - 1, shape[0]),
        slice(shape[1] - 1, shape[1]),
        slice(0, shape[2]),
        slice(shape[3] // 2, shape[3]),
        slice(1, shape[4] - 1),
    )
    return [whole, one_head, inside]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", GROUPS_READ)
def test_the_same_bytes_whole_and_in_part(tmp_path: Path, name: str, reader: str) -> None:
    with _stored(tmp_path, GROUPS_READ[name]) as world:
        stride = world.namespace.record(world.keys[world.group.extent_blocks - 1]).chunk_stride
        assert (stride is not None and stride % 4096 == 0) == (name == "aligned")
        for start, stop in ((0, world.group.extent_blocks), (world.group.extent_blocks, None)):
            end = len(world.keys) if stop is None else stop
            expected = _array(world, start, end)
            for region in _regions(expected.shape):
                found = np.asarray(READERS[reader](world.folder(end - 1), region))
                assert found.dtype == expected.dtype
                assert found.tobytes() == expected[region].tobytes()


@pytest.mark.parametrize("name", GROUPS_READ)
def test_our_own_lazy_array_agrees(tmp_path: Path, name: str) -> None:
    with _stored(tmp_path, GROUPS_READ[name]) as world:
        end = world.group.extent_blocks
        raw = _array(world, 0, end).view(np.uint8)
        at = 0
        for part in world.group.parts:
            lazy = open_array(world.folder(end - 1), part.name)
            assert lazy.shape[-1] == part.count
            assert str(lazy.dtype) == f"torch.{part.element.name}"
            found = lazy[:].view(__import__("torch").uint8).numpy()
            assert np.array_equal(found, raw[..., at : at + part.nbytes])
            at += part.nbytes


@pytest.mark.parametrize("reader", [*READERS, "ours"])
@pytest.mark.parametrize("where", ["chunk", "checksum", "index", "index checksum"])
def test_every_reader_refuses_a_flipped_bit(tmp_path: Path, where: str, reader: str) -> None:
    with _stored(tmp_path, GROUPS_READ["bfloat16"]) as world:
        folder = world.folder(world.group.extent_blocks - 1)
        shape = (2, 2, 2, 4, 16)
        whole = tuple(slice(0, n) for n in shape)
        path = folder / "c.0.0.0.0.0"
        data = bytearray(path.read_bytes())
        chunk = 2 * 4 * 16 * 2
        data[{"chunk": 9, "checksum": chunk + 1, "index": -20, "index checksum": -1}[where]] ^= 4
        path.write_bytes(data)
        if reader == "ours":
            with pytest.raises(FormatError):
                open_array(folder)[:]
            assert [f.kind for f in world.namespace.verify()]
            return
        with pytest.raises(Exception, match=r"(?i)checksum|crc|corrupt|invalid|mismatch|digest"):
            READERS[reader](folder, whole)


def test_the_hierarchy_is_browsable(tmp_path: Path) -> None:
    """Groups all the way down, so that any Zarr tool walks the store."""
    with _stored(tmp_path, GROUPS_READ["float32"]) as world:
        with warnings.catch_warnings():
            # "Object at __kvstore__ is not recognized": Zarr reserves such names for extensions.
            warnings.filterwarnings("ignore", message=".*__kvstore__.*")
            members = dict(zarr.open_group(tmp_path, mode="r").members(max_depth=None))
        arrays = {n for n, m in members.items() if isinstance(m, zarr.Array)}
        assert arrays == {e.path for e in world.namespace.extents()}
        assert members[world.namespace.name].attrs["kvstore"]["format"] == "kvstore"
