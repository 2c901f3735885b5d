"""One thread's way through ranges of files: open, choose direct or buffered, read, hand over."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import Corrupt, InvalidArgument, KVStoreError, NotFound, StorageError
from kvstore.io.direct import ALIGNMENT, DirectPolicy
from kvstore.io.local_names import LocalNames, absent_or
from kvstore.io.protocol import ByteRange, Consume, SinkOf
from kvstore.io.pump import PIECE_BYTES, pump, pumped
from kvstore.io.residency import ResidencyProbe
from kvstore.io.staging import Staging

GIVEN_UP = StorageError("the read was given up before it was done")
"""Result of a range whose batch was given up."""

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BUFFERED = os.O_NONBLOCK
_DIRECT = os.O_NONBLOCK | os.O_DIRECT
_MASK = ALIGNMENT - 1


_this_thread = threading.local()


class _ByCaller(Exception):
    """Carries what the caller's own function raised past the handling of the medium's errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Gate(Protocol):
    """Lets a thread hand bytes over, or says that the batch was given up."""

    def __enter__(self) -> bool:
        """Enter; True when the batch was given up and nothing may be handed over."""

    def __exit__(self, *_: object) -> None:
        """Leave."""


@dataclass(slots=True)
class Traffic:
    """Bytes that an engine moved, by the way they took. Counted without locks: near enough."""

    direct: int = 0
    buffered: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """What all the reading threads of one engine share.

    Attributes:
        hot_bytes: bytes per buffered read: small, so that the copy stays in the processor's cache
            until the consumer has it.
        cold_bytes: bytes per direct read: large, so that the device works in long runs.
    """

    names: LocalNames
    policy: DirectPolicy
    staging: Staging
    traffic: Traffic
    hot_bytes: int
    cold_bytes: int
    deadline: float | None


def refuse_in_consumer() -> None:
    """Refuse to read from within a consumer, which holds a staging buffer and may hold a thread.

    Were it to wait for another of these, all could wait for each other.

    Raises:
        InvalidArgument: this thread is in a consumer.
    """
    if getattr(_this_thread, "reads", False):
        raise InvalidArgument("a consumer called read; collect the ranges and read them after")


