"""How the posix engine reads: directly or through the cache, in which sizes, in whose threads."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import Corrupt, InvalidArgument, NotFound, StorageError
from kvstore.io import direct, local_read, workers
from kvstore.io.posix import COLD_BYTES, HOT_BYTES, PosixEngine
from kvstore.io.protocol import ByteRange
from kvstore.io.residency import ResidencyProbe

KIB, MIB = 1 << 10, 1 << 20
SIZE = 20 * MIB + 1234
CONTENT = np.random.default_rng(7).bytes(SIZE)

Open = Callable[..., PosixEngine]


def nothing(_index: int, _offset: int, _data: memoryview) -> None:
    """Consume and forget."""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens engines on one folder, closes them."""
    engines: list[PosixEngine] = []

    def open_one(**options: Any) -> PosixEngine:
        engines.append(PosixEngine(tmp_path, **{"durable": False, **options}))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An object named ``file`` of 20 MiB and a bit, on the disk."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)
    return path


def forget(path: Path) -> None:
    """Take a file out of the page cache; skips where that cannot be told."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    resident = ResidencyProbe().mostly_resident(descriptor, 0, SIZE)
    os.close(descriptor)
    if resident is not False:
        pytest.skip("this kernel does not tell what is cached, or keeps it")


class Calls:
    """Records every preadv: whether direct, where, how much, into which memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[bool, int, int, int]] = []
        real = os.preadv

        def preadv(fd: int, buffers: Sequence[memoryview], offset: int, *more: int) -> int:
            memory = np.frombuffer(buffers[0], np.uint8).__array_interface__["data"][0]
            is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            self.seen.append((is_direct, offset, len(buffers[0]), memory))
            return real(fd, buffers, offset, *more)

        monkeypatch.setattr(os, "preadv", preadv)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def read_all(engine: PosixEngine, ranges: Sequence[ByteRange]) -> list[bytes]:
    parts: list[bytearray] = [bytearray() for _ in ranges]
    results = engine.read(ranges, lambda i, _offset, data: parts[i].extend(data))
    assert results == [None] * len(ranges)
    return [bytes(part) for part in parts]


# -- direct or buffered ---------------------------------------------------------------------------


def test_what_is_cached_is_read_buffered_and_what_is_not_directly(opened: Open, file: Path):
    engine = opened()
    if not engine.direct_io:
        pytest.skip("no O_DIRECT here")
    forget(file)
    assert read_all(engine, [ByteRange("file", 0, SIZE, MIB)]) == [CONTENT]
    assert (engine.traffic.direct, engine.traffic.buffered) == (SIZE, 0)
    assert read_all(engine, [ByteRange("file", 0, SIZE, MIB)]) == [CONTENT]
    assert engine.traffic.buffered == 0, "a direct read filled the cache"
    file.read_bytes()
    assert read_all(engine, [ByteRange("file", 0, SIZE, MIB)]) == [CONTENT]
    assert (engine.traffic.direct, engine.traffic.buffered) == (2 * SIZE, SIZE)


