"""A reader of kvstore format 1, from its specification: reader.py STORE [NAMESPACE/GROUP/KEY]."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from functools import reduce
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

Json = dict[str, Any]
CARRIERS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int8": "|i1", "uint8": "|u1"}
CARRIERS |= {"float8_e4m3fn": "|u1", "float8_e5m2": "|u1"}
NAMESPACE, TEXT = r"(?!.*\.\.)[a-z0-9](?:[a-z0-9.-]{0,62}[a-z0-9])?-[0-9a-f]{32}", "(?s:.{1,4096})"
TIME = "(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"
# Text is a string's pattern, (1, 4) an integer, [x, 1, 4] an array of x, {x} x or null (page 08).
HEADER = {"format": "kvstore", "version": r"1\.(0|[1-9][0-9]{0,5})", "must_understand": [{}, 0, 0]}
PART = {"name": "[a-z][a-z0-9_]{0,31}", "element": "|".join(CARRIERS), "count": (1, 1 << 20)}
GROUP: Json = {"name": "[a-z][a-z0-9_-]{0,63}", "layers": [(0, 4095), 1, 4096]}
GROUP |= dict.fromkeys(("heads", "extent_blocks", "shard_layers", "shard_heads"), (1, 4096))
GROUP |= {"attention": "full|sliding_window|chunked|mla|linear|opaque", "parts": [PART, 1, 16]}
GROUP |= {"block_tokens": (1, 65536), "window": {(1, 1 << 31)}, "parallel": {"[ -~]{1,4096}"}}
SCHEME: Json = {name: {"[a-z0-9][a-z0-9_.+-]{0,63}"} for name in ("name", "algorithm")}
SCHEME |= {"scheme": "kvstore-sha256|opaque", "root": "([0-9a-f]{2}){1,64}", "key_bytes": (16, 64)}
IDENTITY: Json = {"model": TEXT, "model_layers": (1, 4096), "variants": {}, "revision": {TEXT}}
IDENTITY |= {"weights_digest": {TEXT}, "key_scheme": SCHEME, "groups": [GROUP, 1, 256]}
SPACE = {"identity": IDENTITY, "fingerprint": "[0-9a-f]{64}", "created": TIME}
EXTENT: Json = {"start_block": (0, 1 << 40), "tokens": (1, 1 << 28), "parallel_invariant": False}
EXTENT |= {"parent": SCHEME["root"], "parts": [PART, 1, 16], "chunk_stride": {(1, 1 << 32)}}
EXTENT |= {"shards": [{"name": TEXT, "bytes": (1, 1 << 40)}, 1, 65536], "created": TIME}
EXTENT |= {"writer": dict.fromkeys(("software", "config", "session"), "(?s:.{0,4096})")}
CODECS = '[{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]'
ARRAY = """{"shape": [%(L)d, %(b)d, %(heads)d, %(T)d, %(C)d], "data_type": "%(type)s", "fill_value":
0, "dimension_names": ["layer", "block", "head", "token", "content"], "chunk_key_encoding": {"name":
"default", "configuration": {"separator": "."}}, "chunk_grid": {"name": "regular", "configuration":
{"chunk_shape": [%(shard_layers)d, %(b)d, %(shard_heads)d, %(T)d, %(C)d]}}, "codecs": [{"name":
"sharding_indexed", "configuration": {"chunk_shape": [1, %(b)d, 1, %(T)d, %(C)d],
"codecs": %(codecs)s, "index_codecs": %(codecs)s, "index_location": "end"}}]}"""
CRC_TABLE = [reduce(lambda c, _: c >> 1 ^ 0x82F63B78 * (c & 1), range(8), n) for n in range(256)]
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode  # page 05
Rejected = ValueError  # every refusal, as Python itself refuses what is not UTF-8 or not JSON


def need(rule: str, *conditions: object) -> None:
    """Refuse unless all conditions hold."""
    if not all(conditions):
        raise Rejected(rule)


def crc32c(data: bytes) -> bytes:
    """CRC-32C, as it is stored (page 07)."""
    crc = reduce(lambda c, byte: c >> 8 ^ CRC_TABLE[(c ^ byte) & 255], data, 0xFFFFFFFF)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def root_key(salt: bytes) -> bytes:
    """What stands for the key before a sequence's first block (page 05)."""
    return hashlib.sha256(b"kvstore/v1/root\0" + len(salt).to_bytes(4, "little") + salt).digest()


def block_key(parent: bytes, tokens: list[int], extra: list[bytes]) -> bytes:
    """Key of the block after the one of key ``parent`` (page 05)."""
    numbers = np.array([len(tokens), *tokens, len(extra)], "<u4").tobytes()
    tail = b"".join(len(x).to_bytes(4, "little") + x for x in extra)
    return hashlib.sha256(b"kvstore/v1/block" + parent + numbers + tail).digest()


