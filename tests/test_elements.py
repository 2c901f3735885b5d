from __future__ import annotations

import numpy as np
import pytest

from kvstore.elements import ELEMENT_TYPES, ElementType, element
from kvstore.errors import InvalidArgument

# name: (bytes an element, carrier), written out from the specification.
TABLE = {
    "float32": (4, "float32"),
    "float16": (2, "float16"),
    "bfloat16": (2, "uint16"),
    "float8_e4m3fn": (1, "uint8"),
    "float8_e5m2": (1, "uint8"),
    "int8": (1, "int8"),
    "uint8": (1, "uint8"),
}


def test_the_table_is_the_formats() -> None:
    assert {n: (t.itemsize, t.carrier) for n, t in ELEMENT_TYPES.items()} == TABLE


@pytest.mark.parametrize("name", TABLE)
def test_carrier_is_as_wide_as_the_element_and_little_endian(name: str) -> None:
    carrier = element(name).numpy_carrier
    assert carrier.itemsize == element(name).itemsize
    assert carrier.str[0] in "<|"
    assert np.dtype(element(name).carrier).kind == carrier.kind


@pytest.mark.parametrize("name", TABLE)
def test_torch_has_a_dtype_of_that_name_and_width(name: str) -> None:
    dtype = element(name).torch_dtype()
    assert str(dtype) == f"torch.{name}"
    assert dtype.itemsize == element(name).itemsize
    assert element(str(dtype)) is element(name)


def test_an_element_type_passes_through() -> None:
    assert element(element("int8")) is ELEMENT_TYPES["int8"]


@pytest.mark.parametrize(
    "bad",
    [
        "float64",
        "",
        "BFLOAT16",
        "torch.torch.int8",
        None,
        2,
        ElementType("int8", 2, "int8"),
        ElementType("own", 1, "uint8"),
    ],
    ids=repr,
)
def test_an_unknown_type_is_refused_by_name(bad: object) -> None:
    with pytest.raises(InvalidArgument, match="is not known; use one of: float32, float16"):
        element(bad)  # type: ignore[arg-type]
