"""Rows of the engine's offloading, against a plain description of each byte."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

import kvstore
from kvstore import InvalidArgument, NotCertified
from kvstore.geometry import LayerGroup
from kvstore.parallel import ParallelConfig, Rank
from kvstore.plugins.vllm.checkpoint import AttentionSizes
from kvstore.plugins.vllm.offload import (
    CacheGroup,
    cache_element,
    chunk_keys,
    model_name,
    offload_groups,
    offload_identity,
)
from kvstore.plugins.vllm.roots import key_scheme, root_of
from kvstore.plugins.vllm.rows import RowLayout, content_bytes, opaque_buffers

SCHEME = key_scheme("sha256", root_of("sha256", "seed"))
HEADS, TOKENS, SIZE = 2, 4, 8
NAMES = ("model.layers.1.attn", "model.layers.0.attn", "model.layers.3.attn")
GQA = AttentionSizes(heads=HEADS, head_size=SIZE)
MLA = AttentionSizes(latent=6, rope=2)


def rows_of(layout: RowLayout, chunks: np.ndarray, blocks: int, row_bytes: int) -> np.ndarray:
    """Rows for ``chunks`` [chunk, layer in row order, head, token, content], by the definition."""
    count, layers, _heads, tokens, content = chunks.shape
    n = tokens // blocks
    out = np.zeros((count, row_bytes), np.uint8)
    for c, layer, b in itertools.product(range(count), range(layers), range(blocks)):
        page = chunks[c, layer, :, b * n : (b + 1) * n]  # [head, token, content]
        if layout.family == "nhd":
            page = page.transpose(1, 0, 2)
        if layout.kind == "split":
            half = content // 2
            page = np.stack([page[..., :half], page[..., half:]])
        data = np.ascontiguousarray(page).view(np.uint8).ravel()
        start = (layer * blocks + b) * len(data)
        out[c, start : start + len(data)] = data
    return out


def made(sizes: AttentionSizes, blocks: int, dtype: str) -> tuple[CacheGroup, LayerGroup]:
    cache = CacheGroup(0, TOKENS, blocks, NAMES)
    return cache, offload_groups([cache], sizes, dtype)[0]


CASES = [
    (family, kind, blocks, MLA if kind == "latent" else GQA)
    for family in ("nhd", "hnd")
    for kind in ("packed", "split", "latent")
    for blocks in (1, 3)
]


@pytest.mark.parametrize(("family", "kind", "blocks", "sizes"), CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_each_byte_is_where_the_layout_says(
    tmp_path: Path, family: str, kind: str, blocks: int, sizes: AttentionSizes, dtype: str
) -> None:
    cache, group = made(sizes, blocks, dtype)
    heads, content = group.heads, group.token_bytes // group.carrier.itemsize
    rng = np.random.default_rng(5)
    kind_of = group.carrier.numpy_carrier
    chunks = rng.integers(0, 255, (2, 3, heads, blocks * TOKENS, content)).astype(kind_of)
    row_bytes = -(-content_bytes(group) // 64) * 64 + 64
    layout = RowLayout(family, kind)
    memory = torch.from_numpy(rows_of(layout, chunks, blocks, row_bytes).ravel())
    identity = offload_identity(
        "m",
        {0: group},
        SCHEME,
        dtype=dtype,
        revision="r",
        weights_digest=None,
        variants={"kv_scales": "one"},
    )
    one = ParallelConfig()
    with kvstore.open(tmp_path / "s", durable=False) as store:
        space = store.namespace(identity)
        worker = space.worker(one, Rank(), layout.buffers(memory, row_bytes, cache, group))
        order = [cache.indices.index(i) for i in group.layers]
        for c in range(2):
            keys = chunk_keys(bytes([c + 1]) * 32, SCHEME)
            worker.store(keys, [c])
            worker.commit(keys)
            stored = zarr.open_array(f"{store.location}/{space.path(keys[0])}", mode="r")[:]
            np.testing.assert_array_equal(
                stored.view(kind_of)[:, 0], chunks[c][order].reshape(stored[:, 0].shape)
            )
        # And back, to the other row, with the padding untouched.
        again = torch.full_like(memory, 0xA5)
        reader = space.worker(one, Rank(), layout.buffers(again, row_bytes, cache, group))
        for c in range(2):
            assert reader.load(chunk_keys(bytes([c + 1]) * 32, SCHEME), [1 - c]).blocks == 1
        size = content_bytes(group)
        want = memory.reshape(2, -1)[[1, 0], :size]
        assert torch.equal(again.reshape(2, -1)[:, :size], want)
        assert bool((again.reshape(2, -1)[:, size:] == 0xA5).all())


def test_opaque_rows_come_back_as_they_were(tmp_path: Path) -> None:
    config = ParallelConfig(tp=2)
    group = LayerGroup(
        name="opaque-0",
        layers=(0, 1, 2),
        heads=1,
        block_tokens=16,
        parts=(kvstore.ContentPart("page", "uint8", 50),),
        attention="opaque",
        extent_blocks=1,
        parallel=config.describe(Rank()),
    )
    memory = torch.randint(0, 255, (4 * 200,), dtype=torch.uint8)
    copy = memory.clone()
    identity = kvstore.Identity("m", 3, (group,), revision="r", key_scheme=SCHEME)
    with kvstore.open(tmp_path / "s", durable=False) as store:
        space = store.namespace(identity)
        worker = space.worker(config, Rank(), opaque_buffers(memory, 200, group), session="x")
        keys = chunk_keys(b"k" * 32, SCHEME)
        worker.store(keys, [2])
        assert worker.commit(keys).committed
        memory.zero_()
        assert worker.load(keys, [0]).blocks == 1
    assert torch.equal(memory[:150], copy[400:550])
    assert not memory[150:].any()


def test_a_row_too_small_is_refused() -> None:
    cache, group = made(GQA, 1, "bfloat16")
    with pytest.raises(InvalidArgument, match="cannot hold chunks of"):
        RowLayout("nhd", "packed").buffers(torch.zeros(64, dtype=torch.uint8), 64, cache, group)


def test_layers_need_numbers_of_their_own() -> None:
    for names in (("a.b",), ("m.0.x.1",), ("m.0.a", "m.0.b")):
        with pytest.raises(NotCertified, match="number of its own"):
            _ = CacheGroup(0, 4, 1, names).indices


def test_what_is_not_said_is_refused() -> None:
    with pytest.raises(NotCertified, match="int4"):
        cache_element("int4")
    with pytest.raises(InvalidArgument, match="give heads and head_size"):
        made(AttentionSizes(heads=2), 1, "bfloat16")
    _, group = made(GQA, 1, "fp8")
    with pytest.raises(InvalidArgument, match="kv_scales"):
        offload_identity(
            "m", {0: group}, SCHEME, dtype="fp8", revision="r", weights_digest=None, variants={}
        )
    with pytest.raises(InvalidArgument, match="another algorithm"):
        chunk_keys(b"x" * 16, SCHEME)


def test_a_path_names_a_model_by_its_last_part() -> None:
    assert model_name("/models/foo/") == "foo"
    assert model_name("./foo") == "foo"
    assert model_name("org/foo") == "org/foo"
