"""What the connector's two sides tell each other: plain values.

The scheduler's side elects what to load and store, and hears what came of it. The engine carries
these between its processes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.identity import Identity
from kvstore.keys import BlockKeys
from kvstore.plugins.vllm.layers import LayerFacts


@dataclass(frozen=True, slots=True)
class Opening:
    """What a rank needs to open the store: sent once, before any job."""

    identity: Identity
    session: str
    pp_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks to load for one request.

    Attributes:
        request: its id.
        keys: of the blocks from the sequence's first to the last wanted.
        first: for each layer group, the first block wanted of it.
        block_tokens: tokens of a block.
        tables: for each layer group the engine's block ids, from token 0 on.
        waits: whether this very step's forward needs them.
    """

    request: str
    keys: BlockKeys
    first: dict[str, int]
    block_tokens: int
    tables: dict[str, list[int]]
    waits: bool


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Blocks to store, once this step's forward has computed them.

    Attributes:
        number: of the job.
        keys: consecutive blocks, from an extent boundary on.
        first: for each layer group that they are stored for, the first of its blocks.
        tables: for each layer group the engine's block ids, from token 0 on.
        tail: whether the last extent may be a shorter one.
    """

    number: int
    keys: BlockKeys
    first: dict[str, int]
    tables: dict[str, list[int]]
    tail: bool


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # the engine's base is untyped here
    """All that a step asks of the ranks."""

    opening: Opening | None = None
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)


@dataclass
class RankFacts(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one rank registered, layer by layer."""

    layers: tuple[LayerFacts, ...]


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What came of jobs, on one rank or summed over ranks.

    Attributes:
        stored: store job -> ranks that are done with it.
        failed: store jobs that could not be written by some rank, with the reason.
        loaded: requests whose load is over, well or not -> ranks that say so.
        unloaded: those of which something could not be loaded.
    """

    stored: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    unloaded: set[str] = field(default_factory=set)

    def aggregate(self, other: Any) -> WorkerReport:
        """The sum with another rank's."""
        return WorkerReport(
            dict(Counter(self.stored) + Counter(other.stored)),
            {**other.failed, **self.failed},
            dict(Counter(self.loaded) + Counter(other.loaded)),
            self.unloaded | other.unloaded,
        )

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.stored or self.loaded)
