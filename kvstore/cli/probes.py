"""All that ``kvstore doctor`` looks at, in one order, and what follows for the I/O engine."""

from __future__ import annotations

import os
import platform

from kvstore.cli.findings import Check, Examination
from kvstore.cli.folder_probes import folder_checks
from kvstore.cli.gpu_probes import gpu_checks
from kvstore.cli.text import size
from kvstore.io.select import open_engine
from kvstore.native import SWITCH


def examine(directory: str) -> Examination:
    """Examine this machine and a folder.

    Raises:
        NotFound: there is no such folder.
    """
    checks = [*_machine(), *folder_checks(directory), *gpu_checks()]
    engine = open_engine(directory, read_only=True, create=False)
    try:
        name = engine.name
    finally:
        engine.close()
    return Examination(checks, name, _reason(name, {c.name: c for c in checks}))


def _machine() -> list[Check]:
    usable = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        Check("python", "ok", f"{platform.python_version()}, {platform.machine()}"),
        Check("kernel", "ok", f"{platform.system()} {platform.release()}"),
        Check("cores", "ok", f"{usable} usable of {os.cpu_count()}"),
        Check("memory", "ok", size(memory)),
        _native(),
    ]


def _native() -> Check:
    """Whether host memory is loaded by the C functions."""
    from kvstore.rowcopy import functions

    name = "native"
    if functions() is not None:
        return Check(name, "ok", "bytes are read, checked and copied into pages in C")
    slow = "loads into host memory go through NumPy, about half as fast"
    if os.environ.get(SWITCH) == "0":
        return Check(name, "info", f"turned off by {SWITCH}=0: {slow}")
    return Check(
        name,
        "lacking",
        f"the C functions are not installed: {slow}",
        "install kvstore again with a C compiler at hand (and google-crc32c with its C part)",
    )


def _reason(engine: str, checks: dict[str, Check]) -> str:
    if engine != "posix":
        return f"It serves this location, and what it needs is there ({checks['kvikio'].detail})."
    direct = checks.get("direct")
    way = (
        "past the page cache where that pays"
        if direct is not None and direct.state == "ok"
        else "through the page cache"
    )
    if checks["gpu"].state == "info":
        return f"There is no GPU; it reads {way}, into host memory."
    return f"It reads {way}, into host memory, from which torch copies to the GPU."
