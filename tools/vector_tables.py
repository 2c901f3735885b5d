"""The tables of spec/vectors: keys, identities, shares, names and slots.

Computed from the formulas of the specification; see ``vector_stores.py`` for the ground rules.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from vector_stores import (
    Json,
    block_preimage,
    canonical,
    chain,
    fingerprint,
    group_object,
    identity_object,
    root_preimage,
    slot,
    slug,
    tiny_identity,
)

CONFIG = {"tp": 1, "pp": 1, "dcp": 1, "pcp": 1, "interleave": 1, "pcp_kv": "sharded"}


def tables() -> Json:
    """Every table, by the name of its file."""
    return {
        "keys": keys(),
        "identities": identities(),
        "shares": shares(),
        "names": names(),
        "slots": slots(),
    }


def keys() -> list[Json]:
    """Salt, tokens and extra keys, with the preimage of the first block and every key."""
    cases: list[tuple[bytes, int, list[int], list[list[bytes]]]] = [
        (b"", 2, [11, 22, 33, 44], []),
        (b"", 4, [], []),
        (b"", 4, [1, 2, 3], []),
        (b"", 1, [0, 0xFFFFFFFF, 256, 65536], []),
        (b"tenant-7", 2, [11, 22, 33, 44], []),
        (b"\x00", 2, [11, 22], []),
        (b"", 2, [11, 22, 33, 44, 55], [[b"lora:a"], [b"lora:a", b""]]),
        (b"", 2, [11, 22], [[b"ab", b"c"]]),
        (b"", 2, [11, 22], [[b"a", b"bc"]]),
        (b"\xff" * 40, 16, list(range(0, 3200, 100)), [[], [b"img\x00\xff"]]),
    ]
    out = []
    for salt, block, tokens, extra in cases:
        root = hashlib.sha256(root_preimage(salt)).digest()
        made = chain(tokens, block, root, extra)
        first = block_preimage(root, tokens[:block], extra[0] if extra else [])
        out.append(
            {
                "salt": salt.hex(),
                "block_tokens": block,
                "tokens": tokens,
                "extra": [[item.hex() for item in items] for items in extra],
                "root": root.hex(),
                "first_preimage": first.hex() if made else None,
                "keys": [key.hex() for key in made],
            }
        )
    return out


def identities() -> list[Json]:
    """Identities, their canonical JSON, fingerprint and namespace name."""
    root = hashlib.sha256(root_preimage(b"")).digest()
    kv = [("key", "bfloat16", 128), ("value", "bfloat16", 128)]
    llama: Json = {"layers": list(range(32)), "heads": 8, "block_tokens": 16, "extent_blocks": 16}
    big = group_object("kv", kv, **llama, shard_layers=32)
    cases = [
        tiny_identity(),
        identity_object("meta-llama/Meta-Llama-3-8B", [big], root, model_layers=32),
        identity_object("Größe \U0001f600/\u212a..x", [big], root, model_layers=32)
        | {"variants": {"rope": 'a"b\\c/\n\t\x01\x7f', "é": "\u2028", "\U00010000": "\uffff"}},
    ]
    models = [
        "Qwen/Qwen3-0.6B",
        "--..--",
        "\u0130stanbul",
        "\u212aelvin",
        "a..b",
        "a-..b-.-c",
        "a" * 63 + "-" + "b" * 9,
        "v1.5 (beta)",
        "///",
        "A_B",
        ".hidden.",
    ]
    out = [
        {
            "identity": identity,
            "canonical": canonical(identity),
            "fingerprint": fingerprint(identity),
            "namespace": f"{slug(identity['model'])}-{fingerprint(identity)[:32]}",
        }
        for identity in cases
    ]
    return [*out, *({"model": model, "slug": slug(model)} for model in models)]


def refusal(heads: int, layers: int, c: Json) -> str | None:
    """Why a config cannot be certified, by the name of the rule."""
    if c["tp"] % heads and heads % c["tp"]:
        return "heads-uneven"
    copies = c["tp"] // heads if c["tp"] > heads else 1
    if copies % c["dcp"]:
        return "dcp-uneven"
    if c["pp_layers"] is None and layers % c["pp"]:
        return "layers-uneven"
    if c["pp_layers"] is not None and sum(c["pp_layers"]) != layers:
        return "layers-sum"
    return None


def share(heads: int, group_layers: list[int], model_layers: int, c: Json, rank: Json) -> Json:
    """What one rank holds."""
    sizes = c["pp_layers"] or [model_layers // c["pp"]] * c["pp"]
    first = sum(sizes[: rank["pp"]])
    stage = range(first, first + sizes[rank["pp"]])
    copies = max(1, c["tp"] // heads)
    width = max(1, heads // c["tp"])
    head = rank["tp"] // copies * width
    writers = copies // c["dcp"]
    writer = rank["tp"] % copies // c["dcp"]
    cp, index = c["dcp"], rank["tp"] % c["dcp"]
    if c["pcp_kv"] == "sharded":
        cp, index = cp * c["pcp"], rank["pcp"] * c["dcp"] + index
    else:
        writers, writer = writers * c["pcp"], rank["pcp"] * writers + writer
    inside = [i for i, layer in enumerate(group_layers) if layer in stage]
    owned = [t for t in range(24) if t // c["interleave"] % cp == index]
    return {
        "rank": f"{rank['pp']}.{rank['pcp']}.{rank['tp']}",
        "layers": inside,
        "heads": list(range(head, head + width)),
        "cp": cp,
        "index": index,
        "tokens_below_24": owned,
        "replicas": writers,
        "replica": writer,
    }


def shares() -> list[Json]:
    """Configs, and what each of their ranks holds, or the rule that refuses them."""
    cases: list[tuple[int, list[int], int, Json]] = [
        (3, [0, 1, 2, 3], 4, {}),
        (3, [0, 1, 2, 3], 4, {"tp": 3, "pp": 2}),
        (3, [0, 1, 2, 3], 4, {"tp": 9, "dcp": 3}),
        (2, [0, 1], 2, {"tp": 8, "dcp": 2, "pcp": 2, "interleave": 2}),
        (2, [0, 1], 2, {"tp": 8, "dcp": 2, "pcp": 2, "pcp_kv": "replicated"}),
        (1, [0, 1, 2], 3, {"tp": 4, "pp": 2, "pp_layers": [2, 1]}),
        (4, [1, 3, 5], 6, {"tp": 2, "pp": 3}),
        (4, [4, 5], 6, {"pp": 3}),
        (3, [0, 1], 2, {"tp": 2}),
        (4, [0, 1], 2, {"tp": 6}),
        (4, [0, 1], 2, {"tp": 4, "dcp": 2}),
        (2, [0, 1], 2, {"tp": 8, "dcp": 3}),
        (2, [0, 1, 2], 3, {"pp": 2}),
        (2, [0, 1, 2], 3, {"pp": 2, "pp_layers": [2, 2]}),
    ]
    out = []
    for heads, layers, model_layers, changed in cases:
        c: Json = CONFIG | {"pp_layers": None} | changed
        text = ",".join(f"{k}={_text(c[k])}" for k in c if k in changed) or "tp=1"
        reason = refusal(heads, model_layers, c)
        case: Json = {"heads": heads, "layers": layers, "model_layers": model_layers}
        case |= {"config": text, "refused": reason}
        if reason is None:
            ranks = itertools.product(range(c["pp"]), range(c["pcp"]), range(c["tp"]))
            triples = [{"pp": p, "pcp": q, "tp": t} for p, q, t in ranks]
            case["ranks"] = [share(heads, layers, model_layers, c, rank) for rank in triples]
        out.append(case)
    return out


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def names() -> Json:
    """For every kind of stored name, some that are one and some that are not."""
    key = "0123456789abcdef" * 4
    digest = key[:32]
    return {
        "namespace": {
            "valid": [f"a-{digest}", f"qwen3-0.6b-{digest}", f"{'x' * 64}-{digest}"],
            "invalid": [
                digest,
                f"-{digest}",
                f"A-{digest}",
                f"a-{digest[:-1]}",
                f"a-{digest.upper()}",
                f"a..b-{digest}",
                f".a-{digest}",
                f"a/b-{digest}",
                f"{'x' * 65}-{digest}",
                f"a-{digest}\n",
                "__kvstore__",
                "",
            ],
        },
        "group": {
            "valid": ["kv", "a", "fp8-window", "rank-3", "a_b", "x" * 64],
            "invalid": ["", "Kv", "3kv", "_kv", "k/v", "k.v", "..", "x" * 65, "kv\n", "größe"],
        },
        "key": {
            "valid": [key, key[:32], key * 2],
            "invalid": ["", key[:30], key[:33], key.upper(), key * 2 + "00", "zz" * 32, key + "\n"],
        },
        "fanout": {"valid": ["00", "ff", "9a"], "invalid": ["0", "000", "FF", "g0", ""]},
        "shard": {
            "valid": ["c.0.0.0.0.0", "c.4095.0.12.0.0"],
            "invalid": [
                "c.0.0.0.0.0.part",
                "c.00.0.0.0.0",
                "c.0.1.0.0.0",
                "c.0.0.0.0.1",
                "c.-1.0.0.0.0",
                "c.10000.0.0.0.0",
                "c/0/0/0/0/0",
                "c.0.0.0.0",
                "C.0.0.0.0.0",
                "c.0.0.0.0.0\n",
            ],
        },
        "inflight": {
            "valid": [f"{key}-0123456789abcdef", f"{key[:32]}-{'0' * 16}"],
            "invalid": [key, f"{key}-0123", f"{key}-{'G' * 16}", f"{key[:30]}-{'0' * 16}"],
        },
        "done": {
            "valid": ["0-0-0", "1-0-15", "65535-0-0"],
            "invalid": ["0-0", "00-0-0", "0-0-0-0", "-1-0-0", "a-0-0", "0-0-1000000"],
        },
    }


def slots() -> Json:
    """Chunk bytes and stride, and writer ids, and elections."""
    sizes = [1, 32, 2040, 3840, 3900, 4080, 4092, 4093, 8188, 65472, 65471, 65536, 131072, 294912]
    elected = []
    for start, replicas in itertools.product(("00" * 8, "0123456789abcdef", "ff" * 8), (1, 3, 8)):
        number = int(start, 16) % replicas
        elected.append({"key": start + "00" * 24, "replicas": replicas, "replica": number})
    writers = [
        {"session": s, "config": c, "id": hashlib.sha256(f"{s}\0{c}".encode()).hexdigest()[:16]}
        for s, c in (("engine-0", "tp=2"), ("", "tp=1"), ("größe", "tp=9,dcp=3"))
    ]
    return {
        "strides": [{"chunk_bytes": size, "stride": slot(size)} for size in sizes],
        "elections": elected,
        "writers": writers,
    }
