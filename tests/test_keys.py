from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.keys import BlockKeys, KeyScheme, chain_keys, opaque_keys, root_key

TOKENS = list(range(1, 9))
# Computed once with sha256sum over the preimages of the specification.
GOLDEN: dict[str, Any] = {
    "root": "eca0e438a3842e96b197a7d397ac301dcb34ab27da0b53cf934b27fe706574ca",
    "blocks": [
        "b49eae3048941ea01dd10a6530415f9fbf9a9b19cb7e86fbe120d6e5a4a772ee",
        "c07f5d492486229f1b329cd593e83f4d063fed29899467dd05d238239416abc6",
    ],
}


def by_hand(parent: bytes, tokens: list[int], extra: list[bytes]) -> bytes:
    """The block preimage, from the specification and not from the module."""
    preimage = b"kvstore/v1/block" + parent
    preimage += struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)
    preimage += struct.pack("<I", len(extra))
    for item in extra:
        preimage += struct.pack("<I", len(item)) + item
    return hashlib.sha256(preimage).digest()


def test_root_key_golden() -> None:
    assert root_key() == hashlib.sha256(b"kvstore/v1/root\x00\x00\x00\x00\x00").digest()
    assert (
        root_key(b"tenant") == hashlib.sha256(b"kvstore/v1/root\x00\x06\x00\x00\x00tenant").digest()
    )
    assert root_key().hex() == GOLDEN["root"]


def test_block_keys_golden() -> None:
    keys = chain_keys(TOKENS, 4)
    assert [k.hex() for k in keys] == GOLDEN["blocks"]
    first = by_hand(root_key(), [1, 2, 3, 4], [])
    assert list(keys) == [first, by_hand(first, [5, 6, 7, 8], [])]
    assert keys.parent == root_key()


def test_extra_keys_golden() -> None:
    keys = chain_keys(TOKENS, 4, root=root_key(b"s"), extra={1: [b"lora", b""]})
    first = by_hand(root_key(b"s"), [1, 2, 3, 4], [])
    assert list(keys) == [first, by_hand(first, [5, 6, 7, 8], [b"lora", b""])]
    every = chain_keys(TOKENS, 4, extra=[b"x"])
    first = by_hand(root_key(), [1, 2, 3, 4], [b"x"])
    assert list(every) == [first, by_hand(first, [5, 6, 7, 8], [b"x"])]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 9),
    st.binary(max_size=9),
    st.lists(st.binary(max_size=9), max_size=3),
)
def test_chain_is_the_specifications(
    tokens: list[int], block: int, salt: bytes, extra: list[bytes]
) -> None:
    keys = chain_keys(tokens, block, root=root_key(salt), extra=extra)
    assert len(keys) == len(tokens) // block
    for i, key in enumerate(keys):
        assert key == by_hand(keys.parent_of(i), tokens[i * block : (i + 1) * block], extra)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=24), st.integers(1, 4), st.integers(0, 24))
def test_a_prefix_has_a_prefix_of_the_keys(tokens: list[int], block: int, cut: int) -> None:
    whole = chain_keys(tokens, block)
    assert chain_keys(tokens[:cut], block) == whole[: len(tokens[:cut]) // block]


@pytest.mark.parametrize("dtype", ["i1", "u2", "<i4", ">i4", "<u4", "i8", "u8", ">u8"])
def test_the_width_and_order_of_the_callers_integers_do_not_matter(dtype: str) -> None:
    wanted = chain_keys(TOKENS, 4)
    assert chain_keys(np.array(TOKENS, dtype), 4) == wanted
    assert chain_keys(np.array([t for t in TOKENS for _ in (0, 1)], dtype)[::2], 4) == wanted


def test_one_changed_token_changes_all_keys_from_its_block_on() -> None:
    a = chain_keys(range(32), 4)
    b = chain_keys([*range(9), 99, *range(10, 32)], 4)
    assert list(a[:2]) == list(b[:2])
    assert not set(a[2:]) & set(b[2:])


def test_what_has_no_full_block_has_no_keys() -> None:
    for tokens in ([], [1, 2, 3], np.empty(0, "f4")):
        keys = chain_keys(tokens, 4)
        assert (len(keys), keys.parent) == (0, root_key())


@pytest.mark.parametrize(
    ("tokens", "fragment"),
    [
        ([-1], "run from -1"),
        ([2**32], "must fit 32 bits"),
        ([2**70], "whole numbers"),
        ([1.0], "whole numbers"),
        ([True], "whole numbers"),
        ("abcd", "whole numbers"),
        ([[1], [2]], "1-D"),
        ([[1], [2, 3]], "1-D"),
        ([None], "whole numbers"),
        (3, "1-D"),
    ],
    ids=repr,
)
def test_token_ids_rejected(tokens: Any, fragment: str) -> None:
    with pytest.raises(InvalidArgument, match=fragment):
        chain_keys(tokens, 1)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"block_tokens": -4}, "block_tokens"),
        ({"block_tokens": 2.0}, "block_tokens"),
        ({"block_tokens": 2**32}, "block_tokens"),
        ({"root": b"short"}, "must be 32 bytes"),
        ({"root": "0" * 32}, "must be 32 bytes"),
        ({"extra": ["text"]}, "must be bytes"),
        ({"extra": b"bytes"}, "must be bytes"),
        ({"extra": [b"x" * 65537]}, "65537 bytes"),
        ({"extra": [b""] * 1025}, "1025 extra keys"),
        ({"extra": {0: [b""] * 1025}}, "1025 extra keys"),
        ({"extra": {-1: [b"image"]}}, "by block index"),
        ({"extra": {"0": [b"image"]}}, "by block index"),
    ],
    ids=lambda x: f"{x!r:.40}",
)
def test_chain_rejected(arguments: dict[str, Any], fragment: str) -> None:
    with pytest.raises(InvalidArgument, match=fragment):
        chain_keys(TOKENS, **{"block_tokens": 4, **arguments})


