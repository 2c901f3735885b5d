from __future__ import annotations

import copy
import hashlib
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutate import Edit, drop, junk, paths_of, put

from kvstore.errors import FormatError, GeometryMismatch, InvalidArgument
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity, identity_from_json
from kvstore.jsonform import canonical
from kvstore.keys import KeyScheme, root_key

# The whole identity of a small model, spelt out: what the fingerprint is taken of.
GOLDEN_JSON = (
    '{"groups":[{"attention":"full","block_tokens":16,"extent_blocks":16,"heads":3,"layers":[0,1],'
    '"name":"kv","parallel":null,"parts":[{"count":64,"element":"bfloat16","name":"key"},'
    '{"count":64,"element":"bfloat16","name":"value"}],"shard_heads":3,"shard_layers":2,'
    '"window":null}],"key_scheme":{"algorithm":null,"key_bytes":32,"name":null,"root":"'
    "eca0e438a3842e96b197a7d397ac301dcb34ab27da0b53cf934b27fe706574ca"
    '","scheme":"kvstore-sha256"},"model":"SmolLM2 \\u00e9","model_layers":2,"revision":"main",'
    '"variants":{"kv_scale":"none","rope":"yarn"},"weights_digest":null}'
)


def smollm(**changed: Any) -> Identity:
    fields: dict[str, Any] = {
        "model": "SmolLM2 é",
        "model_layers": 2,
        "groups": (LayerGroup.attention_kv(layers=2, heads=3, head_size=64),),
        "revision": "main",
        "variants": {"rope": "yarn", "kv_scale": "none"},
    }
    return Identity(**(fields | changed))


def test_fingerprint_golden() -> None:
    wanted = hashlib.sha256(b"kvstore/v1/name\0" + GOLDEN_JSON.encode("ascii")).hexdigest()
    assert smollm().fingerprint == wanted
    assert smollm().namespace == f"smollm2-{wanted[:32]}"
    assert smollm().to_json() == json.loads(GOLDEN_JSON)


def test_round_trip(identity: Identity) -> None:
    stored = json.loads(json.dumps(identity.to_json()))
    assert identity_from_json(stored, "x") == identity
    assert identity_from_json(stored, "x").fingerprint == identity.fingerprint


def test_an_opaque_key_scheme_round_trips() -> None:
    scheme = KeyScheme.opaque("vllm", algorithm="sha256_cbor", root=b"\x01" * 20, key_bytes=16)
    given = smollm(key_scheme=scheme)
    assert identity_from_json(given.to_json(), "x") == given
    assert given.to_json()["key_scheme"] == {
        "scheme": "opaque",
        "name": "vllm",
        "algorithm": "sha256_cbor",
        "root": "01" * 20,
        "key_bytes": 16,
    }


OTHERS = {
    "model": {"model": "SmolLM3"},
    "model_layers": {"model_layers": 3},
    "revision": {"revision": "v2"},
    "weights_digest": {"weights_digest": "sha256:00"},
    "variants": {"variants": {"rope": "yarn"}},
    "salt": {"key_scheme": KeyScheme.sha256(b"tenant")},
    "element": {
        "groups": [LayerGroup.attention_kv(layers=2, heads=3, head_size=64, element="float16")]
    },
    "extent": {
        "groups": [LayerGroup.attention_kv(layers=2, heads=3, head_size=64, extent_blocks=8)]
    },
}


@pytest.mark.parametrize("field", OTHERS)
def test_whatever_changes_the_bytes_changes_the_namespace(field: str) -> None:
    other = smollm(**OTHERS[field])
    assert other.fingerprint != smollm().fingerprint
    assert other != smollm()


def test_the_order_in_which_variants_are_given_does_not_matter() -> None:
    other = smollm(variants={"kv_scale": "none", "rope": "yarn"})
    assert (other, hash(other), other.namespace) == (smollm(), hash(smollm()), smollm().namespace)


def test_an_identity_cannot_be_changed_afterwards() -> None:
    variants = {"rope": "yarn"}
    made = smollm(variants=variants)
    before = made.fingerprint
    variants["rope"] = "linear"
    assert made.variants == {"rope": "yarn"}
    with pytest.raises(TypeError):
        made.variants["rope"] = "linear"  # type: ignore[index]
    assert replace(made, revision="v2").fingerprint != before


def test_an_identity_can_be_sent_to_another_process() -> None:
    made = smollm()
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301  # our own bytes
        assert (other, other.fingerprint) == (made, made.fingerprint)


