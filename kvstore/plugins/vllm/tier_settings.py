"""Settings of the tier: what its entry in ``secondary_tiers`` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidArgument
from kvstore.plugins.vllm.checkpoint import AttentionSizes, checkpoint_sizes
from kvstore.plugins.weights import weights_digest

PAGES = ("auto", "packed", "split", "opaque")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Settings of the tier; each has the name of its key.

    Attributes:
        root: folder or URL of the store. Required.
        model: name of the model in the store; default the engine's own name for it.
        revision: the weights' revision, or
        weights: a folder with the weights, to take a digest of. Default: the engine's model, where
            that is a local path.
        heads: KV heads of the whole model. Default, as for the sizes below: out of the
            ``config.json`` in the folder of the weights.
        head_size: elements of a key.
        value_size: elements of a value, where there are other than of a key.
        latent: for latent attention, elements of the latent, and
        rope: of the key's rotary part.
        pages: how keys and values lie in the engine's pages: ``packed`` (next to each other in each
            token), ``split`` (all keys, then all values), ``opaque`` (not known, or of the backend
            B12X: kept for this very parallel config), ``auto`` (packed, where that is certain).
        hash_algorithm: the engine's ``--prefix-caching-hash-algo``.
        variants: what else changes the bytes of a cache, as names and values: overrides of the
            model's configuration, quantisation at run time, where FP8 scales come from.
        threads: threads that move chunks.
        max_queued: chunks that may wait for a thread; what comes on top of them fails.
        verify: check every chunk's checksum on load.
        durable: sync what is stored, so that it outlives a power failure.
        read_only: store nothing.
        enable_kv_events: emit the engine's events for what is stored.
        locality: for these events, ``LOCAL`` or ``REMOTE``.
    """

    root: str
    model: str = ""
    revision: str = ""
    weights: str = ""
    heads: int = 0
    head_size: int = 0
    value_size: int = 0
    latent: int = 0
    rope: int = 0
    pages: str = "auto"
    hash_algorithm: str = "sha256"
    variants: Mapping[str, str] = field(default_factory=dict)
    threads: int = 8
    max_queued: int = 4096
    verify: bool = True
    durable: bool = False
    read_only: bool = False
    enable_kv_events: bool = False
    locality: str | None = None

    def sizes(self, model: str) -> AttentionSizes:
        """Sizes of the cache: those given, or the checkpoint's.

        Args:
            model: the engine's name of the model.

        Raises:
            InvalidArgument: they are not known.
        """
        given = AttentionSizes(self.heads, self.head_size, self.value_size, self.latent, self.rope)
        return given if given.known else checkpoint_sizes(Path(self.weights or model))

    def which_weights(self, model: str) -> tuple[str | None, str | None]:
        """Revision, or digest of the weights.

        Args:
            model: the engine's name of the model.

        Raises:
            InvalidArgument: there is no telling. StorageError: they cannot be read.
        """
        if self.revision:
            return self.revision, None
        folder = self.weights or model
        if not Path(folder).exists():
            raise InvalidArgument(
                f"cannot tell which weights {folder!r} stands for; set 'revision' (the commit that "
                "was loaded) or 'weights' (their folder) in the tier's configuration"
            )
        return None, weights_digest(folder)


def tier_settings(given: Mapping[str, Any]) -> TierSettings:
    """Settings out of a tier's configuration.

    Raises:
        InvalidArgument: a key is unknown, missing, or its value cannot be.
    """
    kinds = {f.name: str(f.type) for f in fields(TierSettings)}
    unknown = sorted(set(given) - set(kinds))
    if unknown:
        raise InvalidArgument(
            f"the tier's configuration has unknown keys {', '.join(unknown)}; those of kvstore "
            f"are: {', '.join(kinds)}"
        )
    if not given.get("root"):
        raise InvalidArgument("the tier's configuration needs 'root', the folder of the store")
    for name, value in given.items():
        _check(name, kinds[name], value)
    return TierSettings(**given)


def _check(name: str, kind: str, value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    fits = {
        "str": isinstance(value, str),
        "str | None": value is None or isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": whole and value >= (name in ("threads", "max_queued")),
        "Mapping[str, str]": isinstance(value, Mapping)
        and all(isinstance(t, str) for item in value.items() for t in item),
    }
    if not fits[kind]:
        raise InvalidArgument(f"{name} in the tier's configuration is {value!r}, not a {kind}")
    if name == "pages" and value not in PAGES:
        raise InvalidArgument(f"pages is {value!r}; it is one of {', '.join(PAGES)}")
