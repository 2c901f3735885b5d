"""What dead processes left in a folder, and what a folder takes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from kvstore.io.local_names import TEMPORARY, TRASH
from kvstore.io.oserrors import translate
from kvstore.io.protocol import Footprint


def leavings(root: str, older_than: float) -> Iterator[str]:
    """Paths below a root of unfinished objects, and of discarded folders. See ``Engine.leavings``.

    What vanishes meanwhile is left out; a folder that cannot be listed is passed over.
    """
    before = time.time() - older_than
    for folder, folders, files in os.walk(root):
        below = os.path.relpath(folder, root)
        prefix = "" if below == "." else f"{below}/"
        if below == TRASH:
            yield from (prefix + name for name in [*folders, *files])
            folders.clear()
            continue
        for name in files:
            if name.startswith(TEMPORARY) and _changed(os.path.join(folder, name)) < before:
                yield prefix + name


def footprint(full: str) -> Footprint:
    """Bytes and age of a file, or of a folder with all in it. See ``Engine.footprint``."""
    try:
        found = os.lstat(full)
    except OSError as error:
        raise translate(error, "look at", full) from error
    nbytes, changed = 0, found.st_mtime
    if not os.path.isdir(full) or os.path.islink(full):
        return Footprint(found.st_size, time.time() - changed)
    for folder, folders, files in os.walk(full):
        for name in [*folders, *files]:
            try:
                inside = os.lstat(os.path.join(folder, name))
            except OSError:
                continue  # moved or removed meanwhile, which the folder's own time tells of
            changed = max(changed, inside.st_mtime)
            nbytes += inside.st_size if name in files else 0
    return Footprint(nbytes, time.time() - changed)


def _changed(full: str) -> float:
    """When a file last changed; never, as it were, for one that is gone."""
    try:
        return os.lstat(full).st_mtime
    except OSError:
        return float("inf")
