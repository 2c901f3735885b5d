"""Statistics of an extent's values, in their true element type, layer by layer and part by part.

Chunks stream past in pieces, so memory does not grow with the extent. Values are decoded with NumPy
alone: bfloat16 is the upper half of a float32, float8_e5m2 of a float16, and float8_e4m3fn has 256
values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.elements import ElementType
from kvstore.extent import CommitRecord
from kvstore.geometry import LayerGroup
from kvstore.io.protocol import ByteRange, Engine
from kvstore.load import read_bytes
from kvstore.paths import GroupPath, shard_name
from kvstore.plan import planned_layout
from kvstore.shard import decode_index


@dataclass(frozen=True, slots=True)
class ValueStats:
    """Statistics of the values of one part in one layer, over all heads and tokens.

    Attributes:
        layer: index of the layer in the model.
        part: content part: ``key``, ``value`` ...
        element: its element type.
        count: values.
        minimum, maximum, mean, std: of the finite values (``std`` of the population); NaN where
            there is none.
        nan, inf: values that are not a number, and infinite ones of either sign.
        zeros: values that are zero, of either sign.
    """

    layer: int
    part: str
    element: str
    count: int
    minimum: float
    maximum: float
    mean: float
    std: float
    nan: int
    inf: int
    zeros: int

    @property
    def zero_fraction(self) -> float:
        """Zeros among all values, from 0 to 1."""
        return self.zeros / self.count


def decode_values(data: NDArray[np.uint8], element: ElementType) -> NDArray[Any]:
    """Stored bytes as numbers that NumPy can reckon with, without loss.

    Args:
        data: ``[..., bytes]``, whole elements along the last axis.
        element: what they are.

    Returns:
        ``[..., elements]``: float32 for every floating type, else the integer type itself.
    """
    raw = np.ascontiguousarray(data)
    if element.name == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if element.name == "float8_e5m2":
        half = (raw.astype(np.uint16) << np.uint16(8)).view(np.float16)
        return half.astype(np.float32)
    if element.name == "float8_e4m3fn":
        return _e4m3fn_values()[raw]
    values = raw.view(element.numpy_carrier)
    return values.astype(np.float32) if element.name == "float16" else values


@lru_cache(maxsize=1)
def _e4m3fn_values() -> NDArray[np.float32]:
    """The value of every byte: sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinities."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values = np.where(byte & 128, -values, values)
    values[(byte & 127) == 127] = np.nan
    return values.astype(np.float32)


def extent_statistics(
    engine: Engine, group: LayerGroup, names: GroupPath, record: CommitRecord
) -> list[ValueStats]:
    """Statistics of every layer and part of an extent. Checksums are not looked at.

    Raises:
        NotFound, Corrupt, StorageError: a shard is missing, cut short, or cannot be read.
    """
    ranges: list[ByteRange] = []
    layers: list[int] = []
    rows, columns = group.shard_grid()
    for row in range(rows):
        for column in range(columns):
            shard = shard_name(row, column)
            path = names.shard(record.key.hex(), shard)
            for i, at in enumerate(_offsets(engine, group, record, path, record.shards[shard])):
                layers.append(row * group.shard_layers + i // group.shard_heads)
                size = group.chunk_bytes(len(record.blocks))
                ranges.append(ByteRange(path, at, size, group.token_bytes))
    # One set of tallies a chunk: threads then share nothing, and sums come in one order.
    tallies = [[_Tally() for _ in group.parts] for _ in ranges]

    def consume(number: int, _offset: int, data: memoryview) -> None:
        rows = np.frombuffer(data, np.uint8).reshape(-1, group.token_bytes)
        at = 0
        for part, tally in zip(group.parts, tallies[number], strict=True):
            tally.add(decode_values(rows[:, at : at + part.nbytes], part.element))
            at += part.nbytes

    for outcome in engine.read(ranges, consume):
        if outcome is not None:
            raise outcome
    sums = [[_Tally() for _ in group.parts] for _ in group.layers]
    for layer, chunk in zip(layers, tallies, strict=True):
        for total, tally in zip(sums[layer], chunk, strict=True):
            total.merge(tally)
    return [
        tally.result(layer, part.name, part.element.name)
        for layer, row in zip(group.layers, sums, strict=True)
        for part, tally in zip(group.parts, row, strict=True)
    ]


def _offsets(
    engine: Engine, group: LayerGroup, record: CommitRecord, path: str, size: int
) -> list[int]:
    layout = planned_layout(group, len(record.blocks), record.chunk_stride)
    if record.chunk_stride is not None:
        return [layout.offset(i) for i in range(layout.chunks)]
    tail = layout.index_bytes
    data = read_bytes(engine, ByteRange(path, size - tail, tail))
    found: list[int] = decode_index(data, layout.chunks, layout.chunk_bytes, size, path).tolist()
    return found


class _Tally:
    """Running statistics, merged by the method of Chan, Golub and LeVeque (1979)."""

    __slots__ = ("count", "finite", "high", "inf", "low", "mean", "nan", "squares", "zeros")

    def __init__(self) -> None:
        self.count = self.finite = self.nan = self.inf = self.zeros = 0
        self.mean = self.squares = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, values: NDArray[Any]) -> None:
        """Count some values in."""
        piece = _Tally()
        piece.count = values.size
        piece.zeros = values.size - int(np.count_nonzero(values))
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            piece.nan = int(np.isnan(values).sum())
            piece.inf = values.size - int(finite.sum()) - piece.nan
            if piece.nan or piece.inf:
                values = values[finite]
        piece.finite = values.size
        if values.size:
            piece.low, piece.high = float(values.min()), float(values.max())
            piece.mean = float(values.mean(dtype=np.float64))
            piece.squares = float(
                np.square(np.subtract(values, piece.mean, dtype=np.float64)).sum()
            )
        self.merge(piece)

    def merge(self, other: _Tally) -> None:
        """Count in what another tally counted."""
        both = self.finite + other.finite
        if other.finite:
            step = other.mean - self.mean
            self.squares += other.squares + step * step * self.finite * other.finite / both
            self.mean += step * other.finite / both
        self.finite = both
        self.count += other.count
        self.nan += other.nan
        self.inf += other.inf
        self.zeros += other.zeros
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def result(self, layer: int, part: str, element: str) -> ValueStats:
        """The statistics."""
        none = not self.finite
        return ValueStats(
            layer=layer,
            part=part,
            element=element,
            count=self.count,
            minimum=math.nan if none else self.low,
            maximum=math.nan if none else self.high,
            mean=math.nan if none else self.mean,
            std=math.nan if none else math.sqrt(self.squares / self.finite),
            nan=self.nan,
            inf=self.inf,
            zeros=self.zeros,
        )
