"""A checker of kvstore stores, format version 1, written from the specification alone.

It needs NumPy and the standard library, and shares no code with the kvstore package, nor with the
shorter spec/reader.py. It refuses whatever spec/10-rejections.md says that a reader refuses, and
names the rule and the class of each refusal. With ``tests`` on the path:

    python -m second_reader.reader STORE                        lists namespaces and extents
    python -m second_reader.reader STORE NAMESPACE/GROUP/KEY    reads one extent, every byte checked
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from second_reader.group import Group
from second_reader.rules import (
    KEY,
    NAMESPACE,
    Json,
    Rejected,
    canonical,
    check,
    crc32c,
    fingerprint,
    namespace_name,
    need,
    parse,
)


class Namespace:
    """A namespace whose record has been checked."""

    def __init__(self, root: Path, name: str) -> None:
        parse(root / "zarr.json", "group", "store")
        need(re.fullmatch(NAMESPACE, name), "name", name)
        self.folder, self.name = root / name, name
        self.record = parse(self.folder / "zarr.json", "group", "namespace")[1]
        identity = check(self.record["identity"], "identity", closed=True)
        texts = [t for pair in identity["variants"].items() for t in pair]
        need(all(type(t) is str for t in texts), "field-type", "variants")
        need(all(1 <= len(t) <= 4096 for t in texts), "field-range", "variants")
        need(identity["revision"] or identity["weights_digest"], "identity-weights")
        self.scheme = check(identity["key_scheme"], "key scheme", closed=True)
        named = self.scheme["name"] is not None, self.scheme["algorithm"] is not None
        sha = self.scheme["scheme"] == "kvstore-sha256"
        need(named == (not sha, not sha), "identity-scheme", named)
        length = len(self.scheme["root"]), self.scheme["key_bytes"]
        need(not sha or length == (64, 32), "identity-scheme", length)
        groups = [Group(g, identity["model_layers"]) for g in identity["groups"]]
        self.groups = {g.name: g for g in groups}
        need(len(self.groups) == len(groups), "identity-groups", list(self.groups))
        need(fingerprint(identity) == self.record["fingerprint"], "fingerprint", name)
        need(namespace_name(identity) == name, "namespace-name", namespace_name(identity))

    def extents(self) -> Iterator[tuple[str, str]]:
        """Layer group and key of every extent. Names that the format does not know are skipped."""
        for group in sorted(self.groups):
            for path in sorted((self.folder / group).glob("*/*/zarr.json")):
                key, fanout = path.parent.name, path.parent.parent.name
                whole = len(key) == 2 * self.scheme["key_bytes"]
                if whole and re.fullmatch(KEY, key) and key[:2] == fanout:
                    yield group, key


class Extent:
    """An extent whose record has been checked against its place and its namespace."""

    def __init__(self, namespace: Namespace, group: str, key: str) -> None:
        length = 2 * namespace.scheme["key_bytes"]
        need(re.fullmatch(KEY, key) and len(key) == length, "name", key)
        need(group in namespace.groups, "name", group)
        self.folder = namespace.folder / group / key[:2] / key
        self.group = g = namespace.groups[group]
        document, self.record = parse(self.folder / "zarr.json", "array", "extent")
        r = self.record
        place = [r["namespace"], r["group"], r["key"]]
        need(place == [namespace.name, group, key], "record-place", place)
        blocks = r["blocks"]
        keys = [k for k in blocks if type(k) is str and re.fullmatch(KEY, k) and len(k) == length]
        distinct = len(set(keys)) == len(blocks)
        need(distinct and len(blocks) <= g.blocks, "record-blocks", blocks)
        need(blocks[-1] == key, "record-key", blocks[-1])
        need(r["start_block"] % g.blocks == 0, "record-start", r["start_block"])
        first, rooted = r["start_block"] == 0, r["parent"] == namespace.scheme["root"]
        salted = namespace.scheme["scheme"] != "opaque" and len(r["parent"]) == length
        follows = rooted or salted if first else not rooted and len(r["parent"]) == length
        need(follows and r["parent"] not in blocks, "record-parent", r["parent"])
        need(r["tokens"] == len(blocks) * g.json["block_tokens"], "record-tokens", r["tokens"])
        parts = [check(p, "part") for p in r["parts"]]
        same = [(p["name"], p["element"], p["count"]) for p in parts] == g.parts
        need(same, "record-parts", r["parts"])
        need(r["parallel_invariant"] == (g.json["attention"] != "opaque"), "record-invariant")
        check(r["writer"], "writer")
        self.array = g.array(len(blocks))
        for name, wanted in self.array.items():
            need(name in document, "field-missing", name)
            rule = "zarr-" + name.replace("_", "-")
            need(canonical(document[name]) == canonical(wanted), rule, document[name])
        for name in document.keys() - self.array.keys() - {"attributes"}:
            extra = document[name]
            ignorable = type(extra) is dict and extra.get("must_understand") is False
            need(ignorable or (name == "storage_transformers" and extra == []), "zarr-member", name)
        self.chunk = len(blocks) * g.block_bytes
        stride, tail = r["chunk_stride"], 16 * len(g.box) + 4
        limit = 2 * self.chunk + 4 + 65536
        need(stride is None or self.chunk + 4 <= stride <= limit, "record-stride", stride)
        names = [f"c.{row}.0.{column}.0.0" for row, column in itertools.product(*g.grid)]
        shards = [check(s, "shard") for s in r["shards"]]
        need([s["name"] for s in shards] == names, "record-shards", [s["name"] for s in shards])
        for s in shards:
            least = len(g.box) * (stride or self.chunk + 4) + tail
            exact = s["bytes"] == least if stride else s["bytes"] >= least
            need(exact, "record-shards", s)

    def read(self) -> NDArray[Any]:
        """The whole array ``[layer, block, head, token, content]`` in its carrier type, checked."""
        for shard in self.record["shards"]:  # before memory is set aside for what they hold
            path = self.folder / shard["name"]
            need(path.is_file(), "shard-missing", path)
            need(path.stat().st_size == shard["bytes"], "shard-size", path)
        out = np.empty(self.array["shape"], self.group.carrier.newbyteorder("<"))
        layers, heads = self.group.json["shard_layers"], self.group.json["shard_heads"]
        for (row, column), shard in zip(
            itertools.product(*self.group.grid), self.record["shards"], strict=True
        ):
            for (layer, head), chunk in zip(self.group.box, self.chunks(shard), strict=True):
                page = np.frombuffer(chunk, out.dtype).reshape(out.shape[1], *out.shape[3:])
                out[row * layers + layer, :, column * heads + head] = page
        return out

    def chunks(self, shard: Json) -> Iterator[bytes]:
        """The inner chunks of a shard, in order, through its index, each checked."""
        path, count, size = self.folder / shard["name"], len(self.group.box), self.chunk + 4
        data = path.read_bytes()
        need(len(data) == shard["bytes"], "shard-size", path)
        end = len(data) - 16 * count - 4
        need(crc32c(data[end:-4]) == data[-4:], "index-checksum", path)
        index = np.frombuffer(data[end:-4], "<u8").reshape(count, 2).tolist()
        stride = self.record["chunk_stride"]
        for i, (offset, nbytes) in enumerate(index):
            placed = stride is None or offset == i * stride
            need(nbytes == size and placed, "index-entry", (path, i, offset, nbytes))
            need(offset <= end - size, "index-range", (path, i))
        for a, b in itertools.pairwise(sorted(offset for offset, _ in index)):
            need(b - a >= size, "index-overlap", (path, a, b))
        for i, (offset, _) in enumerate(index):
            chunk = data[offset : offset + self.chunk]
            stored = data[offset + self.chunk : offset + size]
            need(crc32c(chunk) == stored, "chunk-checksum", (path, i))
            yield chunk


def namespaces(root: Path) -> list[str]:
    """Names of the namespaces of a store."""
    parse(root / "zarr.json", "group", "store")
    found = (p.parent.name for p in root.glob("*/zarr.json"))
    return sorted(name for name in found if re.fullmatch(NAMESPACE, name))


def main(arguments: list[str]) -> int:
    """List a store, or read one extent of it."""
    root, say = Path(arguments[0]), sys.stdout.write
    try:
        if len(arguments) > 1:
            name, group, key = arguments[1].split("/")
            array = Extent(Namespace(root, name), group, key).read()
            digest = hashlib.sha256(array.tobytes()).hexdigest()
            say(f"{array.dtype} {list(array.shape)} sha256 {digest}\n")
            return 0
        for name in namespaces(root):
            space = Namespace(root, name)
            for group, key in space.extents():
                record = Extent(space, group, key).record
                say(f"{name}/{group}/{key} tokens {record['tokens']}\n")
    except Rejected as refusal:
        say(f"{refusal.error}: {refusal}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
