"""What is promised, as ratios within one run; printed next to what was measured.

Timing is never an assertion: a floor that is not met is reported, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.bench.timing import Samples, ratio


@dataclass(frozen=True, slots=True)
class Floor:
    """One promise.

    Attributes:
        key: short name.
        title: what a person reads.
        row: row key of what is judged.
        against: row key that it is divided by; None: the row's own rate, in units a second.
        limit: the bound.
        at_most: the bound is an upper one.
        ceiling: row key of the limit that bounds ``row``, where the bound may be out of its reach.
    """

    key: str
    title: str
    row: str
    against: str | None
    limit: float
    at_most: bool = False
    ceiling: str | None = None


FLOORS = (
    Floor(
        "cold",
        "cold load, rate / O_DIRECT limit",
        "llama.cold.same",
        "llama.cold.limit",
        0.90,
    ),
    Floor(
        "hot_unverified",
        "hot load unverified, rate / hot preadv plus one copy",
        "llama.hot.same_unverified",
        "llama.hot.limit_copy",
        0.80,
    ),
    Floor(
        "hot_verified",
        "hot load verified, rate / hot preadv plus one copy",
        "llama.hot.same",
        "llama.hot.limit_copy",
        0.65,
    ),
    Floor(
        "other_config_hot",
        "hot load by another config, time per byte / same config",
        "llama.hot.same",
        "llama.hot.other_config",
        1.05,
        at_most=True,
    ),
    Floor(
        "other_config_cold",
        "cold load by another config, time per byte / same config",
        "llama.cold.same",
        "llama.cold.other_config",
        1.05,
        at_most=True,
    ),
    Floor(
        "zarr",
        "cold load, rate / zarr-python cold",
        "llama.cold.same",
        "llama.cold.zarr",
        20.0,
        ceiling="llama.cold.limit",
    ),
    Floor("lookup", "prefix lookup, keys a second", "lookup.small", None, 500_000.0),
    Floor(
        "lookup_flat",
        "time per key, 1000 times the extents / few",
        "lookup.small",
        "lookup.large",
        1.5,
        at_most=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A promise and what came of it.

    Attributes:
        floor: the promise.
        value: what was measured; None where a row was not.
        ceiling: what the limit itself reaches, where the floor names one.
    """

    floor: Floor
    value: float | None
    ceiling: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the promise was kept in this run."""
        if self.value is None:
            return None
        if self.floor.at_most:
            return self.value <= self.floor.limit
        return self.value >= self.floor.limit


def judge(rows: Mapping[str, Samples]) -> list[Verdict]:
    """Compare what was measured with every promise.

    Args:
        rows: row key -> samples, of all sections.
    """
    verdicts = []
    for floor in FLOORS:
        row = rows.get(floor.row)
        value: float | None = None
        if row is not None and floor.against is None:
            value = row.rate
        else:
            value = _ratio(rows, floor.row, floor.against)
        verdicts.append(Verdict(floor, value, _ratio(rows, floor.ceiling, floor.against)))
    return verdicts


def _ratio(rows: Mapping[str, Samples], key: str | None, against: str | None) -> float | None:
    a, b = rows.get(key or ""), rows.get(against or "")
    return None if a is None or b is None else ratio(a, b)
