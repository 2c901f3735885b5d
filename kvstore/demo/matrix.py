"""Which parallel configs store, and which load what they stored."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.demo.placement import PageStyle
from kvstore.errors import InvalidArgument
from kvstore.geometry import LayerGroup
from kvstore.parallel import ParallelConfig
from kvstore.share import certify

ARROW = "->"

DEFAULT_TEXTS = (
    "tp=3@hnd-packed -> tp=1@nhd-split",
    "tp=3@hnd-packed -> pp=3@nhd-packed",
    "tp=3@hnd-packed -> tp=9,dcp=3@hnd-split",
    "tp=9@nhd-split -> tp=1@hnd-packed",
    "tp=9@nhd-split -> tp=3@hnd-packed",
    "tp=3,pp=2,pp_layers=16+14@hnd-split -> tp=1@nhd-split",
    "tp=3,pp=2,pp_layers=16+14@hnd-split -> tp=3@nhd-packed",
    "tp=3,pp=2,pp_layers=16+14@hnd-split -> pp=3@hnd-packed",
    "tp=9,dcp=3@nhd-packed -> tp=1@hnd-split",
    "tp=9,dcp=3@nhd-packed -> tp=9@hnd-packed",
    "tp=9,dcp=3@nhd-packed -> tp=3,pp=2,pp_layers=16+14@nhd-split",
)
"""The demonstration's rows: every writer is read by unlike configs, in another page layout."""


@dataclass(frozen=True, slots=True)
class Side:
    """An engine: its parallel config and its page layout. As text: ``tp=9,dcp=3@nhd-split``."""

    config: ParallelConfig
    style: PageStyle

    def __str__(self) -> str:
        return f"{self.config}@{self.style}"


@dataclass(frozen=True, slots=True)
class Row:
    """One engine that stores, and one that loads."""

    writer: Side
    reader: Side


def parse_rows(texts: list[str]) -> list[Row]:
    """Read rows such as ``tp=3 -> tp=9,dcp=3``; a page layout may follow each config after ``@``.

    Args:
        texts: the rows; none for the demonstration's own.

    Raises:
        InvalidArgument: a text is not of that form, or a config is not valid.
    """
    rows = []
    for text in texts or DEFAULT_TEXTS:
        sides = text.split(ARROW)
        if len(sides) != 2:
            raise InvalidArgument(
                f"{text!r} is not of the form WRITER -> READER, as in 'tp=3 -> tp=1'"
            )
        rows.append(Row(_side(sides[0], "hnd-packed"), _side(sides[1], "nhd-split")))
    return rows


def certify_rows(rows: list[Row], group: LayerGroup, model_layers: int) -> None:
    """Refuse rows that the model's cache cannot be spread over, before anything is computed.

    Raises:
        NotCertified: a config does not fit the model; the message says why.
    """
    for row in rows:
        for side in (row.writer, row.reader):
            certify(group, side.config, model_layers)


def _side(text: str, default: str) -> Side:
    config, _, layout = text.strip().partition("@")
    order, _, parts = (layout.strip() or default).partition("-")
    return Side(ParallelConfig.parse(config), PageStyle(order, parts))
