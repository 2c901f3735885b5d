"""The prompt: a handbook of some two thousand tokens, and a question about it."""

from __future__ import annotations

from importlib.resources import files
from itertools import cycle, islice

from kvstore.demo.model import LoadedModel
from kvstore.errors import InvalidArgument

QUESTION = "Which three villages does the mill serve?"
"""Its answer stands near the start of the document, so it can only come out of the stored cache."""

MIN_TOKENS = 128


def prompt_tokens(loaded: LoadedModel, tokens: int | None, reserve: int) -> list[int]:
    """Token ids of the whole prompt: the document between the marks of the model's chat format.

    Args:
        loaded: the model, for its tokenizer and its limit.
        tokens: length of the prompt; the document is cut, or repeated, to fit. None: the document
            as it is.
        reserve: tokens that are to be generated after it.

    Raises:
        InvalidArgument: the length is below 128, or more than the model has positions for.
    """
    tokenizer = loaded.tokenizer
    document = files("kvstore.demo").joinpath("document.txt").read_text(encoding="utf-8")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\N{REPLACEMENT CHARACTER}\n\n" + QUESTION}],
        tokenize=False,
        add_generation_prompt=True,
    )
    before, after = (
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in text.split("\N{REPLACEMENT CHARACTER}")
    )
    body = tokenizer(document, add_special_tokens=False)["input_ids"]
    if tokens is not None:
        _check_length(tokens, loaded.positions - reserve)
        body = list(islice(cycle(body), tokens - len(before) - len(after)))
    return [*before, *body, *after]


def _check_length(tokens: int, most: int) -> None:
    if not MIN_TOKENS <= tokens <= most:
        raise InvalidArgument(f"--tokens is {tokens}; it must be from {MIN_TOKENS} to {most}")
