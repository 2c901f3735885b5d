"""The package's codecs against the vectors in spec/vectors, which other code wrote."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import errors, paths
from kvstore.election import elected_replica
from kvstore.errors import FormatError, InvalidArgument, KVStoreError, NotCertified, NotFound
from kvstore.extent import decode_extent, encode_extent, shard_layout
from kvstore.geometry import LayerGroup
from kvstore.identity import identity_from_json
from kvstore.jsonform import canonical
from kvstore.keys import KeyScheme, chain_keys, root_key
from kvstore.parallel import ParallelConfig
from kvstore.records import NamespaceRecord, decode_layer_group, decode_store
from kvstore.shard import ShardLayout, slot_stride, split_chunks
from kvstore.share import certify, share_of

ROOT = Path(__file__).parent.parent
VECTORS = ROOT / "spec" / "vectors"
sys.path.insert(0, str(ROOT / "tools"))

import make_vectors  # noqa: E402 - found by the line above

MANIFEST = json.loads((VECTORS / "manifest.json").read_text())
VALID = {store["name"]: store for store in MANIFEST["valid"]}


def table(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text())


def by_name(vectors: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("vector", [pytest.param(v, id=v["name"]) for v in vectors])


def fetch(path: Path) -> bytes:
    if not path.is_file():
        raise NotFound(str(path))
    return path.read_bytes()


def read(root: Path, at: str) -> list[dict[str, Any]]:
    """Read what lies at one place of a store with the package's codecs alone."""
    decode_store(fetch(root / "zarr.json"), "store")
    if not at:
        return []
    name, _, rest = at.partition("/")
    if not paths.is_namespace(name):
        raise InvalidArgument(name)
    identity = NamespaceRecord.decode(fetch(root / name / "zarr.json"), name).identity
    if not rest:
        return []
    group_name, key = rest.split("/")
    if not paths.is_key(key) or len(key) != 2 * identity.key_scheme.key_bytes:
        raise InvalidArgument(key)
    group = identity.group(group_name)
    place = paths.GroupPath(name, group.name)
    record = decode_extent(fetch(root / place.record(key)), identity, group, key, key)
    array = read_array(root / place.extent(key), group, len(record.blocks), record)
    return [
        {
            "namespace": name,
            "group": group.name,
            "key": key,
            "start_block": record.start_block,
            "shape": list(array.shape),
            "data_type": array.dtype.name,
            "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
        }
    ]


def read_array(folder: Path, group: LayerGroup, blocks: int, record: Any) -> Any:
    array = np.empty(group.shape(blocks), group.carrier.numpy_carrier)
    plain = shard_layout(group, blocks)
    layout = ShardLayout(plain.chunks, plain.chunk_bytes, record.chunk_stride or 0)
    for name, size in record.shards.items():
        row, column = paths.parse_shard_name(name)
        try:
            data = fetch(folder / name)
        except NotFound as error:
            raise errors.Corrupt(str(error)) from None
        if len(data) != size:
            raise errors.Corrupt(name)
        for i, chunk in enumerate(split_chunks(layout, data)):
            layer, head = divmod(i, group.shard_heads)
            page = np.frombuffer(chunk, array.dtype).reshape(blocks, *array.shape[3:])
            array[row * group.shard_layers + layer, :, column * group.shard_heads + head] = page
    return array


def places(store: dict[str, Any]) -> list[str]:
    return [f"{e['namespace']}/{e['group']}/{e['key']}" for e in store["extents"]]


@by_name(MANIFEST["valid"])
def test_reads_every_valid_store(vector: dict[str, Any]) -> None:
    root = VECTORS / "valid" / vector["name"]
    assert [e for at in places(vector) for e in read(root, at)] == vector["extents"]
    for extent in vector["extents"]:
        folder = root / extent["namespace"] / extent["group"]
        group = decode_layer_group((folder / "zarr.json").read_bytes(), "group")
        assert group == extent["group"]


@by_name(MANIFEST["variations"])
def test_reads_every_variation_as_its_base(vector: dict[str, Any], tmp_path: Path) -> None:
    make_vectors.expand(vector, VECTORS, tmp_path / "store")
    base = VALID[vector["base"]]
    found = [e for at in places(base) for e in read(tmp_path / "store", at)]
    assert found == base["extents"]


