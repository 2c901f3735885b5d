"""A cache folder that the engine's own file system tier wrote: what it holds, and in which form.

The tier keeps one file a chunk, the chunk's row as it was in memory::

    <model>_<12 hex digits>/config.json
    <model>_<12 hex digits>_r<rank>/<hhh>/<hh>_g<group>/<block hash>.bin

where the digits are of a digest of ``config.json``. There is no checksum in a file, and nothing
says whether keys and values are interleaved or apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import FormatError, InvalidArgument, NotCertified, NotFound
from kvstore.jsonform import Fields
from kvstore.plugins.vllm.offload import CacheGroup
from kvstore.plugins.vllm.rows import FAMILIES

CONFIG = "config.json"
PAGE = 4096
"""Rows, so files, are padded to whole memory pages."""

_CANONICAL = re.compile(r"v1-([a-z]+)")
_FOLDER = re.compile(r"(.+)_([0-9a-f]{12})")
_CHUNK = re.compile(r"([0-9a-f]{32,128})\.bin")
_SHARD = re.compile(r"([0-9a-f]{2})_g([0-9]{1,9})")
_MOST_BYTES = 16 << 20
_MOST_LAYERS = 4096
_MOST_COPIES = 4096
_ONE = ("tp_size", "pp_size", "pcp_size", "dcp_size")


@dataclass(frozen=True, slots=True)
class FsCache:
    """A cache in canonical form.

    Attributes:
        folder: its folder of chunks.
        model: the engine's name of the model.
        dtype: the engine's name of the cache's data type.
        family: of its pages, ``nhd`` or ``hnd``.
        groups: the engine's cache groups.
    """

    folder: Path
    model: str
    dtype: str
    family: str
    groups: tuple[CacheGroup, ...]


@dataclass(frozen=True, slots=True)
class FsChunk:
    """One file of a cache.

    Attributes:
        path: the file.
        block_hash: of the chunk's last block.
        group: number of the cache group.
    """

    path: Path
    block_hash: bytes
    group: int


def find_caches(source: Path) -> list[Path]:
    """Folders of caches: the source itself, or those in it.

    Raises:
        NotFound: there are none.
    """
    if (source / CONFIG).is_file() and _FOLDER.fullmatch(source.name):
        return [source]
    found = []
    if source.is_dir():
        found = sorted(
            p for p in source.iterdir() if _FOLDER.fullmatch(p.name) and (p / CONFIG).is_file()
        )
    if not found:
        raise NotFound(
            f"there is no cache of vLLM's fs tier in {str(source)!r}; give the tier's root_dir, or "
            "the folder in it that holds config.json"
        )
    return found


def read_cache(folder: Path) -> FsCache:
    """What a cache holds, out of its ``config.json``.

    Raises:
        FormatError: the file is not what the tier wrote.
        NotCertified: the chunks are not canonical; only the config that wrote them can read them.
    """
    what = str(folder / CONFIG)
    try:
        with (folder / CONFIG).open("rb") as opened:
            value: Any = json.loads(opened.read(_MOST_BYTES))
    except ValueError as error:
        raise FormatError(f"{what} is not JSON: {error}") from None
    fields = Fields(value, what)
    _check_name(folder, value)
    _check_canonical(what, value)
    form = _CANONICAL.fullmatch(str(value.get("canonical_format")))
    if form is None or form[1] not in FAMILIES:
        raise NotCertified(
            f"{what}: canonical_format {value.get('canonical_format')!r} is not known; those are: "
            + ", ".join(f"v1-{family}" for family in FAMILIES),
            reason="its canonical format is not known",
        )
    blocks = fields.integer("blocks_per_file", 1, 1 << 20)
    groups = []
    for number, item in enumerate(fields.array("kv_cache_groups", 256)):
        group = Fields(item, f"{what}, cache group {number}")
        names = group.array("layer_names", _MOST_LAYERS)
        if not names or not all(isinstance(name, str) for name in names):
            raise FormatError(f"{group.what}: 'layer_names' are not names")
        tokens = group.integer("tokens_per_block", 1, 65536)
        groups.append(CacheGroup(number, tokens, blocks, tuple(names)))
    if len({len(g.layers) for g in groups}) != 1:
        raise NotCertified(
            f"{what}: its cache groups have different numbers of layers, or there are none; which "
            "bytes of a chunk are whose is not certain",
            reason="cache groups differ",
        )
    folder = folder.with_name(f"{folder.name}_r0")
    return FsCache(folder, fields.text("model_name"), fields.text("dtype"), form[1], tuple(groups))


def _check_name(folder: Path, value: Any) -> None:
    """The folder's name is a digest of what its configuration says."""
    encoded = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(encoded).hexdigest()[:12]
    name = _FOLDER.fullmatch(folder.name)
    if name is None or name[2] != digest:
        raise FormatError(
            f"{folder / CONFIG} is not the one that the folder is named after (its digest is "
            f"{digest}); it was changed, or the folder renamed"
        )


def _check_canonical(what: str, value: dict[str, Any]) -> None:
    engine = value.get("inference_engine")
    if engine != "vllm":
        raise NotCertified(f"{what} was written by {engine!r}, not vllm", reason="another engine")
    if value.get("canonical_format") is None or value.get("parallel_agnostic") is False:
        raise NotCertified(
            f"{what}: the cache is not in canonical form, but in that of one parallel config "
            f"({', '.join(f'{name} {value.get(name)}' for name in _ONE)}); only caches written "
            "with canonical_layout, and certified by the engine, can be converted",
            reason="not canonical",
        )
    if any(value.get(name) != 1 for name in _ONE):
        raise FormatError(f"{what}: a canonical cache that names a parallel config")


def chunks_of(cache: FsCache) -> Iterator[FsChunk | tuple[Path, str]]:
    """All chunks of a cache, in order of name; and other things in its folder, with a reason.

    Files that the engine had not finished writing are left out.

    Raises:
        NotFound: the folder of chunks is gone.
    """
    if not cache.folder.is_dir():
        raise NotFound(f"there is no folder {str(cache.folder)!r}; the cache holds no chunks")
    for top in _sorted(cache.folder):
        for shard in _sorted(top.path) if top.is_dir(follow_symlinks=False) else ():
            where = _SHARD.fullmatch(shard.name)
            for entry in _sorted(shard.path) if shard.is_dir(follow_symlinks=False) else ():
                path = Path(entry.path)
                name = _CHUNK.fullmatch(entry.name)
                if entry.name.endswith(".tmp"):
                    continue
                if name is None or where is None or name[1][:5] != top.name + where[1]:
                    yield path, "its name is not that of a chunk in its place"
                elif not entry.is_file(follow_symlinks=False):
                    yield path, "it is not a plain file"
                elif int(where[2]) >= len(cache.groups):
                    yield path, f"config.json has no cache group {int(where[2])}"
                else:
                    yield FsChunk(path, bytes.fromhex(name[1]), int(where[2]))


def _sorted(folder: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return sorted(found, key=lambda entry: entry.name)


def check_size(size: int, content: int) -> None:
    """Hold a file's size against the content of a chunk.

    Heads that several ranks hold take their room in a row as often as there are such ranks, though
    they are written once.

    Raises:
        InvalidArgument: the file is not of a chunk like that.
    """
    copies = range(1, _MOST_COPIES + 1)
    if not any(size == -(-content * n // PAGE) * PAGE for n in copies):
        raise InvalidArgument(
            f"it has {size} bytes, but a chunk has {content}, padded to a multiple of {PAGE}"
        )
