"""Copy runs: which bytes of a rank's local page are which bytes of the canonical page.

A canonical page is ``[head][token][content]`` without gaps: all heads of the model, all tokens of
the span that one engine block covers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvstore.errors import NotCertified
from kvstore.geometry import LayerGroup
from kvstore.layout import PageLayout
from kvstore.share import Share


class CopyRun(NamedTuple):
    """``nbytes`` bytes at ``local`` of the local page are those at ``canonical`` of the canonical.

    ``buffer`` says which of the layer's tensors ``local`` is in; 0 where there is only one.
    """

    local: int
    canonical: int
    nbytes: int
    buffer: int = 0


def check_layout(group: LayerGroup, share: Share, layout: PageLayout) -> None:
    """Check that a page layout can hold that share of the group.

    Raises:
        NotCertified: heads or parts differ, or the engine block does not hold whole interleaves.
    """
    reason = None
    wanted = {p.name: p.nbytes for p in group.parts}
    given = {p.name: p.nbytes for p in layout.parts}
    lattice = share.lattice
    if layout.heads != len(share.heads):
        reason = f"the layout has {layout.heads} heads, but the rank holds {len(share.heads)}"
    elif wanted != given:
        reason = f"the layout has parts of bytes {given}, but the group's are {wanted}"
    elif not lattice.whole and layout.block_tokens % lattice.interleave:
        # Otherwise an engine block would not be a whole number of turns, and so not one span.
        reason = (
            f"an engine block of {layout.block_tokens} tokens is no multiple of interleave "
            f"{lattice.interleave}"
        )
    if reason is not None:
        raise NotCertified(
            f"layer group {group.name!r} cannot use this page layout: {reason}; describe the "
            "engine's pages as they are",
            reason=reason,
        )


def copy_runs(
    group: LayerGroup, share: Share, layout: PageLayout, canonical_tokens: int
) -> list[CopyRun]:
    """Copy runs of one local page, as long as they can be, by buffer and then local offset.

    Args:
        group: the layer group.
        share: the rank's share; its layers do not matter.
        layout: the rank's page layout. ``local`` offsets are those of block 0, layer 0.
        canonical_tokens: tokens of the canonical page: ``layout.block_tokens * cp``.

    Raises:
        NotCertified: the layout does not fit the share, or ``canonical_tokens`` is another number.
    """
    check_layout(group, share, layout)
    span = layout.block_tokens * share.lattice.cp
    if canonical_tokens != span:
        raise NotCertified(
            f"layer group {group.name!r}: an engine block of {layout.block_tokens} local tokens "
            f"spans {span} tokens under cp={share.lattice.cp}, not {canonical_tokens}",
            reason="the canonical page is not the span of one engine block",
        )
    heads = np.arange(share.heads.start, share.heads.stop, dtype=np.int64)[:, None]
    tokens = share.lattice.canonical(np.arange(layout.block_tokens))[None, :]
    start = (heads * span + tokens) * group.token_bytes
    columns = []
    for part in layout.parts:
        local = layout.offsets(part.name).ravel()
        canonical = (start + group.part_offset(part.name)).ravel()
        columns.append(
            (
                local,
                canonical,
                np.full_like(local, part.nbytes),
                np.full_like(local, part.buffer),
            )
        )
    local, canonical, nbytes, buffer = (
        np.concatenate(column) for column in zip(*columns, strict=True)
    )
    by_place = np.lexsort((local, buffer))
    local, canonical, nbytes, buffer = (
        column[by_place] for column in (local, canonical, nbytes, buffer)
    )
    breaks = (
        (local[:-1] + nbytes[:-1] != local[1:])
        | (canonical[:-1] + nbytes[:-1] != canonical[1:])
        | (buffer[:-1] != buffer[1:])
    )
    first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.add.reduceat(nbytes, first)
    return [
        CopyRun(*numbers)
        for numbers in zip(
            local[first].tolist(),
            canonical[first].tolist(),
            lengths.tolist(),
            buffer[first].tolist(),
            strict=True,
        )
    ]