def test_ranges_of_one_open_file_may_differ(opened: Open, file: Path):
    engine = opened()
    forget(file)
    with file.open("rb", buffering=0) as half:
        os.posix_fadvise(half.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        half.read(10 * MIB)
    ranges = [ByteRange("file", at * MIB, MIB) for at in (0, 15, 1, 16, 2, 17)]
    assert read_all(engine, ranges) == [CONTENT[r.offset : r.offset + MIB] for r in ranges]
    assert (engine.traffic.direct, engine.traffic.buffered) == (3 * MIB, 3 * MIB)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_the_mode_can_be_fixed(opened: Open, file: Path, mode: direct.DirectMode):
    engine = opened(direct=mode)
    file.read_bytes()
    read_all(engine, [ByteRange("file", 0, SIZE, MIB)])
    forget(file)
    read_all(engine, [ByteRange("file", 0, SIZE, MIB)])
    expected = (2 * SIZE, 0) if mode == "always" else (0, 2 * SIZE)
    assert (engine.traffic.direct, engine.traffic.buffered) == expected


def test_where_the_kernel_does_not_tell_reads_are_buffered(
    opened: Open, file: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = opened()
    forget(file)
    monkeypatch.setattr(local_read.ResidencyProbe, "mostly_resident", lambda *_: None)
    assert read_all(engine, [ByteRange("file", 0, SIZE, MIB)]) == [CONTENT]
    assert engine.traffic.buffered == SIZE


def test_direct_reads_are_aligned_in_every_way(
    opened: Open, file: Path, monkeypatch: pytest.MonkeyPatch
):
    assert file.exists()
    engine = opened(direct="always")
    calls = Calls(monkeypatch)
    offsets = [0, 1, 4095, 4096, 5000, SIZE - 4096, SIZE - 5000, SIZE - 1]
    ranges = [
        ByteRange("file", at, min(length, SIZE - at), piece)
        for at in offsets
        for length in (1, 4096, 300_001)
        for piece in (0, 1000, 4096)
    ]
    assert read_all(engine, ranges) == [CONTENT[r.offset : r.offset + r.length] for r in ranges]
    assert all(is_direct for is_direct, *_ in calls.seen)
    for _, offset, length, memory in calls.seen:
        assert offset % 4096 == length % 4096 == memory % 4096 == 0


def test_read_sizes(opened: Open, file: Path, monkeypatch: pytest.MonkeyPatch):
    engine = opened()
    if not engine.direct_io:
        pytest.skip("no O_DIRECT here")
    calls = Calls(monkeypatch)
    piece = 100_000
    file.read_bytes()
    read_all(engine, [ByteRange("file", 0, SIZE, piece)])
    lengths = {length for _, _, length, _ in calls.seen[:-1]}
    assert lengths == {HOT_BYTES // piece * piece}
    calls.seen.clear()
    forget(file)
    read_all(engine, [ByteRange("file", 0, SIZE, piece)])
    assert len(calls.seen) == -(-SIZE // (COLD_BYTES // piece * piece))
    assert all(is_direct for is_direct, *_ in calls.seen)


# -- file systems without O_DIRECT ----------------------------------------------------------------


def refuse_direct(monkeypatch: pytest.MonkeyPatch, *, at: str) -> list[str]:
    """Behave like a file system that refuses O_DIRECT when a file is opened, set, or read."""
    asked: list[str] = []
    real_open, real_fcntl, real_preadv = os.open, fcntl.fcntl, os.preadv

    def refuse() -> OSError:
        asked.append(at)
        return OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def open_(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise refuse()
        return real_open(path, flags, *args, **kwargs)

    def fcntl_(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise refuse()
        return real_fcntl(fd, command, argument)

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int, *more: int) -> int:
        if real_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise refuse()
        return real_preadv(fd, buffers, offset, *more)

    patches: dict[str, tuple[Any, str, Any]] = {
        "open": (os, "open", open_),
        "set": (fcntl, "fcntl", fcntl_),
        "read": (os, "preadv", preadv),
    }
    monkeypatch.setattr(*patches[at])
    return asked


@pytest.mark.parametrize("at", ["open", "read"])
def test_the_probe_finds_out(opened: Open, tmp_path: Path, at: str, monkeypatch: Any):
    refuse_direct(monkeypatch, at=at)
    assert not opened().direct_io
    with pytest.raises(InvalidArgument, match="O_DIRECT"):
        opened(direct="always")
    assert list(tmp_path.iterdir()) == [], "the probe left something behind"


def test_the_probe_is_a_real_transfer(opened: Open, tmp_path: Path, monkeypatch: Any):
    calls = Calls(monkeypatch)
    assert opened().direct_io == any(is_direct for is_direct, *_ in calls.seen)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_probe_writes_nothing(opened: Open, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(os, "pwritev", None)
    assert opened(read_only=True).direct_io
    (tmp_path / "zarr.json").write_bytes(b"{}")
    assert opened(read_only=True).direct_io
    refuse_direct(monkeypatch, at="open")
    assert not opened(read_only=True).direct_io


@pytest.mark.parametrize("at", ["set", "read"])
def test_a_refused_direct_read_falls_back_once_and_for_all(
    opened: Open, file: Path, at: str, monkeypatch: Any
):
    engine = opened(threads=1)
    if not engine.direct_io:
        pytest.skip("no O_DIRECT here")
    forget(file)
    monkeypatch.setattr(local_read.ResidencyProbe, "mostly_resident", lambda *_: False)
    asked = refuse_direct(monkeypatch, at=at)
    ranges = [ByteRange("file", at * MIB + 1, MIB) for at in range(10)]
    for _ in range(2):
        assert read_all(engine, ranges) == [CONTENT[r.offset : r.offset + MIB] for r in ranges]
    assert len(asked) == 1
    assert not engine.direct_io
    assert engine.traffic.direct == 0


# -- short reads and other surprises --------------------------------------------------------------


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("most", [4096, 5000, 65536])
def test_short_reads_are_continued(
    opened: Open, file: Path, mode: direct.DirectMode, most: int, monkeypatch: Any
):
    assert file.exists()
    engine = opened(direct=mode)
    real = os.preadv
    count = 0

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal count
        count += 1
        return min(real(fd, buffers, offset), most)

    monkeypatch.setattr(os, "preadv", preadv)
    ranges = [ByteRange("file", 4096 * 3 + 5, MIB), ByteRange("file", SIZE - 300_000, 300_000)]
    assert read_all(engine, ranges) == [CONTENT[r.offset : r.offset + r.length] for r in ranges]
    assert count > MIB // most
    assert engine.traffic.direct == (0 if mode == "never" else MIB + 300_000)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_an_object_cut_while_it_is_read_is_corrupt(
    opened: Open, file: Path, mode: direct.DirectMode
):
    engine = opened(direct=mode)

    def consume(_index: int, offset: int, _data: memoryview) -> None:
        if offset == 0:
            os.truncate(file, 10 * MIB + 5)

    (result,) = engine.read([ByteRange("file", 0, SIZE, 100_000)], consume)
    assert isinstance(result, Corrupt)
    assert str(10 * MIB + 5) in str(result)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_failing_medium_is_a_storage_error_of_that_range(
    opened: Open, file: Path, code: int, monkeypatch: Any
):
    assert file.exists()
    engine = opened(direct="never")
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 3 * MIB:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    results = engine.read([ByteRange("file", at * MIB, MIB) for at in range(8)], nothing)
    assert [result is None for result in results] == [at != 3 for at in range(8)]
    error = results[3]
    assert isinstance(error, StorageError)
    assert error.errno == code
    assert str(file) in str(error)


def test_a_planted_link_or_pipe_is_not_followed(opened: Open, file: Path, tmp_path: Path):
    engine = opened()
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    secret.write_bytes(b"secret")
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    before = engine.direct_io
    ranges = [ByteRange(name, 0, 6) for name in ("link", "pipe", "folder")]
    results = engine.read(ranges, nothing)
    assert [type(result) for result in results] == [StorageError, NotFound, NotFound]
    assert "symbolic link" in str(results[0])
    assert engine.direct_io == before, "a folder says nothing about the file system"
    with pytest.raises(StorageError, match="symbolic link"):
        engine.get("link", 100)
    for name in ("link", "pipe"):
        with pytest.raises(NotFound):
            engine.size(name)
    with pytest.raises(NotFound):
        engine.get("pipe", 100)
    with pytest.raises(StorageError, match="symbolic link"):
        engine.write_into("link", 6, [(0, b"redone")])
    assert not engine.create("link", b"redone")
    engine.write("link", [b"mine"])
    assert secret.read_bytes() == b"secret"
    assert engine.get("link", 4) == b"mine"
    assert file.exists()


def test_discarding_a_link_leaves_what_it_points_to(opened: Open, tmp_path: Path):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(outside)
    (tmp_path / "link").symlink_to(outside)
    engine = opened()
    assert engine.discard("link")
    assert engine.discard("folder")
    assert (outside / "kept").exists()


@pytest.mark.parametrize("size", [0, 50, 99, 101, 10_000])
def test_a_small_object_that_changes_while_it_is_read_is_corrupt(
    opened: Open, tmp_path: Path, size: int, monkeypatch: Any
):
    path = tmp_path / "record"
    path.write_bytes(b"x" * 100)
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        status = real(fd)
        path.write_bytes(b"y" * size)
        return status

    engine = opened()
    assert engine.get("record", 1000) == b"x" * 100
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        with pytest.raises(Corrupt, match="100 bytes"):
            engine.get("record", 1000)


# -- threads --------------------------------------------------------------------------------------


def test_small_batches_are_read_by_the_caller(opened: Open, file: Path):
    assert file.exists()
    engine = opened()
    threads: set[int] = set()

    def consume(_index: int, _offset: int, _data: memoryview) -> None:
        threads.add(threading.get_ident())

    engine.read([ByteRange("file", 0, SIZE, MIB)], consume)
    engine.read([ByteRange("file", at, 1000) for at in range(200)], consume)
    assert threads == {threading.get_ident()}
    assert not engine._workers._serving
    engine.read([ByteRange("file", at, MIB) for at in range(200)], consume)
    assert threading.get_ident() in threads
    assert 2 <= len(threads) <= 1 + engine._threads


def test_consecutive_ranges_of_one_object_share_an_open_file(
    opened: Open, file: Path, tmp_path: Path, monkeypatch: Any
):
    engine = opened(threads=2)
    for i in range(20):
        (tmp_path / f"f{i}").write_bytes(CONTENT[: 256 * KIB])
    count = 0
    real = os.open

    def open_(path: str, *args: Any, **kwargs: Any) -> int:
        nonlocal count
        count += 1
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    ranges = [ByteRange(f"f{i}", at * KIB, KIB) for i in range(20) for at in range(256)]
    read_all(engine, ranges)
    assert 20 <= count <= 24
    count = 0
    read_all(engine, [ByteRange("file", at * 4 * KIB, 4 * KIB) for at in range(4000)])
    assert count <= 2
    assert file.exists()


def test_no_file_stays_open_and_staging_is_bounded(opened: Open, file: Path):
    assert file.exists()
    engine = opened(direct="always", max_staging_bytes=MIB)
    before = open_files()
    for _ in range(5):
        engine.read([ByteRange("file", at * MIB, MIB, 4096) for at in range(20)], nothing)
        engine.read([ByteRange("absent", 0, MIB)] * 5, nothing)
    engine.close()  # joins the threads
    assert open_files() == before
    assert engine._settings.staging.allocated_bytes == 0


def test_a_consumer_that_breaks_off_the_batch_reaches_the_caller(opened: Open, file: Path):
    assert file.exists()
    engine = opened()

    class Stop(BaseException):
        pass

    def consume(index: int, _offset: int, _data: memoryview) -> None:
        if index == 3:
            raise Stop

    ranges = [ByteRange("file", at * MIB, MIB) for at in range(10)]
    with pytest.raises(Stop):
        engine.read(ranges, consume)
    assert engine.read(ranges, nothing) == [None] * 10


def test_threads_end_with_an_engine_that_was_forgotten(tmp_path: Path, file: Path):
    assert file.exists()
    engine = PosixEngine(tmp_path, durable=False)
    engine.read([ByteRange("file", at * MIB, MIB) for at in range(10)], nothing)
    threads = list(engine._workers._serving)
    assert threads
    del engine
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_with_threads_of_its_own(opened: Open, file: Path):
    assert file.exists()
    engine = opened()
    ranges = [ByteRange("file", at * MIB, MIB) for at in range(20)]
    read_all(engine, ranges)
    engine._settings.staging._changed.acquire()  # as if another thread held it just now
    child = os.fork()
    if child == 0:
        status = 1
        try:
            expected = [CONTENT[r.offset : r.offset + MIB] for r in ranges]
            status = 0 if read_all(engine, ranges) == expected else 2
        finally:
            os._exit(status)
    engine._settings.staging._changed.release()
    until = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    read_all(engine, ranges)


# -- deadlines ------------------------------------------------------------------------------------


class Medium:
    """Hangs when reading at chosen offsets until let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hanging: set[int] = set()
        self.let_go = threading.Event()
        real = os.preadv

        def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset in self.hanging:
                self.let_go.wait(30)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)


def test_a_stuck_read_does_not_hold_the_caller(opened: Open, file: Path, monkeypatch: Any):
    assert file.exists()
    engine = opened(deadline=0.3, threads=2)
    medium = Medium(monkeypatch)
    medium.hanging = {5 * MIB}
    handed: list[int] = []
    ranges = [ByteRange("file", at * MIB, MIB) for at in range(20)]
    started = time.monotonic()
    results = engine.read(ranges, lambda i, _o, _d: handed.append(i))
    assert 0.3 <= time.monotonic() - started < 5
    assert [i for i, result in enumerate(results) if result is not None] == [5]
    assert isinstance(results[5], StorageError)
    assert "0.3 s" in str(results[5])
    # The engine goes on, with a thread in place of the stuck one.
    medium.hanging = set()
    for _ in range(3):
        assert engine.read(ranges, nothing) == [None] * 20
    # What comes late is handed to nobody.
    assert 5 not in handed
    stuck = list(engine._workers._stuck)
    assert len(stuck) == 1
    medium.let_go.set()
    stuck[0].join(10)
    assert not stuck[0].is_alive()
    assert 5 not in handed
    assert results[5] is not None


def test_one_small_range_has_the_deadline_too(opened: Open, file: Path, monkeypatch: Any):
    assert file.exists()
    engine = opened(deadline=0.2)
    medium = Medium(monkeypatch)
    medium.hanging = {0}
    (result,) = engine.read([ByteRange("file", 0, 10)], nothing)
    assert isinstance(result, StorageError)
    medium.let_go.set()


def test_the_caller_waits_for_a_consumer_in_the_middle(opened: Open, file: Path):
    """The target's memory must not change once ``read`` has returned."""
    assert file.exists()
    engine = opened(deadline=0.1)
    log: list[str] = []

    def consume(_index: int, _offset: int, _data: memoryview) -> None:
        log.append("in")
        time.sleep(0.4)
        log.append("out")

    (result,) = engine.read([ByteRange("file", 0, 10 * MIB, MIB)], consume)
    log.append("returned")
    time.sleep(0.6)
    assert isinstance(result, StorageError)
    assert log == ["in", "out", "returned"]


def test_a_caller_that_is_interrupted_takes_its_memory_back(
    opened: Open, file: Path, monkeypatch: Any
):
    assert file.exists()
    engine = opened()
    handed: list[int] = []

    class Interrupt(BaseException):
        pass

    def wait(self: workers.Batch, _timeout: float | None) -> bool:
        assert self
        raise Interrupt

    def consume(index: int, _offset: int, _data: memoryview) -> None:
        time.sleep(0.05)
        handed.append(index)

    with monkeypatch.context() as patch:
        patch.setattr(workers.Batch, "wait", wait)
        with pytest.raises(Interrupt):
            engine.read([ByteRange("file", at * MIB, MIB) for at in range(20)], consume)
    count = len(handed)
    time.sleep(0.3)
    assert len(handed) == count < 20


def test_threads_are_not_lost_without_end(opened: Open, file: Path, monkeypatch: Any):
    assert file.exists()
    monkeypatch.setattr(workers, "_MOST_STUCK", 3)
    engine = opened(deadline=0.05, threads=2)
    medium = Medium(monkeypatch)
    medium.hanging = {at * MIB for at in range(20)}
    ranges = [ByteRange("file", at * MIB, MIB) for at in range(2)]
    for _ in range(100):  # a slow machine may take more rounds to have them all stuck
        if len(engine._workers._stuck) > 3:
            break
        assert all(isinstance(r, StorageError) for r in engine.read(ranges, nothing))
    with pytest.raises(StorageError, match="hang in the medium"):
        engine.read(ranges, nothing)
    medium.let_go.set()
    for thread in engine._workers._stuck:
        thread.join(10)
    medium.hanging = set()
    assert engine.read(ranges, nothing) == [None] * 2


def test_a_deadline_and_the_callers_memory_do_not_meet(opened: Open, file: Path, monkeypatch: Any):
    """A read that hangs in memory of the caller could not be given up, so none goes there."""
    file.read_bytes()
    engine = opened(deadline=0.2, direct="never")
    medium = Medium(monkeypatch)
    medium.hanging = {0}
    memory = bytearray(MIB)
    started = time.monotonic()
    (result,) = engine.read(
        [ByteRange("file", 0, MIB)], nothing, lambda *_: ([memoryview(memory)], lambda: None)
    )
    assert time.monotonic() - started < 5
    assert isinstance(result, StorageError)
    medium.let_go.set()
    engine.close()
    assert memory == bytes(MIB)


def test_cached_bytes_go_straight_to_where_they_belong(opened: Open, file: Path, monkeypatch: Any):
    file.read_bytes()
    engine = opened()
    real = os.preadv
    calls: list[int] = []

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        got = real(fd, buffers[:3], offset)
        return min(got, 5000)

    monkeypatch.setattr(os, "preadv", preadv)
    memory = bytearray(100_000)
    views = [memoryview(memory)[at : at + 30] for at in range(0, 100_000, 30)]
    landed: list[int] = []
    assert engine.read(
        [ByteRange("file", 7, 100_000)], nothing, lambda *_: (views, lambda: landed.append(1))
    ) == [None]
    assert memory == CONTENT[7 : 7 + 100_000]
    assert landed == [1]
    assert max(calls) == 1024
    assert engine._settings.staging.allocated_bytes == 0


# -- looking up -----------------------------------------------------------------------------------


def test_a_lookup_is_one_system_call(opened: Open, tmp_path: Path, monkeypatch: Any):
    engine = opened()
    (tmp_path / "there").write_bytes(b"")
    calls: list[str] = []
    real = os.access

    def access(path: str, mode: int) -> bool:
        calls.append(path)
        return real(path, mode)

    for name in ("stat", "lstat", "open", "scandir", "listdir"):
        monkeypatch.setattr(os, name, None)
    monkeypatch.setattr(os, "access", access)
    assert engine.exists("there")
    assert not engine.exists("a/b/c")
    assert calls == [f"{tmp_path}/there", f"{tmp_path}/a/b/c"]
