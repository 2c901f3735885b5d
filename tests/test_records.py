from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutate import Edit, drop, junk, paths_of, put
from tiny import tiny_identity

from kvstore.errors import Corrupt, FormatError, UnsupportedVersion
from kvstore.identity import Identity
from kvstore.jsonform import pretty
from kvstore.records import (
    NamespaceRecord,
    decode_layer_group,
    decode_store,
    encode_layer_group,
    encode_plain_group,
    encode_store,
)

CREATED = "2026-12-01T03:21:18Z"
HERE = "attributes.kvstore"


def test_store_golden() -> None:
    assert encode_store() == (
        b'{\n  "zarr_format": 3,\n  "node_type": "group",\n  "attributes": {\n    "kvstore": {\n'
        b'      "format": "kvstore",\n      "version": "1.0",\n      "must_understand": []\n'
        b"    }\n  }\n}\n"
    )
    decode_store(encode_store(), "store")


def test_layer_group_golden() -> None:
    assert json.loads(encode_layer_group("kv")) == {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {
            "kvstore": {"format": "kvstore", "version": "1.0", "must_understand": [], "group": "kv"}
        },
    }
    assert decode_layer_group(encode_layer_group("kv"), "group") == "kv"


def test_a_fanout_folder_is_a_plain_zarr_group() -> None:
    assert json.loads(encode_plain_group()) == {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {},
    }
    with pytest.raises(FormatError, match="'kvstore' is missing"):
        decode_store(encode_plain_group(), "store")


def test_namespace_round_trip(identity: Identity) -> None:
    record = NamespaceRecord(identity, CREATED)
    stored = json.loads(record.encode())["attributes"]["kvstore"]
    assert sorted(stored) == [
        *("created", "fingerprint", "format", "identity", "must_understand", "version")
    ]
    assert stored["fingerprint"] == identity.fingerprint
    assert NamespaceRecord.decode(record.encode(), identity.namespace) == record


HEADER_REJECTED: dict[str, tuple[Edit, type[FormatError], str]] = {
    "zarr-2": (put("zarr_format", 2), FormatError, "'zarr_format' is 2, not 3"),
    "zarr-bool": (put("zarr_format", value=True), FormatError, "'zarr_format' is True"),
    "zarr-text": (put("zarr_format", "3"), FormatError, "'zarr_format' is '3'"),
    "zarr-missing": (drop("zarr_format"), FormatError, "'zarr_format' is missing"),
    "node-array": (put("node_type", "array"), FormatError, "'node_type' is 'array'"),
    "node-missing": (drop("node_type"), FormatError, "'node_type' is missing"),
    "attributes-missing": (drop("attributes"), FormatError, "'attributes' is missing"),
    "attributes-list": (put("attributes", []), FormatError, "a list where an object belongs"),
    "record-missing": (drop(HERE), FormatError, "'kvstore' is missing"),
    "record-text": (put(HERE, "kvstore"), FormatError, "a str where an object belongs"),
    "format": (put(f"{HERE}.format", "KVStore"), FormatError, "format is not 'kvstore'"),
    "format-missing": (drop(f"{HERE}.format"), FormatError, "'format' is missing"),
    "version-missing": (drop(f"{HERE}.version"), FormatError, "'version' is missing"),
    "version-number": (put(f"{HERE}.version", 1), FormatError, "'version' is 1, not a string"),
    "version-spelling": (put(f"{HERE}.version", "1"), FormatError, "is not <major>.<minor>"),
    "version-zeros": (put(f"{HERE}.version", "01.0"), FormatError, "is not <major>.<minor>"),
    "version-digits": (put(f"{HERE}.version", "1.٣"), FormatError, "is not <major>.<minor>"),
    "version-huge": (put(f"{HERE}.version", "1." + "9" * 31), FormatError, "not a string of at"),
    "version-0": (put(f"{HERE}.version", "0.9"), UnsupportedVersion, "format version 0.9; this"),
    "version-2": (put(f"{HERE}.version", "2.0"), UnsupportedVersion, "format version 2.0; this"),
    "feature": (
        put(f"{HERE}.must_understand", ["zstd-chunks"]),
        UnsupportedVersion,
        "needs the feature 'zstd-chunks'",
    ),
    "feature-odd": (put(f"{HERE}.must_understand", [None]), UnsupportedVersion, "feature None"),
    "features-missing": (drop(f"{HERE}.must_understand"), FormatError, "is missing"),
    "features-text": (put(f"{HERE}.must_understand", "x"), FormatError, "not an array"),
    "features-many": (put(f"{HERE}.must_understand", [0] * 65), FormatError, "at most 64 items"),
}
NAMESPACE_REJECTED: dict[str, tuple[Edit, type[FormatError], str]] = {
    "identity-missing": (drop(f"{HERE}.identity"), FormatError, "'identity' is missing"),
    "identity-null": (put(f"{HERE}.identity", None), FormatError, "where an object belongs"),
    "identity-heads": (put(f"{HERE}.identity.groups.0.heads", 0), FormatError, "'heads' is 0"),
    "identity-extra": (put(f"{HERE}.identity.extra", 1), FormatError, "not in the format"),
    "group-extra": (put(f"{HERE}.identity.groups.0.x", 1), FormatError, "not in the format"),
    "identity-changed": (
        put(f"{HERE}.identity.model", "Tiny/Model-1.5B (Test)"),
        Corrupt,
        "its identity gives",
    ),
    "fingerprint-missing": (drop(f"{HERE}.fingerprint"), FormatError, "'fingerprint' is missing"),
    "fingerprint": (put(f"{HERE}.fingerprint", "0" * 64), Corrupt, "fingerprint is 0000"),
    "fingerprint-short": (put(f"{HERE}.fingerprint", "0" * 62), FormatError, "hex of 32 to 32"),
    "fingerprint-upper": (put(f"{HERE}.fingerprint", "A" * 64), FormatError, "lower-case hex"),
    "created-missing": (drop(f"{HERE}.created"), FormatError, "'created' is missing"),
    "created-zone": (put(f"{HERE}.created", CREATED[:-1]), FormatError, "not a time as"),
    "created-number": (put(f"{HERE}.created", 5), FormatError, "not a string"),
    "created-month": (put(f"{HERE}.created", "2026-13-01T03:21:18Z"), FormatError, "not a time"),
    "created-day": (put(f"{HERE}.created", "2026-02-29T03:21:18Z"), FormatError, "not a time"),
    "created-year": (put(f"{HERE}.created", "0000-01-01T00:00:00Z"), FormatError, "not a time"),
    "created-digits": (put(f"{HERE}.created", "٣026-01-01T00:00:00Z"), FormatError, "not a time"),
}


