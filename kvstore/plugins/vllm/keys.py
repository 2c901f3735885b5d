"""Keys of a request's blocks: its tokens, and whatever else its cache depends on.

They are the store's own keys (:func:`kvstore.keys.chain_keys`), not the engine's block hashes: so
they do not depend on the engine's hash algorithm or its seed, and any program that has the tokens
can compute them. What the engine adds to its own hashes goes in here too: adapters (by a digest of
their weights, as a name may come to mean another adapter), images, prompt embeddings, salts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvstore.errors import InvalidArgument
from kvstore.keys import BlockKeys, chain_keys, root_key
from kvstore.plugins.weights import weights_digest


def request_keys(request: Any, tokens: int, block_tokens: int, root: bytes, salt: str) -> BlockKeys:
    """Keys of the full blocks among a request's first ``tokens`` tokens.

    Args:
        request: the engine's request.
        tokens: how many of its tokens.
        block_tokens: tokens a block.
        root: the namespace's root key.
        salt: the namespace's salt, which a request's own goes on top of.

    Raises:
        InvalidArgument: the adapter's weights cannot be found.
    """
    ids = list(request.all_token_ids[:tokens])
    if request.cache_salt:
        root = root_key(b"\0".join((salt.encode(), request.cache_salt.encode())))
    every: list[bytes] = []
    if request.lora_request is not None:
        every.append(b"lora\0" + _adapter(request.lora_request.lora_path).encode())
    if not request.mm_features and request.prompt_embeds is None:
        return chain_keys(ids, block_tokens, root=root, extra=every)
    extra = {}
    feature = 0
    for index in range(len(ids) // block_tokens):
        start = index * block_tokens
        found, feature = generate_block_hash_extra_keys(
            request, start, start + block_tokens, feature
        )
        extra[index] = [*every, *(_encode(item) for item in found or () if _of_content(item))]
    return chain_keys(ids, block_tokens, root=root, extra=extra)


def _of_content(item: Sequence[Any]) -> bool:
    return item[0] not in ("lora", "cache_salt")


def _encode(item: Sequence[Any]) -> bytes:
    """An extra key of the engine as bytes: its kind, then each field with its length."""
    out = [str(item[0]).encode()]
    for field in item[1:]:
        data = field if isinstance(field, bytes) else str(field).encode()
        out.append(len(data).to_bytes(4, "little") + data)
    return b"\0".join(out)


@lru_cache(maxsize=256)
def _adapter(path: str) -> str:
    if not Path(path).exists():
        raise InvalidArgument(
            f"the weights of adapter {path!r} are not on this machine, so its requests have no "
            "key; give the adapter as a local folder"
        )
    return weights_digest(path)
