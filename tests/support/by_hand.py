"""Moving one token at a time, as the library's movers should do all at once."""

from __future__ import annotations

from typing import Any

from kvstore.placement import Placement
from support.pools import Bytes, Pool


def by_hand(pool: Pool, slots: Any, where: Placement, chunks: Bytes, *, out: bool) -> None:
    """One token at a time, through the tests' own views; ``out``: from the chunks."""
    single = where.split()
    source = range(len(single.block)) if single.source is None else single.source
    for i, (layer, head) in enumerate(slots):
        for t, block, slot in zip(source, single.block, single.slot, strict=True):
            at = 0
            for part in pool.buffers.group.parts:
                there = pool.views[layer][part.name][block, head, slot]
                content = chunks[i, t, at : at + part.nbytes]
                if out:
                    there[:] = content
                else:
                    content[:] = there
                at += part.nbytes
