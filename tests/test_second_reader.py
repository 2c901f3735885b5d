"""The second reader, which names the rule of every refusal, against the vectors in spec/vectors.

It was written from the specification, apart from the vectors' maker and from the package.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from second_reader import reader, rules

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "spec"
VECTORS = SPEC / "vectors"
sys.path.insert(0, str(ROOT / "tools"))

import make_vectors  # noqa: E402 - found by the line above

MANIFEST = json.loads((VECTORS / "manifest.json").read_text())
VALID = {store["name"]: store for store in MANIFEST["valid"]}
KEYS = json.loads((VECTORS / "keys.json").read_text())
IDENTITIES = json.loads((VECTORS / "identities.json").read_text())


def by_name(vectors: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("vector", [pytest.param(v, id=v["name"]) for v in vectors])


def read_whole(root: Path, at: str = "") -> list[dict[str, Any]]:
    """Read the store, or what lies at one place of it, and say what was found."""
    name, _, rest = at.partition("/")
    names = [name] if name else reader.namespaces(root)
    found = []
    for space in (reader.Namespace(root, n) for n in names):
        places = [tuple(rest.split("/"))] if rest else list(space.extents())
        for group, key in places:
            extent = reader.Extent(space, group, key)
            array = extent.read()
            found.append(
                {
                    "namespace": space.name,
                    "group": group,
                    "key": key,
                    "start_block": extent.record["start_block"],
                    "shape": list(array.shape),
                    "data_type": array.dtype.name,
                    "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
                }
            )
    return found


def ordered(extents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(extents, key=lambda e: (e["namespace"], e["group"], e["key"]))


@by_name(MANIFEST["valid"])
def test_reads_every_valid_store(vector: dict[str, Any]) -> None:
    found = read_whole(VECTORS / "valid" / vector["name"])
    assert ordered(found) == ordered(vector["extents"])


@by_name(MANIFEST["variations"])
def test_reads_every_variation_as_its_base(vector: dict[str, Any], tmp_path: Path) -> None:
    make_vectors.expand(vector, VECTORS, tmp_path / "store")
    assert read_whole(tmp_path / "store") == VALID[vector["base"]]["extents"]


@by_name(MANIFEST["invalid"])
def test_refuses_every_spoilt_store_by_its_rule(vector: dict[str, Any], tmp_path: Path) -> None:
    make_vectors.expand(vector, VECTORS, tmp_path / "store")
    with pytest.raises(reader.Rejected) as refusal:
        read_whole(tmp_path / "store", vector["at"])
    assert (refusal.value.rule, refusal.value.error) == (vector["rule"], vector["error"])


def test_every_rule_of_the_reader_has_a_vector() -> None:
    folder = Path(reader.__file__).parent
    tree = [ast.parse((folder / f).read_text()) for f in ("reader.py", "group.py", "rules.py")]
    texts = {n.value for t in tree for n in ast.walk(t) if isinstance(n, ast.Constant)}
    spoken = {v["rule"] for v in MANIFEST["invalid"]}
    shaped = {t for t in texts if isinstance(t, str) and re.fullmatch("[a-z]+-[a-z-]+[a-z]", t)}
    assert shaped - {"kvstore-sha256", "group-name"} <= spoken
    assert set(rules.ERRORS) <= spoken


def test_rules_and_errors_are_those_of_the_specification() -> None:
    text = (SPEC / "10-rejections.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| `(\w+)` \|", text, flags=re.MULTILINE)
    table = dict(rows)
    assert len(table) == len(rows)
    for vector in MANIFEST["invalid"]:
        assert table[vector["rule"]] == vector["error"], vector["name"]
    for rule, error in rules.ERRORS.items():
        assert table[rule] == error


@pytest.mark.parametrize("case", KEYS)
def test_recomputes_keys(case: dict[str, Any]) -> None:
    parent = rules.root_key(bytes.fromhex(case["salt"]))
    assert parent.hex() == case["root"]
    size = case["block_tokens"]
    for i, expected in enumerate(case["keys"]):
        extra = [bytes.fromhex(x) for x in (case["extra"][i] if case["extra"] else [])]
        parent = rules.block_key(parent, case["tokens"][i * size : (i + 1) * size], extra)
        assert parent.hex() == expected
    assert len(case["keys"]) == len(case["tokens"]) // size


@pytest.mark.parametrize("case", IDENTITIES)
def test_recomputes_fingerprints_and_names(case: dict[str, Any]) -> None:
    if "slug" in case:
        assert rules.namespace_name({"model": case["model"]})[:-33] == case["slug"]
        return
    assert rules.canonical(case["identity"]).decode() == case["canonical"]
    assert rules.fingerprint(case["identity"]) == case["fingerprint"]
    assert rules.namespace_name(case["identity"]) == case["namespace"]


@pytest.mark.parametrize("kind", ["namespace", "group", "key"])
def test_name_patterns(kind: str) -> None:
    cases = json.loads((VECTORS / "names.json").read_text())[kind]
    pattern = {"namespace": rules.NAMESPACE, "group": rules.GROUP, "key": rules.KEY}[kind]
    assert all(re.fullmatch(pattern, name) for name in cases["valid"])
    assert not any(re.fullmatch(pattern, name) for name in cases["invalid"])


@pytest.mark.parametrize(
    ("data", "crc"),
    [(b"", "00000000"), (b"123456789", "839206e3"), (bytes(32), "aa36918a")],
)
def test_crc32c_check_values(data: bytes, crc: str) -> None:
    # The check value of CRC-32C, and the 32 zero bytes of RFC 3720 B.4, as stored.
    assert rules.crc32c(data).hex() == crc


def test_lists_no_extent_under_a_key_of_another_length(tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(VECTORS / "valid" / "tiny", root)
    extent = VALID["tiny"]["extents"][0]
    fanout = root / extent["namespace"] / extent["group"] / extent["key"][:2]
    shutil.copytree(fanout / extent["key"], fanout / extent["key"][:32])
    assert read_whole(root) == VALID["tiny"]["extents"]


def test_reader_as_a_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    extent = VALID["tiny"]["extents"][0]
    place = f"{extent['namespace']}/{extent['group']}/{extent['key']}"
    assert reader.main([str(VECTORS / "valid" / "tiny"), place]) == 0
    assert extent["sha256"] in capsys.readouterr().out
    assert reader.main([str(tmp_path)]) == 1
    assert "not-found" in capsys.readouterr().out
