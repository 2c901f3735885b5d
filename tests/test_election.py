from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.election import elected_ranks, elected_replica, is_writer
from kvstore.errors import InvalidArgument
from kvstore.geometry import LayerGroup
from kvstore.parallel import ParallelConfig, Rank
from kvstore.share import all_shares, share_of


@given(st.binary(min_size=8, max_size=64), st.integers(1, 512))
def test_elected_replica_is_in_range(key: bytes, replicas: int):
    assert 0 <= elected_replica(key, replicas) < replicas


def test_election_rule_is_pinned():
    assert elected_replica(bytes(8), 3) == 0
    assert elected_replica(bytes.fromhex("0000000000000005ffff"), 3) == 2
    assert elected_replica(bytes.fromhex("0100000000000000"), 7) == 2**56 % 7


def test_writing_rotates_over_replicas():
    keys = [hashlib.sha256(bytes([i])).digest() for i in range(240)]
    turns = Counter(elected_replica(key, 6) for key in keys)
    assert sorted(turns) == list(range(6))
    assert min(turns.values()) > 20


@given(st.binary(min_size=16, max_size=32))
def test_one_of_the_holders_of_the_same_bytes_writes(key: bytes):
    group = LayerGroup.mla(layers=4)
    config = ParallelConfig(tp=8, dcp=2, pcp=2, pp=2, pcp_kv="replicated")
    shares = all_shares(group, config, 4)
    writers = elected_ranks(shares, key)
    assert all(is_writer(share, key) for _, share in writers)
    places = [(share.layers, share.lattice.index) for _, share in writers]
    assert sorted(places, key=str) == [(range(a, a + 2), c) for a in (0, 2) for c in (0, 1)]


def test_replicas_write_in_turns():
    shares = all_shares(LayerGroup.mla(layers=1), ParallelConfig(tp=3), 1)
    turns = [elected_ranks(shares, key.to_bytes(8, "big")) for key in range(6)]
    assert [[rank.tp for rank, _ in turn] for turn in turns] == [[0], [1], [2]] * 2


def test_rank_without_layers_is_not_elected():
    group = LayerGroup.attention_kv(layers=[0, 1], heads=1, head_size=4)
    config = ParallelConfig(pp=2)
    assert [rank for rank, _ in elected_ranks(all_shares(group, config, 4), bytes(32))] == [Rank()]
    idle = share_of(group, config, Rank(pp=1), 4)
    assert is_writer(idle, bytes(32))
    assert elected_ranks([(Rank(pp=1), idle)], bytes(32)) == []


def test_bad_arguments_are_refused():
    with pytest.raises(InvalidArgument, match="shorter than 8"):
        elected_replica(b"1234567", 2)
    with pytest.raises(InvalidArgument, match="replicas"):
        elected_replica(bytes(8), 0)
