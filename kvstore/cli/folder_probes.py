"""What a folder can do for a store: tried, not guessed, in a scratch folder that goes again."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvstore.cli.findings import Check, State
from kvstore.cli.text import size
from kvstore.errors import NotFound, StorageError
from kvstore.io.direct import DirectPolicy
from kvstore.io.oserrors import translate
from kvstore.io.residency import ResidencyProbe

_LITTLE_SPACE = 10 << 30
_SHARED = ("nfs", "nfs4", "lustre", "beegfs", "gpfs", "cephfs", "ceph", "fuse", "9p", "cifs")
_OCTAL = re.compile(r"\\([0-7]{3})")
_MEMORY = ("tmpfs", "ramfs")


def folder_checks(directory: str) -> list[Check]:
    """Try a folder.

    Raises:
        NotFound: there is no such folder.
    """
    folder = Path(directory).absolute()
    if not folder.is_dir():
        raise NotFound(f"{directory} is not a folder; make it, or name its parent")
    checks = [_file_system(folder), _space(folder)]
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".kvstore-doctor-", dir=folder))
    except OSError as error:
        what = translate(error, "make a folder", str(folder))
        cause = os.strerror(what.errno or errno.EIO) if isinstance(what, StorageError) else what
        advice = "stores there can be read, not written; give this user write access to write"
        return [*checks, Check("writable", "lacking", f"cannot write here: {cause}", advice)]
    try:
        return [*checks, Check("writable", "ok", "made a folder in it"), *_tried(scratch)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _tried(scratch: Path) -> list[Check]:
    probes: dict[str, Callable[[Path], Check]] = {
        "publish": _publish,
        "links": _links,
        "sync": _sync,
        "direct": _direct,
        "cachestat": _cachestat,
    }
    checks = []
    for name, probe in probes.items():
        try:
            checks.append(probe(scratch))
        except OSError as error:
            checks.append(Check(name, "failed", f"{error.strerror}", "look at the kernel log"))
    return checks


def _file_system(folder: Path) -> Check:
    mount, kind, device, options = mount_of(folder)
    detail = f"{kind}, {device} on {mount}"
    state: State = "ok"
    advice = None
    if "ro" in options.split(","):
        state, advice = "lacking", "mounted read-only: stores there can be read, not written"
    elif kind in _MEMORY:
        state, advice = "lacking", "kept in memory, gone after a restart: good for trying, no more"
    elif kind == "overlay":
        state, advice = "lacking", "a container's own layer, gone with it: mount a volume"
    elif kind.split(".")[0] in _SHARED:
        detail += "; shared between hosts"
    return Check("filesystem", state, detail, advice)


def mount_of(folder: Path) -> tuple[str, str, str, str]:
    """Mount point, type, device and options of the file system that a folder is on."""
    wanted = folder.stat().st_dev
    best = ("?", "unknown", "?", "")
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return best
    real = os.path.realpath(folder)
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, about = left.split(), right.split()
        if len(fields) < 6 or len(about) < 2:
            continue
        point = _OCTAL.sub(lambda m: chr(int(m[1], 8)), fields[4])
        under = point in ("/", real) or real.startswith(point + "/")
        if under and len(point) >= len(best[0]) and _device(point) in (wanted, None):
            best = (point, about[0], about[1], fields[5])
    return best


def _device(point: str) -> int | None:
    try:
        return Path(point).stat().st_dev
    except OSError:
        return None


def _space(folder: Path) -> Check:
    status = os.statvfs(folder)
    free, whole = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    detail = f"{size(free)} free of {size(whole)}"
    if status.f_files and status.f_favail < 10_000:
        what = f"{detail}; {status.f_favail:,} files may be made"
        return Check("space", "lacking", what, "free some files: a store makes a few an extent")
    if free < _LITTLE_SPACE:
        return Check(
            "space", "lacking", detail, "remove what is not needed: kvstore ls, kvstore rm"
        )
    return Check("space", "ok", detail)


def _publish(scratch: Path) -> Check:
    """Two folders with something in them: renaming one onto the other must be refused."""
    for name in ("a", "b"):
        (scratch / name).mkdir()
        (scratch / name / "file").write_bytes(name.encode())
    try:
        (scratch / "a").rename(scratch / "b")
    except OSError as error:
        refused = error.errno in (errno.EEXIST, errno.ENOTEMPTY)
        moved = (scratch / "a").rename(scratch / "c") if refused else None
        if moved is not None and (moved / "file").exists():
            return Check(
                "publish", "ok", "a folder gets its name in one step, and never replaces one"
            )
        what = f"renaming a folder fails: {error.strerror}"
    else:
        what = "renaming a folder onto another replaces it: two writers would spoil each other"
    advice = "use a POSIX file system: ext4, xfs, NFS, Lustre ..."
    return Check("publish", "failed", what, advice)


def _links(scratch: Path) -> Check:
    (scratch / "one").write_bytes(b"")
    try:
        os.link(scratch / "one", scratch / "two")
    except OSError as error:
        what = f"no hard links here: {error.strerror}"
        advice = "works without: lookups that end inside an extent then miss its blocks"
        return Check("links", "lacking", what, advice)
    return Check("links", "ok", "hard links work")


def _sync(scratch: Path) -> Check:
    fd = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        what = f"a folder cannot be synced: {error.strerror}"
        advice = "a commit may be lost with the power; what was lost is a miss, nothing worse"
        return Check("sync", "lacking", what, advice)
    finally:
        os.close(fd)
    return Check("sync", "ok", "folders can be synced, so commits survive a power failure")


def _direct(scratch: Path) -> Check:
    if DirectPolicy(str(scratch), "auto", read_only=False).works:
        return Check("direct", "ok", "wrote and read a page with O_DIRECT")
    advice = (
        "works without: loads go through the page cache and push other things out of memory; ext4 "
        "and xfs on a local disk have it"
    )
    return Check("direct", "lacking", "O_DIRECT was refused", advice)


def _cachestat(scratch: Path) -> Check:
    path = scratch / "cached"
    path.write_bytes(b"x" * 4096)
    with path.open("rb") as file:
        known = ResidencyProbe().mostly_resident(file.fileno(), 0, 4096)
    if known is None:
        advice = "all loads then go through the page cache; Linux 6.5 and later tell what is in it"
        return Check("cachestat", "lacking", "the kernel does not tell what is cached", advice)
    return Check(
        "cachestat", "ok", "the kernel tells what is cached, so only the rest is read directly"
    )
