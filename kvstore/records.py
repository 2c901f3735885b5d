"""The records of a store, a namespace and a layer group: Zarr v3 group metadata with attributes.

Version rules, for every record: another major version is refused, a newer minor version is read,
fields that are not known are ignored, and a ``must_understand`` entry that is not known is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvstore.errors import Corrupt, FormatError, UnsupportedVersion
from kvstore.identity import Identity, identity_from_json
from kvstore.jsonform import Fields, canonical, parse, pretty
from kvstore.paths import is_group

FORMAT = "kvstore"
VERSION = "1.0"
MAJOR = 1
MAX_MUST_UNDERSTAND = 64

_VERSION = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")
_CREATED = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z")


def header() -> dict[str, Any]:
    """The fields that every record of this version starts with."""
    return {"format": FORMAT, "version": VERSION, "must_understand": []}


def check_header(record: Fields) -> None:
    """Refuse a record that this release cannot read.

    Raises:
        FormatError: not a kvstore record, or a malformed version.
        UnsupportedVersion: another major version, or a feature that must be understood and is not.
    """
    if record.text("format", 64) != FORMAT:
        raise FormatError(f"{record.what}: format is not {FORMAT!r}")
    version = record.text("version", 32)
    match = _VERSION.fullmatch(version)
    if match is None:
        raise FormatError(f"{record.what}: version {version!r} is not <major>.<minor>")
    if int(match[1]) != MAJOR:
        raise UnsupportedVersion(
            f"{record.what}: format version {version}; this release reads version {MAJOR}.x. "
            "Use a kvstore release that reads it"
        )
    for feature in record.array("must_understand", MAX_MUST_UNDERSTAND):
        raise UnsupportedVersion(
            f"{record.what}: needs the feature {feature!r:.80}, which this release does not know. "
            "Use a newer kvstore release"
        )


def check_created(record: Fields) -> str:
    """The ``created`` field: UTC, seconds, as ``2026-12-01T03:21:18Z``."""
    created = record.text("created", 20)
    problem = f"{record.what}: created is {created!r}, not a time as YYYY-MM-DDThh:mm:ssZ"
    if not _CREATED.fullmatch(created):
        raise FormatError(problem)
    try:
        datetime.fromisoformat(created)
    except ValueError:
        raise FormatError(problem) from None
    return created


def _encode_group(attributes: dict[str, Any] | None) -> bytes:
    attached = {} if attributes is None else {FORMAT: attributes}
    return pretty({"zarr_format": 3, "node_type": "group", "attributes": attached})


def _decode_group(data: bytes, what: str) -> Fields:
    fields = Fields(parse(data, what), what)
    fields.exactly("zarr_format", 3)
    fields.exactly("node_type", "group")
    record = fields.fields("attributes").fields(FORMAT)
    record.what = what
    check_header(record)
    return record


def encode_plain_group() -> bytes:
    """``zarr.json`` of a fan-out folder: a Zarr group and nothing more."""
    return _encode_group(None)


def encode_store() -> bytes:
    """``zarr.json`` of a store's root."""
    return _encode_group(header())


def decode_store(data: bytes, what: str) -> None:
    """Check the record of a store's root.

    Raises:
        FormatError: it is not one. UnsupportedVersion, Corrupt: as named.
    """
    _decode_group(data, what)


def encode_layer_group(name: str) -> bytes:
    """``zarr.json`` of a layer group."""
    return _encode_group({**header(), "group": name})


def decode_layer_group(data: bytes, what: str) -> str:
    """Name of the layer group, out of its record.

    Raises:
        FormatError: it is not one. UnsupportedVersion, Corrupt: as named.
    """
    name = _decode_group(data, what).text("group", 64)
    if not is_group(name):
        raise FormatError(f"{what}: {name!r} is not the name of a layer group")
    return name


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """The record of a namespace: its identity, and when it was made."""

    identity: Identity
    created: str

    def encode(self) -> bytes:
        """``zarr.json`` of the namespace."""
        return _encode_group(
            {
                **header(),
                "identity": self.identity.to_json(),
                "fingerprint": self.identity.fingerprint,
                "created": self.created,
            }
        )

    @classmethod
    def decode(cls, data: bytes, name: str) -> NamespaceRecord:
        """Check and read a namespace's record.

        Args:
            data: the bytes of its ``zarr.json``.
            name: the directory it was found in; the identity must give that very name.

        Raises:
            FormatError: a field is missing or out of range. UnsupportedVersion: as named.
            Corrupt: the identity does not give the fingerprint or the name.
        """
        what = f"namespace {name}"
        record = _decode_group(data, what)
        identity = identity_from_json(record.value("identity"), f"{what}, identity")
        # The fingerprint is of the object as stored: a reader that ignored a field of it, or took
        # another spelling, would disagree with others on what the namespace is.
        if canonical(record.value("identity")) != canonical(identity.to_json()):
            raise FormatError(f"{what}: its identity has fields that are not in the format")
        stored = record.hex_bytes("fingerprint", 32, 32).hex()
        if stored != identity.fingerprint:
            raise Corrupt(
                f"{what}: fingerprint is {stored}, its identity gives {identity.fingerprint}"
            )
        if identity.namespace != name:
            raise Corrupt(
                f"{what}: its identity belongs in {identity.namespace}; the folder was renamed or "
                "copied. Give it that name again, or remove it"
            )
        return cls(identity, check_created(record))
