"""What the engine's offloading keeps, as a namespace of the store: one identity for all who use it.

The engine's offloading addresses *chunks*: some engine blocks in a row, of one of its cache groups,
named by the hash of the last one. A chunk is one block of the store, and one extent: what came
before it is not known where chunks are moved, so each stands on its own, at block 0 under the root.
The hash says all that matters of what came before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from kvstore.elements import ELEMENT_TYPES, element
from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import ContentPart, LayerGroup
from kvstore.identity import Identity
from kvstore.keys import BlockKeys, KeyScheme
from kvstore.plugins.vllm.checkpoint import AttentionSizes

FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
KV_SCALES = "kv_scales"
_PACKED_MLA = {"fp8_ds_mla": 656}
"""Caches of latent attention in a packed form of their own: bytes of a token."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One of the engine's cache groups.

    Attributes:
        number: its number, as in the engine's offload keys.
        block_tokens: tokens of an engine block.
        chunk_blocks: engine blocks of a chunk.
        layers: the engine's names of its layers, in the order of their pages in a chunk.
    """

    number: int
    block_tokens: int
    chunk_blocks: int
    layers: tuple[str, ...]

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.block_tokens * self.chunk_blocks

    @property
    def indices(self) -> tuple[int, ...]:
        """The layers' numbers in the model, in the order of :attr:`layers`.

        Raises:
            NotCertified: a name does not hold exactly one number, or two hold the same.
        """
        found = []
        for name in self.layers:
            numbers = [int(word) for word in name.split(".") if word.isdigit()]
            if len(numbers) != 1 or numbers[0] in found:
                raise NotCertified(
                    f"layer {name!r} does not have a number of its own in the model; this model's "
                    "cache cannot be stored in a form that others can read",
                    reason="which layer is which is not known",
                )
            found.append(numbers[0])
        return tuple(found)


def cache_element(dtype: str) -> str:
    """Element type of the store for the engine's name of a cache's data type.

    Raises:
        NotCertified: not known.
    """
    name = FP8.get(dtype, dtype)
    if name not in ELEMENT_TYPES:
        raise NotCertified(
            f"the engine's cache has data type {dtype!r}, which the store does not know; use "
            f"another kv_cache_dtype: {', '.join((*ELEMENT_TYPES, *FP8))}",
            reason="the cache's data type is not known",
        )
    return name


def cell_parts(sizes: AttentionSizes, dtype: str) -> tuple[int, tuple[ContentPart, ...]]:
    """Heads, and what one head holds for one token.

    Raises:
        NotCertified: the data type is not known. InvalidArgument: the sizes are not.
    """
    if not sizes.known:
        raise InvalidArgument(
            "the sizes of the cache are not known; give heads and head_size, or latent and rope"
        )
    if dtype in _PACKED_MLA:
        if not sizes.latent:
            raise InvalidArgument(f"cache data type {dtype} is for latent attention; give latent")
        return 1, (ContentPart(f"packed_{dtype}", element("uint8"), _PACKED_MLA[dtype]),)
    of = element(cache_element(dtype))
    if sizes.latent:
        rope = (ContentPart("rope_key", of, sizes.rope),) if sizes.rope else ()
        return 1, (ContentPart("latent", of, sizes.latent), *rope)
    value = sizes.value_size or sizes.head_size
    return sizes.heads, (ContentPart("key", of, sizes.head_size), ContentPart("value", of, value))


def offload_groups(
    groups: Sequence[CacheGroup], sizes: AttentionSizes, dtype: str
) -> dict[int, LayerGroup]:
    """The store's layer groups, by the number of the engine's cache group.

    A window of attention is left out of them on purpose: it changes which chunks are asked for, and
    no byte of any.

    Raises:
        NotCertified, InvalidArgument: as the functions above.
    """
    heads, parts = cell_parts(sizes, dtype)
    role, attention = ("mla", "mla") if sizes.latent else ("kv", "full")
    return {
        g.number: LayerGroup(
            name=f"{role}-{g.number}",
            layers=tuple(sorted(g.indices)),
            heads=heads,
            block_tokens=g.chunk_tokens,
            parts=parts,
            attention=attention,
            extent_blocks=1,
        )
        for g in groups
    }


def offload_identity(
    model: str,
    groups: Mapping[int, LayerGroup],
    scheme: KeyScheme,
    *,
    dtype: str,
    revision: str | None,
    weights_digest: str | None,
    variants: Mapping[str, str],
) -> Identity:
    """The identity of a namespace of chunks.

    Args:
        model: the engine's name of the model, or a path.
        groups: the layer groups.
        scheme: of the engine's block hashes.
        dtype: the engine's name of the cache's data type.
        revision: of the weights, or
        weights_digest: a digest of them.
        variants: whatever else changes the bytes.

    Raises:
        InvalidArgument: which weights, or which scales of an FP8 cache, is not said.
    """
    if dtype.startswith("fp8") and KV_SCALES not in variants:
        raise InvalidArgument(
            f"a cache of {dtype} means nothing without its scales, and the engine's offloading "
            f"does not say which it has; add {KV_SCALES} to the variants: 'checkpoint', or 'one' "
            "where the checkpoint has none. Scales computed at run time (--calculate-kv-scales) "
            "differ from run to run and cannot be stored"
        )
    return Identity(
        model=model_name(model),
        model_layers=1 + max(g.layers[-1] for g in groups.values()),
        groups=tuple(groups[n] for n in sorted(groups)),
        revision=revision,
        weights_digest=weights_digest,
        key_scheme=scheme,
        variants=variants,
    )


def model_name(name: str) -> str:
    """The model's name in the store: of a path its last part, wherever that path is."""
    return PurePath(name).name if name.startswith(("/", ".", "~")) else name


def chunk_keys(block_hash: bytes, scheme: KeyScheme) -> BlockKeys:
    """A chunk's key, standing on its own.

    Raises:
        InvalidArgument: the hash has another length than the scheme's.
    """
    if len(block_hash) != scheme.key_bytes:
        raise InvalidArgument(
            f"block hash {block_hash.hex()!r:.80} has {len(block_hash)} bytes, but those of "
            f"{scheme.algorithm} have {scheme.key_bytes}; the engine hashes blocks with another "
            "algorithm than the namespace is for"
        )
    return BlockKeys([block_hash], scheme.root)