def damaged(data: bytes, edit: Edit) -> bytes:
    stored = json.loads(data)
    edit(stored)
    return pretty(stored)


@pytest.mark.parametrize("case", HEADER_REJECTED)
def test_every_record_rejects_a_wrong_header(case: str, identity: Identity) -> None:
    edit, error, fragment = HEADER_REJECTED[case]
    record = NamespaceRecord(identity, CREATED).encode()
    for decode, data in (
        (decode_store, encode_store()),
        (decode_layer_group, encode_layer_group("kv")),
        (NamespaceRecord.decode, record),
    ):
        with pytest.raises(error, match=fragment) as caught:
            decode(damaged(data, edit), identity.namespace)
        assert type(caught.value) is error
        assert identity.namespace in str(caught.value)


@pytest.mark.parametrize("case", NAMESPACE_REJECTED)
def test_namespace_rejected(case: str, identity: Identity) -> None:
    edit, error, fragment = NAMESPACE_REJECTED[case]
    data = NamespaceRecord(identity, CREATED).encode()
    with pytest.raises(error, match=fragment) as caught:
        NamespaceRecord.decode(damaged(data, edit), identity.namespace)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"namespace {identity.namespace}")


@pytest.mark.parametrize("name", ["..", "a/b", "", "zarr.json", "x" * 65, None, 5])
def test_a_layer_groups_name_is_a_folders(name: Any) -> None:
    with pytest.raises(FormatError, match=r"not the name of a layer group|not a string"):
        decode_layer_group(damaged(encode_layer_group("kv"), put(f"{HERE}.group", name)), "x")


def test_a_renamed_namespace_is_corrupt(identity: Identity) -> None:
    data = NamespaceRecord(identity, CREATED).encode()
    with pytest.raises(Corrupt, match="the folder was renamed or copied"):
        NamespaceRecord.decode(data, "other-" + "0" * 32)


@pytest.mark.parametrize("version", ["1.1", "1.999999"])
def test_a_newer_minor_version_with_fields_of_its_own_is_read(
    version: str, identity: Identity
) -> None:
    record = NamespaceRecord(identity, CREATED)
    stored = json.loads(record.encode())
    stored["attributes"]["kvstore"] |= {"version": version, "later": {"x": [1]}}
    stored["attributes"]["others"] = 5
    stored["consolidated_metadata"] = None
    assert NamespaceRecord.decode(pretty(stored), identity.namespace) == record


@pytest.mark.parametrize("size", range(0, 400, 7))
def test_a_cut_record_is_corrupt(size: int, identity: Identity) -> None:
    with pytest.raises(Corrupt, match="not a JSON object"):
        NamespaceRecord.decode(NamespaceRecord(identity, CREATED).encode()[:size], "x")


VALID = json.loads(NamespaceRecord(tiny_identity(), CREATED).encode())


@given(st.data())
def test_any_change_gives_the_same_record_or_a_format_error(data: st.DataObject) -> None:
    stored = copy.deepcopy(VALID)
    put(data.draw(st.sampled_from(paths_of(stored))), data.draw(junk))(stored)
    try:
        read = NamespaceRecord.decode(pretty(stored), tiny_identity().namespace)
    except FormatError:
        return
    assert read.identity == tiny_identity()


@given(st.integers(0, 10_000), st.binary(max_size=4), st.integers(0, 3))
def test_any_damaged_bytes_give_the_same_identity_or_a_format_error(
    at: int, new: bytes, removed: int
) -> None:
    whole = NamespaceRecord(tiny_identity(), CREATED).encode()
    at %= len(whole)
    try:
        read = NamespaceRecord.decode(
            whole[:at] + new + whole[at + removed :], tiny_identity().namespace
        )
    except FormatError:
        return
    assert read.identity == tiny_identity()
