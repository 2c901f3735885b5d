"""What all parts of one open store share: the I/O engine, threads, staging memory, settings."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstore.io.protocol import Engine
from kvstore.io.staging import Staging

WRITE_THREADS = 4
WRITE_STAGING_BYTES = 256 << 20


@dataclass
class Runtime:
    """Shared by a store, its namespaces and their workers.

    Attributes:
        engine: the I/O engine.
        software: name and version that records are signed with.
        verify: whether loads check checksums.
        staging: memory in which shards are built: as many at a time as fit, and at least one.
    """

    engine: Engine
    software: str
    verify: bool = True
    staging: Staging = field(default_factory=lambda: Staging(WRITE_STAGING_BYTES))
    _pool: ThreadPoolExecutor | None = None
    _pool_pid: int = 0

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that build and write shards; a forked child gets its own."""
        if self._pool is None or self._pool_pid != os.getpid():
            self._pool = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="kvstore-write")
            self._pool_pid = os.getpid()
        return self._pool

    def close(self) -> None:
        """Release threads and memory."""
        if self._pool is not None and self._pool_pid == os.getpid():
            self._pool.shutdown()
        self._pool = None
        self.engine.close()
