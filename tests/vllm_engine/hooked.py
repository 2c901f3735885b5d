"""A connector whose loads and stores a test can delay, and pull the store from under.

For engines at TP=1 that run in the process of the job: steps of the job change ``plan``.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import kvstore
from kvstore.plugins.vllm.connector import KVStoreConnector
from kvstore.plugins.vllm.jobs import LoadOutcome, RankStore
from kvstore.plugins.vllm.messages import LoadJob, StoreJob
from kvstore.plugins.vllm.scheduler import StoreScheduler
from kvstore.plugins.vllm.worker import StoreWorker

plan: dict[str, Any] = {"root": None, "load": None, "store": None, "hold": True}
"""What happens before a load, before a store, and whether blocks are held for stores at all."""

released = threading.Event()
events: list[tuple[str, float]] = []


def before(what: str) -> None:
    """Do what is planned for a load or a store that is about to start."""
    action, _, value = str(plan[what] or "").partition(":")
    if action == "sleep":
        time.sleep(float(value))
    elif action == "wait":
        released.wait(60)
    elif action == "remove":
        remove_all()
    elif action == "rmtree":
        delete_extents()
    elif action == "rmtree-meanwhile":
        threading.Thread(target=delete_extents).start()
    elif action == "wipe":
        wipe()


def wipe() -> None:
    """Delete the whole store, though the engine may be moving things about in it."""
    while Path(plan["root"]).exists():
        shutil.rmtree(plan["root"], ignore_errors=True)


def remove_all() -> None:
    """Remove every extent, as ``kvstore rm`` does."""
    with kvstore.open(plan["root"]) as store:
        for name in store.namespaces():
            namespace = store.open_namespace(name)
            for key in [extent.key for extent in namespace.extents()]:
                namespace.remove(key)


def delete_extents() -> None:
    """Delete the folders of all extents, as ``rm -r`` does."""
    for record in Path(plan["root"]).glob("*/*/??/*/zarr.json"):
        shutil.rmtree(record.parent, ignore_errors=True)


class Hooked(KVStoreConnector):
    """Does what ``plan`` says before loads and stores, and notes when they begin and end."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        plan["root"] = vllm_config.kv_transfer_config.kv_connector_extra_config["root"]
        if isinstance(self._side, StoreScheduler):
            hold = self._side._held.hold

            def maybe_hold(job: int, block_ids: set[int]) -> None:
                if plan["hold"]:
                    hold(job, block_ids)

            self._side._held.hold = maybe_hold  # type: ignore[method-assign]

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        side = self._side
        assert isinstance(side, StoreWorker)
        opened = side._open

        def hooked_open(opening: Any) -> None:
            opened(opening)
            assert side.store is not None
            hook(side.store)

        side._open = hooked_open  # type: ignore[method-assign]


def hook(store: RankStore) -> None:
    load, load_layers, save = store.load, store.load_layers, store.store

    def timed(what: str, run: Callable[[Any], Any], job: Any) -> Any:
        events.append((f"{what} begins", time.time()))
        before(what)
        try:
            return run(job)
        finally:
            events.append((f"{what} ends", time.time()))

    def hooked_load(job: LoadJob) -> LoadOutcome:
        outcome: LoadOutcome = timed("load", load, job)
        return outcome

    def hooked_layers(job: LoadJob) -> Iterator[tuple[str, LoadOutcome]]:
        for number, item in enumerate(load_layers(job)):
            if number == 2:  # the third layer is in place, the others are not
                before("load")
            yield item

    def hooked_store(job: StoreJob) -> int:
        nbytes: int = timed("store", save, job)
        return nbytes

    store.load = hooked_load  # type: ignore[method-assign]
    store.load_layers = hooked_layers  # type: ignore[method-assign]
    store.store = hooked_store  # type: ignore[method-assign]
