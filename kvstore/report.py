"""What loads, stores and commits report: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Outcome of a load.

    Attributes:
        blocks: leading blocks of the request that are whole in the buffers, in every layer asked.
        requested: blocks of the request.
        misses: index in the request -> why that block was not loaded. Its pages hold no usable
            bytes, even where the load was tried.
        bytes_read: bytes read from storage, checksums and padding included.
        bytes_placed: bytes put into the buffers.
        seconds: wall time.
        engine: name of the I/O engine.
    """

    blocks: int
    requested: int
    misses: dict[int, str]
    bytes_read: int
    bytes_placed: int
    seconds: float
    engine: str


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Outcome of one rank's store.

    Attributes:
        extents: extents that the rank wrote something of.
        present: extents that were committed already.
        not_elected: extents of which another rank writes the same bytes.
        unstored_blocks: blocks of the request that lie in no extent that could be stored.
        bytes_written: content bytes written, checksums and padding left out.
        seconds: wall time.
    """

    extents: int
    present: int
    not_elected: int
    unstored_blocks: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Missing:
    """What keeps one extent from being committed.

    Attributes:
        key: hex of the extent's key.
        shards: names of the shards that are not complete.
        ranks: ranks that have not written their bytes, as ``pp.pcp.tp``.
    """

    key: str
    shards: tuple[str, ...]
    ranks: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"extent {self.key[:16]}: shards {', '.join(self.shards)} wait for "
            f"rank {', '.join(self.ranks)} (pp.pcp.tp)"
        )


@dataclass(frozen=True, slots=True)
class CommitReport:
    """Outcome of a commit.

    Attributes:
        committed: keys of the extents that this call published.
        already: keys of the extents that were there.
        missing: extents that could not be published yet, and what they wait for.
    """

    committed: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every extent asked for is there now."""
        return not self.missing
