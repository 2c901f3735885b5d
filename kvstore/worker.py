"""A worker: one rank's loads and stores, between the store and its paged buffers."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.commit import Committer
from kvstore.errors import InvalidArgument, require_kind
from kvstore.geometry import LayerGroup
from kvstore.keys import BlockKeys
from kvstore.load import Loader, Loading
from kvstore.lookup import Lookup
from kvstore.pages import pages_of
from kvstore.parallel import ParallelConfig, Rank
from kvstore.paths import GroupPath, writer_id
from kvstore.placement import block_table
from kvstore.report import CommitReport, LoadResult, StoreReport
from kvstore.runtime import Runtime
from kvstore.share import Share, share_of
from kvstore.write import Saver

if TYPE_CHECKING:
    from kvstore.buffers import PagedBuffers

BlockIds = Sequence[int] | Any


class Worker:
    """One rank of one engine. Made by :meth:`kvstore.namespace.Namespace.worker`.

    Block ids, in every method: 1-D whole numbers; entry ``v`` is the engine block that holds local
    tokens ``v * n`` to ``(v + 1) * n - 1`` of this rank, counted from token 0 of the sequence, with
    ``n`` the engine's block size. Under context parallelism these are ``n * cp`` canonical tokens.
    Only entries whose tokens are moved need to be valid.

    Not for use by several threads at once; several workers may be.

    Attributes:
        config, rank, share: who the worker is, and what it holds.
        buffers: its paged buffers.
        session: name that the engine's ranks share.
    """

    def __init__(
        self,
        *,
        runtime: Runtime,
        lookup: Lookup,
        committer: Committer,
        group: LayerGroup,
        names: GroupPath,
        config: ParallelConfig,
        rank: Rank,
        share: Share,
        buffers: PagedBuffers,
        session: str | None,
        model_layers: int,
        quarantine: Callable[[str, str], None],
        counters: Counter[str],
    ) -> None:
        self.config = config
        self.rank = rank
        self.share = share
        self.buffers = buffers
        self.session = session
        self._group = group
        self._committer = committer
        self._model_layers = model_layers
        self._counters = counters
        pages = self._pages = pages_of(buffers)
        parts = (runtime.engine, lookup, group, names)
        self._loader = Loader(
            *parts, share, pages, buffers.block_tokens, quarantine, verify=runtime.verify
        )
        writer = "" if session is None else writer_id(session, str(config))
        self._saver = Saver(
            *parts, writer, pages, buffers.block_tokens, runtime.staging, lambda: runtime.pool
        )

    def load(
        self, keys: BlockKeys, block_ids: BlockIds, *, layers: range | None = None
    ) -> LoadResult:
        """Load this rank's share of stored blocks into its buffers.

        Loads the leading blocks of ``keys`` that are stored, and says which are not. A slice of a
        sequence's keys loads those blocks only; ``keys[:match.blocks]`` a matched prefix.

        Args:
            keys: blocks wanted, consecutive.
            block_ids: see the class.
            layers: only these of the rank's own layers, counted from 0.

        Raises:
            InvalidArgument: block ids or layers are out of range. Nothing was read.
        """
        self._pages.require_unmoved()
        layers = self._check_layers(layers)
        loading = self._loader.prepare(keys, block_table(block_ids, self.buffers.blocks))
        return self._count(loading.run(layers))

    def load_layers(self, keys: BlockKeys, block_ids: BlockIds) -> Iterator[tuple[int, LoadResult]]:
        """Load layer by layer, in order: yields each layer as soon as it is complete.

        The layers after it are read meanwhile, so an engine can compute on one layer while the next
        arrives. Closing the iterator stops the load after the layer in progress.

        Yields:
            Index of the layer among the rank's own, and the state of the load so far: an extent
            that fails in one layer is a miss from that layer on.

        Raises:
            InvalidArgument: as :meth:`load`.
        """
        self._pages.require_unmoved()
        loading = self._loader.prepare(keys, block_table(block_ids, self.buffers.blocks))
        return self._layers(loading)

    def _layers(self, loading: Loading) -> Iterator[tuple[int, LoadResult]]:
        done: queue.SimpleQueue[tuple[int, LoadResult | BaseException]] = queue.SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            for layer in range(self._loader.layers):
                if stop.is_set():
                    return
                try:
                    done.put((layer, loading.run(range(layer, layer + 1))))
                except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                    done.put((layer, error))
                    return

        thread = threading.Thread(target=work, name="kvstore-layers", daemon=True)
        thread.start()
        try:
            last: LoadResult | None = None
            for _ in range(self._loader.layers):
                layer, result = done.get()
                if isinstance(result, BaseException):
                    raise result
                last = result
                yield layer, result
            if last is not None:
                self._count(last)
        finally:
            stop.set()
            thread.join()

    def store(
        self,
        keys: BlockKeys,
        block_ids: BlockIds,
        *,
        tail: bool = True,
        stand_in_for: Rank | None = None,
    ) -> StoreReport:
        """Store what this rank was elected to store of a sequence's blocks.

        Nothing is visible before :meth:`commit`. Extents that are there already are skipped, so
        storing a longer sequence again costs its new part only.

        Args:
            keys: blocks to store, consecutive, from an extent boundary on (0 is one).
            block_ids: see the class.
            tail: also store a last extent that is not full.
            stand_in_for: write what that rank was elected to write: one that holds the same bytes
                and died.

        Raises:
            InvalidArgument: no session, block ids out of range, or the rank to stand in for holds
                other bytes.
            StorageError: the medium failed; nothing became visible, and calling again goes on.
        """
        self._session()
        self._pages.require_unmoved()
        share, rank = self.share, self.rank
        if stand_in_for is not None:
            require_kind("stand_in_for", stand_in_for, Rank, "the Rank that died")
            rank = stand_in_for
            share = share_of(self._group, self.config, rank, self._model_layers)
            same = (share.layers, share.heads, share.lattice)
            if same != (self.share.layers, self.share.heads, self.share.lattice):
                raise InvalidArgument(
                    f"rank {self.rank} cannot stand in for rank {rank}: they hold different bytes"
                )
        table = block_table(block_ids, self.buffers.blocks)
        report = self._saver.store(keys, table, share, rank, tail=tail)
        self._counters["stored_bytes"] += report.bytes_written
        return report

    def commit(self, keys: BlockKeys, *, tail: bool = True) -> CommitReport:
        """Publish what all ranks have written; see :meth:`kvstore.namespace.Namespace.commit`."""
        return self._committer.commit(
            keys, self.config, self._session(), self._model_layers, tail=tail
        )

    def _session(self) -> str:
        if self.session is None:
            raise InvalidArgument(
                f"{self.config} has {self.config.world_size} ranks, which write together: give "
                "the worker the session that they share"
            )
        return self.session

    def _check_layers(self, layers: range | None) -> range | None:
        if layers is None:
            return None
        count = self._loader.layers
        require_kind("layers", layers, range, "a range of the rank's own layers, or None for all")
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= count:
            raise InvalidArgument(f"{layers} is not a range of the rank's {count} layers")
        return layers

    def _count(self, result: LoadResult) -> LoadResult:
        self._counters["hit_blocks"] += result.requested - len(result.misses)
        self._counters["miss_blocks"] += len(result.misses)
        self._counters["loaded_bytes"] += result.bytes_placed
        return result
