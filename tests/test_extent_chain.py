"""What may stand before an extent in its sequence."""

from __future__ import annotations

import pytest

from kvstore.errors import FormatError
from kvstore.extent import CommitRecord, Writer, decode_extent, encode_extent, shard_sizes
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.keys import KeyScheme


def test_engines_keys_have_the_one_root_of_their_scheme() -> None:
    """The store's own keys may have a root for every salt; an engine's have the one it named."""
    group = LayerGroup.attention_kv(layers=1, heads=1, head_size=4, extent_blocks=2)
    scheme = KeyScheme.opaque("vllm", algorithm="sha256_cbor", root=b"root", key_bytes=16)
    identity = Identity("m", 1, (group,), revision="r", key_scheme=scheme)
    for start, parent, good in (
        (0, b"root", True),
        (0, b"\1" * 16, False),
        (2, b"\1" * 16, True),
        (2, b"root", False),
        (2, b"\1" * 17, False),
    ):
        record = CommitRecord(
            namespace=identity.namespace,
            group="kv",
            blocks=(b"\2" * 16, b"\3" * 16),
            parent=parent,
            start_block=start,
            chunk_stride=None,
            shards=shard_sizes(group, 2),
            parallel_invariant=True,
            writer=Writer("s", "c", "e"),
            write_id="00" * 16,
            created="2026-12-01T03:21:18Z",
        )
        data = encode_extent(group, record)
        if good:
            assert decode_extent(data, identity, group, "03" * 16, "x") == record
        else:
            with pytest.raises(FormatError, match="cannot be the key before block"):
                decode_extent(data, identity, group, "03" * 16, "x")
