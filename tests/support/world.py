"""A store and the ranks of an engine on it, in one process: what most tests drive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvstore import (
    BlockKeys,
    CommitReport,
    Identity,
    LayerGroup,
    LoadResult,
    Namespace,
    ParallelConfig,
    Rank,
    StoreReport,
    Worker,
)
from support.pools import LAYOUTS, Bytes, Pool
from support.reference import Held, held, put, truth_of

ONE = ParallelConfig()


@dataclass
class Seat:
    """One rank with its pool, block table and worker."""

    group: LayerGroup
    rank: Rank
    held: Held
    layout: str
    pool: Pool
    table: NDArray[np.int64]
    worker: Worker
    total: int
    seed: int

    def fill(self, truth: Bytes) -> None:
        """Put the sequence's content into the pool, as prefill would."""
        put(self.pool, self.group, self.held, truth, self.table)

    def expect(self, truth: Bytes, start: int, stop: int, layers: range | None = None) -> None:
        """Tokens ``start`` to ``stop - 1`` are in the pool, and every other byte is as it was."""
        twin = LAYOUTS[self.layout](
            self.group,
            len(self.held.layers),
            len(self.held.heads),
            self.pool.blocks,
            self.pool.tokens,
        )
        put(twin, self.group, self.held, truth, self.table, start, stop, layers)
        for mine, wanted in zip(self.pool.memory, twin.memory, strict=True):
            if not np.array_equal(mine, wanted):
                wrong = np.flatnonzero(mine != wanted)
                raise AssertionError(
                    f"rank {self.rank}, {self.layout}: {len(wrong)} of {mine.size} bytes differ, "
                    f"the first at {wrong[:5]}"
                )


