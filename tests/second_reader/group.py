"""A layer group of an identity: the rules it obeys, and the array geometry that follows from it.

Written from the specification alone (spec/03-geometry.md); shares no code with the kvstore package.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from second_reader.rules import CARRIERS, Json, check, need


class Group:
    """A layer group of an identity: its fields, and the array geometry that follows."""

    def __init__(self, o: Any, model_layers: int) -> None:
        check(o, "group", closed=True)
        kind, layers = o["attention"], o["layers"]
        need(all(type(x) is int for x in layers), "field-type", "layers")
        ordered = layers == sorted(set(layers))
        need(ordered and layers[0] >= 0 and layers[-1] < model_layers, "group-layers", layers)
        parts = [check(p, "part", closed=True) for p in o["parts"]]
        need(len({p["name"] for p in parts}) == len(parts), "group-parts", parts)
        windowed, opaque = kind in ("sliding_window", "chunked"), kind == "opaque"
        need((o["window"] is not None) == windowed, "group-attention", "window")
        need((o["parallel"] is not None) == opaque, "group-attention", "parallel")
        page = [(p["name"], p["element"]) for p in parts] == [("page", "uint8")]
        need(not opaque or (o["heads"] == 1 and page), "group-attention", "opaque page")
        shards = (len(layers), o["shard_layers"]), (o["heads"], o["shard_heads"])
        need(all(whole % part == 0 for whole, part in shards), "group-shards", shards)
        self.parts = [(p["name"], p["element"], p["count"]) for p in parts]
        types = {p["element"] for p in parts}
        self.carrier = np.dtype(CARRIERS[types.pop()] if len(types) == 1 else "uint8")
        sizes = [p["count"] * np.dtype(CARRIERS[p["element"]]).itemsize for p in parts]
        self.tokens = 1 if opaque else o["block_tokens"]
        self.block_bytes = self.tokens * sum(sizes)
        self.content = sum(sizes) // self.carrier.itemsize
        large = self.content > 1 << 20 or o["extent_blocks"] * self.block_bytes > 1 << 30
        need(not large, "group-size", self.content)
        self.json, self.name, self.blocks = o, str(o["name"]), int(o["extent_blocks"])
        self.grid = [range(whole // part) for whole, part in shards]
        self.box = list(itertools.product(range(o["shard_layers"]), range(o["shard_heads"])))

    def array(self, blocks: int) -> Json:
        """What the Zarr metadata of an extent of that many blocks says, attributes aside."""
        o, n, c = self.json, self.tokens, self.content
        little, crc = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
        inner: Json = {"chunk_shape": [1, blocks, 1, n, c], "codecs": [little, crc]}
        inner |= {"index_codecs": [little, crc], "index_location": "end"}
        outer = {"chunk_shape": [o["shard_layers"], blocks, o["shard_heads"], n, c]}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [len(o["layers"]), blocks, o["heads"], n, c],
            "data_type": self.carrier.name,
            "chunk_grid": {"name": "regular", "configuration": outer},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0,
            "codecs": [{"name": "sharding_indexed", "configuration": inner}],
            "dimension_names": ["layer", "block", "head", "token", "content"],
        }
