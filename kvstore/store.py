"""A store: a folder of namespaces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from kvstore.collect import GRACE, find_leavings, free
from kvstore.commit import now
from kvstore.errors import InvalidArgument, NotFound, require_kind
from kvstore.identity import Identity
from kvstore.io.protocol import Engine
from kvstore.io.select import open_engine
from kvstore.jsonform import MAX_RECORD_BYTES
from kvstore.leavings import Leaving
from kvstore.namespace import Namespace
from kvstore.paths import INFLIGHT, QUARANTINE, RECORD, REFS, is_namespace
from kvstore.records import NamespaceRecord, decode_store, encode_layer_group, encode_store
from kvstore.runtime import Runtime
from kvstore.version import SOFTWARE


def open_store(
    location: str | os.PathLike[str],
    *,
    create: bool = True,
    read_only: bool = False,
    verify: bool = True,
    **options: Any,
) -> Store:
    """Open a store; exported as ``kvstore.open``.

    Args:
        location: a folder on a local or shared file system, as a path or a ``file://`` URL.
        create: make the store when there is none.
        read_only: refuse every writing call; nothing is created, nothing is quarantined.
        verify: check the checksum of every chunk that is loaded. Without it a damaged chunk would
            be handed over as it is.
        options: of the I/O engine: ``durable`` (default True: a commit survives a power failure),
            ``direct`` ("auto", "always", "never": reads past the page cache), ``threads``,
            ``max_staging_bytes`` (memory for reads), ``deadline`` (seconds a load may take).

    Raises:
        NotFound: no store there, and it was not to be created.
        InvalidArgument: a folder with other things in it, or an option out of range.
        UnsupportedVersion: a store of a newer major version. FormatError, StorageError: as named.
    """
    engine = open_engine(location, read_only=read_only, create=create, **options)
    try:
        _check_root(engine, create=create and not read_only)
    except BaseException:
        engine.close()
        raise
    return Store(Runtime(engine, SOFTWARE, verify))


def _check_root(engine: Engine, *, create: bool) -> None:
    what = f"store {engine.location}"
    if not engine.exists(RECORD):
        if not create:
            raise NotFound(f"there is no store at {engine.location}; open it with create=True")
        others = [n for n in engine.list_dir("") if not n.startswith((".", "lost+found"))]
        if others and not engine.exists(RECORD):
            raise InvalidArgument(
                f"{engine.location} holds other things ({', '.join(others[:3])} ...) and no "
                "store; give an empty or a new folder"
            )
        engine.create(RECORD, encode_store())
    decode_store(engine.get(RECORD, MAX_RECORD_BYTES), what)


class Store:
    """An open store. Use it as a context manager, or call :meth:`close`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __repr__(self) -> str:
        return f"Store({self.location!r}, engine={self.engine.name!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The I/O engine in use."""
        return self._runtime.engine

    @property
    def location(self) -> str:
        """The root, as it was given."""
        return self._runtime.engine.location

    def namespace(self, identity: Identity, *, create: bool = True) -> Namespace:
        """The namespace of an identity; made when it is not there and ``create`` is on.

        Raises:
            GeometryMismatch: its record holds another identity. NotFound: absent, and not made.
            FormatError, StorageError: as named.
        """
        require_kind("identity", identity, Identity, "an Identity")
        name = identity.namespace
        record = f"{name}/{RECORD}"
        if not self.engine.exists(record):
            if self.engine.read_only or not create:
                raise NotFound(f"there is no namespace {name} in {self.location}")
            self._create(identity)
        return self.open_namespace(name, expect=identity)

    def _create(self, identity: Identity) -> None:
        name = identity.namespace
        for group in identity.groups:
            self.engine.create(f"{name}/{group.name}/{RECORD}", encode_layer_group(group.name))
        # Last, so that a namespace whose record is there has its groups.
        self.engine.create(f"{name}/{RECORD}", NamespaceRecord(identity, now()).encode())

    def open_namespace(self, name: str, *, expect: Identity | None = None) -> Namespace:
        """A namespace by its directory name, or by the start of it where that is unambiguous.

        Args:
            name: directory name, or its beginning.
            expect: identity that it must have.

        Raises:
            NotFound: no such namespace. GeometryMismatch: names every field that differs from
            ``expect``. InvalidArgument: several start like that. FormatError: as named.
        """
        require_kind("name", name, str, "a namespace's directory name, as text")
        if expect is not None:
            require_kind("expect", expect, Identity, "an Identity")
        full = self._resolve(name)
        data = self.engine.get(f"{full}/{RECORD}", MAX_RECORD_BYTES)
        identity = NamespaceRecord.decode(data, full).identity
        if expect is not None:
            identity.require_same(expect, f"namespace {full}")
        return Namespace(self._runtime, identity)

    def _resolve(self, name: str) -> str:
        if is_namespace(name) and self.engine.exists(f"{name}/{RECORD}"):
            return name
        found = [n for n in self.namespaces() if n.startswith(name)]
        if not found:
            known = ", ".join(self.namespaces()) or "none"
            raise NotFound(f"there is no namespace {name!r} in {self.location}; there are: {known}")
        if len(found) > 1:
            raise InvalidArgument(f"{name!r} may be any of {', '.join(found)}; give more of it")
        return found[0]

    def namespaces(self) -> Iterator[str]:
        """Directory names of all namespaces, sorted."""
        for name in self.engine.list_dir(""):
            if is_namespace(name) and self.engine.exists(f"{name}/{RECORD}"):
                yield name

    def remove_namespace(self, name: str) -> bool:
        """Remove a namespace: from one moment to the next, all of it is a miss for everyone.

        Engines that use it at that time must be stopped first: what they commit later would lie in
        a namespace without a record, which nobody finds.

        Args:
            name: its whole directory name. Its record need not be valid.

        Returns:
            False when it was not there.

        Raises:
            InvalidArgument: not the name of a namespace. StorageError: as named.
        """
        require_kind("name", name, str, "a namespace's directory name, as text")
        if not is_namespace(name):
            raise InvalidArgument(f"{name!r:.160} is not a namespace's directory name")
        removed = self.engine.discard(name)
        for folder in (INFLIGHT, REFS, QUARANTINE):
            self.engine.discard(f"{folder}/{name}")
        return removed

    def collect(
        self, *, grace: float = GRACE, quarantine: float | None = None, dry_run: bool = False
    ) -> list[Leaving]:
        """Free what is of no use any more (algorithm 9): no extent is touched, engines may run.

        Args:
            grace: seconds for which what is in flight must have been left alone. It must be longer
                than any store takes from first byte to commit: one that it hits is not committed.
            quarantine: seconds after which damaged extents go too; None: never.
            dry_run: only find it.

        Returns:
            What was freed; what could not be, with an ``error``; not what another process freed
            meanwhile.

        Raises:
            InvalidArgument: a negative number of seconds, or a store opened read-only and not a
            ``dry_run``. StorageError: the store cannot be looked at.
        """
        found = find_leavings(self.engine, grace=grace, quarantine=quarantine)
        return list(found if dry_run else free(self.engine, found))

    def close(self) -> None:
        """Release threads and memory. Workers of this store are of no use after it."""
        self._runtime.close()
