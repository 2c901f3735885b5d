"""Extents as arrays, for people and tools: lazy, through zarr, in the true element type."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.elements import ElementType
from kvstore.errors import FormatError, InvalidArgument, NotFound, require_kind
from kvstore.geometry import MAX_SHARDS, ContentPart
from kvstore.identity import parts_from_json
from kvstore.jsonform import Fields, parse
from kvstore.paths import RECORD, parse_shard_name
from kvstore.records import FORMAT, check_header

if TYPE_CHECKING:
    import torch


class LazyArray:
    """One extent, ``[layer, block, head, token, content]``; indexing reads what is asked.

    Attributes:
        shape: sizes of the axes, content in elements of the part (or of all parts).
        dtype: torch dtype of what indexing returns.
        part: name of the content part shown, None for all of them.
    """

    def __init__(
        self,
        array: Any,
        parts: tuple[ContentPart, ...],
        part: str | None,
        where: str,
        shards: list[str],
    ) -> None:
        chosen = [p for p in parts if part in (None, p.name)]
        if not chosen:
            known = ", ".join(p.name for p in parts)
            raise InvalidArgument(f"{where} has no content part {part!r}; it has: {known}")
        kinds = {p.element for p in chosen}
        if len(kinds) > 1:
            known = ", ".join(p.name for p in parts)
            raise InvalidArgument(
                f"the parts of {where} have different element types; open one of them: {known}"
            )
        self._array = array
        self._shards = [f"{where}/{name}" for name in shards]
        self._element: ElementType = kinds.pop()
        size = array.dtype.itemsize
        first = parts.index(chosen[0])
        self._start = sum(p.nbytes for p in parts[:first]) // size
        self._stop = self._start + sum(p.nbytes for p in chosen) // size
        self.part = part
        self.shape: tuple[int, ...] = (*array.shape[:4], sum(p.count for p in chosen))
        self.dtype: torch.dtype = self._element.torch_dtype()

    def __repr__(self) -> str:
        return f"LazyArray(shape={self.shape}, dtype={self.dtype}, part={self.part!r})"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a selection of whole numbers, slices and an ellipsis, as a torch tensor.

        Raises:
            InvalidArgument: other kinds of index. FormatError: a chunk is damaged.
            NotFound: the extent was removed, or lacks a shard.
        """
        import numpy as np
        import torch

        rest, content = _split_index(index)
        try:
            raw = self._array[(*rest, slice(self._start, self._stop))]
        except (ValueError, RuntimeError) as error:
            raise FormatError(f"{self!r} cannot be read: {error}") from error
        # To Zarr an absent shard is a shard of zeros. One that is there now was there before.
        for shard in self._shards:
            if not os.path.lexists(shard):
                raise NotFound(f"{shard} is gone; was the extent removed?")
        raw = np.ascontiguousarray(raw)
        return torch.from_numpy(raw).view(self.dtype)[..., content]


def _split_index(index: Any) -> tuple[tuple[Any, ...], Any]:
    """Index of the first four axes, and that of the content axis."""
    items = index if isinstance(index, tuple) else (index,)
    for item in items:
        if not isinstance(item, int | slice) and item is not Ellipsis:
            raise InvalidArgument(
                f"an extent is indexed by whole numbers, slices and '...', not {item!r}"
            )
    if items.count(Ellipsis) > 1 or len(items) - items.count(Ellipsis) > 5:
        raise InvalidArgument(f"an extent has 5 axes; the index is {index!r}")
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    missing = 5 - (len(items) - items.count(Ellipsis))
    full = (*items[:at], *[slice(None)] * missing, *items[at + 1 :])
    return full[:4], full[4]


def open_array(path: str | os.PathLike[str], part: str | None = None) -> LazyArray:
    """Open an extent's folder as a lazy array in its true element type.

    Args:
        path: the extent's folder: a Zarr v3 array with a commit record.
        part: show one content part only (``"key"``, ``"value"`` ...). Needed where parts have
            different element types.

    Raises:
        NotFound: no such folder. FormatError: it is not an extent of this format.
    """
    import zarr

    give = "an extent's folder, as text or a Path"
    require_kind("path", path, (str, os.PathLike), give)
    where = os.fspath(path)
    require_kind("path", where, str, give)
    try:
        data = Path(where, RECORD).read_bytes()
    except OSError as error:
        raise NotFound(f"there is no extent at {where}: {error.strerror}") from error
    record = Fields(parse(data, where), where).fields("attributes").fields(FORMAT)
    check_header(record)
    parts = parts_from_json(record.array("parts", 16), where)
    names = [
        Fields(s, f"{where}, shard").text("name", 32) for s in record.array("shards", MAX_SHARDS)
    ]
    for name in names:
        parse_shard_name(name)
    try:
        array = zarr.open_array(where, mode="r")
    except Exception as error:  # zarr raises what it comes across: KeyError, TypeError ...
        raise FormatError(f"{where} is not an array that zarr can open: {error}") from error
    carried = sum(p.nbytes for p in parts)
    if array.ndim != 5 or array.shape[4] * array.dtype.itemsize != carried:
        raise FormatError(f"{where}: an array {array.shape} does not hold {carried} bytes a token")
    return LazyArray(array, parts, part, where, names)
