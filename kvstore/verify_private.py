"""Verification of what lies beside the Zarr hierarchy: in-flight data, hints, quarantine, trash.

No reader depends on any of it, so almost all there is to say are notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvstore.catalog import quarantine_reason
from kvstore.errors import FormatError, KVStoreError, NotFound, UnsupportedVersion
from kvstore.extent import decode_extent
from kvstore.faults import Fault
from kvstore.identity import Identity
from kvstore.io.protocol import Engine
from kvstore.jsonform import MAX_RECORD_BYTES
from kvstore.paths import (
    INFLIGHT,
    PART_SUFFIX,
    PRIVATE,
    QUARANTINE,
    REFS,
    TRASH,
    GroupPath,
    is_fanout,
    is_group,
    is_key,
    is_namespace,
    parse_inflight,
    parse_quarantine,
)
from kvstore.verify_content import failure

_FOLDERS = (INFLIGHT, QUARANTINE, REFS, TRASH)


def private_faults(
    engine: Engine,
    identities: Mapping[str, Identity],
    namespace: str | None,
    group: str | None,
) -> Iterator[Fault]:
    """Findings below the private folder.

    Args:
        engine: the I/O engine.
        identities: of the namespaces whose records are valid, by name.
        namespace: look at what belongs to this namespace only; None: at everything.
        group: at this layer group only.
    """
    look = _Look(engine, identities, namespace, group)
    if namespace is None:
        for name in look.names(PRIVATE):
            if f"{PRIVATE}/{name}" not in _FOLDERS:
                look.stray(f"{PRIVATE}/{name}")
        for name in look.names(TRASH):
            look.note(f"{TRASH}/{name}", "trash", "a removed folder whose bytes are not freed yet")
    yield from look.taken()
    for folder, visit in (
        (INFLIGHT, look.inflight),
        (QUARANTINE, look.quarantined),
        (REFS, look.references),
    ):
        for names in look.groups(folder):
            visit(names, f"{folder}/{names.folder}")
            yield from look.taken()
        yield from look.taken()


class _Look:
    def __init__(
        self,
        engine: Engine,
        identities: Mapping[str, Identity],
        namespace: str | None,
        group: str | None,
    ) -> None:
        self._engine = engine
        self._identities = identities
        self._namespace = namespace
        self._group = group
        self._found: list[Fault] = []

    def taken(self) -> list[Fault]:
        """What was found since the last call."""
        found, self._found = self._found, []
        return found

    def note(self, path: str, kind: str, message: str) -> None:
        """Keep a finding."""
        self._found.append(Fault(path, kind, message))

    def stray(self, path: str) -> None:
        """Keep a name that the format does not know."""
        self.note(path, "stray", "the format has no such name here; nothing uses it")

    def names(self, path: str) -> list[str]:
        """Names below a folder; one that cannot be listed is a finding."""
        try:
            return self._engine.list_dir(path)
        except KVStoreError as error:
            self._found.append(failure(path, error))
            return []

    def groups(self, folder: str) -> Iterator[GroupPath]:
        """Layer groups of which there is something below a private folder."""
        for namespace in self.names(folder):
            if self._namespace not in (None, namespace):
                continue
            if not is_namespace(namespace):
                self.stray(f"{folder}/{namespace}")
                continue
            for group in self.names(f"{folder}/{namespace}"):
                if self._group not in (None, group):
                    continue
                if is_group(group):
                    yield GroupPath(namespace, group)
                else:
                    self.stray(f"{folder}/{namespace}/{group}")

    def inflight(self, names: GroupPath, folder: str) -> None:
        """What is being written, and how far it is."""
        for name in self.names(folder):
            if parse_inflight(name) is None:
                self.stray(f"{folder}/{name}")
                continue
            shards = self.names(f"{folder}/{name}/array")
            parts = sum(s.endswith(PART_SUFFIX) for s in shards)
            ranks = [r.replace("-", ".") for r in self.names(f"{folder}/{name}/done")]
            what = f"being written, or left by writers that died: {len(shards) - parts} shards"
            if parts or ranks:
                what += f" and {parts} partly; finished ranks: {', '.join(ranks) or 'none'}"
            self.note(f"{folder}/{name}", "inflight", f"{what}. Layer group {names.group}")

    def quarantined(self, names: GroupPath, folder: str) -> None:
        """What loads found damaged, and why."""
        for name in self.names(folder):
            parsed = parse_quarantine(name)
            if parsed is None:
                self.stray(f"{folder}/{name}")
                continue
            reason = quarantine_reason(self._engine, names, *parsed)
            self.note(f"{folder}/{name}", "quarantined", reason)

    def references(self, names: GroupPath, folder: str) -> None:
        """Hints that lead nowhere."""
        identity = self._identities.get(names.namespace)
        if identity is None or names.group not in {g.name for g in identity.groups}:
            if not self._engine.exists(names.folder):
                self.note(folder, "reference", "hints of a layer group that is not there any more")
            return
        for xx in self.names(folder):
            if not is_fanout(xx):
                self.stray(f"{folder}/{xx}")
                continue
            for name in self.names(f"{folder}/{xx}"):
                path = f"{folder}/{xx}/{name}"
                if is_key(name) and name[:2] == xx:
                    self._reference(identity, names, path, name)
                else:
                    self.stray(path)

    def _reference(self, identity: Identity, names: GroupPath, path: str, block: str) -> None:
        try:
            data = self._engine.get(path, MAX_RECORD_BYTES)
            record = decode_extent(data, identity, identity.group(names.group), None, "record")
        except NotFound:
            return  # removed meanwhile
        except UnsupportedVersion as error:
            self._found.append(failure(path, error))
            return
        except FormatError as error:
            self.note(path, "reference", f"not valid, so lookups ignore it: {error}")
            return
        except KVStoreError as error:
            self._found.append(failure(path, error))
            return
        if bytes.fromhex(block) not in record.blocks:
            what = f"leads to extent {record.key.hex()}, which does not hold that block"
            self.note(path, "reference", what)
        elif not self._engine.exists(names.record(record.key.hex())):
            self.note(path, "reference", f"leads to extent {record.key.hex()}, which is gone")
