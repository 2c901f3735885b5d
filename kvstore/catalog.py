"""What is in a store, for tools: names and records, read through an engine, nothing else.

Lighter than :class:`kvstore.store.Store`, which also loads and stores: it needs no NumPy, and it
goes on where a record is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.errors import FormatError, InvalidArgument, KVStoreError, NotFound
from kvstore.extent import CommitRecord, decode_extent
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.io.protocol import Engine
from kvstore.jsonform import MAX_RECORD_BYTES, parse
from kvstore.paths import (
    QUARANTINE,
    RECORD,
    GroupPath,
    is_fanout,
    is_group,
    is_key,
    is_namespace,
    parse_quarantine,
)
from kvstore.records import NamespaceRecord, decode_store

MIN_PREFIX = 4
"""Hex digits of a key that a prefix must have at least: one of fewer is a slip of the hand."""


@dataclass(frozen=True, slots=True)
class Found:
    """An extent's place, and its record or why that is not valid."""

    namespace: str
    group: LayerGroup
    key: str
    record: CommitRecord | None
    problem: str | None

    @property
    def path(self) -> str:
        """Its folder, relative to the store's root."""
        return GroupPath(self.namespace, self.group.name).extent(self.key)

    @property
    def nbytes(self) -> int:
        """Bytes of its shards; 0 where the record is not valid."""
        return 0 if self.record is None else sum(self.record.shards.values())

    @property
    def tokens(self) -> int:
        """Tokens that it holds; 0 where the record is not valid."""
        return 0 if self.record is None else len(self.record.blocks) * self.group.block_tokens


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An extent in quarantine."""

    namespace: str
    group: str
    key: str
    path: str
    reason: str


class Catalog:
    """Names and records of one store.

    Raises:
        NotFound: there is no store. FormatError, StorageError: its record cannot be used.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        if not engine.exists(RECORD):
            raise NotFound(f"there is no store at {engine.location}")
        decode_store(engine.get(RECORD, MAX_RECORD_BYTES), f"store {engine.location}")

    def namespaces(self) -> list[str]:
        """Directory names of all namespaces, sorted."""
        names = filter(is_namespace, self._engine.list_dir(""))
        return [n for n in names if self._engine.exists(f"{n}/{RECORD}")]

    def namespace(self, name: str) -> NamespaceRecord:
        """The record of a namespace.

        Raises:
            NotFound, FormatError, StorageError: as named.
        """
        return NamespaceRecord.decode(self._engine.get(f"{name}/{RECORD}", MAX_RECORD_BYTES), name)

    def extents(self, identity: Identity, prefix: str = "") -> Iterator[Found]:
        """All extents of a namespace, in order of key in each layer group.

        Args:
            identity: of the namespace.
            prefix: only those whose keys start with these hex digits.
        """
        for group in identity.groups:
            for key in self._keys(GroupPath(identity.namespace, group.name), prefix):
                if len(key) == 2 * identity.key_scheme.key_bytes:
                    found = self.extent(identity, group, key)
                    if found is not None:
                        yield found

    def _keys(self, names: GroupPath, prefix: str) -> Iterator[str]:
        for xx in filter(is_fanout, self._engine.list_dir(names.folder)):
            if xx[: len(prefix)] != prefix[:2]:
                continue
            for key in filter(is_key, self._engine.list_dir(f"{names.folder}/{xx}")):
                if key.startswith(prefix) and key[:2] == xx:
                    yield key

    def extent(self, identity: Identity, group: LayerGroup, key: str) -> Found | None:
        """One extent; None where there is none of that key."""
        path = GroupPath(identity.namespace, group.name).record(key)
        try:
            data = self._engine.get(path, MAX_RECORD_BYTES)
            record = decode_extent(data, identity, group, key, f"extent {path}")
        except NotFound:
            return None
        except FormatError as error:
            return Found(identity.namespace, group, key, None, str(error))
        return Found(identity.namespace, group, key, record, None)

    def quarantined(self, namespace: str | None = None) -> Iterator[Quarantined]:
        """Extents that loads found damaged, with the reasons."""
        for name in filter(is_namespace, self._engine.list_dir(QUARANTINE)):
            if namespace not in (None, name):
                continue
            for group in filter(is_group, self._engine.list_dir(f"{QUARANTINE}/{name}")):
                names = GroupPath(name, group)
                for entry in self._engine.list_dir(f"{QUARANTINE}/{name}/{group}"):
                    parsed = parse_quarantine(entry)
                    if parsed is not None:
                        reason = quarantine_reason(self._engine, names, *parsed)
                        path = names.quarantine(*parsed)
                        yield Quarantined(name, group, parsed[0], path, reason)

    # -- what people type -------------------------------------------------------------------------

    def resolve_namespace(self, text: str) -> str:
        """A namespace by the start of its directory name.

        Raises:
            NotFound: none starts like that. InvalidArgument: several do.
        """
        names = self.namespaces()
        text = text.strip("/")
        return text if text in names else _only([n for n in names if n.startswith(text)], text)

    def resolve_extent(self, namespace: str, text: str) -> Found:
        """An extent of a namespace by the start of its key.

        Raises:
            NotFound: none starts like that. InvalidArgument: several do, or it is too short.
            FormatError: the namespace's record is not valid.
        """
        identity = self.namespace(namespace).identity
        if len(text) < MIN_PREFIX or text.strip("0123456789abcdef"):
            raise InvalidArgument(
                f"{text!r} is not the start of an extent's key: give {MIN_PREFIX} or more of its "
                "lower-case hex digits"
            )
        found = list(self.extents(identity, text))
        paths = [f.path for f in found]
        return found[paths.index(_only(paths, text))]

    def resolve(self, text: str) -> str | Found:
        """A namespace or an extent, by name, by path below the root, or by an unambiguous start.

        Raises:
            NotFound: nothing starts like that. InvalidArgument: several things do.
        """
        parts = text.strip("/").split("/")
        if len(parts) > 1:
            return self.resolve_extent(self.resolve_namespace(parts[0]), parts[-1])
        names = self.namespaces()
        if text in names:
            return text
        named: dict[str, str | Found] = {n: n for n in names if n.startswith(text)}
        if len(text) >= MIN_PREFIX and not text.strip("0123456789abcdef"):
            for name in names:
                try:
                    identity = self.namespace(name).identity
                except FormatError:
                    continue
                named.update({f.path: f for f in self.extents(identity, text)})
        return named[_only(list(named), text)]


def _only(found: list[str], text: str) -> str:
    if not found:
        raise NotFound(f"nothing here is called {text!r}, or starts like that; see kvstore ls")
    if len(found) > 1:
        # One prompt has the same keys in every namespace.
        hint = ", or NAMESPACE/KEY" if "/" in found[-1] else ""
        few = ", ".join(found[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise InvalidArgument(f"{text!r} may be any of {few}{more}; give more of it{hint}")
    return found[0]


def quarantine_reason(engine: Engine, names: GroupPath, key: str, token: str) -> str:
    """Why an extent is in quarantine, in the words of the load that put it there."""
    path = f"{names.quarantine(key, token)}/reason.json"
    try:
        reason = parse(engine.get(path, MAX_RECORD_BYTES), "reason").get("reason")
    except KVStoreError as error:
        return f"its reason cannot be read: {error}"
    return reason if isinstance(reason, str) else "it holds no reason"
