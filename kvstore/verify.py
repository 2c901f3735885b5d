"""Verification of a whole store: every name, every record, every byte; every fault is reported.

Nothing is changed: no quarantine, no repair. A store may be in use meanwhile; an extent that is
removed while it is looked at is no fault. Memory stays bounded however large the store is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

from kvstore.errors import FormatError, KVStoreError, NotFound, UnsupportedVersion
from kvstore.extent import CommitRecord, decode_extent
from kvstore.faults import Fault
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.io.protocol import Engine
from kvstore.jsonform import MAX_RECORD_BYTES, Fields, parse
from kvstore.paths import PRIVATE, RECORD, GroupPath, is_fanout, is_key, is_namespace
from kvstore.records import NamespaceRecord, decode_layer_group, decode_store
from kvstore.verify_content import ContentCheck, failure
from kvstore.verify_private import private_faults

Progress = Callable[[int, int], None]
"""``progress(bytes done, bytes in all)``, called by the thread that iterates."""

KNOWN_PLACES = 4096
"""Extents whose place in their sequence is remembered, to compare their successors with."""


def verify_store(
    engine: Engine,
    *,
    namespace: str | None = None,
    group: str | None = None,
    key: str | None = None,
    progress: Progress | None = None,
) -> Iterator[Fault]:
    """Everything that is wrong with a store, and what is worth knowing (``Fault.is_note``).

    Args:
        engine: of the store; may be read-only.
        namespace: look at this namespace only, by its directory name.
        group: at this layer group only.
        key: at the extent of that key (hex) only.
        progress: told how far it is; asking for it costs a listing of all extents first.

    Raises:
        NotFound: no such namespace, layer group or extent.
    """
    walk = _Walk(engine, namespace, group, key, progress)
    # Now, not when the iterator is first asked: an error belongs to the call that caused it.
    walk.require()
    return walk.store()


class _Walk:
    def __init__(
        self,
        engine: Engine,
        namespace: str | None,
        group: str | None,
        key: str | None,
        progress: Progress | None,
    ) -> None:
        self._engine = engine
        self._namespace = namespace
        self._group = group
        self._key = key
        self._progress = progress
        self._done = self._total = 0
        self._place = lru_cache(maxsize=KNOWN_PLACES)(self._read_place)

    def require(self) -> None:
        """Refuse to look for what is not there.

        Raises:
            NotFound: as named.
        """
        where = self._engine.location
        if self._namespace is None:
            names = self._engine.list_dir("")
            if RECORD not in names and PRIVATE not in names and not any(map(is_namespace, names)):
                raise NotFound(f"there is no store at {where}")
            return
        names = self._engine.list_dir(self._namespace) if is_namespace(self._namespace) else []
        if not names:
            raise NotFound(f"there is no namespace {self._namespace} in {where}")
        if self._group is not None and self._group not in names:
            raise NotFound(f"there is no layer group {self._group} in {self._namespace}")
        if self._key is not None and not any(
            is_key(self._key)
            and self._engine.exists(f"{self._namespace}/{g}/{self._key[:2]}/{self._key}")
            for g in ([self._group] if self._group else names)
        ):
            raise NotFound(f"there is no extent {self._key} in {self._namespace}")

    # -- names ------------------------------------------------------------------------------------

    def store(self) -> Iterator[Fault]:
        """All findings."""
        if self._progress is not None:
            self._total = sum(self._sizes())
            self._advance(0)
        yield from self._check(RECORD, "record", partial(decode_store, what="record"))[1]
        identities: dict[str, Identity] = {}
        names, faults = self._list("")
        yield from faults
        for name in names:
            if self._namespace not in (None, name):
                continue
            if is_namespace(name):
                yield from self._in_namespace(name, identities)
            elif name not in (RECORD, PRIVATE, "lost+found") and not name.startswith("."):
                yield _stray(name)
        if self._key is None:
            yield from private_faults(self._engine, identities, self._namespace, self._group)
        self._advance(self._total)

    def _in_namespace(self, name: str, identities: dict[str, Identity]) -> Iterator[Fault]:
        decode = partial(NamespaceRecord.decode, name=name)
        record, faults = self._check(f"{name}/{RECORD}", "record", decode)
        if faults and faults[0].kind == "missing" and not any(self._extents(name)):
            what = "a namespace without a record or extents: its making stopped half way"
            faults = [Fault(name, "unfinished", what)]
        yield from faults
        if record is None:
            return
        identity = identities[name] = record.identity
        groups = {g.name: g for g in identity.groups}
        names, faults = self._list(name)
        yield from faults
        for missing in sorted(groups.keys() - set(names)):
            what = "there is no folder of this layer group"
            yield Fault(f"{name}/{missing}", "missing", what)
        for child in names:
            if child in groups:
                if self._group in (None, child):
                    yield from self._in_group(identity, groups[child])
            elif child != RECORD:
                yield _stray(f"{name}/{child}")

    def _in_group(self, identity: Identity, group: LayerGroup) -> Iterator[Fault]:
        paths = GroupPath(identity.namespace, group.name)
        decode = partial(_decode_group_record, name=group.name)
        yield from self._check(f"{paths.folder}/{RECORD}", "record", decode)[1]
        names, faults = self._list(paths.folder)
        yield from faults
        for name in names:
            if is_fanout(name):
                if self._key is None or self._key[:2] == name:
                    yield from self._in_fanout(identity, group, paths, name)
            elif name != RECORD:
                yield _stray(f"{paths.folder}/{name}")

    def _in_fanout(
        self, identity: Identity, group: LayerGroup, paths: GroupPath, xx: str
    ) -> Iterator[Fault]:
        folder = f"{paths.folder}/{xx}"
        names, faults = self._list(folder)
        yield from faults
        record = self._check(f"{folder}/{RECORD}", "record", _decode_plain_group)[1]
        if names or not record or record[0].kind != "missing":
            yield from record
        else:
            yield Fault(folder, "unfinished", "an empty fan-out folder without a record")
        digits = 2 * identity.key_scheme.key_bytes
        for name in names:
            if is_key(name) and name[:2] == xx and len(name) == digits:
                if self._key in (None, name):
                    yield from self._extent(identity, group, paths, name)
            elif name != RECORD:
                yield _stray(f"{folder}/{name}")

    # -- extents ----------------------------------------------------------------------------------

    def _extent(
        self, identity: Identity, group: LayerGroup, paths: GroupPath, key: str
    ) -> Iterator[Fault]:
        path = paths.record(key)
        decode = partial(decode_extent, identity=identity, group=group, key=key, what="record")
        record, faults = self._check(path, "extent", decode)
        if record is None:
            if self._engine.exists(paths.extent(key)):
                yield from faults
            self._advance(sum(self._folder_sizes(paths.extent(key))))
            return
        # Of a whole extent, so that one removed meanwhile is told from one that lacks something.
        found = list(self._content(identity, group, paths, record))
        if not found or self._engine.exists(path):
            yield from found

    def _content(
        self, identity: Identity, group: LayerGroup, paths: GroupPath, record: CommitRecord
    ) -> Iterator[Fault]:
        folder = paths.extent(record.key.hex())
        names, faults = self._list(folder)
        yield from faults
        yield from (
            _stray(f"{folder}/{n}") for n in names if n != RECORD and n not in record.shards
        )
        yield from self._chain(identity, group, paths, record)
        yield from ContentCheck(self._engine, group, paths, record, self._advance).faults()

    def _chain(
        self, identity: Identity, group: LayerGroup, paths: GroupPath, record: CommitRecord
    ) -> Iterator[Fault]:
        if record.start_block == 0:
            return
        path, before = paths.extent(record.key.hex()), record.parent.hex()
        place = self._place(identity, group, paths, before)
        wanted = (record.start_block - group.extent_blocks, group.extent_blocks)
        if place in (wanted, (-1, 0)):
            return
        if place is None:
            what = f"starts at block {record.start_block}; the extent before it, {before}, is gone"
            yield Fault(path, "gap", what)
            return
        what = (
            f"starts at block {record.start_block}, so the extent before it must hold blocks "
            f"{wanted[0]} to {record.start_block - 1}; {before} holds {place[1]} from {place[0]} on"
        )
        yield Fault(path, "chain", what)

    def _read_place(
        self, identity: Identity, group: LayerGroup, paths: GroupPath, key: str
    ) -> tuple[int, int] | None:
        """First block and number of blocks of an extent; (-1, 0) where its record is not valid."""
        try:
            data = self._engine.get(paths.record(key), MAX_RECORD_BYTES)
            record = decode_extent(data, identity, group, key, "record")
        except NotFound:
            return None
        except KVStoreError:
            return (-1, 0)  # its own fault, told where it is looked at
        return (record.start_block, len(record.blocks))

    # -- inside -----------------------------------------------------------------------------------

    def _list(self, path: str) -> tuple[list[str], list[Fault]]:
        try:
            return self._engine.list_dir(path), []
        except KVStoreError as error:
            return [], [failure(path, error)]

    def _check(
        self, path: str, kind: str, decode: Callable[[bytes], Any]
    ) -> tuple[Any, list[Fault]]:
        """What a record decodes to, or None and why not."""
        try:
            data = self._engine.get(path, MAX_RECORD_BYTES)
        except FormatError as error:
            return None, [Fault(path, kind, str(error))]
        except KVStoreError as error:
            return None, [failure(path, error)]
        try:
            return decode(data), []
        except UnsupportedVersion as error:
            return None, [Fault(path, "version", str(error))]
        except FormatError as error:
            return None, [Fault(path, kind, str(error))]

    def _extents(self, namespace: str) -> Iterator[str]:
        """Folders that have the place and the name of an extent's."""
        for group in self._list(namespace)[0]:
            if self._group not in (None, group):
                continue
            for xx in filter(is_fanout, self._list(f"{namespace}/{group}")[0]):
                for key in filter(is_key, self._list(f"{namespace}/{group}/{xx}")[0]):
                    if self._key in (None, key):
                        yield f"{namespace}/{group}/{xx}/{key}"

    def _sizes(self) -> Iterator[int]:
        for name in filter(is_namespace, self._list("")[0]):
            if self._namespace in (None, name):
                for extent in self._extents(name):
                    yield from self._folder_sizes(extent)

    def _folder_sizes(self, folder: str) -> Iterator[int]:
        for name in self._list(folder)[0] if self._progress is not None else ():
            if name != RECORD:
                try:
                    yield self._engine.size(f"{folder}/{name}")
                except KVStoreError:
                    continue  # told where it is looked at

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


def _stray(path: str) -> Fault:
    return Fault(path, "stray", "the format has no such name here; readers ignore it")


def _decode_group_record(data: bytes, name: str) -> None:
    found = decode_layer_group(data, "record")
    if found != name:
        raise FormatError(f"the record of layer group {found!r} lies in the folder of {name!r}")


def _decode_plain_group(data: bytes) -> None:
    fields = Fields(parse(data, "record"), "record")
    fields.exactly("zarr_format", 3)
    fields.exactly("node_type", "group")
