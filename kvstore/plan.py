"""Plans: which chunks of which shards a share is made of. Pure values, no I/O.

A plan depends on the group, the share and the number of blocks of an extent, never on a key, so a
worker makes it once and uses it for every extent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.extent import shard_layout
from kvstore.geometry import LayerGroup
from kvstore.paths import shard_name
from kvstore.shard import ShardLayout
from kvstore.share import Share


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive chunks of one shard that belong to a share.

    Attributes:
        shard: name of the shard.
        first: index within the shard of the first chunk.
        slots: for each chunk, (layer, head) as the rank counts its own, from 0.
    """

    shard: str
    first: int
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ShardPart:
    """What a share has of one shard.

    Attributes:
        name: name of the shard.
        runs: its chunks, in order.
        whole: the share is all of the shard: all its chunks, all their tokens.
    """

    name: str
    runs: tuple[ChunkRun, ...]
    whole: bool


def shard_parts(group: LayerGroup, share: Share, layers: range | None = None) -> list[ShardPart]:
    """The shards that a share touches, in grid order.

    Args:
        group: the layer group.
        share: the rank's share.
        layers: positions in the rank's own layers, to plan only those; None: all.
    """
    wanted = share.layers
    if layers is not None:
        wanted = range(share.layers.start + layers.start, share.layers.start + layers.stop)
    rows, columns = group.shard_grid()
    out = []
    for row in range(rows):
        own_layers = _overlap(wanted, row, group.shard_layers)
        for column in range(columns):
            own_heads = _overlap(share.heads, column, group.shard_heads)
            if not own_layers or not own_heads:
                continue
            name = shard_name(row, column)
            runs = tuple(_runs(group, share, name, row, column, own_layers, own_heads))
            full = len(own_layers) == group.shard_layers and len(own_heads) == group.shard_heads
            out.append(ShardPart(name, runs, full and share.lattice.whole))
    return out


def _overlap(span: range, index: int, size: int) -> range:
    start = max(span.start, index * size)
    return range(start, max(start, min(span.stop, (index + 1) * size)))


def _runs(
    group: LayerGroup,
    share: Share,
    name: str,
    row: int,
    column: int,
    layers: range,
    heads: range,
) -> Iterator[ChunkRun]:
    first_layer, first_head = row * group.shard_layers, column * group.shard_heads
    slots: list[tuple[int, int]] = []
    first = 0
    for layer in layers:
        start = (layer - first_layer) * group.shard_heads + heads.start - first_head
        if slots and first + len(slots) != start:
            yield ChunkRun(name, first, tuple(slots))
            slots = []
        if not slots:
            first = start
        slots += [(layer - share.layers.start, head - share.heads.start) for head in heads]
    if slots:
        yield ChunkRun(name, first, tuple(slots))


def split_run(run: ChunkRun, chunks: int) -> Iterator[ChunkRun]:
    """Cut a run into runs of at most ``chunks`` chunks."""
    for at in range(0, len(run.slots), chunks):
        yield ChunkRun(run.shard, run.first + at, run.slots[at : at + chunks])


def planned_layout(group: LayerGroup, blocks: int, stride: int | None) -> ShardLayout:
    """Layout of an extent's shards, with the stride that its record names."""
    layout = shard_layout(group, blocks)
    if stride is None or stride == layout.stride:
        return layout
    return ShardLayout(layout.chunks, layout.chunk_bytes, stride)
