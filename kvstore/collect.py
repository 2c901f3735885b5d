"""Collection (spec, algorithm 9): what dead writers, removals and damage leave is found and freed.

No extent is touched. What is found is of no use to any reader, so that nothing worse can be lost
than a hint, or the unfinished store of a writer slower than the grace time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvstore.catalog import Catalog
from kvstore.errors import FormatError, InvalidArgument, NotFound, StorageError
from kvstore.identity import Identity
from kvstore.io.protocol import Engine
from kvstore.leavings import Leaving
from kvstore.paths import TRASH
from kvstore.verify_private import private_faults

GRACE = 3600.0
"""Seconds for which a live writer leaves nothing in flight alone."""


def find_leavings(
    engine: Engine, *, grace: float = GRACE, quarantine: float | None = None
) -> Iterator[Leaving]:
    """What can be freed.

    Args:
        engine: of the store; may be read-only.
        grace: seconds for which what is in flight, or being written, must have been left alone.
        quarantine: the same for damaged extents; None: they stay.

    Raises:
        InvalidArgument: a negative number of seconds. StorageError: as named.
    """
    for what, seconds in (("grace", grace), ("quarantine", quarantine)):
        if seconds is not None and not 0 <= seconds <= math.inf:
            raise InvalidArgument(f"{what} is {seconds!r}; give seconds, 0 or more")
    return _found(engine, grace, quarantine)


def free(engine: Engine, found: Iterable[Leaving]) -> Iterator[Leaving]:
    """Remove what was found.

    Yields:
        What was freed, and with an error what could not be; not what was gone already.
    """
    for leaving in found:
        try:
            freed = engine.discard(leaving.path)
        except StorageError as error:
            yield replace(leaving, error=str(error))
        else:
            if freed:
                yield leaving


def _found(engine: Engine, grace: float, quarantine: float | None) -> Iterator[Leaving]:
    oldest = {"inflight": grace, "reference": 0.0, "quarantined": quarantine}
    for fault in private_faults(engine, _identities(engine), None, None):
        limit = oldest.get(fault.kind)
        if limit is not None:
            yield from _if_old(engine, fault.path, fault.kind, limit)
    for path in engine.leavings(grace):
        kind = "trash" if path.startswith(f"{TRASH}/") else "temporary"
        yield from _if_old(engine, path, kind, 0.0)


def _if_old(engine: Engine, path: str, kind: str, limit: float) -> Iterator[Leaving]:
    try:
        found = engine.footprint(path)
    except NotFound:
        return
    if found.age >= limit or limit == 0:  # whatever the clocks say
        yield Leaving(path, kind, found.nbytes, found.age)


def _identities(engine: Engine) -> dict[str, Identity]:
    """Of the namespaces whose records are valid: the hints of others are left alone."""
    catalog = Catalog(engine)
    identities = {}
    for name in catalog.namespaces():
        try:
            identities[name] = catalog.namespace(name).identity
        except (FormatError, NotFound):
            continue
    return identities
