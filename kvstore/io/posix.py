"""The engine for local and shared file systems: large reads in threads, atomic names.

Reading: a range whose pages are cached is read through the page cache in pieces that stay in the
processor's cache; any other is read directly (``O_DIRECT``) in long runs, so that a load does not
push a model's weights out of memory.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Callable, Sequence
from types import NoneType

from kvstore.errors import Corrupt, InvalidArgument, NotFound, StorageError, require_kind
from kvstore.io.direct import DirectMode, DirectPolicy
from kvstore.io.local_leavings import footprint, leavings
from kvstore.io.local_names import LocalNames, absent_or
from kvstore.io.local_read import GIVEN_UP, RangeReader, ReadSettings, Traffic, refuse_in_consumer
from kvstore.io.local_write import create, write_runs, write_whole
from kvstore.io.oserrors import translated
from kvstore.io.protocol import Buffer, ByteRange, Consume, Footprint, SinkOf
from kvstore.io.staging import Staging
from kvstore.io.workers import Gate, Workers

# Measured: on two cores 1 to 8 threads read cached files alike, and a virtual disk alike from 2 on;
# arrays of real ones want several reads at a time, hence 4, and one a core up to 8.
DEFAULT_THREADS = 8
DEFAULT_STAGING_BYTES = 256 << 20
HOT_BYTES = 1 << 20
COLD_BYTES = 8 << 20
SMALL_BATCH_BYTES = 256 << 10
"""Batches up to this are read by the calling thread: waking others takes longer."""

_UNIT_BYTES = 4 << 20
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_UNUSUAL = ("", ".", "/")


class PosixEngine:
    """An I/O engine on a folder. Safe between threads; usable in forked children.

    Meets :class:`kvstore.io.protocol.Engine`; what is said there is not repeated here.
    """

    name = "posix"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        read_only: bool = False,
        durable: bool = True,
        direct: DirectMode = "auto",
        threads: int = DEFAULT_THREADS,
        max_staging_bytes: int = DEFAULT_STAGING_BYTES,
        deadline: float | None = None,
    ) -> None:
        """Serve a folder that is there already.

        Args:
            root: the folder.
            read_only: refuse every writing call.
            durable: a call that wrote returns after its bytes and names are on the medium.
            direct: ``auto``: read past the page cache what is not in it; ``always``; ``never``.
            threads: threads that read at the same time.
            max_staging_bytes: bound on the memory that reads land in. A single chunk that is larger
                is read alone.
            deadline: seconds a :meth:`read` may take before its unfinished ranges fail; None: for
                ever.

        Raises:
            InvalidArgument: an option out of range.
            NotFound: no such folder.
        """
        require_kind("threads", threads, int, "a whole number")
        require_kind("max_staging_bytes", max_staging_bytes, int, "a whole number of bytes")
        require_kind("deadline", deadline, (int, float, NoneType), "seconds, or None")
        if threads < 1:
            raise InvalidArgument(f"threads is {threads}; at least one has to read")
        if deadline is not None and deadline <= 0:
            raise InvalidArgument(f"deadline is {deadline} s; give a positive time, or None")
        self.location = os.fspath(root)
        self.read_only = read_only
        self.durable = durable
        self._root = os.path.abspath(self.location)
        if not os.path.isdir(self._root):
            raise NotFound(f"{self._root} is not a folder; create it, or open it with create=True")
        self._prefix = self._root.rstrip("/") + "/"
        self._closed = False
        self._deadline = deadline
        self._names = LocalNames(self._root, durable=durable)
        self._policy = DirectPolicy(self._root, direct, read_only=read_only)
        self.traffic = Traffic()
        self._threads = threads
        self._max_staging_bytes = max_staging_bytes
        self._workers = Workers(threads, "kvstore-posix")
        self._settings = self._new_settings()
        _engines.add(self)

    @property
    def direct_io(self) -> bool:
        """Whether the file system takes ``O_DIRECT``, found out by a real write and read."""
        return self._policy.works

    # -- names ------------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """Whether an object or folder is there; False also when the medium refuses to say."""
        # A few quick tests instead of the whole check: this is called for every block looked up.
        if self._closed or "/." in path or "//" in path or path[:1] in _UNUSUAL or path[-1] == "/":
            self._open_name(path)
        try:
            return os.access(self._prefix + path, os.F_OK)
        except ValueError:  # a NUL
            self._names.full(path)
            raise

    def size(self, path: str) -> int:
        """Bytes of an object."""
        self._check_open()
        return self._names.size(path)

    def list_dir(self, path: str) -> list[str]:
        """Names directly below a folder, sorted; without those still being written."""
        self._check_open()
        return self._names.list_dir(path)

    # -- small objects ----------------------------------------------------------------------------

    def get(self, path: str, limit: int) -> bytes:
        """A whole small object; :class:`~kvstore.errors.Corrupt` above ``limit`` bytes."""
        full = self._open_name(path)
        try:
            fd = os.open(full, _FLAGS)
        except OSError as error:
            raise absent_or(error, "read", full) from error
        try:
            with translated("read", full):
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise NotFound(f"{full} is not a plain file, so no object of a store")
                if status.st_size > limit:
                    raise Corrupt(
                        f"{full} has {status.st_size} bytes, more than the {limit} that such an "
                        f"object may have; quarantine it"
                    )
                return _read_all(fd, full, status.st_size)
        finally:
            os.close(fd)

    def create(self, path: str, data: bytes, *, settle: bool = True) -> bool:
        """Create an object whole and at once, only if absent."""
        self._check_writable()
        made = create(self._names, path, data, settle=settle)
        self.traffic.written += made * len(data)
        return made

    # -- bulk -------------------------------------------------------------------------------------

    def read(
        self, ranges: Sequence[ByteRange], consume: Consume, sink_of: SinkOf | None = None
    ) -> list[Exception | None]:
        """Read many ranges at once; the result says for each what went wrong, or None."""
        self._check_open()
        refuse_in_consumer()
        small = len(ranges) <= 1 or sum(wanted.length for wanted in ranges) <= SMALL_BATCH_BYTES
        if small and self._deadline is None:
            return self._read_here(ranges, consume, sink_of)
        return self._read_in_threads(ranges, consume, sink_of)

    def write(self, path: str, pieces: Sequence[Buffer], *, settle: bool = True) -> None:
        """Write an object whole; it replaces one of that name in one step."""
        self._check_writable()
        self.traffic.written += write_whole(self._names, path, pieces, settle=settle)

    def write_into(
        self,
        path: str,
        size: int,
        pieces: Sequence[tuple[int, Buffer]],
        *,
        create: bool = True,
    ) -> None:
        """Write runs into an object of ``size`` bytes that several writers fill."""
        self._check_writable()
        self.traffic.written += write_runs(self._names, path, size, pieces, make=create)

    def sync(self, paths: Sequence[str]) -> None:
        """Make objects, or folders' entries, durable (nothing to do when not ``durable``)."""
        self._check_writable()
        for path in paths:
            self._names.sync(path)

    # -- publication ------------------------------------------------------------------------------

    def rename(self, source: str, target: str, *, settle: bool = True) -> None:
        """Give a finished object its final name in one step."""
        self._check_writable()
        self._names.rename(source, target, settle=settle)

    def link(self, source: str, target: str) -> bool:
        """Give an object a second name, unless that is taken."""
        self._check_writable()
        return self._names.link(source, target)

    def publish(self, source: str, target: str) -> bool:
        """Give a finished folder its final name, unless a folder with something in it has it."""
        self._check_writable()
        return self._names.publish(source, target)

    def discard(self, path: str) -> bool:
        """Remove an object or a folder in one step; its bytes are freed after."""
        self._check_writable()
        return self._names.discard(path)

    def leavings(self, older_than: float) -> list[str]:
        """What dead processes left: unfinished objects, discarded folders."""
        self._check_open()
        return sorted(leavings(self._names.root, older_than))

    def footprint(self, path: str) -> Footprint:
        """Bytes and age of an object, or of a folder with all in it."""
        return footprint(self._open_name(path))

    def close(self) -> None:
        """Release threads and staging memory. Calls after this raise ``StorageError``."""
        if not self._closed:
            self._closed = True
            self._workers.close(timeout=1.0)
            self._settings.staging.close()

    # -- inside -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the engine on {self.location} was closed; open the store again")

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise InvalidArgument(
                f"{self.location} was opened read-only; open it with read_only=False to write"
            )

    def _open_name(self, path: str) -> str:
        self._check_open()
        return self._names.full(path)

    def _new_settings(self) -> ReadSettings:
        share = self._max_staging_bytes // self._threads
        return ReadSettings(
            names=self._names,
            policy=self._policy,
            staging=Staging(self._max_staging_bytes, users=self._threads),
            traffic=self.traffic,
            hot_bytes=min(HOT_BYTES, share),
            cold_bytes=min(COLD_BYTES, share),
            deadline=self._deadline,
        )

    def _after_fork(self) -> None:
        """In a forked child: its parent's threads do not exist, its locks may be held for ever."""
        self._workers.reset()
        self._settings = self._new_settings()

    def _read_here(
        self, ranges: Sequence[ByteRange], consume: Consume, sink_of: SinkOf | None
    ) -> list[Exception | None]:
        reader = RangeReader(self._settings)
        try:
            return [reader.read(i, ranges[i], consume, sink_of, _OPEN) for i in range(len(ranges))]
        finally:
            reader.close()

    def _read_in_threads(
        self, ranges: Sequence[ByteRange], consume: Consume, sink_of: SinkOf | None
    ) -> list[Exception | None]:
        units = _units(ranges, self._threads)
        results: list[Exception | None] = [GIVEN_UP] * len(ranges)
        settings = self._settings
        fatal: list[BaseException] = []
        # Threads beyond the cores keep a device busy while others check and scatter. Where bytes
        # are cached they would only get in each other's way, so the first direct read calls them.
        cores = len(os.sched_getaffinity(0))

        def work(
            next_unit: Callable[[], int],
            gate: Gate,
            finished: Callable[[], None],
            recruit: Callable[[], None],
        ) -> None:
            reader = RangeReader(settings, recruit)
            try:
                while (unit := next_unit()) < len(units):
                    try:
                        for i in units[unit]:
                            results[i] = reader.read(i, ranges[i], consume, sink_of, gate)
                    except BaseException as error:  # noqa: BLE001 - raised again by the caller
                        fatal.append(error)
                    finally:
                        finished()
            finally:
                reader.close()

        in_time = not units or self._workers.run(len(units), work, self._deadline, cores)
        if fatal:
            raise fatal[0]
        if in_time:
            return results
        return [self._too_late() if result is GIVEN_UP else result for result in list(results)]

    def _too_late(self) -> StorageError:
        return StorageError(
            f"a read from {self.location} was not done in {self._deadline} s: the medium hangs or "
            f"is overloaded; check its mount, or raise the deadline"
        )