REJECTED = {
    "model-empty": ({"model": ""}, "model has 0 characters"),
    "model-type": ({"model": 5}, "model must be text"),
    "model-long": ({"model": "x" * 4097}, "model has 4097 characters"),
    "model-surrogate": ({"model": "\udc80"}, "model is not Unicode text"),
    "no-weights": ({"revision": None}, "needs revision or weights_digest"),
    "revision-empty": ({"revision": ""}, "revision has 0 characters"),
    "digest-type": ({"weights_digest": b"00"}, "weights_digest must be text"),
    "variant-type": ({"variants": {"a": 1}}, "variant 'a' must be text"),
    "variant-name": ({"variants": {1: "a"}}, "variant name must be text"),
    "variant-empty": ({"variants": {"": "a"}}, "variant name has 0 characters"),
    # Named as a field of the identity itself: checked all the same, and not instead of it.
    "variant-model": ({"model": "", "variants": {"model": "x"}}, "model has 0 characters"),
    "variant-revision": ({"variants": {"revision": 5}}, "variant 'revision' must be text"),
    "variants-many": ({"variants": {f"v{i}": "x" for i in range(257)}}, "257 variants"),
    "layers-bool": ({"model_layers": True}, "model_layers is True"),
    "layers-zero": ({"model_layers": 0}, "model_layers is 0"),
    "layers-many": ({"model_layers": 4097}, "model_layers is 4097"),
    "layers-text": ({"model_layers": "2"}, "model_layers is '2'"),
    "layers-few": ({"model_layers": 1}, "has layer 1, but the model has layers 0 to 0"),
    "groups-none": ({"groups": ()}, "1 to 256 layer groups"),
    "groups-many": ({"groups": smollm().groups * 257}, "1 to 256 layer groups"),
    "groups-twice": ({"groups": smollm().groups * 2}, "different names"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case: str) -> None:
    changed, fragment = REJECTED[case]
    with pytest.raises(InvalidArgument, match=fragment):
        smollm(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"revision": None, "weights_digest": "sha256:00"},
        {"model": "x" * 4096},
        {"variants": {f"v{i}": "x" for i in range(256)}},
        {"model_layers": 4096},
        {"groups": [replace(smollm().groups[0], name=f"g{i}") for i in range(256)]},
    ],
    ids=lambda x: f"{x!r:.40}",
)
def test_the_limits_themselves_are_accepted(changed: dict[str, Any]) -> None:
    made = smollm(**changed)
    assert identity_from_json(made.to_json(), "x") == made


def test_group_by_name(identity: Identity) -> None:
    assert identity.group("mla").name == "mla"
    assert smollm().group() == smollm().group("kv")
    with pytest.raises(InvalidArgument, match="no layer group 'x'"):
        identity.group("x")
    with pytest.raises(InvalidArgument, match="no layer group None"):
        identity.group()
    with pytest.raises(InvalidArgument, match="no layer group 'x'"):
        smollm().group("x")


