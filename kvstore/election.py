"""Election: which of the ranks that hold the same bytes stores them, for a given extent.

The key decides, so every rank reaches the same answer without a message, and the work of writing
spreads over the replicas as keys do.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.errors import InvalidArgument
from kvstore.parallel import Rank
from kvstore.share import Share

_KEY_BYTES = 8


def elected_replica(key: bytes, replicas: int) -> int:
    """The replica, 0 to ``replicas - 1``, that stores the extent of that key.

    The first 8 bytes of the key, as a big-endian number, modulo ``replicas``.

    Raises:
        InvalidArgument: the key is shorter than 8 bytes, or ``replicas`` is below 1.
    """
    if len(key) < _KEY_BYTES:
        raise InvalidArgument(f"extent key {key.hex()!r} is shorter than {_KEY_BYTES} bytes")
    if replicas < 1:
        raise InvalidArgument(f"replicas must be at least 1, not {replicas}")
    return int.from_bytes(key[:_KEY_BYTES], "big") % replicas


def is_writer(share: Share, key: bytes) -> bool:
    """Whether the rank of that share stores its bytes of the extent of that key.

    True as well for a rank that holds no layer of the group: it has nothing to store.

    Raises:
        InvalidArgument: the key is shorter than 8 bytes.
    """
    return share.replica == elected_replica(key, share.replicas)


def elected_ranks(shares: Iterable[tuple[Rank, Share]], key: bytes) -> list[tuple[Rank, Share]]:
    """Of all shares (see :func:`kvstore.share.all_shares`), those that store the key's extent.

    Raises:
        InvalidArgument: the key is shorter than 8 bytes.
    """
    return [(rank, share) for rank, share in shares if is_writer(share, key) and not share.empty]
