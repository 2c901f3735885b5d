from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import paths
from kvstore.errors import FormatError, InvalidArgument
from kvstore.geometry import GROUP_NAME

NAMESPACE = "tiny-model-" + "0123456789abcdef" * 2
KEY = "ab" + "0" * 62
WRITER = "0123456789abcdef"
GROUP = paths.GroupPath(NAMESPACE, "kv")


def test_every_name_of_the_format() -> None:
    folder = f"{NAMESPACE}/kv"
    flight = GROUP.inflight(KEY, WRITER)
    inflight = f"__kvstore__/inflight/{folder}/{KEY}-{WRITER}"
    shard = "c.0.0.1.0.0"
    names = {
        GROUP.folder: folder,
        GROUP.fanout(KEY): f"{folder}/ab",
        GROUP.extent(KEY): f"{folder}/ab/{KEY}",
        GROUP.record(KEY): f"{folder}/ab/{KEY}/zarr.json",
        GROUP.shard(KEY, shard): f"{folder}/ab/{KEY}/c.0.0.1.0.0",
        GROUP.ref(KEY): f"__kvstore__/refs/{folder}/ab/{KEY}",
        GROUP.quarantine(KEY, "0badcafe"): f"__kvstore__/quarantine/{folder}/{KEY}-0badcafe",
        flight.folder: inflight,
        flight.array: f"{inflight}/array",
        flight.done_folder: f"{inflight}/done",
        flight.shard(shard): f"{inflight}/array/c.0.0.1.0.0",
        flight.part(shard): f"{inflight}/array/c.0.0.1.0.0.part",
        flight.done((0, 1, 12)): f"{inflight}/done/0-1-12",
    }
    for built, wanted in names.items():
        assert built == wanted


BAD_KEYS = ["", "ab", "ab" * 15, "ab" * 65, "AB" * 32, "0" * 33, "../" + KEY, KEY + "\n", "gg" * 32]


@pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
def test_no_name_is_built_from_what_is_not_a_key(key: str) -> None:
    assert not paths.is_key(key)
    for build in (GROUP.fanout, GROUP.extent, GROUP.record, GROUP.ref):
        with pytest.raises(InvalidArgument, match="is not a key"):
            build(key)
    with pytest.raises(InvalidArgument, match="is not a key"):
        GROUP.shard(key, "c.0.0.0.0.0")
    with pytest.raises(InvalidArgument, match="is not a key"):
        GROUP.quarantine(key, "0badcafe")
    with pytest.raises(InvalidArgument, match="in-flight extent"):
        GROUP.inflight(key, WRITER)


@pytest.mark.parametrize("name", ["", "0123456789abcde", "0123456789ABCDEF", "../4567890123456"])
def test_writers_and_tokens_are_checked(name: str) -> None:
    with pytest.raises(InvalidArgument, match="in-flight extent"):
        GROUP.inflight(KEY, name)
    with pytest.raises(InvalidArgument, match="8 lower-case hex"):
        GROUP.quarantine(KEY, name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "m",
        "m-" + "0" * 31,
        "m-" + "0" * 33,
        "m-" + "A" * 32,
        "-" + "0" * 32,
        "-m-" + "0" * 32,
        "m.-" + "0" * 32,
        "a..b-" + "0" * 32,
        "__kvstore__",
        "a/b-" + "0" * 32,
        "M-" + "0" * 32,
        "m" * 65 + "-" + "0" * 32,
        "m-" + "0" * 32 + "\n",
    ],
    ids=repr,
)
def test_not_a_namespace(name: str) -> None:
    assert not paths.is_namespace(name)
    with pytest.raises(InvalidArgument, match="is not a namespace's directory name"):
        paths.GroupPath(name, "kv")


@pytest.mark.parametrize("name", ["", "..", "KV", "kv/", "zarr.json", "__kvstore__", "kv\n", "-kv"])
def test_not_a_group(name: str) -> None:
    assert not paths.is_group(name)
    with pytest.raises(InvalidArgument, match="is not a layer group's directory name"):
        paths.GroupPath(NAMESPACE, name)


