"""In whose threads the posix engine reads, and what it holds on to."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.reads import (
    CONTENT,
    KIB,
    MIB,
    SIZE,
    Open,
    nothing,
    open_files,
    read_all,
)

from kvstore.io.posix import PosixEngine
from kvstore.io.protocol import ByteRange


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


def test_threads_beyond_the_cores_are_called_by_direct_reads_only(opened: Open, file: Path):
    file.read_bytes()
    ranges = [ByteRange("file", at * MIB, MIB) for at in range(20)]
    cores = len(os.sched_getaffinity(0))
    seen: dict[str, set[int]] = {}
    for mode in ("never", "always"):
        engine = opened(direct=mode, threads=cores + 4)
        if mode == "always" and not engine.direct_io:
            pytest.skip("this file system has no O_DIRECT")
        mine = seen.setdefault(mode, set())

        def consume(_index: int, _offset: int, _data: memoryview, mine: set[int] = mine) -> None:
            mine.add(threading.get_ident())
            time.sleep(0.02)  # long enough for every thread that was called to take one

        assert engine.read(ranges, consume) == [None] * 20
    assert len(seen["never"]) <= cores < len(seen["always"])