FIELDS = ["model", "model_layers", "revision", "weights_digest", "variants", "key_scheme", "groups"]
GROUP_FIELDS = [
    *("name", "layers", "heads", "block_tokens", "parts", "attention", "window"),
    *("extent_blocks", "shard_layers", "shard_heads", "parallel"),
]
STORED_REJECTED: dict[str, tuple[Edit, str]] = {
    **{f"no-{f}": (drop(f), f"'{f}' is missing") for f in FIELDS},
    **{f"no-group-{f}": (drop(f"groups.0.{f}"), f"'{f}' is missing") for f in GROUP_FIELDS},
    **{
        f"no-scheme-{f}": (drop(f"key_scheme.{f}"), f"'{f}' is missing")
        for f in ("scheme", "name", "algorithm", "root", "key_bytes")
    },
    **{
        f"no-part-{f}": (drop(f"groups.0.parts.0.{f}"), f"'{f}' is missing")
        for f in ("name", "element", "count")
    },
    "model-null": (put("model", None), "'model' is None"),
    "model-empty": (put("model", ""), "model has 0 characters"),
    "layers-bool": (put("model_layers", value=True), "'model_layers' is True"),
    "layers-huge": (put("model_layers", 1 << 63), "'model_layers' is 9223372036854775808"),
    "layers-short": (put("model_layers", 1), "has layer 1"),
    "weights-unknown": (put("revision", None), "needs revision or weights_digest"),
    "variants-list": (put("variants", []), "a list where an object belongs"),
    "variants-number": (put("variants.rope", 4), "'rope' is 4, not a string"),
    "groups-object": (put("groups", {}), "not an array"),
    "groups-none": (put("groups", []), "1 to 256 layer groups"),
    "groups-many": (put("groups", [None] * 257), "an array of at most 256 items"),
    "group-null": (put("groups.0", None), "a NoneType where an object belongs"),
    "group-name": (put("groups.0.name", "../x"), "layer group name"),
    "group-layers-text": (put("groups.0.layers", "01"), "not an array"),
    "group-layers-bool": (put("groups.0.layers.1", value=True), "other than whole numbers"),
    "group-layers-null": (put("groups.0.layers.1", None), "other than whole numbers"),
    "group-layers-order": (put("groups.0.layers", [1, 0]), "must be ascending"),
    "group-layers-none": (put("groups.0.layers", []), "number of layers"),
    "group-layers-huge": (put("groups.0.layers.1", 1 << 62), "layer index"),
    "group-heads-bool": (put("groups.0.heads", value=True), "'heads' is True"),
    "group-heads-huge": (put("groups.0.heads", 1 << 40), "'heads' is 1099511627776"),
    "group-tokens-zero": (put("groups.0.block_tokens", 0), "'block_tokens' is 0"),
    "group-parts-none": (put("groups.0.parts", []), "number of content parts"),
    "group-parts-many": (put("groups.0.parts", [{}] * 17), "an array of at most 16"),
    "group-parts-text": (put("groups.0.parts.0", "key"), "a str where an object belongs"),
    "part-name": (put("groups.0.parts.0.name", "K"), "content part name"),
    "part-same": (put("groups.0.parts.0.name", "value"), "different names"),
    "part-element": (put("groups.0.parts.0.element", "int4"), "'int4' is not known"),
    # The prefix is a courtesy to callers; two spellings on disk would be two fingerprints.
    "part-element-torch": (put("groups.0.parts.0.element", "torch.int8"), "is not known"),
    "part-count": (put("groups.0.parts.0.count", 1 << 21), "'count' is 2097152"),
    "attention": (put("groups.0.attention", "Full"), "must be one of"),
    "window": (put("groups.0.window", 5), "goes with sliding_window"),
    "window-zero": (put("groups.0.window", 0), "'window' is 0"),
    # Zero asks a caller's group for its default; a record always says which.
    "extent-default": (put("groups.0.extent_blocks", 0), "'extent_blocks' is 0"),
    "shard-layers-default": (put("groups.0.shard_layers", 0), "'shard_layers' is 0"),
    "shard-heads-default": (put("groups.0.shard_heads", 0), "'shard_heads' is 0"),
    "shard-heads": (put("groups.0.shard_heads", 2), "does not divide"),
    "parallel": (put("groups.0.parallel", "tp=2"), "goes with opaque"),
    "scheme": (put("key_scheme.scheme", "md5"), "'md5' is not known to format version 1"),
    "scheme-name": (put("key_scheme.name", "x"), "no name or algorithm"),
    "scheme-root-short": (put("key_scheme.root", "00"), "keys of 32 bytes"),
    "scheme-root-upper": (put("key_scheme.root", root_key().hex().upper()), "lower-case hex"),
    "scheme-root-null": (put("key_scheme.root", None), "lower-case hex"),
    "scheme-bytes": (put("key_scheme.key_bytes", 16), "keys of 32 bytes"),
    "scheme-bytes-huge": (put("key_scheme.key_bytes", 65), "'key_bytes' is 65"),
    "scheme-opaque": (put("key_scheme.scheme", "opaque"), "name None must match"),
}


@pytest.mark.parametrize("case", STORED_REJECTED)
def test_stored_rejected(case: str) -> None:
    edit, fragment = STORED_REJECTED[case]
    stored = copy.deepcopy(smollm().to_json())
    edit(stored)
    with pytest.raises(FormatError, match=fragment) as caught:
        identity_from_json(stored, "namespace x")
    assert str(caught.value).startswith("namespace x")


@pytest.mark.parametrize("value", [None, [], "x", 5, True])
def test_an_identity_is_an_object(value: object) -> None:
    with pytest.raises(FormatError, match="where an object belongs"):
        identity_from_json(value, "x")


@given(st.data())
def test_any_change_gives_another_identity_or_a_format_error(data: st.DataObject) -> None:
    stored = copy.deepcopy(smollm().to_json())
    put(data.draw(st.sampled_from(paths_of(stored))), data.draw(junk))(stored)
    try:
        read = identity_from_json(stored, "x")
    except FormatError:
        return
    assert canonical(read.to_json()) == canonical(stored)


def test_mismatch_names_every_field_that_differs() -> None:
    other = smollm(
        model="Other",
        groups=[LayerGroup.attention_kv(layers=2, heads=4, head_size=64, element="float16")],
        variants={"rope": "linear", "adapter": "x"},
    )
    with pytest.raises(GeometryMismatch, match="namespace y was made with another identity") as at:
        smollm().require_same(other, "namespace y")
    assert at.value.fields == {
        "model": ("SmolLM2 é", "Other"),
        "groups[0].heads": (3, 4),
        "groups[0].shard_heads": (3, 4),
        "groups[0].parts[0].element": ("bfloat16", "float16"),
        "groups[0].parts[1].element": ("bfloat16", "float16"),
        "variants.rope": ("yarn", "linear"),
        "variants.adapter": (None, "x"),
        "variants.kv_scale": ("none", None),
    }
    for field in at.value.fields:
        assert field in str(at.value)
    smollm().require_same(smollm(), "namespace y")


def test_mismatch_in_the_number_of_groups_shows_both_lists() -> None:
    two = [*smollm().groups, LayerGroup.mla(layers=2)]
    with pytest.raises(GeometryMismatch) as caught:
        smollm().require_same(smollm(groups=two), "x")
    assert list(caught.value.fields) == ["groups"]
