"""The rules of the format, version 1, as a reader checks them: names, keys, JSON, field tables.

Written from the specification alone; shares no code with the kvstore package. A rule's name is
the one in spec/10-rejections.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

Json = dict[str, Any]
CARRIERS = {"float32": "float32", "float16": "float16", "bfloat16": "uint16", "int8": "int8"}
CARRIERS |= {"float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "uint8": "uint8"}
FANOUT, KEY, GROUP = "[0-9a-f]{2}", "(?:[0-9a-f]{2}){16,64}", "[a-z][a-z0-9_-]{0,63}"
NAMESPACE = r"(?!.*\.\.)[a-z0-9](?:[a-z0-9.-]{0,62}[a-z0-9])?-[0-9a-f]{32}"
LABEL, PARENT = "[a-z0-9][a-z0-9_.+-]{0,63}", "(?:[0-9a-f]{2}){1,64}"
VERSION = r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})"
TIME = "[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"
HEADER = f"format:str:1..64 version:str:{VERSION} must_understand:list:0..64"
# field:type:limits; limits are of an integer's value, a string's or list's length; ? allows null
FIELDS = {
    "store": HEADER,
    "layer group": f"{HEADER} group:str:{GROUP}",
    "namespace": f"{HEADER} identity:dict fingerprint:str:[0-9a-f]{{64}} created:str:{TIME}",
    "identity": "model:str model_layers:int:1..4096 revision:str? weights_digest:str? "
    "variants:dict:0..256 key_scheme:dict groups:list:1..256",
    "key scheme": f"scheme:str:kvstore-sha256|opaque name:str?:{LABEL} algorithm:str?:{LABEL} "
    f"root:str:{PARENT} key_bytes:int:16..64",
    "group": f"name:str:{GROUP} layers:list:1..4096 heads:int:1..4096 block_tokens:int:1..65536 "
    "parts:list:1..16 attention:str:full|sliding_window|chunked|mla|linear|opaque "
    "window:int?:1..2147483648 extent_blocks:int:1..4096 shard_layers:int:1..4096 "
    r"shard_heads:int:1..4096 parallel:str?:[\x20-~]{1,4096}",
    "part": f"name:str:[a-z][a-z0-9_]{{0,31}} element:str:{'|'.join(CARRIERS)} "
    "count:int:1..1048576",
    "extent": f"{HEADER} namespace:str:1..160 group:str:1..160 key:str:{KEY} parent:str:{PARENT} "
    "start_block:int:0..1099511627776 blocks:list:1..4096 tokens:int:1..268435456 "
    "parts:list:1..16 chunk_stride:int?:1..4294967296 shards:list:1..65536 "
    f"parallel_invariant:bool writer:dict write_id:str:[0-9a-f]{{32}} created:str:{TIME}",
    "shard": r"name:str:c\.[0-9]{1,4}\.0\.[0-9]{1,4}\.0\.0 bytes:int:1..1099511627776",
    "writer": "software:str:0..4096 config:str:0..4096 session:str:0..4096",
}
ERRORS = {"not-found": "NotFound", "name": "InvalidArgument"}
ERRORS |= dict.fromkeys(("version-major", "must-understand"), "UnsupportedVersion")
ERRORS |= dict.fromkeys(("json-encoding", "json-syntax"), "Corrupt")
ERRORS |= dict.fromkeys(("fingerprint", "namespace-name", "record-place", "record-key"), "Corrupt")
ERRORS |= dict.fromkeys(("shard-missing", "shard-size", "chunk-checksum"), "Corrupt")
INDEX_RULES = ("index-checksum", "index-entry", "index-range", "index-overlap")
ERRORS |= dict.fromkeys(INDEX_RULES, "Corrupt")
TABLE = list(range(256))
for _ in range(8):
    TABLE = [c >> 1 ^ (0x82F63B78 if c & 1 else 0) for c in TABLE]


class Rejected(Exception):
    """Refused: the rule's name in ``rule``, its class of error in ``error``."""

    def __init__(self, rule: str, detail: object) -> None:
        super().__init__(f"{rule}: {detail!s:.200}")
        self.rule, self.error = rule, ERRORS.get(rule, "FormatError")


def need(holds: object, rule: str, detail: object = "") -> None:
    """Raise the rule's rejection unless it holds."""
    if not holds:
        raise Rejected(rule, detail)


