"""GPUs, and the software between them and the disk. Drivers are tried in processes of their own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.cli.findings import Check, State

_TIMEOUT = 60.0
_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"version": torch.__version__, "built": torch.version.cuda, "gpus": names}))
"""
# A real transfer, of a buffer on the host: importing kvikio succeeds where nothing else does.
_KVIKIO = """
import json, os, sys, tempfile
import numpy, kvikio
try:
    import kvikio.cufile_driver as driver
    gds = bool(driver.get("is_gds_available"))
except Exception:
    gds = False
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "page")
    data = numpy.arange(4096, dtype=numpy.uint8)
    with kvikio.CuFile(path, "w") as file:
        file.write(data)
    back = numpy.zeros_like(data)
    with kvikio.CuFile(path, "r") as file:
        file.read(back)
print(json.dumps({"gds": gds, "same": bool((data == back).all())}))
"""
_CUFILE = (
    ("/usr/local", "cuda*/targets/*/lib/libcufile.so*"),
    ("/usr/local", "cuda*/lib64/libcufile.so*"),
    ("/usr/lib", "*-linux-gnu/libcufile.so*"),
    ("/usr/lib64", "libcufile.so*"),
)


def gpu_checks() -> list[Check]:
    """Look at torch, GPUs, cuFile, the GPUDirect Storage driver and kvikio."""
    with ThreadPoolExecutor(2) as pool:
        torch_answer = pool.submit(_asked, "torch", _TORCH)
        kvikio_answer = pool.submit(_asked, "kvikio", _KVIKIO)
    gpus = _driver_gpus()
    torch_check, seen = _torch(torch_answer.result(), gpus)
    return [
        torch_check,
        _gpu(gpus, seen),
        _cufile(gpus),
        _gpudirect(gpus),
        _kvikio(kvikio_answer.result(), gpus),
    ]


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cu13", f"{package}-cu12"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _asked(package: str, code: str) -> dict[str, object] | str | None:
    """What a process of its own prints as JSON; why it failed; None where it is not installed."""
    if _version(package) is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter, our own code
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {_TIMEOUT:.0f} s"
    lines = done.stdout.strip().splitlines()
    try:
        answer: dict[str, object] = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()
        died = f"died of signal {-done.returncode}" if done.returncode < 0 else "failed"
        return f"{died}: {said[-1]}" if said else died
    return answer


def _driver_gpus() -> list[str]:
    """Models of the GPUs that the NVIDIA driver knows; empty without a driver."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            text = path.read_text("utf-8", "replace")
        except OSError:
            continue
        models = [line.partition(":")[2].strip() for line in text.splitlines() if "Model" in line]
        found.append(models[0] if models else "GPU")
    return found


def _torch(answer: dict[str, object] | str | None, gpus: list[str]) -> tuple[Check, bool]:
    version = _version("torch")
    if answer is None:
        return Check("torch", "lacking", "not installed", "pip install torch"), False
    if isinstance(answer, str):
        advice = "the package is broken: install it again"
        return Check("torch", "lacking", f"{version}: {answer}", advice), False
    built = answer.get("built")
    detail = f"{answer.get('version')}, " + (f"for CUDA {built}" if built else "without CUDA")
    if gpus and not answer.get("gpus"):
        advice = "install a torch build that fits the driver; see pytorch.org"
        return Check("torch", "lacking", f"{detail}; does not see the GPU", advice), False
    return Check("torch", "ok", detail), bool(answer.get("gpus"))


def _gpu(gpus: list[str], seen: bool) -> Check:
    if not gpus and not seen:
        return Check("gpu", "info", "no NVIDIA GPU or driver; loads go to buffers in host memory")
    return Check("gpu", "ok", ", ".join(gpus) or "seen by torch")


def _cufile(gpus: list[str]) -> Check:
    places = [*_CUFILE, (sysconfig.get_paths()["purelib"], "nvidia/*/lib/libcufile.so*")]
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    places += [(folder, "libcufile.so*") for folder in folders if folder]
    found = sorted(str(path) for folder, name in places for path in Path(folder).glob(name))
    if found:
        return Check("cufile", "ok", found[0])
    advice = "pip install nvidia-cufile, or CUDA's own package" if gpus else None
    return Check("cufile", "lacking" if gpus else "info", "no libcufile.so", advice)


def _gpudirect(gpus: list[str]) -> Check:
    if Path("/proc/driver/nvidia-fs").exists() or Path("/sys/module/nvidia_fs").exists():
        return Check("gpudirect", "ok", "the kernel module nvidia_fs is loaded")
    advice = None
    if gpus:
        advice = (
            "install the driver's package nvidia-fs and load it (modprobe nvidia_fs); it needs "
            "ext4 or xfs on NVMe, or a file system whose vendor supports it"
        )
    state: State = "lacking" if gpus else "info"
    return Check("gpudirect", state, "the kernel module nvidia_fs is not loaded", advice)


def _kvikio(answer: dict[str, object] | str | None, gpus: list[str]) -> Check:
    version = _version("kvikio")
    if answer is None:
        advice = "pip install 'kvstore[gds]'" if gpus else None
        return Check("kvikio", "lacking" if gpus else "info", "not installed", advice)
    if isinstance(answer, str):
        advice = "it needs the NVIDIA driver: install that, or uninstall kvikio"
        state: State = "lacking" if gpus else "info"
        return Check("kvikio", state, f"{version}, not usable: {answer}", advice if gpus else None)
    if not answer.get("same"):
        advice = "do not use it: uninstall kvikio, and report this"
        return Check("kvikio", "lacking", f"{version} reads other bytes than it wrote", advice)
    way = "GPUDirect Storage is available" if answer.get("gds") else "without GPUDirect Storage"
    return Check("kvikio", "ok", f"{version}, {way}")