def check(value: Any, rule: Any) -> Any:
    """The value, if it is what the rule says, less members that no rule speaks of."""
    if isinstance(rule, set):
        return None if value is None else check(value, *rule)
    wrong, kind = f"{value!r:.99} is not {rule!r:.99}", type(rule)
    need(wrong, type(value) is (int if kind is tuple else kind))  # so true is no integer
    if kind is dict:  # a member that is missing, "...", is not what any rule says
        return {name: check(value.get(name, ...), rule[name]) for name in rule}
    if kind is list:
        need(wrong, rule[1] <= len(value) <= rule[2])
        return [check(item, rule[0]) for item in value]
    need(wrong, kind is not tuple or rule[0] <= value <= rule[1])
    need(wrong, kind is not str or re.fullmatch(rule, value))
    return value


def parse(folder: Path, node: str, members: Json) -> tuple[Json, Json]:
    """The object in a folder's ``zarr.json``, and the record in it (page 08)."""
    path, strings = folder / "zarr.json", re.compile(r'"(?:[^"\\]|\\.)*"')
    need(f"not-found or json-size: {path}", path.is_file() and path.stat().st_size <= 16 << 20)
    rule = {"zarr_format": (3, 3), "node_type": node, "attributes": {"kvstore": HEADER | members}}
    bare = strings.sub("", text := path.read_bytes().decode())
    need("json-depth", max(accumulate((c in "[{") - (c in "]}") for c in bare), default=0) <= 32)
    need("json-number", *(-(2**63) <= int(n) < 2**64 for n in re.findall("-?[0-9]+", bare)))
    document: Json = json.loads(text, parse_float=int, parse_constant=int)  # int refuses both
    kept = strings.sub("", json.dumps(document, ensure_ascii=False).encode().decode())
    need("json-duplicate", kept.count(":") == bare.count(":"))  # and encode half a surrogate pair
    record: Json = check(document, rule)["attributes"]["kvstore"]
    np.datetime64(record.get("created", "2026-12-01Z")[:-1])  # refuses the 31st of June
    return document, record


def open_namespace(root: Path, name: str) -> tuple[Json, Json]:
    """Key scheme and layer groups of a namespace; C, E, L and T are as in page 02."""
    need("name", re.fullmatch(NAMESPACE, name), parse(root, "group", {}))
    document, record = parse(root / name, "group", SPACE)
    stored = document["attributes"]["kvstore"]["identity"]
    identity = record["identity"] | {"variants": stored["variants"]}
    scheme, groups, variants = identity["key_scheme"], identity["groups"], identity["variants"]
    check([*variants, *variants.values()], [TEXT, 0, 512])
    fixed = [scheme["name"], scheme["algorithm"], scheme["key_bytes"], len(scheme["root"])]
    own = scheme["scheme"] == "kvstore-sha256"
    need("identity-scheme", fixed == [None, None, 32, 64] if own else None not in fixed)
    need("identity-weights", identity["revision"] or identity["weights_digest"])
    need("identity-groups", len({g["name"] for g in groups}) == len(groups))
    need("field-unknown", canonical(identity) == canonical(stored))
    digest = hashlib.sha256(b"kvstore/v1/name\0" + canonical(identity).encode()).hexdigest()
    text = identity["model"].encode().lower().decode()  # bytes have no case but that of A to Z
    slug = re.sub(r"[^a-z0-9.]+|\.{2,}", "-", text)[:64].strip("-.") or "model"
    need("fingerprint", record["fingerprint"] == digest, name == f"{slug}-{digest[:32]}")
    for g in groups:
        layers, parts, kind = g["layers"], g["parts"], g["attention"]
        names, types = {p["name"] for p in parts}, {p["element"] for p in parts}
        need("group-layers", layers == sorted({*layers}), layers[-1] < identity["model_layers"])
        need("group-shards", len(layers) % g["shard_layers"] == g["heads"] % g["shard_heads"] == 0)
        given = [g["window"] is not None, g["parallel"] is not None]
        page = (g["heads"], names, types) == (1, {"page"}, {"uint8"})
        need("group-attention", given == [kind in ("sliding_window", "chunked"), kind == "opaque"])
        need("group-attention or group-parts", page or kind != "opaque", len(names) == len(parts))
        size = sum(p["count"] * np.dtype(CARRIERS[p["element"]]).itemsize for p in parts)
        carrier = np.dtype(CARRIERS[types.pop()] if len(types) == 1 else "|u1")
        tokens, content = 1 if kind == "opaque" else g["block_tokens"], size // carrier.itemsize
        need("group-size", content <= 1 << 20, g["extent_blocks"] * tokens * size <= 1 << 30)
        g |= {"C": content, "E": size, "L": len(layers), "T": tokens, "type": carrier.name}
    return scheme | {"key": f"[0-9a-f]{{{2 * fixed[2]}}}"}, {g["name"]: g for g in groups}