@by_name(MANIFEST["invalid"])
def test_refuses_every_spoilt_store(vector: dict[str, Any], tmp_path: Path) -> None:
    make_vectors.expand(vector, VECTORS, tmp_path / "store")
    with pytest.raises(KVStoreError) as refusal:
        read(tmp_path / "store", vector["at"])
    assert isinstance(refusal.value, getattr(errors, vector["error"])), refusal.value


@by_name(MANIFEST["valid"])
def test_writes_the_very_documents(vector: dict[str, Any]) -> None:
    root = VECTORS / "valid" / vector["name"]
    for at in places(vector):
        name, group_name, key = at.split("/")
        stored = (root / name / "zarr.json").read_bytes()
        namespace = NamespaceRecord.decode(stored, name)
        assert json.loads(namespace.encode()) == json.loads(stored)
        group = namespace.identity.group(group_name)
        stored = (root / paths.GroupPath(name, group_name).record(key)).read_bytes()
        record = decode_extent(stored, namespace.identity, group, key, key)
        assert json.loads(encode_extent(group, record)) == json.loads(stored)


@pytest.mark.parametrize("case", table("keys"))
def test_keys(case: dict[str, Any]) -> None:
    root = root_key(bytes.fromhex(case["salt"]))
    extra = {i: [bytes.fromhex(x) for x in xs] for i, xs in enumerate(case["extra"])}
    keys = chain_keys(case["tokens"], case["block_tokens"], root=root, extra=extra)
    assert root.hex() == case["root"] == KeyScheme.sha256(bytes.fromhex(case["salt"])).root.hex()
    assert [key.hex() for key in keys] == case["keys"]


@pytest.mark.parametrize("case", table("identities"))
def test_identities(case: dict[str, Any]) -> None:
    if "slug" in case:
        assert paths.slug(case["model"]) == case["slug"]
        return
    identity = identity_from_json(case["identity"], "vector")
    assert canonical(identity.to_json()).decode() == case["canonical"]
    assert identity.fingerprint == case["fingerprint"]
    assert identity.namespace == case["namespace"]


@pytest.mark.parametrize("case", table("shares"), ids=lambda case: case["config"])
def test_shares(case: dict[str, Any]) -> None:
    group = LayerGroup.attention_kv(
        layers=case["layers"], heads=case["heads"], head_size=2, element="int8"
    )
    config = ParallelConfig.parse(case["config"])
    assert str(config) == case["config"]
    if case["refused"]:
        with pytest.raises(NotCertified):
            certify(group, config, case["model_layers"])
        return
    certify(group, config, case["model_layers"])
    found = []
    for rank in config.ranks():
        share = share_of(group, config, rank, case["model_layers"])
        found.append(
            {
                "rank": str(rank),
                "layers": list(share.layers),
                "heads": list(share.heads),
                "cp": share.lattice.cp,
                "index": share.lattice.index,
                "tokens_below_24": share.lattice.owned(0, 24).tolist(),
                "replicas": share.replicas,
                "replica": share.replica,
            }
        )
    assert found == case["ranks"]


def is_shard(name: str) -> bool:
    try:
        paths.parse_shard_name(name)
    except FormatError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "accepts"),
    [
        ("namespace", paths.is_namespace),
        ("group", paths.is_group),
        ("key", paths.is_key),
        ("fanout", paths.is_fanout),
        ("shard", is_shard),
        ("inflight", lambda name: paths.parse_inflight(name) is not None),
        ("done", lambda name: paths.parse_done(name) is not None),
    ],
)
def test_names(kind: str, accepts: Any) -> None:
    cases = table("names")[kind]
    assert [name for name in cases["valid"] if not accepts(name)] == []
    assert [name for name in cases["invalid"] if accepts(name)] == []


def test_strides_elections_and_writer_ids() -> None:
    cases = table("slots")
    for case in cases["strides"]:
        assert slot_stride(case["chunk_bytes"]) == case["stride"]
    for case in cases["elections"]:
        found = elected_replica(bytes.fromhex(case["key"]), case["replicas"])
        assert found == case["replica"]
    for case in cases["writers"]:
        assert paths.writer_id(case["session"], case["config"]) == case["id"]
