"""Roots of the engine's hash chains."""

from __future__ import annotations

import hashlib
import pickle

import pytest

from kvstore import InvalidArgument
from kvstore.plugins.vllm.roots import DEFAULT_SEED, key_scheme, root_of, seed_of


@pytest.mark.parametrize("seed", ["", "0", DEFAULT_SEED, "ü" * 200])
def test_sha256_is_that_of_the_pickled_seed(seed: str) -> None:
    assert root_of("sha256", seed) == hashlib.sha256(pickle.dumps(seed, protocol=5)).digest()


@pytest.mark.parametrize(("seed", "head"), [("a", "61"), ("a" * 24, "7818"), ("a" * 256, "790100")])
def test_cbor_is_canonical(seed: str, head: str) -> None:
    wanted = hashlib.sha256(bytes.fromhex(head) + seed.encode()).digest()
    assert root_of("sha256_cbor", seed) == wanted


def test_a_random_root_is_refused_with_the_remedy() -> None:
    assert seed_of("sha256", {}) == DEFAULT_SEED
    assert seed_of("xxhash", {"PYTHONHASHSEED": "7"}) == "7"
    with pytest.raises(InvalidArgument, match="set PYTHONHASHSEED"):
        seed_of("xxhash_cbor", {})
    with pytest.raises(InvalidArgument, match="not known"):
        seed_of("md5", {})
    with pytest.raises(InvalidArgument, match="only known to the engine"):
        root_of("xxhash", "7")


def test_the_scheme_has_the_length_of_the_keys() -> None:
    assert key_scheme("xxhash", b"r" * 16).key_bytes == 16
