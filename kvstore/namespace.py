"""A namespace: one model's caches in a store, and what can be done with them."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.commit import Committer
from kvstore.errors import InvalidArgument, KVStoreError, NotFound, StorageError, require_kind
from kvstore.extent import CommitRecord
from kvstore.faults import Fault
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.jsonform import pretty
from kvstore.keys import BlockKeys, chain_keys, opaque_keys, root_key
from kvstore.lookup import Lookup, Match
from kvstore.parallel import ParallelConfig, Rank
from kvstore.paths import RECORD, GroupPath, is_fanout, is_key
from kvstore.report import CommitReport
from kvstore.runtime import Runtime
from kvstore.share import Share, certify, share_of
from kvstore.verify import Progress, verify_store
from kvstore.worker import Worker

if TYPE_CHECKING:
    from kvstore.buffers import PagedBuffers

log = logging.getLogger("kvstore")


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """One stored extent: where it is; its record is read when asked for.

    Attributes:
        namespace: directory name of its namespace.
        group: its layer group.
        key: hex of its key.
        path: its folder, relative to the store's root. It is a Zarr v3 array.
    """

    namespace: str
    group: LayerGroup
    key: str
    path: str


class Namespace:
    """Caches of one model. Made by :meth:`kvstore.store.Store.namespace`.

    Attributes:
        identity: what the namespace is for.
        name: its directory name.
        counters: events since the namespace was opened, by name: ``hit_blocks``, ``miss_blocks``,
            ``quarantined`` ...
    """

    def __init__(self, runtime: Runtime, identity: Identity) -> None:
        self.identity = identity
        self.name = identity.namespace
        self.counters: Counter[str] = Counter()
        self._runtime = runtime
        self._names = {g.name: GroupPath(self.name, g.name) for g in identity.groups}
        self._lookups = {
            g.name: Lookup(runtime.engine, identity, g, self._names[g.name])
            for g in identity.groups
        }
        self._committers = {
            g.name: Committer(
                runtime.engine,
                self._lookups[g.name],
                g,
                self._names[g.name],
                runtime.software,
                lambda: runtime.pool,
            )
            for g in identity.groups
        }

    def __repr__(self) -> str:
        return f"Namespace({self.name!r} at {self._runtime.engine.location!r})"

    def keys(
        self,
        tokens: Any,
        *,
        salt: bytes | None = None,
        extra: Mapping[int, Sequence[bytes]] | Sequence[bytes] = (),
        group: str | None = None,
    ) -> BlockKeys:
        """Keys of the full blocks of a sequence.

        Args:
            tokens: token ids, 1-D (a list, a NumPy array, a torch tensor on the host).
            salt: tenant salt of this request; None: the namespace's own root.
            extra: extra keys, for every block or by block index: LoRA digest, image hash ...
            group: layer group, where there are several.

        Raises:
            InvalidArgument: a token id is out of range, or the namespace's keys are an engine's.
        """
        scheme = self.identity.key_scheme
        if scheme.scheme != "kvstore-sha256":
            raise InvalidArgument(
                f"keys of namespace {self.name} are made by {scheme.name!r}; wrap the engine's "
                "block hashes with Namespace.engine_keys"
            )
        root = scheme.root if salt is None else root_key(salt)
        n = self.identity.group(group).block_tokens
        return chain_keys(tokens, n, root=root, extra=extra)

    def engine_keys(self, hashes: Sequence[bytes]) -> BlockKeys:
        """Keys out of an engine's own block hashes, from the first block of the sequence on.

        Raises:
            InvalidArgument: the namespace makes its own keys, or a hash has the wrong length.
        """
        scheme = self.identity.key_scheme
        if scheme.scheme != "opaque":
            raise InvalidArgument(
                f"namespace {self.name} makes its own keys; use Namespace.keys, or an identity "
                "with KeyScheme.opaque"
            )
        return opaque_keys(hashes, scheme)

    def match_prefix(self, keys: BlockKeys, *, group: str | None = None) -> Match:
        """The longest stored prefix of a sequence: existence checks only, no content is read."""
        return self._lookups[self.identity.group(group).name].match(keys)

    def share(self, config: ParallelConfig, rank: Rank, *, group: str | None = None) -> Share:
        """What a rank of a config holds of a layer group.

        Raises:
            NotCertified: the config cannot be mapped onto the group's pages.
        """
        _require_config(config, rank)
        return share_of(self.identity.group(group), config, rank, self.identity.model_layers)

    def worker(
        self,
        config: ParallelConfig,
        rank: Rank,
        buffers: PagedBuffers,
        *,
        session: str | None = None,
    ) -> Worker:
        """One rank's access: loads into and stores from its paged buffers.

        Args:
            config: the engine's parallel config; proved here to tile every page.
            rank: the rank.
            buffers: its paged buffers; their group says which layer group is meant.
            session: name that all ranks of one engine share and that no other engine uses; ranks
                write together under it. Needed to store where the config has several ranks.

        Raises:
            NotCertified: config or buffers cannot be mapped; the message says why.
            InvalidArgument: the buffers' layer group is not this namespace's.
        """
        _require_config(config, rank)
        meant = getattr(buffers, "group", None)
        require_kind("buffers", buffers if meant is None else meant, LayerGroup, "PagedBuffers")
        group = self.identity.group(buffers.group.name)
        if buffers.group != group:
            raise InvalidArgument(
                f"the buffers are for another layer group {group.name!r} than the namespace's"
            )
        layers = self.identity.model_layers
        certify(group, config, layers)
        share = share_of(group, config, rank, layers)
        buffers.require(share)
        if session is None and config.world_size == 1:
            session = str(uuid.uuid4())
        return Worker(
            runtime=self._runtime,
            lookup=self._lookups[group.name],
            committer=self._committers[group.name],
            group=group,
            names=self._names[group.name],
            config=config,
            rank=rank,
            share=share,
            buffers=buffers,
            session=session,
            model_layers=layers,
            quarantine=lambda key, reason: self.quarantine(key, reason, group=group.name),
            counters=self.counters,
        )

    def commit(
        self,
        keys: BlockKeys,
        config: ParallelConfig,
        *,
        session: str,
        group: str | None = None,
        tail: bool = True,
    ) -> CommitReport:
        """Publish the extents of ``keys`` that all elected writers have written.

        Any process may call it, any number of times.

        Args:
            keys: the blocks that were stored.
            config: the writers' parallel config.
            session: the writers' session.
            group: layer group, where there are several.
            tail: as it was for the stores.

        Returns:
            What is committed, and exactly what is missing where something is.
        """
        _require_config(config)
        committer = self._committers[self.identity.group(group).name]
        layers = self.identity.model_layers
        return committer.commit(keys, config, session, layers, tail=tail)

    def abandon(
        self,
        keys: BlockKeys,
        config: ParallelConfig,
        *,
        session: str,
        group: str | None = None,
        tail: bool = True,
    ) -> int:
        """Discard what a session has written of ``keys`` and not committed.

        For an engine that gives up a store, once none of its ranks works on it any more.

        Args:
            keys: the blocks that were stored.
            config: the writers' parallel config.
            session: the writers' session.
            group: layer group, where there are several.
            tail: as it was for the stores.

        Returns:
            Number of extents of which something was discarded.
        """
        _require_config(config)
        committer = self._committers[self.identity.group(group).name]
        return committer.abandon(keys, config, session, tail=tail)

    def extents(self, *, group: str | None = None) -> Iterator[ExtentInfo]:
        """All committed extents, in order of key within each layer group."""
        groups = self.identity.groups if group is None else (self.identity.group(group),)
        engine = self._runtime.engine
        digits = 2 * self.identity.key_scheme.key_bytes
        for g in groups:
            names = self._names[g.name]
            for xx in filter(is_fanout, engine.list_dir(names.folder)):
                for key in filter(is_key, engine.list_dir(f"{names.folder}/{xx}")):
                    placed = key[:2] == xx and len(key) == digits
                    if placed and engine.exists(names.record(key)):
                        yield ExtentInfo(self.name, g, key, names.extent(key))

    def record(self, key: str | bytes, *, group: str | None = None) -> CommitRecord:
        """The commit record of an extent.

        Raises:
            NotFound: no such extent. FormatError: its record is not valid.
        """
        return self._lookups[self.identity.group(group).name].record(_hex(key))

    def remove(self, key: str | bytes, *, group: str | None = None) -> bool:
        """Remove an extent: from one moment to the next, it is a miss for everyone.

        Returns:
            False when it was not there.
        """
        name = _hex(key)
        chosen = self.identity.group(group).name
        names, lookup = self._names[chosen], self._lookups[chosen]
        engine = self._runtime.engine
        try:
            blocks = lookup.record(name).blocks[:-1]
        except KVStoreError:
            blocks = ()  # absent or damaged: its hints lead nowhere, and lookups see that
        removed = engine.discard(names.extent(name))
        for block in blocks:
            # A hint may name another extent that holds the block. Losing one is no failure.
            with contextlib.suppress(NotFound, StorageError):
                if lookup.referred(block.hex()) is None:
                    engine.discard(names.ref(block.hex()))
        return removed

    def quarantine(self, key: str | bytes, reason: str, *, group: str | None = None) -> None:
        """Move an extent out of the way, with the reason; it is a miss from then on."""
        name = _hex(key)
        names = self._names[self.identity.group(group).name]
        engine = self._runtime.engine
        if engine.read_only:
            log.error("damaged extent %s stays in place, read-only: %s", name, reason)
            return
        target = names.quarantine(name, secrets.token_hex(4))
        try:
            # Moved first: whoever moves it, and nobody else, counts it and says why.
            if not self._move_away(names.extent(name), f"{target}/extent"):
                return
            self.counters["quarantined"] += 1
            log.error("quarantined extent %s: %s", name, reason)
            engine.create(f"{target}/reason.json", pretty({"key": name, "reason": reason}))
        except KVStoreError as error:
            log.warning("extent %s stays in place: %s", name, error)

    def _move_away(self, extent: str, target: str) -> bool:
        """Move an extent's folder into quarantine. False: another process was first."""
        engine = self._runtime.engine
        try:
            return engine.publish(extent, target)
        except NotFound:
            return False
        except StorageError as error:
            if error.errno != errno.ENOTDIR:
                raise
            # No folder but a symbolic link or a file, with nothing in it to keep.
            return engine.discard(extent)

    def verify(
        self,
        *,
        group: str | None = None,
        key: str | bytes | None = None,
        notes: bool = False,
        progress: Progress | None = None,
    ) -> Iterator[Fault]:
        """Check every name, record and byte of the namespace; nothing is changed.

        Args:
            group: only this layer group.
            key: only this extent.
            notes: also yield what is no fault but worth knowing (:data:`kvstore.faults.NOTES`).
            progress: called with bytes done and bytes in all.

        Yields:
            Every fault, as it is found.

        Raises:
            NotFound: no such layer group or extent.
        """
        found = verify_store(
            self._runtime.engine,
            namespace=self.name,
            group=group,
            key=None if key is None else _hex(key),
            progress=progress,
        )
        return (fault for fault in found if notes or not fault.is_note)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups."""
        return self.identity.groups

    def path(self, key: str | bytes, *, group: str | None = None) -> str:
        """An extent's folder, relative to the store's root."""
        return self._names[self.identity.group(group).name].extent(_hex(key))

    @property
    def record_path(self) -> str:
        """The namespace's record, relative to the store's root."""
        return f"{self.name}/{RECORD}"


def _hex(key: str | bytes) -> str:
    require_kind("key", key, (str, bytes), "an extent's key, as bytes or lower-case hex")
    name = key if isinstance(key, str) else key.hex()
    if not is_key(name):
        raise InvalidArgument(f"{name!r:.80} is not an extent's key (lower-case hex)")
    return name


def _require_config(config: ParallelConfig, *ranks: Rank) -> None:
    require_kind("config", config, ParallelConfig, "a ParallelConfig")
    for rank in ranks:
        require_kind("rank", rank, Rank, "a Rank of the config")
