"""The parent of a sequence's first block in the engine's own hash chains.

The engine derives it from a seed, by the algorithm that hashes its blocks. The seed is fixed, or
the environment variable PYTHONHASHSEED; for the fast, guessable algorithms it is drawn at random in
each process unless that variable is set. Keys that hang from a random root are never seen again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from kvstore.errors import InvalidArgument
from kvstore.keys import KeyScheme

DEFAULT_SEED = "vllm-none-hash"
SEED_VARIABLE = "PYTHONHASHSEED"
GUESSABLE = ("xxhash", "xxhash_cbor")
ALGORITHMS = ("sha256", "sha256_cbor", *GUESSABLE)
_NAME = "vllm"


def seed_of(algorithm: str, environment: Mapping[str, str]) -> str:
    """The seed that an engine with this environment takes.

    Raises:
        InvalidArgument: it would draw one at random, or the algorithm is not known.
    """
    if algorithm not in ALGORITHMS:
        raise InvalidArgument(
            f"hash algorithm {algorithm!r} is not known; give the engine's "
            f"--prefix-caching-hash-algo, one of {', '.join(ALGORITHMS)}"
        )
    seed = environment.get(SEED_VARIABLE)
    if seed is not None:
        return seed
    if algorithm in GUESSABLE:
        raise InvalidArgument(
            f"the engine hashes blocks with {algorithm} from a random root, so no other run would "
            f"ever hit what is stored; set {SEED_VARIABLE} to one value for all engines, or use "
            "--prefix-caching-hash-algo sha256"
        )
    return DEFAULT_SEED


def root_of(algorithm: str, seed: str) -> bytes:
    """The root of the two SHA-256 algorithms, as the engine computes it.

    Raises:
        InvalidArgument: another algorithm; its root can only be taken from the engine.
    """
    encoders: dict[str, Callable[[bytes], bytes]] = {"sha256": _pickled, "sha256_cbor": _cbor}
    if algorithm not in encoders:
        raise InvalidArgument(
            f"the root of {algorithm!r} is only known to the engine; give it in hexadecimal"
        )
    return hashlib.sha256(encoders[algorithm](seed.encode())).digest()


def key_scheme(algorithm: str, root: bytes) -> KeyScheme:
    """The scheme of a namespace whose keys are the engine's block hashes."""
    return KeyScheme.opaque(_NAME, algorithm=algorithm, root=root, key_bytes=len(root))


def _pickled(text: bytes) -> bytes:
    """What the pickle module writes, protocol 5, for a str of that UTF-8 text."""
    size = len(text)
    head = b"\x8c" + size.to_bytes(1) if size < 256 else b"X" + size.to_bytes(4, "little")
    frame = head + text + b"\x94."
    return b"\x80\x05\x95" + len(frame).to_bytes(8, "little") + frame


def _cbor(text: bytes) -> bytes:
    """Canonical CBOR of a text string."""
    size = len(text)
    if size < 24:
        return bytes([0x60 + size]) + text
    width = next(n for n in (1, 2, 4, 8) if size < 1 << 8 * n)
    return bytes([0x78 + width.bit_length() - 1]) + size.to_bytes(width) + text
