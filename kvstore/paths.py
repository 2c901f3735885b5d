"""Every stored name, built and parsed in this one place.

Names are relative to the store's root and use ``/``. Nothing here touches a file system; nothing
elsewhere joins strings into a stored name.
"""

from __future__ import annotations

import hashlib
import re
import string
from dataclasses import dataclass

from kvstore.errors import FormatError, InvalidArgument, require_kind
from kvstore.geometry import GROUP_NAME

RECORD = "zarr.json"
PRIVATE = "__kvstore__"
"""Folder of all that is not Zarr hierarchy. Zarr reserves names that start with ``__``."""

INFLIGHT = f"{PRIVATE}/inflight"
QUARANTINE = f"{PRIVATE}/quarantine"
REFS = f"{PRIVATE}/refs"
TRASH = f"{PRIVATE}/trash"
PART_SUFFIX = ".part"
MAX_SESSION = 4096

_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,62}[a-z0-9])?-[0-9a-f]{32}")
_KEY = re.compile(r"(?:[0-9a-f]{2}){16,64}")
_TOKEN = re.compile(r"[0-9a-f]{8}")
_FANOUT = re.compile(r"[0-9a-f]{2}")
_SHARD = re.compile(r"c\.(0|[1-9][0-9]{0,3})\.0\.(0|[1-9][0-9]{0,3})\.0\.0")
_DONE = re.compile(r"(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,5})")
_INFLIGHT = re.compile(r"((?:[0-9a-f]{2}){16,64})-([0-9a-f]{16})")
_QUARANTINE = re.compile(r"((?:[0-9a-f]{2}){16,64})-([0-9a-f]{8})")
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_SLUG_JUNK = re.compile(r"[^a-z0-9.]+|\.{2,}")


@dataclass(frozen=True, slots=True)
class GroupPath:
    """Names inside one layer group of one namespace."""

    namespace: str
    group: str

    def __post_init__(self) -> None:
        if not is_namespace(self.namespace):
            raise InvalidArgument(f"{self.namespace!r} is not a namespace's directory name")
        if not is_group(self.group):
            raise InvalidArgument(f"{self.group!r} is not a layer group's directory name")

    @property
    def folder(self) -> str:
        """The layer group's folder."""
        return f"{self.namespace}/{self.group}"

    def fanout(self, key: str) -> str:
        """The folder that an extent's folder lies in."""
        return f"{self.folder}/{_checked(key)[:2]}"

    def extent(self, key: str) -> str:
        """The folder of an extent, by the hex of its key."""
        return f"{self.fanout(key)}/{key}"

    def record(self, key: str) -> str:
        """The record whose existence is the extent's existence."""
        return f"{self.extent(key)}/{RECORD}"

    def shard(self, key: str, name: str) -> str:
        """One shard of an extent."""
        return f"{self.extent(key)}/{name}"

    def ref(self, block_key: str) -> str:
        """The hint that names an extent in which a block lies."""
        return f"{REFS}/{self.extent(block_key)}"

    def inflight(self, key: str, writer: str) -> InflightPath:
        """The folder in which one writer group builds an extent."""
        name = f"{key}-{writer}"
        if parse_inflight(name) is None:
            raise InvalidArgument(f"{name!r} is not the name of an in-flight extent")
        return InflightPath(f"{INFLIGHT}/{self.folder}/{name}")

    def quarantine(self, key: str, token: str) -> str:
        """Where an extent that failed verification is moved."""
        if not _TOKEN.fullmatch(token):
            raise InvalidArgument(f"{token!r} is not 8 lower-case hex digits")
        return f"{QUARANTINE}/{self.folder}/{_checked(key)}-{token}"


@dataclass(frozen=True, slots=True)
class InflightPath:
    """Names inside the folder in which one writer group builds one extent."""

    folder: str

    @property
    def array(self) -> str:
        """The extent's folder under construction; publication renames it."""
        return f"{self.folder}/array"

    @property
    def done_folder(self) -> str:
        """Folder of the ranks' marks."""
        return f"{self.folder}/done"

    def shard(self, name: str) -> str:
        """A finished shard."""
        return f"{self.folder}/array/{name}"

    def part(self, name: str) -> str:
        """A shard that several ranks fill, not sealed yet."""
        return f"{self.folder}/array/{name}{PART_SUFFIX}"

    def done(self, rank: tuple[int, int, int]) -> str:
        """The mark of rank ``(pp, pcp, tp)``: all bytes it was elected to write are in place."""
        return f"{self.folder}/done/{rank[0]}-{rank[1]}-{rank[2]}"


def _checked(key: str) -> str:
    if not is_key(key):
        raise InvalidArgument(f"{key!r:.160} is not a key: lower-case hex of 16 to 64 bytes")
    return key


def writer_id(session: str, config: str) -> str:
    """Name of a writer group: the ranks of one engine under one parallel config, 16 hex digits.

    Raises:
        InvalidArgument: the session's name is too long for a record, or not Unicode text.
    """
    require_kind("session", session, str, "the name that the engine's ranks share, as text")
    if len(session) > MAX_SESSION:
        raise InvalidArgument(f"session has {len(session)} characters; at most {MAX_SESSION}")
    try:
        text = f"{session}\0{config}".encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"session {session!r:.80} is not Unicode text: {error}") from None
    return hashlib.sha256(text).hexdigest()[:16]


def slug(model: str) -> str:
    """The readable part of a namespace's name."""
    # ASCII letters alone change case: Unicode's rules have versions, and names must not.
    text = _SLUG_JUNK.sub("-", model.translate(_LOWER))[:64].strip("-.")
    return text or "model"


def shard_name(layer_shard: int, head_shard: int) -> str:
    """Name of a shard by its place in the shard grid."""
    return f"c.{layer_shard}.0.{head_shard}.0.0"


def parse_shard_name(name: str) -> tuple[int, int]:
    """Place in the shard grid of a shard's name.

    Raises:
        FormatError: it is not the name of a shard.
    """
    match = _SHARD.fullmatch(name)
    if match is None:
        raise FormatError(f"{name!r} is not the name of a shard (c.<layer>.0.<head>.0.0)")
    return int(match[1]), int(match[2])


def is_namespace(name: str) -> bool:
    """Whether a name is one that a namespace may have."""
    return _NAMESPACE.fullmatch(name) is not None and ".." not in name


def is_group(name: str) -> bool:
    """Whether a name is one that a layer group may have."""
    return GROUP_NAME.fullmatch(name) is not None


def is_key(name: str) -> bool:
    """Whether a name is one that an extent may have."""
    return _KEY.fullmatch(name) is not None


def is_fanout(name: str) -> bool:
    """Whether a name is a fan-out folder's."""
    return _FANOUT.fullmatch(name) is not None


def parse_done(name: str) -> tuple[int, int, int] | None:
    """Rank ``(pp, pcp, tp)`` of a mark; None for other names."""
    match = _DONE.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def parse_inflight(name: str) -> tuple[str, str] | None:
    """Extent key and writer id of an in-flight folder; None for other names."""
    match = _INFLIGHT.fullmatch(name)
    return None if match is None else (match[1], match[2])


def parse_quarantine(name: str) -> tuple[str, str] | None:
    """Extent key and token of a folder in quarantine; None for other names."""
    match = _QUARANTINE.fullmatch(name)
    return None if match is None else (match[1], match[2])
