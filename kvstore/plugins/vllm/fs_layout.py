"""The folders that vLLM's own file system tier keeps: what is in them, and whether it is canonical.

A cache is two folders: ``<model>_<12 hex>/config.json`` says what is stored, where the hex digits
are of a digest of what it says; ``<model>_<12 hex>_r<rank>/hhh/hh_g<group>/<block hash>.bin`` are
the blocks, one row of the primary tier each. With ``canonical_layout`` the rows of all parallel
configs are alike, and lie under rank 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidArgument, NotCertified, NotFound
from kvstore.plugins.vllm.offload import CacheGroup

CONFIG = "config.json"
FORMATS = {"v1-nhd": "nhd", "v1-hnd": "hnd"}
"""Canonical formats of the engine that are understood, and the family of their pages."""

_FOLDER = re.compile(r".+_(?P<digest>[0-9a-f]{12})")
_RANK = re.compile(r"(?P<cache>.+_[0-9a-f]{12})_r\d+")
_BLOCK = re.compile(r"(?P<hash>(?:[0-9a-f]{2}){16,64})\.bin")
_LEFTOVER = re.compile(r".+\.bin_\d+\.tmp|\.o_direct_probe_\d+\.tmp")
_BRANCH = re.compile(r"[0-9a-f]{3}")
_TWIG = re.compile(r"(?P<hash>[0-9a-f]{2})_g(?P<group>0|[1-9]\d{0,5})")
_MOST_BYTES = 16 << 20
_SIZES = ("tp_size", "pp_size", "pcp_size", "dcp_size")
_KNOWN = {
    *("model_name", "tokens_per_hash", "blocks_per_file", "dtype", "kv_cache_groups"),
    *("inference_engine", "parallel_agnostic", "replicated_layout", "canonical_format", *_SIZES),
}


@dataclass(frozen=True, slots=True)
class BlockFile:
    """One file of a cache.

    Attributes:
        path: where it is.
        block_hash: hash of the last engine block in it; empty where the file is none of a cache.
        group: number of the engine's cache group.
        stray: why it is none of a cache; empty where it is.
    """

    path: str
    block_hash: bytes = b""
    group: int = 0
    stray: str = ""


@dataclass(frozen=True, slots=True)
class FsCache:
    """A canonical cache of the engine's file system tier.

    Attributes:
        folder: the folder with its ``config.json``.
        model: the engine's name of the model.
        dtype: the engine's name of the cache's data type.
        family: order of heads and tokens in its pages, ``nhd`` or ``hnd``.
        groups: the engine's cache groups.
    """

    folder: Path
    model: str
    dtype: str
    family: str
    groups: tuple[CacheGroup, ...]

    def files(self) -> Iterator[BlockFile]:
        """All files, in order of hash; leftovers of writers that died are passed over.

        Raises:
            OSError: a folder cannot be read.
        """
        root = f"{self.folder}_r0"
        if not os.path.isdir(root):  # noqa: PTH112 - a path beside the folder, as a name
            return
        for branch in _entries(root):
            if not (branch.is_dir(follow_symlinks=False) and _BRANCH.fullmatch(branch.name)):
                yield from _stray(branch)
                continue
            for twig in _entries(branch.path):
                named = _TWIG.fullmatch(twig.name)
                if not named or not twig.is_dir(follow_symlinks=False):
                    yield from _stray(twig)
                    continue
                start, group = branch.name + named["hash"], int(named["group"])
                for entry in _entries(twig.path):
                    block = _BLOCK.fullmatch(entry.name)
                    if not block or not block["hash"].startswith(start):
                        yield from _stray(entry)
                        continue
                    yield BlockFile(entry.path, bytes.fromhex(block["hash"]), group)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return sorted(found, key=lambda entry: entry.name)


def _stray(entry: os.DirEntry[str]) -> Iterator[BlockFile]:
    if not _LEFTOVER.fullmatch(entry.name):
        yield BlockFile(entry.path, stray="its name or place is not one of the engine's")


def find_cache(place: Path) -> Path:
    """The folder with the ``config.json`` of the cache that is meant.

    Args:
        place: that folder, the folder of its blocks, or the one that both are in.

    Raises:
        NotFound: there is no cache. InvalidArgument: there are several.
    """
    place = Path(os.path.abspath(place))  # noqa: PTH100 - names matter, so links stay as they are
    if _is_cache(place):
        return place
    blocks = _RANK.fullmatch(place.name)
    if blocks and _is_cache(place.with_name(blocks["cache"])):
        return place.with_name(blocks["cache"])
    found = sorted(p for p in place.iterdir() if _is_cache(p)) if place.is_dir() else []
    if not found:
        raise NotFound(
            f"there is no cache of vLLM's file system tier in {str(place)!r}; give its root_dir, "
            f"where folders <model>_<12 hex digits> hold a {CONFIG} each"
        )
    if len(found) > 1:
        raise InvalidArgument(
            f"{str(place)!r} holds {len(found)} caches; give the one that is meant: "
            f"{', '.join(repr(str(p)) for p in found)}"
        )
    return found[0]


def _is_cache(folder: Path) -> bool:
    return _FOLDER.fullmatch(folder.name) is not None and (folder / CONFIG).is_file()


def read_cache(folder: Path) -> FsCache:
    """What a cache says of itself.

    Args:
        folder: what :func:`find_cache` gave.

    Raises:
        NotCertified: its rows are not known to be canonical. InvalidArgument: its ``config.json``
            is not the engine's.
    """
    fields = _fields(folder)
    what = f"cache {folder.name!r}"
    written = fields.get("canonical_format")
    if written is None:
        raise NotCertified(
            f"{what} was written without 'canonical_layout' in kv_connector_extra_config: its "
            "files hold what each rank happened to hold; they cannot be converted",
            reason="the cache is not canonical",
        )
    if written not in FORMATS:
        raise NotCertified(
            f"{what} has pages of format {written!r}; those that can be converted are "
            f"{', '.join(FORMATS)}",
            reason="the page format is not known",
        )
    if fields.get("parallel_agnostic", True) is not True or any(fields[n] != 1 for n in _SIZES):
        sizes = ", ".join(f"{name} {fields[name]}" for name in _SIZES)
        raise NotCertified(
            f"{what} is for one parallel config ({sizes}): the engine could not certify that its "
            "pages are whole, so they cannot be converted",
            reason="the cache is for one parallel config",
        )
    groups = _groups(fields, what)
    if len({(len(g.layers), g.block_tokens) for g in groups}) > 1:
        raise NotCertified(
            f"{what} has cache groups of different sizes, whose pages lie apart in a way that it "
            "does not say; it cannot be converted",
            reason="cache groups have different sizes",
        )
    return FsCache(folder, fields["model_name"], fields["dtype"], FORMATS[written], groups)


def _fields(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        with path.open("rb") as opened:
            data = opened.read(_MOST_BYTES)
        fields = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(fields, dict) or fields.get("inference_engine") != "vllm":
        raise InvalidArgument(f"{str(path)!r} is not a configuration of vLLM's file system tier")
    named = _FOLDER.fullmatch(folder.name)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    if named is None or hashlib.sha256(text.encode()).hexdigest()[:12] != named["digest"]:
        raise InvalidArgument(
            f"{str(path)!r} does not say what the folder's name stands for: one of them was "
            "changed. Give the cache as the engine left it"
        )
    unknown = sorted(set(fields) - _KNOWN)
    if unknown:
        raise NotCertified(
            f"{str(path)!r} says more than is understood here ({', '.join(unknown)}): the cache is "
            "of a newer engine, and its files may hold something else",
            reason="the cache is of a newer engine",
        )
    _require(fields, str(path))
    return fields


def _require(fields: Mapping[str, Any], path: str) -> None:
    texts = all(isinstance(fields.get(n), str) for n in ("model_name", "dtype"))
    family = isinstance(fields.get("canonical_format"), str | None)
    counts = all(_whole(fields.get(n)) for n in ("tokens_per_hash", "blocks_per_file", *_SIZES))
    groups = fields.get("kv_cache_groups")
    listed = isinstance(groups, list) and bool(groups) and all(_is_group(g) for g in groups)
    if not (texts and family and counts and listed):
        raise InvalidArgument(f"{path!r} lacks fields, or they are of another kind than vLLM's")


def _is_group(group: Any) -> bool:
    if not isinstance(group, dict) or set(group) != {"tokens_per_block", "layer_names"}:
        return False
    names = group["layer_names"]
    named = isinstance(names, list) and bool(names) and all(isinstance(n, str) for n in names)
    return named and _whole(group["tokens_per_block"])


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _groups(fields: Mapping[str, Any], what: str) -> tuple[CacheGroup, ...]:
    blocks = fields["blocks_per_file"]
    groups = tuple(
        CacheGroup(number, g["tokens_per_block"], blocks, tuple(g["layer_names"]))
        for number, g in enumerate(fields["kv_cache_groups"])
    )
    for group in groups:
        if group.block_tokens % fields["tokens_per_hash"]:
            raise InvalidArgument(f"{what} has blocks that do not hold whole hashed spans")
    return groups
