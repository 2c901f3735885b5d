"""Verifying a store, in tests."""

from __future__ import annotations

from typing import Any

from kvstore.faults import FAULTS, NOTES, Fault
from kvstore.io.posix import PosixEngine
from kvstore.verify import verify_store
from support.made import Made


def find(made: Made, **options: Any) -> list[tuple[str, str]]:
    """(path, kind) of all findings, notes too, sorted."""
    return sorted((f.path, f.kind) for f in findings(made, **options))


def findings(made: Made, **options: Any) -> list[Fault]:
    engine = PosixEngine(made.root, read_only=True)
    found = list(verify_store(engine, **options))
    engine.close()
    assert all(f.kind in FAULTS or f.kind in NOTES for f in found)
    assert all(f.message and "\n" not in f.message for f in found)
    return found
