"""KV blocks that stores under way hold back from reuse.

A store reads an engine's blocks after the step that filled them, on threads of its own. Meanwhile
the request may end, be aborted or preempted, or a sliding window may leave the blocks behind. The
engine's own reference counts keep them as they are until every rank is done.
"""

from __future__ import annotations

from typing import Any


class HeldBlocks:
    """Blocks held for each store job."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._pool: Any = None
        self._jobs: dict[int, list[Any]] = {}
        self.count = 0

    def bind(self, pool: Any) -> None:
        """Use the scheduler's block pool."""
        self._pool = pool

    def room(self, blocks: int) -> bool:
        """Whether so many blocks more may be held; one job always may."""
        if not self._jobs:
            return True
        return self.count + blocks <= self._fraction * len(self._pool.blocks)

    def hold(self, job: int, block_ids: set[int]) -> None:
        """Hold blocks for a job."""
        blocks = [self._pool.blocks[i] for i in sorted(block_ids)]
        blocks = [b for b in blocks if not b.is_null]
        self._pool.touch(blocks)
        self._jobs[job] = blocks
        self.count += len(blocks)

    def release(self, job: int) -> None:
        """Give a job's blocks back; no more than once."""
        blocks = self._jobs.pop(job, None)
        if blocks is not None:
            self.count -= len(blocks)
            # From the last block on, so that a chain's end is evicted before its beginning.
            self._pool.free_blocks(reversed(blocks))
