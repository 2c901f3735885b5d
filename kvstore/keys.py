"""Block keys: content addresses of the tokens that a block, and every block before it, stands for.

A key is a chained SHA-256, so equal keys mean equal prefixes. The preimages are laid down in the
specification, section "Keys"; they are, with every integer little endian and 32 bits wide::

    root  = SHA-256("kvstore/v1/root" 00  len(salt) salt)
    block = SHA-256("kvstore/v1/block"    parent  n tokens[n]  m (len extra)[m])

An engine's own block hashes are used as they are, as opaque bytes, under a named scheme.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from kvstore.errors import InvalidArgument, require_kind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

ROOT_TAG = b"kvstore/v1/root\0"
BLOCK_TAG = b"kvstore/v1/block"
KEY_BYTES = 32
MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 64
MAX_TOKEN_ID = 0xFFFF_FFFF
MAX_EXTRA_KEYS = 1024
MAX_EXTRA_BYTES = 1 << 16

_U32 = struct.Struct("<I")
_SCHEME_NAME = re.compile(r"[a-z0-9][a-z0-9_.+-]{0,63}")


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """How a namespace's block keys are made.

    Attributes:
        scheme: ``kvstore-sha256``, or ``opaque`` for keys that an engine computes itself.
        name: for opaque keys, whose they are, for instance ``vllm``.
        algorithm: for opaque keys, the hash and serialisation, for instance ``sha256_cbor``.
        root: the parent of a sequence's first block. An engine that draws its root at random would
            never hit a persistent store, so the root is part of the namespace's identity.
        key_bytes: length of a key.
    """

    scheme: str
    name: str | None
    algorithm: str | None
    root: bytes
    key_bytes: int = KEY_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.root, bytes) or not 1 <= len(self.root) <= MAX_KEY_BYTES:
            raise InvalidArgument(f"root is {self.root!r:.80}, not 1 to {MAX_KEY_BYTES} bytes")
        if self.scheme == "kvstore-sha256":
            if (self.name, self.algorithm) != (None, None):
                raise InvalidArgument(f"key scheme {self.scheme} has no name or algorithm to give")
            if self.key_bytes != KEY_BYTES or len(self.root) != KEY_BYTES:
                raise InvalidArgument(f"key scheme {self.scheme} has keys of {KEY_BYTES} bytes")
            return
        if self.scheme != "opaque":
            raise InvalidArgument(f"key scheme {self.scheme!r} is not known to format version 1")
        for what, text in (("name", self.name), ("algorithm", self.algorithm)):
            if not isinstance(text, str) or not _SCHEME_NAME.fullmatch(text):
                raise InvalidArgument(
                    f"key scheme {what} {text!r} must match {_SCHEME_NAME.pattern}"
                )
        if not isinstance(self.key_bytes, int) or not (
            MIN_KEY_BYTES <= self.key_bytes <= MAX_KEY_BYTES
        ):
            raise InvalidArgument(
                f"key_bytes is {self.key_bytes!r}; keys have {MIN_KEY_BYTES} to {MAX_KEY_BYTES}"
            )

    @property
    def opaque_keys(self) -> bool:
        """Whether an engine makes the keys."""
        return self.scheme == "opaque"

    @classmethod
    def sha256(cls, salt: bytes = b"") -> KeyScheme:
        """The store's own keys. ``salt`` keeps tenants apart: other salts, other keys."""
        return cls("kvstore-sha256", None, None, root_key(salt), KEY_BYTES)

    @classmethod
    def opaque(cls, name: str, *, algorithm: str, root: bytes, key_bytes: int = 32) -> KeyScheme:
        """An engine's own block hashes, taken as they are.

        Raises:
            InvalidArgument: a name or length is out of range.
        """
        return cls("opaque", name, algorithm, root, key_bytes)


class BlockKeys(Sequence[bytes]):
    """Keys of consecutive blocks of one sequence, from its first block on.

    Slicing from the start gives the keys of a prefix; a slice that starts later keeps its place in
    the sequence (:attr:`start`) and the key before it (:attr:`parent`).
    """

    __slots__ = ("_keys", "parent", "start")

    def __init__(self, keys: Sequence[bytes], parent: bytes, start: int = 0) -> None:
        self._keys = tuple(keys)
        self.parent = parent
        self.start = start

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> BlockKeys: ...
    def __getitem__(self, index: int | slice) -> bytes | BlockKeys:
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self._keys))
            if step != 1:
                raise InvalidArgument("block keys are a chain: slices have step 1")
            return BlockKeys(self._keys[first:stop], self.parent_of(first), self.start + first)
        return self._keys[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockKeys):
            return NotImplemented
        return (self._keys, self.parent, self.start) == (other._keys, other.parent, other.start)

    def __hash__(self) -> int:
        return hash((self._keys, self.parent, self.start))

    def __repr__(self) -> str:
        last = self._keys[-1].hex()[:16] if self._keys else "-"
        return f"BlockKeys(blocks={len(self)}, start={self.start}, last={last})"

    def parent_of(self, index: int) -> bytes:
        """The key before block ``index``: the root key for a sequence's first block."""
        return self.parent if index == 0 else self._keys[index - 1]


