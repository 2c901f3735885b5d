from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument, NotCertified
from kvstore.parallel import MAX_RANKS, ParallelConfig, Rank

sizes = st.integers(1, 6)
configs = st.builds(
    ParallelConfig,
    tp=sizes,
    pp=st.just(1),
    dcp=sizes,
    pcp=sizes,
    interleave=st.sampled_from([1, 2, 16]),
    pcp_kv=st.sampled_from(["sharded", "replicated"]),
) | st.lists(st.integers(0, 40), min_size=1, max_size=5).flatmap(
    lambda stages: st.builds(
        ParallelConfig, tp=sizes, pp=st.just(len(stages)), pp_layers=st.just(tuple(stages))
    )
)


@given(configs)
def test_text_form_reads_back(config: ParallelConfig):
    assert ParallelConfig.parse(str(config)) == config


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ParallelConfig(), "tp=1"),
        (ParallelConfig(tp=9, dcp=3), "tp=9,dcp=3"),
        (ParallelConfig(dcp=2), "dcp=2"),
        (ParallelConfig(pp=2, pp_layers=(16, 14)), "pp=2,pp_layers=16+14"),
        (
            ParallelConfig(tp=2, pcp=4, interleave=8, pcp_kv="replicated"),
            "tp=2,pcp=4,interleave=8,pcp_kv=replicated",
        ),
    ],
)
def test_text_form_is_pinned(config: ParallelConfig, text: str):
    assert str(config) == text
    assert ParallelConfig.parse(f" {text} ") == config


def test_text_form_names_rank():
    assert ParallelConfig(tp=9, dcp=3).describe(Rank(tp=4)) == "tp=9,dcp=3;rank=0.0.4"
    with pytest.raises(InvalidArgument, match="tp must be from 0 to 8"):
        ParallelConfig(tp=9, dcp=3).describe(Rank(tp=9))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tp",
        "tp=",
        "tp=x",
        "tp=-1",
        "tp=0",
        "tp=1.5",
        "tp=\N{ARABIC-INDIC DIGIT TWO}",
        "tp=2,tp=2",
        "tp=2,,dcp=2",
        "ep=2",
        "tp=99999999999999999999",
        "tp=" + "9" * 5000,
        "pcp_kv=mirrored",
        "pp=2,pp_layers=16",
        "pp=2,pp_layers=16+",
        f"tp={MAX_RANKS + 1}",
        "tp=65536,pp=2",
    ],
)
def test_bad_text_is_refused(text: str):
    with pytest.raises(InvalidArgument):
        ParallelConfig.parse(text)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", None])
@pytest.mark.parametrize("name", ["tp", "pp", "dcp", "pcp", "interleave"])
def test_bad_field_is_refused(name: str, value: object):
    with pytest.raises(InvalidArgument, match=name):
        ParallelConfig(**{name: value})  # type: ignore[arg-type]


@given(configs)
def test_ranks_are_numbered_with_tp_fastest(config: ParallelConfig):
    ranks = list(config.ranks())
    assert len(ranks) == config.world_size == len(set(ranks))
    for number, rank in enumerate(ranks):
        assert number == (rank.pp * config.pcp + rank.pcp) * config.tp + rank.tp
        assert config.number(rank) == number
        assert config.rank(number) == rank
    assert ranks == sorted(ranks)
    with pytest.raises(InvalidArgument):
        config.rank(config.world_size)


@pytest.mark.parametrize("rank", [Rank(pp=1), Rank(pcp=2), Rank(tp=-1), Rank(tp=True)])
def test_rank_outside_config_is_refused(rank: Rank):
    with pytest.raises(InvalidArgument, match="is not one of tp=4,pcp=2"):
        ParallelConfig(tp=4, pcp=2).number(rank)


def test_cp_rank_by_hand():
    config = ParallelConfig(tp=4, dcp=2, pcp=2)
    assert config.cp == 4
    assert [config.cp_rank(r) for r in config.ranks()] == [0, 1, 0, 1, 2, 3, 2, 3]
    copied = ParallelConfig(tp=4, dcp=2, pcp=2, pcp_kv="replicated")
    assert copied.cp == 2
    assert [copied.cp_rank(r) for r in copied.ranks()] == [0, 1, 0, 1, 0, 1, 0, 1]


def test_stages():
    assert ParallelConfig(pp=3).stage(1, 30) == range(10, 20)
    uneven = ParallelConfig(pp=3, pp_layers=(12, 0, 18))
    assert [uneven.stage(s, 30) for s in range(3)] == [range(12), range(12, 12), range(12, 30)]
    with pytest.raises(NotCertified, match="give pp_layers") as caught:
        ParallelConfig(pp=4).stage(0, 30)
    assert caught.value.reason == "4 pipeline stages do not divide 30 model layers"
    with pytest.raises(NotCertified, match="adds up to 30"):
        uneven.stage(0, 31)
    with pytest.raises(InvalidArgument, match="pipeline stage"):
        uneven.stage(3, 30)


def test_pp_layers_may_be_any_sequence():
    config = ParallelConfig(pp=2, pp_layers=[2, 1])  # type: ignore[arg-type]
    assert config.pp_layers == (2, 1)
    assert hash(config) == hash(ParallelConfig(pp=2, pp_layers=(2, 1)))
