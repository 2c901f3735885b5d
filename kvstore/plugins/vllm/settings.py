"""Settings of the connector: the keys of ``kv_connector_extra_config``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore.errors import InvalidArgument

LOADS = ("async", "layerwise")
SAVES = ("prompt", "all", "none")
PCP_KV = ("", "sharded", "replicated")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may set.

    Attributes:
        root: folder or URL of the store; made when it is not there.
        load: ``async``: a request waits for its cache while others run. ``layerwise``: it is
            scheduled at once, and each attention layer waits for its own pages.
        save: ``prompt``: the blocks of prompts. ``all``: also those of what was generated, when a
            request ends. ``none``: the store is only read.
        verify: check the checksum of every chunk that is loaded.
        durable: sync what is stored, so that it outlives a power failure.
        min_load_tokens: shorter hits than this, beyond what the engine itself still holds, are
            computed rather than loaded.
        block_tokens: tokens of a stored block, the unit that has a key. Engines share a cache only
            if they agree on it, whatever their own block size, which must be a multiple of it. 0:
            the largest power of two up to 16 that divides the engine's block size.
        extent_tokens: tokens of a stored extent.
        lookup_wait_ms: milliseconds that the scheduler may wait for a lookup before it goes on
            without that request, and asks again at the next step.
        max_pending_fraction: share of the engine's KV blocks that stores under way may hold back.
        shutdown_wait_s: seconds that a shutdown waits for stores under way.
        model: name of the model in the store; default the engine's own name for it.
        revision: revision of the weights, where the engine's does not say. Default: the commit that
            a hub model was loaded at, or a digest of the weight files of a local one.
        salt: tenant salt of all keys. A request's own ``cache_salt`` goes on top of it.
        pcp_kv: what prefill context parallel ranks hold: ``sharded`` or ``replicated``. Needed
            where there are several.
    """

    root: str
    load: str = "async"
    save: str = "prompt"
    verify: bool = True
    durable: bool = False
    min_load_tokens: int = 64
    block_tokens: int = 0
    extent_tokens: int = 256
    lookup_wait_ms: float = 5.0
    max_pending_fraction: float = 0.25
    shutdown_wait_s: float = 30.0
    model: str = ""
    revision: str = ""
    salt: str = ""
    pcp_kv: str = ""

    def __post_init__(self) -> None:
        for name, known in (("load", LOADS), ("save", SAVES), ("pcp_kv", PCP_KV)):
            if getattr(self, name) not in known:
                listed = ", ".join(repr(k) for k in known if k)
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}; it is one of {listed}")
        for name, low, high in (
            ("min_load_tokens", 0, 1 << 31),
            ("block_tokens", 0, 65536),
            ("extent_tokens", 1, 1 << 24),
            ("lookup_wait_ms", 0, 10_000),
            ("max_pending_fraction", 0.001, 1),
            ("shutdown_wait_s", 0, 3600),
        ):
            if not low <= getattr(self, name) <= high:
                raise InvalidArgument(
                    f"{name} is {getattr(self, name)!r}; it is a number from {low} to {high}"
                )
        if not self.root:
            raise InvalidArgument("root is empty; give the folder or URL of the store")


def settings(extra: Mapping[str, Any]) -> Settings:
    """Settings out of ``kv_connector_extra_config``.

    Raises:
        InvalidArgument: a key is unknown, missing or of the wrong kind; the message lists the keys.
    """
    kinds = {f.name: str(f.type) for f in fields(Settings)}
    unknown = sorted(set(extra) - set(kinds))
    if unknown:
        raise InvalidArgument(
            f"kv_connector_extra_config has unknown keys {', '.join(unknown)}; "
            f"those of kvstore are: {', '.join(kinds)}"
        )
    if "root" not in extra:
        raise InvalidArgument(
            "kv_connector_extra_config needs 'root', the folder or URL of the store"
        )
    return Settings(**{name: _of_kind(name, kinds[name], extra[name]) for name in extra})


def _of_kind(name: str, kind: str, value: Any) -> Any:
    fits = {
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
    }
    if not fits[kind]:
        raise InvalidArgument(
            f"{name} in kv_connector_extra_config is {value!r}, not of kind {kind}"
        )
    return value
