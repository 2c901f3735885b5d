from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import share as share_module
from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import ContentPart, LayerGroup
from kvstore.parallel import ParallelConfig, Rank
from kvstore.share import Share, TokenLattice, all_shares, certify, share_of


def kv(heads: int, layers: int | list[int] = 4) -> LayerGroup:
    return LayerGroup.attention_kv(layers=layers, heads=heads, head_size=8)


@given(
    st.integers(1, 9),
    st.integers(1, 6).flatmap(lambda cp: st.tuples(st.just(cp), st.integers(0, cp - 1))),
    st.integers(0, 200),
    st.integers(0, 200),
)
def test_lattice_helpers_agree_with_the_definition(
    interleave: int, place: tuple[int, int], start: int, length: int
):
    cp, index = place
    stop = start + length
    lattice = TokenLattice(interleave, cp, index)
    own = [t for t in range(stop) if (t // interleave) % cp == index]
    inside = [t for t in own if t >= start]
    assert lattice.count(start, stop) == len(inside)
    assert lattice.owned(start, stop).tolist() == inside
    assert lattice.canonical(np.arange(len(own))).tolist() == own
    assert lattice.local(own).tolist() == list(range(len(own)))
    assert lattice.whole == (cp == 1)


def test_lattice_helpers_on_an_empty_or_backward_range():
    lattice = TokenLattice(2, 3, 1)
    assert lattice.count(5, 5) == lattice.count(9, 2) == 0
    assert lattice.owned(9, 2).tolist() == []


@pytest.mark.parametrize("fields", [(0, 1, 0), (1, 0, 0), (1, 2, 2), (1, 2, -1)])
def test_bad_lattice_is_refused(fields: tuple[int, int, int]):
    with pytest.raises(InvalidArgument):
        TokenLattice(*fields)


def test_heads_split_over_tp():
    shares = [share_of(kv(8), ParallelConfig(tp=4), Rank(tp=t), 4) for t in range(4)]
    assert [s.heads for s in shares] == [range(2 * t, 2 * t + 2) for t in range(4)]
    assert {(s.replicas, s.replica) for s in shares} == {(1, 0)}


def test_more_tp_ranks_than_heads_are_replicas():
    shares = [share_of(kv(3), ParallelConfig(tp=6), Rank(tp=t), 4) for t in range(6)]
    assert [s.heads.start for s in shares] == [0, 0, 1, 1, 2, 2]
    assert [(s.replicas, s.replica) for s in shares] == [(2, 0), (2, 1)] * 3


def test_dcp_takes_its_ranks_from_the_replicas():
    config = ParallelConfig(tp=8, dcp=2, interleave=4)
    shares = [share_of(kv(2), config, Rank(tp=t), 4) for t in range(8)]
    assert [s.lattice for s in shares] == [TokenLattice(4, 2, t % 2) for t in range(8)]
    assert [s.replica for s in shares] == [0, 0, 1, 1] * 2
    assert {s.replicas for s in shares} == {2}


def test_replicated_pcp_multiplies_the_replicas():
    config = ParallelConfig(tp=4, dcp=2, pcp=2, pcp_kv="replicated")
    shares = [share_of(kv(1), config, rank, 4) for rank in config.ranks()]
    assert [s.replica for s in shares] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {(s.replicas, s.lattice.cp) for s in shares} == {(4, 2)}


def test_stages_are_ranges_of_model_layers():
    hybrid = kv(2, layers=[0, 3, 4, 5, 20])
    config = ParallelConfig(pp=4, pp_layers=(4, 2, 10, 8))
    layers = [share_of(hybrid, config, Rank(pp=p), 24).layers for p in range(4)]
    assert layers == [range(2), range(2, 4), range(4, 4), range(4, 5)]
    assert share_of(hybrid, config, Rank(pp=2), 24).empty
    certify(hybrid, config, 24)


def test_all_shares_leaves_out_ranks_without_layers():
    hybrid = kv(2, layers=[0, 3])
    config = ParallelConfig(tp=2, pp=2)
    assert [str(rank) for rank, _ in all_shares(hybrid, config, 8)] == ["0.0.0", "0.0.1"]


REFUSED = [
    (kv(4), "tp=3", "3 TP ranks cannot share 4 KV heads evenly"),
    (kv(4), "tp=6", "6 TP ranks cannot share 4 KV heads evenly"),
    (kv(4), "tp=2,dcp=2", "dcp 2 does not divide the 1 TP ranks that hold the same heads"),
    (kv(1), "dcp=4", "dcp 4 does not divide the 1 TP ranks"),
    (kv(1), "tp=3,dcp=2", "dcp 2 does not divide the 3 TP ranks"),
    (kv(2), "tp=4,dcp=4", "dcp 4 does not divide the 2 TP ranks"),
    (kv(2), "pp=3", "3 pipeline stages do not divide 4 model layers"),
    (kv(2), "pp=2,pp_layers=3+2", "pp_layers adds up to 5 layers, but the model has 4"),
]


@pytest.mark.parametrize(("group", "text", "reason"), REFUSED)
def test_configs_that_do_not_fit_are_refused(group: LayerGroup, text: str, reason: str):
    config = ParallelConfig.parse(text)
    for call in (
        lambda: share_of(group, config, Rank(), 4),
        lambda: all_shares(group, config, 4),
        lambda: certify(group, config, 4),
    ):
        with pytest.raises(NotCertified) as caught:
            call()
        assert caught.value.reason.startswith(reason)
        assert str(config) in str(caught.value)


def test_linear_state_is_not_split_by_tokens():
    state = LayerGroup(
        name="state",
        layers=(0,),
        heads=1,
        block_tokens=1,
        parts=(ContentPart("state", "float32", 64),),  # type: ignore[arg-type]
        attention="linear",
    )
    certify(state, ParallelConfig(tp=2), 1)
    certify(state, ParallelConfig(pcp=2, pcp_kv="replicated"), 1)
    with pytest.raises(NotCertified, match="linear-attention"):
        certify(state, ParallelConfig(pcp=2), 1)


def test_wrong_calls_are_not_matters_of_certification():
    for call in (
        lambda: share_of(kv(2), ParallelConfig(), Rank(tp=1), 4),
        lambda: share_of(kv(2, layers=[7]), ParallelConfig(), Rank(), 7),
        lambda: certify(kv(2), ParallelConfig(), 0),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert not isinstance(caught.value, NotCertified)


def test_opaque_group_is_for_one_rank_of_one_config():
    config = ParallelConfig(tp=3, dcp=2, pp=2)
    owner = Rank(pp=1, tp=2)
    group = LayerGroup.opaque(
        name="r5", layers=[6, 7, 9], page_bytes=64, block_tokens=16, parallel=config.describe(owner)
    )
    whole = Share(range(3), range(1), TokenLattice())
    assert share_of(group, config, owner, 10) == whole
    assert all_shares(group, config, 10) == ((owner, whole),)
    certify(group, config, 10)
    with pytest.raises(NotCertified, match=r"belongs to tp=3,pp=2,dcp=2;rank=1\.0\.2"):
        share_of(group, config, Rank(pp=1, tp=1), 10)
    for other in (ParallelConfig(tp=3, pp=2), ParallelConfig()):
        with pytest.raises(NotCertified):
            certify(group, other, 10)
        with pytest.raises(NotCertified):
            all_shares(group, other, 10)


@pytest.mark.parametrize(
    "parallel", ["tp=2", "tp=2;rank=0.0", "tp=2;rank=0.0.x", "tp=2;rank=0.0.9"]
)
def test_opaque_group_with_any_other_text_is_refused(parallel: str):
    group = LayerGroup.opaque(
        name="r", layers=[0], page_bytes=64, block_tokens=16, parallel=parallel
    )
    with pytest.raises(NotCertified):
        certify(group, ParallelConfig(tp=2), 1)


def test_page_bytes():
    share = share_of(kv(8), ParallelConfig(tp=4), Rank(), 4)
    assert share.page_bytes(kv(8), 16) == 2 * 16 * 32


def test_certify_looks_at_one_stage_only(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def counting(group: LayerGroup, config: ParallelConfig, rank: Rank, model_layers: int) -> Share:
        asked.append(rank)
        return share_of(group, config, rank, model_layers)

    monkeypatch.setattr(share_module, "share_of", counting)
    certify(kv(8, layers=80), ParallelConfig(tp=64, dcp=8, pp=8), 80)
    assert len(asked) == 64


@pytest.mark.parametrize("fault", ["replica", "index", "heads", "cp", "replicas", "shift"])
def test_certify_catches_a_faulty_mapping(fault: str, monkeypatch: pytest.MonkeyPatch):
    config = ParallelConfig(tp=8, dcp=2)

    def faulty(group: LayerGroup, config: ParallelConfig, rank: Rank, model_layers: int) -> Share:
        right = share_of(group, config, rank, model_layers)
        if fault == "shift":
            moved = range(right.heads.start + 1, right.heads.stop + 1)
            return Share(right.layers, moved, right.lattice, right.replicas, right.replica)
        if rank.tp != 5:
            return right
        lattice, heads, replicas, replica = (
            right.lattice,
            right.heads,
            right.replicas,
            right.replica,
        )
        if fault == "replica":
            replica = 1 - replica
        elif fault == "index":
            lattice = TokenLattice(1, 2, 1 - lattice.index)
        elif fault == "cp":
            lattice = TokenLattice(1, 3, lattice.index)
        elif fault == "heads":
            heads = range(2)
        else:
            replicas = 3
        return Share(right.layers, heads, lattice, replicas, replica)

    certify(kv(2), config, 4)
    monkeypatch.setattr(share_module, "share_of", faulty)
    with pytest.raises(NotCertified, match="tiled exactly once"):
        certify(kv(2), config, 4)
