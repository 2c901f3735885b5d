"""Every example in the specification, recomputed from first principles.

A fenced block ``json``, ``hex``, ``text`` or ``regex`` is marked ``example=NAME`` and follows a
comment ``<!-- check: KIND {arguments} -->``. Each kind is one function here. Where the package has
the same computation, it must agree too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from kvstore import paths
from kvstore.election import elected_replica
from kvstore.geometry import ContentPart, LayerGroup
from kvstore.identity import identity_from_json
from kvstore.keys import chain_keys, root_key
from kvstore.parallel import ParallelConfig, Rank
from kvstore.shard import ShardLayout, slot_stride
from kvstore.share import share_of

SPEC = Path(__file__).parent.parent / "spec"
PAGES = sorted(SPEC.glob("*.md"))
FENCE = re.compile(
    r"(?:<!-- check: (?P<kind>[a-z0-9-]+) (?P<arguments>\{[^\n]*\}) -->\n)?"
    r"^```(?P<language>[a-z]*)(?: example=(?P<name>[a-z0-9-]+))?\n(?P<body>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)
CHECKED = {"json", "hex", "text", "regex"}


@dataclass(frozen=True)
class Example:
    page: str
    kind: str
    arguments: dict[str, Any]
    language: str
    name: str
    body: str

    def json(self) -> Any:
        return json.loads(self.body)

    def bytes(self) -> bytes:
        """The bytes of a hex block, after its offsets have been checked."""
        out = b""
        for line in self.body.splitlines():
            text = line.partition("|")[0]
            at, colon, digits = text.rpartition(":")
            assert not colon or int(at, 16) == len(out), f"{self.name}: offset {at}"
            out += bytes.fromhex(digits)
        return out


def examples() -> list[Example]:
    return [
        Example(
            page.name,
            match["kind"] or "",
            json.loads(match["arguments"] or "{}"),
            match["language"],
            match["name"] or "",
            match["body"],
        )
        for page in PAGES
        for match in FENCE.finditer(page.read_text(encoding="utf-8"))
        if match["language"] in CHECKED
    ]


EXAMPLES = examples()
NAMED = {e.name: e for e in EXAMPLES}
CHECKS: dict[str, Callable[[Example], None]] = {}


def check(kind: str) -> Callable[[Callable[[Example], None]], Callable[[Example], None]]:
    def add(function: Callable[[Example], None]) -> Callable[[Example], None]:
        CHECKS[kind] = function
        return function

    return add


def test_every_block_is_marked_named_once_and_checked() -> None:
    assert len(EXAMPLES) >= 40
    for example in EXAMPLES:
        assert example.name, f"{example.page}: a {example.language} block without a name"
        assert example.kind in CHECKS, f"{example.page}, {example.name}: {example.kind!r}"
    assert len(NAMED) == len(EXAMPLES)
    assert {e.kind for e in EXAMPLES} == set(CHECKS)
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("<!-- check:") == sum(
            e.page == page.name for e in EXAMPLES
        ) + (page.name == "README.md")


@pytest.mark.parametrize("example", [pytest.param(e, id=e.name or e.page) for e in EXAMPLES])
def test_example(example: Example) -> None:
    CHECKS[example.kind](example)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (SPEC / target).exists(), f"{page.name} -> {target}"
    linked = (SPEC / "README.md").read_text(encoding="utf-8")
    assert all(f"({page.name})" in linked for page in PAGES if page.name != "README.md")


# -- keys -----------------------------------------------------------------------------------------


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


@check("sha256")
def sha256(example: Example) -> None:
    assert example.bytes() == hashlib.sha256(NAMED[example.arguments["of"]].bytes()).digest()


@check("root-preimage")
def root_preimage(example: Example) -> None:
    salt = bytes.fromhex(example.arguments["salt"])
    assert example.bytes() == b"kvstore/v1/root" + b"\0" + u32(len(salt)) + salt
    assert root_key(salt) == hashlib.sha256(example.bytes()).digest()


@check("block-preimage")
def block_preimage(example: Example) -> None:
    tokens = example.arguments["tokens"]
    extra = [bytes.fromhex(item) for item in example.arguments["extra"]]
    parent = NAMED[example.arguments["parent"]].bytes()
    expected = b"kvstore/v1/block" + parent + u32(len(tokens)) + b"".join(map(u32, tokens))
    expected += u32(len(extra)) + b"".join(u32(len(item)) + item for item in extra)
    assert example.bytes() == expected
    keys = chain_keys(tokens, len(tokens), root=parent, extra=extra)
    assert list(keys) == [hashlib.sha256(expected).digest()]


# -- identity -------------------------------------------------------------------------------------


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


@check("identity")
def identity(example: Example) -> None:
    assert identity_from_json(example.json(), "example").to_json() == example.json()
    assert example.json()["key_scheme"]["root"] == NAMED["root-key"].bytes().hex()


@check("canonical")
def canonical_json(example: Example) -> None:
    assert example.body == canonical(NAMED[example.arguments["of"]].json()) + "\n"


def fingerprint_of(example: Example) -> str:
    text = canonical(NAMED[example.arguments["of"]].json())
    return hashlib.sha256(b"kvstore/v1/name\0" + text.encode()).hexdigest()


@check("fingerprint")
def fingerprint(example: Example) -> None:
    assert example.body.strip() == fingerprint_of(example)
    parsed = identity_from_json(NAMED[example.arguments["of"]].json(), "example")
    assert example.body.strip() == parsed.fingerprint


@check("namespace-name")
def namespace_name(example: Example) -> None:
    parsed = identity_from_json(NAMED[example.arguments["of"]].json(), "example")
    assert example.body.strip() == f"tiny-example-1-{fingerprint_of(example)[:32]}"
    assert example.body.strip() == parsed.namespace


# -- names ----------------------------------------------------------------------------------------


@check("pattern")
def pattern(example: Example) -> None:
    names = json.loads((SPEC / "vectors" / "names.json").read_text())[example.arguments["kind"]]
    expression = re.compile(example.body.rstrip("\n"))
    assert [n for n in names["valid"] if not expression.fullmatch(n)] == []
    assert [n for n in names["invalid"] if expression.fullmatch(n)] == []


@check("pattern-of")
def pattern_of(example: Example) -> None:
    expression = re.compile(example.body.rstrip("\n"))
    assert all(expression.fullmatch(text) for text in example.arguments["accepts"])
    assert not any(expression.fullmatch(text) for text in example.arguments["refuses"])


@check("writer-id")
def writer_id(example: Example) -> None:
    session, config = example.arguments["session"], example.arguments["config"]
    data = session.encode() + b"\0" + config.encode()
    assert example.body.strip() == hashlib.sha256(data).hexdigest()[:16]
    assert example.body.strip() == paths.writer_id(session, config)


# -- geometry and shards --------------------------------------------------------------------------


@check("geometry")
def geometry(example: Example) -> None:
    a = example.arguments
    width = sum(size * count for _, size, count in a["parts"])
    size = a["parts"][0][1]
    blocks = max(1, 256 // a["block_tokens"])
    chunk = blocks * a["block_tokens"] * width
    divisors = [d for d in range(1, a["heads"] + 1) if a["heads"] % d == 0]
    large = [d for d in divisors if d * a["layers"] * chunk >= 1 << 20]
    shard_heads = min(large, default=a["heads"])
    expected = {
        "E": width,
        "B": blocks,
        "C": width // size,
        "shape": [a["layers"], blocks, a["heads"], a["block_tokens"], width // size],
        "chunk_bytes": chunk,
        "shard_layers": a["layers"],
        "shard_heads": shard_heads,
        "chunks_of_a_shard": a["layers"] * shard_heads,
        "shards": [f"c.0.0.{h}.0.0" for h in range(a["heads"] // shard_heads)],
    }
    assert example.json() == expected
    group = LayerGroup(
        name="kv",
        layers=tuple(range(a["layers"])),
        heads=a["heads"],
        block_tokens=a["block_tokens"],
        parts=tuple(ContentPart(name, "bfloat16", count) for name, _, count in a["parts"]),
    )
    assert list(group.shape(group.extent_blocks)) == expected["shape"]
    assert (group.shard_layers, group.shard_heads) == (a["layers"], shard_heads)
    # The sentence behind the example: value[5] of token 9 of block 3.
    assert (3 * 16 + 9) * width + 64 * 2 + 5 * 2 == 14_730


def stride_of(chunk: int) -> int:
    used = chunk + 4
    aligned = (used + 4095) // 4096 * 4096
    return aligned if (aligned - used) * 16 <= chunk else used


@check("strides")
def strides(example: Example) -> None:
    for row in example.json():
        assert row["stride"] == stride_of(row["chunk_bytes"]) == slot_stride(row["chunk_bytes"])


@check("shard-map")
def shard_map(example: Example) -> None:
    chunk, count = example.arguments["chunk_bytes"], example.arguments["chunks"]
    s = stride_of(chunk)
    end = count * s
    assert example.json() == {
        "stride": s,
        "chunk_0": [0, chunk],
        "crc_0": [chunk, chunk + 4],
        "zeros_0": [chunk + 4, s],
        "chunk_1": [s, s + chunk],
        "chunk_29": [29 * s, 29 * s + chunk],
        "index": [end, end + 16 * count],
        "index_crc": [end + 16 * count, end + 16 * count + 4],
        "shard_bytes": end + 16 * count + 4,
    }
    layout = ShardLayout.of(count, chunk)
    assert (layout.index_offset, layout.shard_bytes) == (end, end + 16 * count + 4)
    assert (3 * layout.shard_bytes, 15 * s) == (6_268_332, 1_044_480)


@check("crc32c")
def checksum(example: Example) -> None:
    crc = crc32c(bytes.fromhex(example.arguments["data"]))
    assert crc == 0xE3069283
    assert example.bytes() == u32(crc)


@check("codecs")
def codecs(example: Example) -> None:
    assert example.json() == NAMED[example.arguments["document"]].json()["codecs"]


# -- parallel -------------------------------------------------------------------------------------


def share(heads: int, layers: list[int], model: int, c: dict[str, Any], rank: str) -> Any:
    """A share by counting, not by formula: tokens are dealt out, and equal ranks are numbered."""
    full = {"tp": 1, "pp": 1, "dcp": 1, "pcp": 1, "interleave": 1, "pcp_kv": "sharded"} | c
    stage = {}
    sizes = full.get("pp_layers") or [model // full["pp"]] * full["pp"]
    for s, size in enumerate(sizes):
        stage |= {len(stage) + i: s for i in range(size)}
    sharded = full["pcp_kv"] == "sharded"
    cp = full["dcp"] * (full["pcp"] if sharded else 1)

    def held(pcp: int, tp: int) -> tuple[list[int], int]:
        own = [h for h in range(heads) for r in range(full["tp"]) if r == tp and holds(r, h)]
        return own, tp % full["dcp"] + (pcp * full["dcp"] if sharded else 0)

    def holds(tp: int, head: int) -> bool:
        if full["tp"] <= heads:
            return head * full["tp"] // heads == tp
        return tp * heads // full["tp"] == head

    pp, pcp, tp = map(int, rank.split("."))
    own, index = held(pcp, tp)
    alike = [
        (q, t) for q in range(full["pcp"]) for t in range(full["tp"]) if held(q, t) == (own, index)
    ]
    dealt = [turn % cp for turn in range(99) for _ in range(full["interleave"])]
    return {
        "rank": rank,
        "layers": [i for i, layer in enumerate(layers) if stage[layer] == pp],
        "heads": own,
        "cp": cp,
        "index": index,
        "replicas": len(alike),
        "replica": alike.index((pcp, tp)),
        "tokens_below_9": [t for t in range(9) if dealt[t] == index],
    }


@check("shares")
def shares(example: Example) -> None:
    a = example.arguments
    group = LayerGroup.attention_kv(layers=a["layers"], heads=a["heads"], head_size=2)
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in a["config"].items()}
    config = ParallelConfig(**values)
    assert [row["rank"] for row in example.json()] == a["ranks"]
    for row in example.json():
        assert row == share(a["heads"], a["layers"], a["model_layers"], a["config"], row["rank"])
        rank = Rank(*map(int, row["rank"].split(".")))
        found = share_of(group, config, rank, a["model_layers"])
        assert (list(found.layers), list(found.heads)) == (row["layers"], row["heads"])
        assert (found.replicas, found.replica) == (row["replicas"], row["replica"])
        assert found.lattice.owned(0, 9).tolist() == row["tokens_below_9"]


@check("election")
def election(example: Example) -> None:
    key, replicas = bytes.fromhex(example.arguments["key"]), example.arguments["replicas"]
    number = sum(byte << (56 - 8 * i) for i, byte in enumerate(key[:8]))
    assert example.json() == {"number": number, "replica": number % replicas}
    assert elected_replica(key, replicas) == number % replicas


# -- stored files ---------------------------------------------------------------------------------


def stored(example: Example) -> bytes:
    key = NAMED["block-key-1"].bytes().hex()
    namespace = NAMED["namespace-name"].body.strip()
    place = example.arguments["path"].format(namespace=namespace, key=key, xx=key[:2])
    return (SPEC / "vectors" / "valid" / example.arguments["store"] / place).read_bytes()


@check("document")
def document(example: Example) -> None:
    shown = example.json()
    if "identity" in example.arguments:
        assert set(shown["attributes"]["kvstore"]["identity"]) == {"see"}
        shown["attributes"]["kvstore"]["identity"] = NAMED[example.arguments["identity"]].json()
    assert shown == json.loads(stored(example))
    assert canonical(shown) == canonical(json.loads(stored(example)))


@check("file")
def file(example: Example) -> None:
    assert example.bytes() == stored(example)
    # From first principles as well: the numbers say where they are, checksums by another library.
    head = int(example.name[-1])
    out = b""
    for layer in range(2):
        numbers = [
            layer << 12 | token << 8 | head << 4 | item for token in range(4) for item in range(4)
        ]
        chunk = b"".join(number.to_bytes(2, "little") for number in numbers)
        out += chunk + u32(crc32c(chunk))
    index = b"".join(part.to_bytes(8, "little") for part in (0, 36, 36, 36))
    assert example.bytes() == out + index + u32(crc32c(index))
    assert example.bytes()[58:60] == (0x1203 | head << 4).to_bytes(2, "little")


@check("tree")
def tree(example: Example) -> None:
    root = SPEC / "vectors" / "valid" / example.arguments["store"]
    found = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    assert example.body.splitlines() == found