def crc32c(data: bytes) -> bytes:
    """CRC-32C of the bytes, as the four bytes that are stored."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return _u32(crc ^ 0xFFFFFFFF)


def _u32(*values: int) -> bytes:
    return b"".join(v.to_bytes(4, "little") for v in values)


def root_key(salt: bytes = b"") -> bytes:
    """Parent of a sequence's first block."""
    return hashlib.sha256(b"kvstore/v1/root\0" + _u32(len(salt)) + salt).digest()


def block_key(parent: bytes, tokens: Sequence[int], extra: Sequence[bytes] = ()) -> bytes:
    """Key of a block of tokens that follows the block whose key is ``parent``."""
    tail = _u32(len(extra)) + b"".join(_u32(len(x)) + x for x in extra)
    return hashlib.sha256(b"kvstore/v1/block" + parent + _u32(len(tokens), *tokens) + tail).digest()


def canonical(value: object) -> bytes:
    """Canonical JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def fingerprint(identity: Json) -> str:
    """Fingerprint of an identity object."""
    return hashlib.sha256(b"kvstore/v1/name\0" + canonical(identity)).hexdigest()


def namespace_name(identity: Json) -> str:
    """Directory name of the namespace with that identity."""
    text = "".join(c.lower() if "A" <= c <= "Z" else c for c in identity["model"])
    text = re.sub(r"[^a-z0-9.]+|\.{2,}", "-", text)[:64].strip("-.")
    return f"{text or 'model'}-{fingerprint(identity)[:32]}"


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text) is not None
    except ValueError:
        return False


def parse(path: Path, node: str, kind: str) -> tuple[Json, Json]:
    """The JSON object in a ``zarr.json``, and the kvstore record in its attributes."""

    def unique(pairs: list[tuple[str, Any]]) -> Json:
        need(len(dict(pairs)) == len(pairs), "json-duplicate", [name for name, _ in pairs])
        return dict(pairs)

    def integer(text: str) -> int:
        need(re.fullmatch("-?[0-9]{1,20}", text), "json-number", text)
        need(-(1 << 63) <= int(text) < 1 << 64, "json-number", text)
        return int(text)

    need(path.is_file(), "not-found", path)
    need(path.stat().st_size <= 16 << 20, "json-size", path)
    hooks: Json = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), integer)
    try:
        document = json.loads(path.read_bytes().decode(), object_pairs_hook=unique, **hooks)
    except UnicodeDecodeError as error:
        raise Rejected("json-encoding", error) from None
    except RecursionError:
        raise Rejected("json-depth", path) from None
    except json.JSONDecodeError as error:
        raise Rejected("json-syntax", error) from None
    level = [document]
    for _ in range(32):
        values = [v for o in level for v in (o.values() if isinstance(o, dict) else o)]
        level = [v for v in values if isinstance(v, dict | list)]
    need(not level, "json-depth", path)
    text = json.dumps(document, ensure_ascii=False)
    need(not re.search("[\ud800-\udfff]", text), "json-surrogate", path)
    attributes = check(document, "", "attributes:dict")["attributes"]
    record: Json = check(attributes, "", "kvstore:dict")["kvstore"]
    need(canonical(document.get("zarr_format")) == b"3", "zarr-format", path)
    need(document.get("node_type") == node, "zarr-node", path)
    check(record, "", HEADER)
    need(record["format"] == "kvstore", "format-name", record["format"])
    need(record["version"].split(".")[0] == "1", "version-major", record["version"])
    need(record["must_understand"] == [], "must-understand", record["must_understand"])
    check(record, kind)
    return document, record


def check(value: Any, kind: str, fields: str = "", *, closed: bool = False) -> Json:
    """Check an object's fields: present, of the type, within the limits."""
    need(type(value) is dict, "field-type", kind)
    names = []
    for item in (fields or FIELDS[kind]).split(" "):
        name, of, limits = (*item.split(":", 2), "")[:3]
        names.append(name)
        need(name in value, "field-missing", f"{kind} {name}")
        found = value[name]
        if of.endswith("?") and found is None:
            continue
        need(type(found).__name__ == of.rstrip("?"), "field-type", f"{kind} {name}")
        limits = limits or ("" if of in ("dict", "bool") else "1..4096")
        if ends := re.fullmatch(r"(\d+)\.\.(\d+)", limits):
            size = found if of[:3] == "int" else len(found)
            need(int(ends[1]) <= size <= int(ends[2]), "field-range", f"{kind} {name}")
        elif of[:3] == "str":
            need(re.fullmatch(limits, found), "field-range", f"{kind} {name}")
            need(limits != TIME or _is_time(found), "field-range", found)
    need(not closed or len(names) == len(value), "field-unknown", kind)
    return dict(value)
