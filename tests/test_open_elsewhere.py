"""What the README says of opening an extent elsewhere, run line by line as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import xarray
import zarr
from support.made import Bytes, Made, flip, make_store, shuffle_chunks
from tiny import GROUPS, gqa_group

import kvstore

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
SECTION = re.search(
    r"<!-- open-elsewhere -->\n```python\n(.*?)```\n<!-- /open-elsewhere -->", README, re.DOTALL
)
AXES = ("layer", "block", "head", "token", "content")


def lines() -> list[str]:
    assert SECTION is not None, "README.md has no section <!-- open-elsewhere -->"
    return SECTION[1].splitlines()


def run(path: Path) -> dict[str, Any]:
    """Names after all lines have run."""
    names: dict[str, Any] = {"path": str(path), "zarr": zarr, "xarray": xarray, "torch": torch}
    names |= {"tensorstore": tensorstore, "kvstore": kvstore}
    for line in lines():
        exec(line, names)  # noqa: S102 - our own README
    return names


def test_there_is_one_line_each() -> None:
    assert [line.partition(" = ")[0] for line in lines()] == [
        *("array", "named", "there", "torch_tensor", "key")
    ]


def test_every_line_reads_the_true_values(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [gqa_group()])
    for extent in made.extents("kv"):
        names = run(made.root / extent)
        bits = made.values[extent].view("<u2")
        assert names["array"].dtype == np.uint16
        np.testing.assert_array_equal(names["array"][:], bits)
        assert names["named"].dims == AXES
        np.testing.assert_array_equal(names["named"].values, bits)
        assert names["there"].domain.labels == AXES
        np.testing.assert_array_equal(names["there"].read().result(), bits)
        assert names["torch_tensor"].dtype == torch.bfloat16
        found = names["torch_tensor"].view(torch.uint16).numpy()
        np.testing.assert_array_equal(found, bits)
        found = names["key"][:].view(torch.uint16).numpy()
        np.testing.assert_array_equal(found, bits[..., :8])


Reader = Callable[[Path], Bytes]
READERS: dict[str, Reader] = {
    "zarr": lambda path: np.asarray(zarr.open_array(path, mode="r")[:]),
    "tensorstore": lambda path: tensorstore.open(f"file://{path}/|zarr3:").result().read().result(),
}


@pytest.mark.parametrize("reader", sorted(READERS))
@pytest.mark.parametrize("group", sorted(GROUPS))
def test_every_geometry(tmp_path: Path, reader: str, group: str) -> None:
    made: Made = make_store(tmp_path / "store", [GROUPS[group]()], blocks=3)
    for extent, values in made.values.items():
        found = READERS[reader](made.root / extent)
        np.testing.assert_array_equal(found.view(np.uint8).reshape(values.shape), values)


@pytest.mark.parametrize("reader", sorted(READERS))
def test_chunks_in_any_order(tmp_path: Path, reader: str) -> None:
    made = make_store(tmp_path / "store", [gqa_group()], blocks=4)
    (extent,) = made.extents("kv")
    shuffle_chunks(made, extent)
    found = READERS[reader](made.root / extent)
    np.testing.assert_array_equal(found.view(np.uint8), made.values[extent])


@pytest.mark.parametrize("reader", sorted(READERS))
def test_others_see_damage_too(tmp_path: Path, reader: str) -> None:
    made = make_store(tmp_path / "store", [gqa_group()], blocks=4)
    (extent,) = made.extents("kv")
    flip(made.root / extent / "c.1.0.0.0.0", 8)
    with pytest.raises(ValueError, match=r"(?i)checksum|digest"):
        READERS[reader](made.root / extent)


def test_the_store_is_one_zarr_hierarchy(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", [gqa_group()])
    # It tells of the private folder, whose name Zarr reserves, and goes on.
    with pytest.warns(zarr.errors.ZarrUserWarning, match="__kvstore__"):
        members = list(zarr.open_group(made.root, mode="r").members(max_depth=None))
    found = {path for path, _ in members}
    arrays = set(made.extents("kv"))
    assert arrays <= found
    assert found - arrays == {
        str(parent) for extent in arrays for parent in Path(extent).parents if parent != Path()
    }
