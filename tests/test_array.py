"""Lazy arrays in the true element type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutate import drop, put
from support.made import Made, flip, make_store
from tiny import GROUPS, gqa_group, mixed_group

import kvstore
from kvstore import FormatError, InvalidArgument, NotFound, UnsupportedVersion, open_array


def one(tmp_path: Path, group: str = "gqa") -> tuple[Made, str]:
    made = make_store(tmp_path / "store", [GROUPS[group]()], blocks=3)
    return made, next(iter(made.records))


def truth(made: Made, extent: str, part: str) -> torch.Tensor:
    group = made.identity.group(made.records[extent].group)
    found = next(p for p in group.parts if p.name == part)
    at = group.part_offset(part)
    raw = np.ascontiguousarray(made.values[extent][..., at : at + found.nbytes])
    return torch.from_numpy(raw).view(found.element.torch_dtype())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits: NaN is not equal to itself."""
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_every_part_of_every_geometry(tmp_path: Path, group: str) -> None:
    made, extent = one(tmp_path, group)
    for part in made.identity.groups[0].parts:
        array = open_array(made.root / extent, part.name)
        wanted = truth(made, extent, part.name)
        assert array.shape == tuple(wanted.shape)
        assert array.dtype == wanted.dtype
        assert len(array) == len(wanted)
        assert same(array[:], wanted)


def test_all_parts_together_where_they_have_one_type(tmp_path: Path) -> None:
    made, extent = one(tmp_path)
    array = open_array(made.root / extent)
    wanted = torch.cat([truth(made, extent, p) for p in ("key", "value")], dim=-1)
    assert array.part is None
    assert same(array[...], wanted)
    assert repr(array) == "LazyArray(shape=(4, 3, 4, 4, 16), dtype=torch.bfloat16, part=None)"


@pytest.mark.parametrize(
    "index",
    [
        2,
        -1,
        slice(1, 3),
        slice(None, None, 2),
        (0, 1, 2),
        (..., 5),
        (..., -1),
        (..., slice(2, 6)),
        (0, ..., slice(None, None, 3)),
        (slice(0, 0), ...),
        (1, 0, 3, 2, 7),
        (slice(None), 0, slice(1, 3), ..., 0),
        ...,
        (),
    ],
)
def test_indexing_is_torchs(tmp_path: Path, index: Any) -> None:
    made, extent = one(tmp_path)
    for part in ("key", "value"):
        found = open_array(made.root / extent, part)[index]
        wanted = truth(made, extent, part)[index]
        assert found.shape == wanted.shape
        assert same(found.reshape(-1), wanted.reshape(-1))


@pytest.mark.parametrize(
    "index", [[0, 1], None, 1.0, "key", (..., ...), (0, 0, 0, 0, 0, 0), (0, None), np.array([1])]
)
def test_other_indices_are_refused(tmp_path: Path, index: Any) -> None:
    made, extent = one(tmp_path)
    with pytest.raises(InvalidArgument):
        open_array(made.root / extent)[index]


@pytest.mark.parametrize("index", [4, -5, (0, 3), (0, 0, 0, 0, 16), (..., -17)])
def test_an_index_out_of_range(tmp_path: Path, index: Any) -> None:
    made, extent = one(tmp_path)
    with pytest.raises(IndexError):
        open_array(made.root / extent)[index]


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    made, extent = one(tmp_path)
    flip(made.root / extent / "c.0.0.0.0.0", 8)
    array = open_array(made.root / extent, "key")
    assert same(array[0, :, 2], truth(made, extent, "key")[0, :, 2])
    with pytest.raises(FormatError, match="cannot be read"):
        array[0, :, 0]


def test_a_shard_that_is_gone_is_not_zeros(tmp_path: Path) -> None:
    """Zarr takes an absent shard for one of zeros."""
    made, extent = one(tmp_path)
    array = open_array(made.root / extent, "key")
    shutil.rmtree(made.root / extent)
    with pytest.raises(NotFound, match="is gone"):
        array[0]


def test_parts_of_several_types_are_opened_one_by_one(tmp_path: Path) -> None:
    made, extent = one(tmp_path, "mixed")
    with pytest.raises(InvalidArgument, match="key, key_scale, value, value_scale"):
        open_array(made.root / extent)
    assert open_array(made.root / extent, "key_scale").dtype == torch.float32
    with pytest.raises(InvalidArgument, match="no content part 'latent'"):
        open_array(made.root / extent, "latent")
    assert mixed_group().carrier.name == "uint8"


def test_through_the_store(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [gqa_group()])
    with kvstore.open(made.root, read_only=True) as store:
        for info in store.open_namespace(made.name).extents():
            array = open_array(made.root / info.path, "value")
            assert same(array[:], truth(made, info.path, "value"))


def test_no_extent(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no extent at"):
        open_array(tmp_path / "none")
    made, extent = one(tmp_path)
    with pytest.raises(FormatError):
        open_array((made.root / extent).parent)  # a Zarr group


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (put("attributes.kvstore.version", "2.0"), UnsupportedVersion),
        (put("attributes.kvstore.must_understand", ["zstd"]), UnsupportedVersion),
        (drop("attributes.kvstore"), FormatError),
        (put("attributes.kvstore.parts.0.element", "float4"), FormatError),
        (put("attributes.kvstore.parts.0.count", 9), FormatError),
        (put("attributes.kvstore.parts", []), FormatError),
        (put("attributes.kvstore.shards.0.name", "../../x"), FormatError),
        (put("attributes.kvstore.shards", 4), FormatError),
        (put("shape", [4, 3, 4, 64]), FormatError),
        (put("codecs", []), FormatError),
        (put("data_type", "complex"), FormatError),
        (put("zarr_format", 2), FormatError),
        (put("node_type", "group"), FormatError),
    ],
)
def test_a_record_that_is_not_the_formats(tmp_path: Path, change: Any, error: type) -> None:
    made, extent = one(tmp_path)
    path = made.root / extent / "zarr.json"
    record = json.loads(path.read_bytes())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(error):
        open_array(made.root / extent)