def seat(
    namespace: Namespace,
    config: ParallelConfig,
    rank: Rank,
    *,
    total: int,
    layout: str = "packed-hnd",
    tokens: int = 4,
    session: str | None = "s",
    spare: int = 3,
    seed: int = 0,
    group: LayerGroup | None = None,
) -> Seat:
    """A rank that can hold ``total`` tokens of one sequence, in blocks drawn at random."""
    group = namespace.identity.group(group.name if group else None)
    mine = held(group, config, rank, namespace.identity.model_layers)
    need = 1 if layout == "contiguous" else mine.local_blocks(total, tokens)
    if layout == "contiguous":
        tokens = max(1, len(mine.tokens(0, total)))
        tokens = -(-tokens // config.interleave) * config.interleave
    blocks = need + spare
    if layout.startswith("split") and blocks == 2:
        blocks = 3
    pool = LAYOUTS[layout](group, len(mine.layers), len(mine.heads), blocks, tokens)
    table = np.random.default_rng(seed + 17 * config.number(rank)).permutation(blocks)[:need]
    worker = namespace.worker(config, rank, pool.buffers, session=session)
    return Seat(group, rank, mine, layout, pool, table, worker, total, seed)


def seats(namespace: Namespace, config: ParallelConfig, **options: Any) -> list[Seat]:
    """All ranks of a config that hold something of the group."""
    group = options.get("group") or namespace.identity.group()
    layers = namespace.identity.model_layers
    ranks = [r for r in config.ranks() if held(group, config, r, layers).layers]
    return [seat(namespace, config, rank, **options) for rank in ranks]


def store_all(
    namespace: Namespace,
    config: ParallelConfig,
    keys: BlockKeys,
    truth: Bytes,
    *,
    commit: bool = True,
    tail: bool = True,
    **options: Any,
) -> tuple[list[StoreReport], CommitReport | None]:
    """Every rank stores its share; then one commits."""
    reports = []
    options.setdefault("total", truth.shape[2])
    everyone = seats(namespace, config, **options)
    for one in everyone:
        one.fill(truth)
        reports.append(one.worker.store(keys, one.table, tail=tail))
    if not commit:
        return reports, None
    return reports, everyone[0].worker.commit(keys, tail=tail)


def load_all(
    namespace: Namespace,
    config: ParallelConfig,
    keys: BlockKeys,
    truth: Bytes,
    **options: Any,
) -> list[LoadResult]:
    """Every rank loads its share of all keys; all must be there, and be right."""
    results = []
    options.setdefault("total", truth.shape[2])
    n = options.get("group", namespace.identity.groups[0]).block_tokens
    for one in seats(namespace, config, **options):
        result = one.worker.load(keys, one.table)
        assert result.blocks == len(keys), result
        one.expect(truth, keys.start * n, (keys.start + len(keys)) * n)
        results.append(result)
    return results


@dataclass
class World:
    """One layer group in a fresh store, and a sequence of it.

    Attributes:
        keys: of its full blocks.
        truth: content ``[layer, head, token, byte]``, of a few tokens beyond the last full block.
    """

    root: Path
    store: kvstore.Store
    namespace: Namespace
    group: LayerGroup
    tokens: NDArray[np.int64]
    keys: BlockKeys
    truth: Bytes

    def sequence(self, seed: int, blocks: int, common: int = 0) -> tuple[BlockKeys, Bytes]:
        """Another sequence, whose first ``common`` blocks are this one's."""
        n = self.group.block_tokens
        own = np.random.default_rng(seed).integers(0, 50_000, blocks * n)
        own[: common * n] = self.tokens[: common * n]
        truth = truth_of(self.group, blocks * self.group.page_tokens, seed)
        shared = common * self.group.page_tokens
        truth[:, :, :shared] = self.truth[:, :, :shared]
        return self.namespace.keys(own), truth

    def seat(self, config: ParallelConfig = ONE, rank: Rank | None = None, **options: Any) -> Seat:
        """One rank that can hold the sequence."""
        options.setdefault("total", self.truth.shape[2])
        return seat(self.namespace, config, rank or Rank(), **options)

    def store_all(self, config: ParallelConfig = ONE, **options: Any) -> Any:
        """Store and commit the sequence."""
        return store_all(self.namespace, config, self.keys, self.truth, **options)

    def load_all(self, config: ParallelConfig = ONE, **options: Any) -> list[LoadResult]:
        """Load the sequence under a config; every byte must be right."""
        return load_all(self.namespace, config, self.keys, self.truth, **options)

    def folder(self, index: int) -> Path:
        """Folder of the extent that ends with that block of the sequence."""
        return self.root / self.namespace.path(self.keys[index])

    def ends(self) -> list[int]:
        """Index of the last block of each extent of the sequence."""
        size, count = self.group.extent_blocks, len(self.keys)
        return [min(at + size, count) - 1 for at in range(0, count, size)]

    def reopen(self, **options: Any) -> World:
        """The same world through a store that was opened anew."""
        options.setdefault("durable", False)
        store = kvstore.open(self.root, **options)
        namespace = store.namespace(self.namespace.identity)
        return World(self.root, store, namespace, self.group, self.tokens, self.keys, self.truth)


def small_group(**changes: Any) -> LayerGroup:
    """Two shards on each axis, extents of two blocks of four tokens."""
    options: dict[str, Any] = {
        "layers": 4,
        "heads": 4,
        "head_size": 8,
        "block_tokens": 4,
        "extent_blocks": 2,
        "shard_layers": 2,
        "shard_heads": 2,
    }
    return LayerGroup.attention_kv(**{**options, **changes})


def make_world(
    root: Path,
    group: LayerGroup | None = None,
    *,
    blocks: int = 5,
    extra_tokens: int = 3,
    model_layers: int | None = None,
    durable: bool = False,
    seed: int = 0,
    **options: Any,
) -> World:
    """A world of one group; by default two full extents, a short one, and an unfinished block."""
    group = group or small_group()
    store = kvstore.open(root, durable=durable, **options)
    layers = model_layers or group.layers[-1] + 1
    identity = Identity("Proof/Model", layers, (group,), revision="r1")
    namespace = store.namespace(identity)
    count = blocks * group.block_tokens + extra_tokens
    tokens = np.random.default_rng(seed).integers(0, 50_000, count)
    keys = namespace.keys(tokens)
    held_tokens = blocks * group.page_tokens + (extra_tokens if group.page_tokens > 1 else 0)
    truth = truth_of(group, held_tokens, seed)
    return World(Path(root), store, namespace, group, tokens, keys, truth)


def every_byte_right(world: World, results: Sequence[LoadResult]) -> bool:
    """Whether all of the sequence was loaded."""
    return all(r.blocks == len(world.keys) for r in results)


def files_below(folder: Path) -> Iterator[Path]:
    """Plain files below a folder, sorted."""
    return (p for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink())
