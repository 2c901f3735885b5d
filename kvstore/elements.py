"""Element types of KV-cache content, and the Zarr types that carry them.

zarr-python and zarrs refuse the registered ``bfloat16`` and ``float8`` types, so an array is stored
under a *carrier*: a type of the same width that every Zarr reader knows. The namespace record and
the commit record name the true type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type.

    Attributes:
        name: the name in records, and also torch's name for the dtype.
        itemsize: bytes an element.
        carrier: the Zarr v3 data type under which its bytes are stored.
    """

    name: str
    itemsize: int
    carrier: str

    @property
    def numpy_carrier(self) -> np.dtype[Any]:
        """The carrier as a little-endian NumPy dtype."""
        import numpy as np

        return np.dtype(self.carrier).newbyteorder("<")

    def torch_dtype(self) -> torch.dtype:
        """The true type as a torch dtype (imports torch)."""
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype


ELEMENT_TYPES: dict[str, ElementType] = {
    t.name: t
    for t in (
        ElementType("float32", 4, "float32"),
        ElementType("float16", 2, "float16"),
        ElementType("bfloat16", 2, "uint16"),
        ElementType("float8_e4m3fn", 1, "uint8"),
        ElementType("float8_e5m2", 1, "uint8"),
        ElementType("int8", 1, "int8"),
        ElementType("uint8", 1, "uint8"),
    )
}
"""Every element type of format version 1, by name."""


def element(name: str | ElementType) -> ElementType:
    """Look an element type up by name, or by ``str`` of a torch dtype (``torch.bfloat16``).

    A known :class:`ElementType` passes through.

    Raises:
        InvalidArgument: the name is not one of :data:`ELEMENT_TYPES`.
    """
    if isinstance(name, ElementType):
        found = ELEMENT_TYPES.get(name.name)
        if found == name:
            return found
    found = ELEMENT_TYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(ELEMENT_TYPES)
        raise InvalidArgument(f"element type {name!r} is not known; use one of: {known}")
    return found
