from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupt, FormatError
from kvstore.jsonform import Fields, canonical, compact, hex_bytes, parse, pretty

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | text
values = st.recursive(
    scalars, lambda x: st.lists(x, max_size=4) | st.dictionaries(text, x, max_size=4), max_leaves=12
)


def test_canonical_golden() -> None:
    value = {"b": [1, None, True, -5], "a": {"é": "\x00/\U0001f600", "Z": ""}}
    assert canonical(value) == (
        rb'{"a":{"Z":"","\u00e9":"\u0000/\ud83d\ude00"},"b":[1,null,true,-5]}'
    )


@given(st.dictionaries(text, values, max_size=5))
def test_every_written_form_is_read_back(value: dict[str, Any]) -> None:
    for form in (canonical, pretty, compact):
        assert parse(form(value), "x") == value


@given(st.dictionaries(text, values, max_size=5))
def test_canonical_does_not_depend_on_the_order_of_names(value: dict[str, Any]) -> None:
    assert canonical(dict(reversed(value.items()))) == canonical(value)
    assert canonical(parse(pretty(value), "x")) == canonical(value)


@pytest.mark.parametrize("write", [canonical, pretty, compact])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_json_is_not_written(write: Any, bad: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write({"x": bad})


REJECTED = {
    "empty": (b"", Corrupt, "not a JSON object"),
    "cut": (b'{"a": 1', Corrupt, "not a JSON object"),
    "trailing": (b'{"a": 1} x', Corrupt, "not a JSON object"),
    "comma": (b'{"a": 1,}', Corrupt, "not a JSON object"),
    "zeros": (b"\0" * 64, Corrupt, "not a JSON object"),
    "byte-order-mark": (b'\xef\xbb\xbf{"a": 1}', Corrupt, "not a JSON object"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), Corrupt, "not a JSON object"),
    "latin-1": (b'{"a": "\xe9"}', Corrupt, "not a JSON object"),
    "control": (b'{"a": "\n"}', Corrupt, "not a JSON object"),
    "leading-zero": (b'{"a": 01}', Corrupt, "not a JSON object"),
    "array": (b"[]", FormatError, "a JSON list where an object belongs"),
    "null": (b"null", FormatError, "a JSON NoneType where an object belongs"),
    "twice": (b'{"a": 1, "a": 1}', FormatError, "a name appears twice"),
    "twice-inside": (b'{"a": [{"b": 1, "b": 2}]}', FormatError, "a name appears twice"),
    "twice-escaped": (rb'{"a": 1, "\u0061": 2}', FormatError, "a name appears twice"),
    "float": (b'{"a": 1.0}', FormatError, "the number 1.0 is not an integer"),
    "exponent": (b'{"a": 1e2}', FormatError, "the number 1e2 is not an integer"),
    "nan": (b'{"a": NaN}', FormatError, "the number NaN is not an integer"),
    "infinity": (b'{"a": -Infinity}', FormatError, "the number -Infinity is not an integer"),
    "large": (b'{"a": 18446744073709551616}', FormatError, "does not fit 64 bits"),
    "small": (b'{"a": -9223372036854775809}', FormatError, "does not fit 64 bits"),
    "huge": (b'{"a": ' + b"9" * 100_000 + b"}", FormatError, "does not fit 64 bits"),
    "half-a-pair": (rb'{"a": "\ud83d"}', FormatError, "half of a surrogate pair"),
    "half-a-pair-in-a-name": (rb'{"a": [{"\uDE00": 1}]}', FormatError, "half of a surrogate"),
    "deep": (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", FormatError, "levels deep"),
    "deeper": (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", FormatError, "levels deep"),
    "deepest": (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, Corrupt, "not a JSON object"),
    "long": (b'{"a": "' + b"x" * (16 << 20) + b'"}', FormatError, "a record has at most"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case: str) -> None:
    data, error, fragment = REJECTED[case]
    with pytest.raises(error, match=fragment) as caught:
        parse(data, "the record")
    assert type(caught.value) is error
    assert str(caught.value).startswith("the record: ")
    assert len(str(caught.value)) < 300


def test_the_bounds_themselves_are_accepted() -> None:
    assert parse(b'{"a": 18446744073709551615}', "x") == {"a": (1 << 64) - 1}
    assert parse(b'{"a": -9223372036854775808}', "x") == {"a": -(1 << 63)}
    assert parse(b'{"a": "' + b"x" * ((16 << 20) - 9) + b'"}', "x")
    assert parse(b'{"a": ' + b"[" * 31 + b"]" * 31 + b"}", "x")
    with pytest.raises(FormatError, match="more than 32 levels deep"):
        parse(b'{"a": ' + b"[" * 32 + b"]" * 32 + b"}", "x")


@given(st.binary(max_size=64) | text.map(str.encode))
def test_any_bytes_give_an_object_or_a_format_error(data: bytes) -> None:
    try:
        value = parse(data, "x")
    except FormatError:
        return
    assert value == json.loads(data)


@pytest.fixture
def fields() -> Fields:
    return Fields(
        {
            "n": 5,
            "yes": True,
            "s": "text",
            "none": None,
            "list": [1, 2, 3],
            "o": {"x": 1},
            "hex": "00ff",
        },
        "the record",
    )


def test_typed_access(fields: Fields) -> None:
    assert fields.integer("n", 5, 5) == 5
    assert fields.optional_integer("n", 0, 9) == 5
    assert fields.optional_integer("none", 0, 9) is None
    assert fields.text("s", 4) == "text"
    assert fields.optional_text("s") == "text"
    assert fields.optional_text("none") is None
    assert fields.boolean("yes") is True
    assert fields.array("list", 3) == [1, 2, 3]
    assert fields.fields("o").integer("x", 0, 1) == 1
    assert fields.hex_bytes("hex", 2, 2) == b"\x00\xff"
    assert fields.value("none") is None
    assert fields.has("none")
    assert not fields.has("absent")
    assert fields.names() == ["n", "yes", "s", "none", "list", "o", "hex"]
    fields.exactly("n", 5)
    fields.exactly("none", None)


WRONG = {
    "integer-missing": (lambda f: f.integer("absent", 0, 9), "'absent' is missing"),
    "integer-low": (lambda f: f.integer("n", 6, 9), "'n' is 5, not a whole number from 6 to 9"),
    "integer-high": (lambda f: f.integer("n", 0, 4), "'n' is 5, not a whole number from 0 to 4"),
    "integer-bool": (lambda f: f.integer("yes", 0, 9), "'yes' is True, not a whole number"),
    "integer-text": (lambda f: f.integer("s", 0, 9), "'s' is 'text', not a whole number"),
    "integer-null": (lambda f: f.integer("none", 0, 9), "'none' is None, not a whole number"),
    "optional-missing": (lambda f: f.optional_integer("absent", 0, 9), "'absent' is missing"),
    "optional-bool": (lambda f: f.optional_integer("yes", 0, 9), "not a whole number"),
    "text-long": (lambda f: f.text("s", 3), "not a string of at most 3 characters"),
    "text-number": (lambda f: f.text("n"), "not a string"),
    "optional-text-missing": (lambda f: f.optional_text("absent"), "'absent' is missing"),
    "optional-text-number": (lambda f: f.optional_text("n"), "not a string"),
    "boolean-number": (lambda f: f.boolean("n"), "'n' is 5, not true or false"),
    "array-long": (lambda f: f.array("list", 2), "not an array of at most 2 items"),
    "array-object": (lambda f: f.array("o", 9), "not an array"),
    "array-text": (lambda f: f.array("s", 9), "not an array"),
    "fields-list": (lambda f: f.fields("list"), "'list': a list where an object belongs"),
    "exactly-value": (lambda f: f.exactly("n", 6), "'n' is 5, not 6"),
    "exactly-type": (lambda f: f.exactly("yes", 1), "'yes' is True, not 1"),
    "exactly-missing": (lambda f: f.exactly("absent", None), "'absent' is missing"),
    "hex-number": (lambda f: f.hex_bytes("n", 0, 9), "is not lower-case hex of 0 to 9 bytes"),
    "hex-short": (lambda f: f.hex_bytes("hex", 3, 9), "is not lower-case hex of 3 to 9 bytes"),
    "hex-long": (lambda f: f.hex_bytes("hex", 0, 1), "is not lower-case hex of 0 to 1 bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_fields(case: str, fields: Fields) -> None:
    access, fragment = WRONG[case]
    with pytest.raises(FormatError, match=fragment) as caught:
        access(fields)
    assert str(caught.value).startswith("the record")


@pytest.mark.parametrize("bad", ["0", "FF", "0x00", "zz", " 00", "00\n", "٠٠", "f f0"])  # noqa: RUF001  # digits that int() takes and hex may not
def test_hex_is_lower_case_and_even(bad: str) -> None:
    with pytest.raises(FormatError, match="lower-case hex"):
        hex_bytes(bad, 0, 64, "x")


def test_hex_and_text_have_exact_bounds() -> None:
    assert hex_bytes("00" * 3, 3, 3, "x") == bytes(3)
    for bad in ("00" * 4, "00" * 2):
        with pytest.raises(FormatError, match="hex of 3 to 3 bytes"):
            hex_bytes(bad, 3, 3, "x")
    for size, method in ((4096, "text"), (4096, "optional_text")):
        assert getattr(Fields({"a": "x" * size}, "x"), method)("a")
        with pytest.raises(FormatError, match="at most 4096 characters"):
            getattr(Fields({"a": "x" * (size + 1)}, "x"), method)("a")


def test_messages_stay_short() -> None:
    with pytest.raises(FormatError) as caught:
        Fields({"a": "x" * 100_000}, "x").integer("a", 0, 1)
    assert len(str(caught.value)) < 200