def _units(ranges: Sequence[ByteRange], threads: int) -> list[range]:
    """Consecutive ranges of one object that one thread takes together, so that it opens it once."""
    most = min(_UNIT_BYTES, sum(wanted.length for wanted in ranges) // (4 * threads))
    units: list[range] = []
    start = 0
    path: str | None = None
    filled = 0
    for i, wanted in enumerate(ranges):
        if i and (wanted.path != path or filled >= most):
            units.append(range(start, i))
            start, filled = i, 0
        path = wanted.path
        filled += wanted.length
    if ranges:
        units.append(range(start, len(ranges)))
    return units


def _read_all(fd: int, full: str, size: int) -> bytes:
    parts = []
    left = size + 1  # one more, to see the end
    while left and (part := os.read(fd, left)):
        parts.append(part)
        left -= len(part)
    if left != 1:
        raise Corrupt(
            f"{full} had {size} bytes and changed while it was read, so something else writes it; "
            f"keep that away, or quarantine it"
        )
    return b"".join(parts)


class _OpenGate:
    """A gate that is always open, for a thread that reads for itself."""

    def __enter__(self) -> bool:
        return False

    def __exit__(self, *_: object) -> None:
        pass


_OPEN = _OpenGate()
_engines: weakref.WeakSet[PosixEngine] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        engine._after_fork()  # noqa: SLF001 - the hook is the engine's own, outside it by necessity


os.register_at_fork(after_in_child=_after_fork_in_child)