class RangeReader:
    """Reads ranges, one after the other. Not for several threads; :meth:`close` it."""

    def __init__(self, settings: ReadSettings, on_direct: Callable[[], None] | None = None) -> None:
        """Make a reader that calls ``on_direct`` before every range that it reads directly."""
        _this_thread.reads = True
        self._on_direct = on_direct
        self._settings = settings
        self._probe = ResidencyProbe()
        self._path: str | None = None
        self._fd = -1
        self._fd_direct = False
        self._buffer: memoryview | None = None
        self._view = memoryview(b"")

    def close(self) -> None:
        """Close the file and give the staging memory back."""
        _this_thread.reads = False
        self._leave_file()
        self._view = memoryview(b"")
        if self._buffer is not None:
            self._settings.staging.release(self._buffer)
            self._buffer = None

    def read(
        self, index: int, wanted: ByteRange, consume: Consume, sink_of: SinkOf | None, gate: Gate
    ) -> Exception | None:
        """Read one range and hand it over. Returns what went wrong instead of raising it.

        A name that is there and is no plain file is :class:`~kvstore.errors.NotFound`.
        """
        try:
            if wanted.offset < 0 or wanted.length < 0 or wanted.piece < 0:
                raise InvalidArgument(f"{wanted}: offset, length and piece cannot be negative")
            if wanted.path != self._path:
                self._enter_file(wanted.path)
            return self._deliver(index, wanted, consume, sink_of, gate) if wanted.length else None
        except _ByCaller as error:
            return error.error
        except KVStoreError as error:
            return error
        except OSError as error:
            full = self._settings.names.full(wanted.path)
            self._leave_file()
            if error.errno in (errno.EISDIR, errno.ESPIPE):
                return NotFound(f"{full} is not a plain file, so no object of a store")
            return absent_or(error, "read", full)

    def _deliver(
        self, index: int, wanted: ByteRange, consume: Consume, sink_of: SinkOf | None, gate: Gate
    ) -> Exception | None:
        """Read and hand over. Returns :data:`GIVEN_UP` or None; whatever fails is raised."""
        offset, length = wanted.offset, wanted.length
        step = self._step(length, wanted.piece, direct=self._choose(offset, length))
        done = 0
        if sink_of is not None and not self._fd_direct and self._settings.deadline is None:
            # With a deadline, a read that hangs could not be given up while the gate is held.
            with gate as abandoned:
                if abandoned:
                    return GIVEN_UP
                done = self._pump(sink_of, index, wanted)
        while done < length:
            size = min(step, length - done)
            view = self._fetch(offset + done, size)
            with gate as abandoned:
                if abandoned:
                    return GIVEN_UP
                try:
                    consume(index, done, view)
                except Exception as error:
                    raise _ByCaller(error) from error
            done += size
        traffic = self._settings.traffic
        if self._fd_direct:
            traffic.direct += done
        else:
            traffic.buffered += done
        return None

    def _pump(self, sink_of: SinkOf, index: int, wanted: ByteRange) -> int:
        """Read to the caller's sink, if there is one. Returns the bytes that it took."""
        if pump() is None:
            return 0
        try:
            sink = sink_of(index)
        except Exception as error:
            raise _ByCaller(error) from error
        if sink is None:
            return 0
        size = self._whole_pieces(wanted.length, wanted.piece, PIECE_BYTES)
        staging = self._staged(size)
        return pumped(self._fd, wanted.offset, wanted.length, staging, size, sink)

    # -- files ------------------------------------------------------------------------------------

    def _enter_file(self, path: str) -> None:
        self._leave_file()
        self._fd = os.open(self._settings.names.full(path), _FLAGS)
        self._fd_direct = False
        self._path = path

    def _leave_file(self) -> None:
        if self._path is not None:
            self._path = None
            os.close(self._fd)

    def _choose(self, offset: int, length: int) -> bool:
        """Set the file to direct or buffered reading for a range."""
        policy = self._settings.policy
        if policy.mode == "never" or not policy.works:
            direct = False
        elif policy.mode == "always":
            direct = True
        else:
            # Not known: buffered is right at any rate.
            direct = self._probe.mostly_resident(self._fd, offset, length) is False
        if direct != self._fd_direct:
            direct = self._set_direct(direct)
        if direct and self._on_direct is not None:
            self._on_direct()
        return direct

    def _set_direct(self, direct: bool) -> bool:
        try:
            # One open file serves both ways: the flag can be changed, and no other thread has it.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, _DIRECT if direct else _BUFFERED)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            # A folder or a pipe in an object's place says nothing about the file system.
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                self._settings.policy.refused()
            direct = False
        self._fd_direct = direct
        return direct

    # -- bytes ------------------------------------------------------------------------------------

    def _step(self, length: int, piece: int, *, direct: bool) -> int:
        """Bytes to read at once: whole pieces, near the size that suits the way of reading."""
        settings = self._settings
        most = settings.cold_bytes if direct else settings.hot_bytes
        return self._whole_pieces(length, piece, most)

    @staticmethod
    def _whole_pieces(length: int, piece: int, most: int) -> int:
        return length if piece == 0 or piece >= length else max(most // piece, 1) * piece

    def _fetch(self, position: int, size: int) -> memoryview:
        """``size`` bytes at ``position`` of the file, in staging memory."""
        if not self._fd_direct:
            view = self._staged(size)
            self._fill(view, position, size)
            return view
        start = position & ~_MASK
        skip = position - start
        view = self._staged((skip + size + _MASK) & ~_MASK)
        try:
            self._fill(view, start, skip + size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._settings.policy.refused()
            self._set_direct(direct=False)
            self._fill(view, start, skip + size)
        return view[skip : skip + size]

    def _fill(self, view: memoryview, position: int, need: int) -> None:
        """Read until the first ``need`` bytes of the view are there; more may come.

        An interrupted call needs no care: ``os.preadv`` repeats it (PEP 475).
        """
        got = os.preadv(self._fd, (view,), position)
        while got < need:
            if self._fd_direct:
                # A direct read goes on at an aligned place, so some bytes are read again.
                got &= ~_MASK
            more = os.preadv(self._fd, (view[got:],), position + got)
            if got + more >= need:
                return
            if more == 0 or (self._fd_direct and more < ALIGNMENT):
                raise self._short(position + need)
            got += more

    def _short(self, end: int) -> Corrupt:
        full = self._settings.names.full(self._path or "?")
        return Corrupt(
            f"{full} has {os.fstat(self._fd).st_size} bytes and should have {end} at least: it was "
            f"cut short; quarantine it"
        )

    def _staged(self, size: int) -> memoryview:
        """Staging memory of this very size; the previous one's bytes are gone."""
        if len(self._view) == size:
            return self._view
        buffer = self._buffer
        staging = self._settings.staging
        if buffer is None or len(buffer) < size:
            self._view = memoryview(b"")
            if buffer is not None:
                # Give back before asking: whoever waits must hold nothing.
                self._buffer = None
                staging.release(buffer)
            buffer = self._buffer = staging.acquire(size, self._settings.deadline)
        self._view = buffer[:size]
        return self._view