def test_the_limits_themselves_are_accepted() -> None:
    assert len(root_key(b"x" * 65536)) == 32
    assert len(chain_keys([1], 1, extra=[b"x" * 65536] + [b""] * 1023)) == 1
    assert len(chain_keys([1], 2**32 - 1)) == 0
    for root, size in ((b"r", 16), (b"r" * 64, 64)):
        scheme = KeyScheme.opaque("v", algorithm="a", root=root, key_bytes=size)
        assert (scheme.key_bytes, scheme.opaque_keys) == (size, True)
    assert not KeyScheme.sha256().opaque_keys


@pytest.mark.parametrize("salt", [b"x" * 65537, "text", None], ids=["long", "text", "none"])
def test_salt_rejected(salt: Any) -> None:
    with pytest.raises(InvalidArgument, match="at most 65536 bytes"):
        root_key(salt)


def test_slices_keep_their_place() -> None:
    keys = chain_keys(range(24), 4)
    part = keys[2:5]
    assert isinstance(part, BlockKeys)
    assert (len(part), part.start, part.parent) == (3, 2, keys[1])
    assert part[1:].start == 3
    assert part[1:].parent == keys[2]
    assert part.parent_of(0) == keys[1]
    assert part.parent_of(2) == keys[3]
    assert keys[:0].parent == keys.parent
    assert keys[6:].parent == keys[5]
    assert keys[-1] == list(keys)[-1]
    assert (keys[:3] == keys[0:3], keys[:3] == keys[1:4], keys[:3] == list(keys[:3])) == (
        True,
        False,
        False,
    )
    assert hash(keys[:3]) == hash(keys[0:3])
    with pytest.raises(InvalidArgument, match="step 1"):
        keys[::2]
    assert repr(keys) == f"BlockKeys(blocks=6, start=0, last={keys[-1].hex()[:16]})"
    assert repr(keys[:0]) == "BlockKeys(blocks=0, start=0, last=-)"


def test_opaque_keys_are_taken_as_they_are() -> None:
    scheme = KeyScheme.opaque("vllm", algorithm="sha256_cbor", root=b"\0" * 32, key_bytes=16)
    given = [bytes([i]) * 16 for i in range(3)]
    keys = opaque_keys(given, scheme)
    assert (list(keys), keys.parent, keys.start) == (given, b"\0" * 32, 0)


@pytest.mark.parametrize(
    ("keys", "fragment"),
    [
        ([b"x" * 31], "keys of 32 bytes"),
        (["x" * 32], "keys of 32 bytes"),
        ([b"x" * 32, bytearray(32)], "key 1 is"),
        ([b"x" * 32, b"x" * 32], "appears twice"),
    ],
    ids=["short", "text", "bytearray", "repeat"],
)
def test_opaque_keys_rejected(keys: Any, fragment: str) -> None:
    scheme = KeyScheme.opaque("vllm", algorithm="sha256_cbor", root=b"r")
    with pytest.raises(InvalidArgument, match=fragment):
        opaque_keys(keys, scheme)


def test_schemes() -> None:
    own = KeyScheme.sha256(b"salt")
    assert own == KeyScheme("kvstore-sha256", None, None, root_key(b"salt"), 32)
    assert KeyScheme.sha256() != own


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        (("md5", None, None, b"r" * 32, 32), "not known to format version 1"),
        (("kvstore-sha256", "x", None, b"r" * 32, 32), "no name or algorithm"),
        (("kvstore-sha256", None, "x", b"r" * 32, 32), "no name or algorithm"),
        (("kvstore-sha256", None, None, b"r" * 31, 32), "keys of 32 bytes"),
        (("kvstore-sha256", None, None, b"r" * 32, 16), "keys of 32 bytes"),
        (("opaque", None, "a", b"r", 32), "name None must match"),
        (("opaque", "Vllm", "a", b"r", 32), "name 'Vllm' must match"),
        (("opaque", "vllm", "", b"r", 32), "algorithm '' must match"),
        (("opaque", "vllm", "a", b"", 32), "root is"),
        (("opaque", "vllm", "a", b"r" * 65, 32), "root is"),
        (("opaque", "vllm", "a", "root", 32), "root is"),
        (("opaque", "vllm", "a", b"r", 15), "key_bytes is 15"),
        (("opaque", "vllm", "a", b"r", 65), "key_bytes is 65"),
        (("opaque", "vllm", "a", b"r", 32.0), "key_bytes is 32.0"),
    ],
    ids=lambda x: f"{x!r:.60}",
)
def test_scheme_rejected(fields: Any, fragment: str) -> None:
    with pytest.raises(InvalidArgument, match=fragment):
        KeyScheme(*fields)
