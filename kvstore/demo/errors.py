"""What stops the demonstration, as opposed to what it finds to differ."""

from __future__ import annotations

from kvstore.errors import KVStoreError


class DemoError(KVStoreError):
    """The demonstration cannot run: a package is missing, or a rank's process failed."""
