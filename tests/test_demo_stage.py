"""The demonstration without its model: rank processes, store, load, and what is noticed."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvstore.demo import model
from kvstore.demo.check import compare
from kvstore.demo.errors import DemoError
from kvstore.demo.generation import Continuation
from kvstore.demo.job import CacheFacts, Job
from kvstore.demo.matrix import Row, parse_rows
from kvstore.demo.prompt import QUESTION, prompt_tokens
from kvstore.demo.show import swap_heads
from kvstore.demo.stage import Stage, load_as, store_as
from kvstore.errors import InvalidArgument

LAYERS, HEADS, SIZE, BLOCK, TOKENS = 6, 3, 4, 4, 76
ROWS = {
    "float32": "tp=9,dcp=3@nhd-packed -> pp=2,pp_layers=4+2@hnd-split",
    "bfloat16": "tp=3,pp=2,pp_layers=4+2@nhd-split -> tp=9,dcp=3@hnd-packed",
}


def stage_of(folder: Path, dtype: str, ticks: list[None]) -> Stage:
    kind = {"float32": np.uint32, "bfloat16": np.uint16}[dtype]
    bits = np.random.default_rng(7).integers(
        0, np.iinfo(kind).max, (LAYERS, HEADS, TOKENS, 2, SIZE), kind
    )
    return Stage(
        root=folder / "store",
        work=folder,
        facts=CacheFacts("model", "0" * 64, LAYERS, HEADS, SIZE, dtype, BLOCK),
        cache=bits,
        tokens=list(range(TOKENS)),
        start_method="forkserver",
        tick=lambda: ticks.append(None),
    )


@pytest.fixture(scope="module", params=sorted(ROWS))
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Stage, Row]:
    """A stage on which a row's writer has stored."""
    ticks: list[None] = []
    stage = stage_of(tmp_path_factory.mktemp("demo"), request.param, ticks)
    (row,) = parse_rows([ROWS[request.param]])
    outcome = store_as(stage, row.writer)
    copies = 9 // HEADS // 3 if row.writer.config.dcp == 3 else 1
    assert outcome.ranks == row.writer.config.world_size == len(ticks)
    assert outcome.private_bytes == copies * stage.cache.nbytes
    assert outcome.disk_bytes > stage.cache.nbytes
    assert [p.name for p in stage.work.iterdir()] == ["store"]
    return stage, row


def test_other_ranks_load_what_these_stored(stored: tuple[Stage, Row]):
    stage, row = stored
    loaded = load_as(stage, row.writer, row.reader)
    assert loaded.pages
    assert np.array_equal(loaded.cache, stage.cache)
    assert loaded.nbytes >= stage.cache.nbytes


def test_a_single_bit_that_differs_is_noticed(stored: tuple[Stage, Row]):
    stage, row = stored
    other = stage.cache.copy()
    other[-1, -1, -1, -1, -1] ^= 1
    loaded = load_as(dataclasses.replace(stage, cache=other), row.writer, row.reader)
    assert not loaded.pages
    assert np.count_nonzero(loaded.cache != other) == 1


def test_other_tokens_are_not_found(stored: tuple[Stage, Row]):
    stage, row = stored
    other = dataclasses.replace(stage, tokens=[*stage.tokens[:-1], 9])
    with pytest.raises(DemoError, match="72 are found"):
        load_as(other, row.writer, row.reader)


def test_a_rank_that_fails_says_why(stored: tuple[Stage, Row], monkeypatch: pytest.MonkeyPatch):
    stage, row = stored
    plain = Job.to_json
    monkeypatch.setattr(
        Job, "to_json", lambda job: plain(dataclasses.replace(job, root="/nowhere/at/all"))
    )
    with pytest.raises(DemoError, match=r"asked to load, failed: NotFound: .*/nowhere/at/all"):
        load_as(stage, row.writer, row.reader)


def test_a_rank_that_dies_is_noticed(stored: tuple[Stage, Row], monkeypatch: pytest.MonkeyPatch):
    stage, row = stored
    monkeypatch.setattr("kvstore.demo.rank.serve", os._exit)
    monkeypatch.setattr(Job, "to_json", lambda _job: 3)
    with pytest.raises(DemoError, match="asked to load, died"):
        load_as(stage, row.writer, row.reader)


def test_the_comparison_sees_every_kind_of_difference():
    bits = np.arange(2 * 3 * 4 * 2 * 2, dtype=np.uint32).reshape(2, 3, 4, 2, 2)
    told = Continuation([4, 1], torch.tensor([[0.0, 1.0], [2.0, 3.0]]), 0.1)
    assert compare((bits, told), (bits.copy(), told), pages=True).good
    negative = dataclasses.replace(told, logits=torch.tensor([[-0.0, 1.0], [2.0, 3.0]]))
    verdict = compare((bits, told), (bits, negative), pages=True)
    assert (verdict.logits, verdict.good) == (False, False)
    other = dataclasses.replace(told, tokens=[4, 2])
    assert not compare((bits, told), (bits, other), pages=True).tokens
    assert not compare((bits, told), (swap_heads(bits), told), pages=True).cache
    verdict = compare((bits, told), (bits, told), pages=False)
    assert not verdict.good
    assert verdict.differences().startswith("pages differ")


def test_missing_packages_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model, "WEIGHTS_PACKAGE", "no_such_weights")
    with pytest.raises(DemoError, match=r"no_such_weights; run the demo with tools/demo"):
        model.weights_file()


class Words:
    """A tokenizer whose tokens are words' lengths."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: bool) -> str:
        return f"<user> {messages[0]['content']} <model>"

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


@pytest.mark.parametrize("tokens", [None, 128, 500, 3000])
def test_a_prompt_is_as_long_as_asked(tokens: int | None):
    fake = SimpleNamespace(tokenizer=Words(), positions=4096)
    prompt = prompt_tokens(fake, tokens, reserve=32)  # type: ignore[arg-type]
    assert len(prompt) == tokens if tokens else len(prompt) > 1500
    # The question stands at the end, whatever was cut from the document.
    assert prompt[-7:] == [len(w) for w in [*QUESTION.split()[-6:], "<model>"]]


@pytest.mark.parametrize("tokens", [127, 4065])
def test_a_prompt_too_short_or_too_long_is_refused(tokens: int):
    fake = SimpleNamespace(tokenizer=Words(), positions=4096)
    with pytest.raises(InvalidArgument, match="from 128 to 4064"):
        prompt_tokens(fake, tokens, reserve=32)  # type: ignore[arg-type]