def require_keys(keys: object) -> None:
    """Refuse anything but the keys of one sequence: their place in it matters.

    Raises:
        InvalidArgument: as said.
    """
    if not isinstance(keys, BlockKeys):
        raise InvalidArgument(
            f"keys must be what Namespace.keys or Namespace.engine_keys gave, or a slice of it, "
            f"not {type(keys).__name__}"
        )


def root_key(salt: bytes = b"") -> bytes:
    """The parent of every sequence's first block, for one tenant's salt.

    Raises:
        InvalidArgument: the salt is not bytes, or longer than 65,536.
    """
    if not isinstance(salt, bytes) or len(salt) > MAX_EXTRA_BYTES:
        raise InvalidArgument(f"salt must be at most {MAX_EXTRA_BYTES} bytes, not {salt!r:.80}")
    return hashlib.sha256(ROOT_TAG + _U32.pack(len(salt)) + salt).digest()


def chain_keys(
    tokens: ArrayLike,
    block_tokens: int,
    *,
    root: bytes | None = None,
    extra: Mapping[int, Sequence[bytes]] | Sequence[bytes] = (),
) -> BlockKeys:
    """Keys of every full block of a token sequence.

    Args:
        tokens: token ids, 1-D, each from 0 to 2^32 - 1. Those after the last full block have no
            key.
        block_tokens: ``N``, tokens a block.
        root: parent of the first block; default :func:`root_key` without a salt.
        extra: extra keys, in order (LoRA digest, hash of an image ...): for every block, or a
            mapping from block index to that block's own.

    Raises:
        InvalidArgument: a token id is out of range, or not a whole number; the root is not 32
            bytes; an extra key is too long, or for a block before the first.
    """
    ids = _token_ids(tokens)
    if not isinstance(block_tokens, int) or not 1 <= block_tokens <= MAX_TOKEN_ID:
        raise InvalidArgument(f"block_tokens is {block_tokens!r}; a block has at least one token")
    parent = root_key() if root is None else root
    if not isinstance(parent, bytes) or len(parent) != KEY_BYTES:
        raise InvalidArgument(f"root is {parent!r:.80}; it must be {KEY_BYTES} bytes")
    first_parent = parent
    per_block = extra if isinstance(extra, Mapping) else None
    for index in per_block or ():
        # One that no block could ask for would be left out of every key in silence.
        if not isinstance(index, int) or index < 0:
            raise InvalidArgument(f"extra keys are by block index, from 0; {index!r} is not one")
    suffix = _extra_bytes(() if per_block is not None else extra)  # type: ignore[arg-type]  # narrowed by per_block
    data = ids.tobytes()
    count = _U32.pack(block_tokens)
    step = 4 * block_tokens
    sha256 = hashlib.sha256
    keys: list[bytes] = []
    for i in range(len(ids) // block_tokens):
        tail = suffix if per_block is None else _extra_bytes(per_block.get(i, ()))
        block = data[i * step : (i + 1) * step]
        parent = sha256(b"".join((BLOCK_TAG, parent, count, block, tail))).digest()
        keys.append(parent)
    return BlockKeys(keys, first_parent)


def opaque_keys(keys: Sequence[bytes], scheme: KeyScheme) -> BlockKeys:
    """An engine's own block hashes, checked against the scheme they are said to follow.

    Raises:
        InvalidArgument: a key has another length than the scheme's, or appears twice.
    """
    for i, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) != scheme.key_bytes:
            raise InvalidArgument(
                f"key {i} is {key!r}; scheme {scheme.name!r} has keys of {scheme.key_bytes} bytes"
            )
    if len(set(keys)) != len(keys):
        raise InvalidArgument("a block key appears twice; a chain of block hashes has no repeats")
    return BlockKeys(keys, scheme.root)


def _token_ids(tokens: ArrayLike) -> NDArray[np.uint32]:
    import numpy as np

    try:
        array: NDArray[Any] = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(
            f"token ids must be a 1-D sequence of whole numbers: {error}"
        ) from None
    if array.size == 0:
        return np.empty(0, dtype="<u4")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"token ids must be a 1-D sequence of whole numbers, not {array.dtype} {array.shape}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_TOKEN_ID:
        raise InvalidArgument(f"token ids run from {low} to {high}; they must fit 32 bits")
    return np.ascontiguousarray(array, dtype="<u4")


def _extra_bytes(extra: Sequence[bytes]) -> bytes:
    require_kind("extra", extra, Sequence, "a list of bytes, or a mapping of block index to such")
    if len(extra) > MAX_EXTRA_KEYS:
        raise InvalidArgument(f"{len(extra)} extra keys; at most {MAX_EXTRA_KEYS} a block")
    out = [_U32.pack(len(extra))]
    for item in extra:
        if not isinstance(item, bytes):
            raise InvalidArgument(f"extra key {item!r} must be bytes; encode text as UTF-8")
        if len(item) > MAX_EXTRA_BYTES:
            raise InvalidArgument(f"extra key of {len(item)} bytes; at most {MAX_EXTRA_BYTES}")
        out += (_U32.pack(len(item)), item)
    return b"".join(out)