def read(root: Path, place: str) -> tuple[Json, Any]:
    """Record of an extent, and its array in its carrier type, every byte checked (page 07)."""
    name, group, key = [*place.split("/", 2), "", ""][:3]
    scheme, groups = open_namespace(root, name)
    need("name", group in groups, re.fullmatch(scheme["key"], key))
    folder, g = root / name / group / key[:2] / key, groups[group]
    rule = EXTENT | {"namespace": re.escape(name), "group": group, "key": key}
    rule |= {"blocks": [scheme["key"], 1, g["extent_blocks"]], "write_id": "[0-9a-f]{32}"}
    document, record = parse(folder, "array", rule)
    blocks, start, parent = record["blocks"], record["start_block"], record["parent"]
    need("record-key or record-start", blocks[-1] == key, start % g["extent_blocks"] == 0)
    need("record-blocks or record-parent", len({parent, *blocks}) == len(blocks) + 1)
    rooted, sized, b = parent == scheme["root"], len(parent) == len(key), len(blocks)
    need("record-parent", not start if rooted else sized and (start or scheme["name"] is None))
    need("record-parts", record["parts"] == g["parts"], record["tokens"] == b * g["block_tokens"])
    need("record-invariant", record["parallel_invariant"] == (g["attention"] != "opaque"))
    zarr = json.loads(ARRAY % (g | {"b": b, "codecs": CODECS}))
    need("zarr-shape or another", canonical(document | zarr) == canonical(document))
    for name in document.keys() - zarr.keys() - {"zarr_format", "node_type", "attributes"}:
        free = isinstance(document[name], dict) and document[name].get("must_understand") is False
        need("zarr-member", free or (name, document[name]) == ("storage_transformers", []))
    stride, used, chunks = record["chunk_stride"], b * g["T"] * g["E"] + 4, []
    need("record-stride", stride is None or used <= stride <= 2 * used + 65532)
    rows, columns, n = g["shard_layers"], g["shard_heads"], g["shard_layers"] * g["shard_heads"]
    grid = product(range(g["L"] // rows), range(g["heads"] // columns))
    for (row, column), shard in zip(grid, record["shards"], strict=True):  # refuses too few
        path, end = folder / shard["name"], shard["bytes"] - 16 * n - 4
        need("record-shards", shard["name"] == f"c.{row}.0.{column}.0.0")
        need("record-shards", end == n * stride if stride else end >= n * used)
        need("shard-missing or -size", path.is_file() and path.stat().st_size == shard["bytes"])
        data = path.read_bytes()
        need("index-checksum", crc32c(data[end:-4]) == data[-4:])
        offsets, sizes = np.frombuffer(data[end:-4], "<u8").reshape(n, 2).T.tolist()
        need("index-entry", {*sizes} == {used}, not stride or offsets == [*range(0, end, stride)])
        need("index-overlap", *(z - a >= used for a, z in pairwise([*sorted(offsets), end])))
        for slot in (data[at : at + used] for at in offsets):
            need("chunk-checksum", crc32c(slot[:-4]) == slot[-4:])
            chunks.append(slot[:-4])
    array = np.frombuffer(b"".join(chunks), np.dtype(g["type"]).newbyteorder("<"))
    shape = g["L"] // rows, g["heads"] // columns, rows, columns, b, g["T"], g["C"]
    return record, array.reshape(shape).transpose(0, 2, 4, 1, 3, 5, 6).reshape(zarr["shape"])


def listing(root: Path) -> list[str]:
    """Namespaces and extents; other names are passed over (page 06)."""
    names = parse(root, "group", {}) and sorted(p.parent.name for p in root.glob("*/zarr.json"))
    lines = [name for name in names if re.fullmatch(NAMESPACE, name)]
    for name in lines.copy():
        scheme, groups = open_namespace(root, name)
        for path in sorted((root / name).glob("*/*/*/zarr.json")):
            group, fanout, key = path.parts[-4:-1]
            if group in groups and key[:2] == fanout and re.fullmatch(scheme["key"], key):
                lines.append(f"{name}/{group}/{key}")
    return lines


if __name__ == "__main__":
    root, sys.tracebacklimit = Path(sys.argv[1]), 0  # a refusal is one line
    lines = [str(read(root, place)[1]) for place in sys.argv[2:]] or listing(root)
    sys.stdout.write("\n".join(lines) + "\n")