@given(st.from_regex(GROUP_NAME, fullmatch=True))
def test_every_group_that_geometry_takes_has_a_path(name: str) -> None:
    assert paths.is_group(name)
    assert paths.GroupPath(NAMESPACE, name).folder == f"{NAMESPACE}/{name}"


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("meta-llama/Llama-3.1-8B", "meta-llama-llama-3.1-8b"),
        ("../../etc/passwd", "etc-passwd"),
        ("a..b", "a-b"),
        ("a. .b", "a.-.b"),
        ("Ünï çødé", "n-d"),
        ("\u0130stan\u212a", "stan"),  # letters whose lower case is ASCII only by Unicode's rules
        ("...", "model"),
        ("", "model"),
        ("模型", "model"),
        ("x" * 63 + "--y", "x" * 63),
        ("x" * 100, "x" * 64),
        ("__kvstore__", "kvstore"),
        ("a\0b\nc", "a-b-c"),
    ],
)
def test_slug_golden(model: str, wanted: str) -> None:
    assert paths.slug(model) == wanted


@given(st.text() | st.text("aA1.-_/ ", max_size=80))
def test_any_model_name_gives_a_namespaces_name(model: str) -> None:
    assert paths.is_namespace(f"{paths.slug(model)}-{'0' * 32}")
    assert len(paths.slug(model)) <= 64


@given(st.integers(0, 9999), st.integers(0, 9999))
def test_shard_names_round_trip(row: int, column: int) -> None:
    assert paths.parse_shard_name(paths.shard_name(row, column)) == (row, column)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "c",
        "c.0.0.0.0",
        "c.0.0.0.0.0.0",
        "c.0.1.0.0.0",
        "c.0.0.0.1.0",
        "c.0.0.0.0.1",
        "c.01.0.0.0.0",
        "c.-1.0.0.0.0",
        "c.0.0.10000.0.0",
        "c/0/0/0/0/0",
        "c.0.0.0.0.0\n",
        "c.0.0.0.0.0.part",
        "c.٣.0.0.0.0",
        "zarr.json",
    ],
    ids=repr,
)
def test_not_a_shard(name: str) -> None:
    with pytest.raises(FormatError, match="is not the name of a shard"):
        paths.parse_shard_name(name)


@given(st.text(max_size=24) | st.from_regex(r"c(\.[0-9]{1,5}){5}", fullmatch=True))
def test_a_shards_name_is_the_only_spelling_of_its_place(name: str) -> None:
    try:
        place = paths.parse_shard_name(name)
    except FormatError:
        return
    assert paths.shard_name(*place) == name


@given(st.tuples(*[st.integers(0, 999_999)] * 3))
def test_marks_round_trip(rank: tuple[int, int, int]) -> None:
    name = GROUP.inflight(KEY, WRITER).done(rank).rsplit("/", 1)[1]
    assert paths.parse_done(name) == rank


@pytest.mark.parametrize("name", ["", "0-0", "0-0-0-0", "00-0-0", "-1-0-0", "0-0-0.tmp", "0-0-٣"])
def test_not_a_mark(name: str) -> None:
    assert paths.parse_done(name) is None


def test_inflight_names_round_trip() -> None:
    name = GROUP.inflight(KEY, WRITER).folder.rsplit("/", 1)[1]
    assert paths.parse_inflight(name) == (KEY, WRITER)
    for bad in (KEY, f"{KEY}-", f"{KEY}-{WRITER}0", f"{KEY}{WRITER}", f"x{name}", f"{name}\n"):
        assert paths.parse_inflight(bad) is None


def test_quarantine_names_round_trip() -> None:
    name = GROUP.quarantine(KEY, "0badcafe").rsplit("/", 1)[1]
    assert paths.parse_quarantine(name) == (KEY, "0badcafe")
    for bad in (KEY, f"{KEY}-", f"{name}0", f"x{name}", f"{name}\n", f"{KEY}-{WRITER}"):
        assert paths.parse_quarantine(bad) is None


def test_fanout_names() -> None:
    assert [n for n in ("00", "ff", "0", "000", "FF", "zz", "..") if paths.is_fanout(n)] == [
        "00",
        "ff",
    ]


def test_writer_id_golden() -> None:
    wanted = hashlib.sha256(b"engine-0\0tp=9,dcp=3").hexdigest()[:16]
    assert paths.writer_id("engine-0", "tp=9,dcp=3") == wanted
    assert paths.writer_id("engine-1", "tp=9,dcp=3") != wanted
    assert paths.writer_id("engine-0", "tp=9") != wanted


def test_a_session_may_have_a_long_name() -> None:
    assert len(paths.writer_id("x" * 4096, "tp=1")) == 16


@pytest.mark.parametrize(
    ("session", "fragment"), [("x" * 4097, "4097 characters"), ("\ud800", "is not Unicode text")]
)
def test_session_rejected(session: Any, fragment: str) -> None:
    with pytest.raises(InvalidArgument, match=fragment):
        paths.writer_id(session, "tp=1")
