"""The reader in spec/ against the vectors in spec/vectors, and the vectors against their maker.

Reader and maker were written from the specification, apart from each other and from the package.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutate import Edit, drop, paths_of, put
from second_reader import reader as strict
from second_reader.rules import Rejected as StrictlyRejected
from support.made import make_store

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "spec"
VECTORS = SPEC / "vectors"
sys.path[:0] = [str(SPEC), str(ROOT / "tools")]

import make_vectors  # noqa: E402 - found by the line above
import reader  # noqa: E402

MANIFEST = json.loads((VECTORS / "manifest.json").read_text())
VALID = {store["name"]: store for store in MANIFEST["valid"]}
KEYS = json.loads((VECTORS / "keys.json").read_text())
IDENTITIES = json.loads((VECTORS / "identities.json").read_text())
MOST_LINES = 199


def by_name(vectors: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("vector", [pytest.param(v, id=v["name"]) for v in vectors])


def read_whole(root: Path, at: str = "") -> list[dict[str, Any]]:
    """Read the store, or what lies at one place of it, and say what was found."""
    if at and "/" not in at:
        reader.open_namespace(root, at)
        return []
    found = []
    for place in [at] if at else reader.listing(root):
        if "/" in place:
            record, array = reader.read(root, place)
            found.append(
                dict(zip(("namespace", "group", "key"), place.split("/"), strict=True))
                | {
                    "start_block": record["start_block"],
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
def test_refuses_every_spoilt_store(vector: dict[str, Any], tmp_path: Path) -> None:
    make_vectors.expand(vector, VECTORS, tmp_path / "store")
    with pytest.raises(reader.Rejected):
        read_whole(tmp_path / "store", vector["at"])


def test_names_only_rules_of_the_specification() -> None:
    table = set(
        re.findall(r"^\| `([a-z-]+)` \|", (SPEC / "10-rejections.md").read_text(), re.MULTILINE)
    )
    calls = [n for n in ast.walk(ast.parse((SPEC / "reader.py").read_text())) if is_need(n)]
    texts = [ast.unparse(call.args[0]) for call in calls]
    spoken = {rule for text in texts for rule in re.findall("[a-z]+-[a-z-]*[a-z]", text)}
    assert len(spoken) >= 25
    assert spoken <= table


def is_need(node: ast.AST) -> Any:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "need"


@pytest.mark.parametrize("case", KEYS)
def test_recomputes_keys(case: dict[str, Any]) -> None:
    parent = reader.root_key(bytes.fromhex(case["salt"]))
    assert parent.hex() == case["root"]
    size = case["block_tokens"]
    for i, expected in enumerate(case["keys"]):
        extra = [bytes.fromhex(x) for x in (case["extra"][i] if case["extra"] else [])]
        parent = reader.block_key(parent, case["tokens"][i * size : (i + 1) * size], extra)
        assert parent.hex() == expected
    assert len(case["keys"]) == len(case["tokens"]) // size


@pytest.mark.parametrize("case", [c for c in IDENTITIES if "identity" in c])
def test_accepts_the_fingerprint_and_the_name_of_an_identity(
    case: dict[str, Any], tmp_path: Path
) -> None:
    name = case["namespace"]
    place_identity(tmp_path, name, case["identity"], case["fingerprint"])
    groups = reader.open_namespace(tmp_path, name)[1]
    assert list(groups) == [g["name"] for g in case["identity"]["groups"]]
    other = name[:-1] + ("0" if name[-1] != "0" else "1")
    place_identity(tmp_path, other, case["identity"], case["fingerprint"])
    with pytest.raises(reader.Rejected, match="fingerprint"):
        reader.open_namespace(tmp_path, other)


SLUGS = [c for c in IDENTITIES if "slug" in c]
SLUGS.append({"model": "A" * 70, "slug": "a" * 64})


@pytest.mark.parametrize("case", SLUGS)
def test_makes_the_slug_of_a_model(case: dict[str, Any], tmp_path: Path) -> None:
    identity = IDENTITIES[0]["identity"] | {"model": case["model"]}
    canonical = reader.canonical(identity).encode()
    digest = hashlib.sha256(b"kvstore/v1/name\0" + canonical).hexdigest()
    name = f"{case['slug']}-{digest[:32]}"
    place_identity(tmp_path, name, identity, digest)
    assert reader.open_namespace(tmp_path, name)


def place_identity(root: Path, name: str, identity: dict[str, Any], fingerprint: str) -> None:
    header = {"format": "kvstore", "version": "1.0", "must_understand": []}
    about = {"identity": identity, "fingerprint": fingerprint, "created": "2026-12-01T03:21:18Z"}
    for folder, record in ((root, header), (root / name, header | about)):
        folder.mkdir(exist_ok=True)
        document = {"zarr_format": 3, "node_type": "group", "attributes": {"kvstore": record}}
        (folder / "zarr.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("data", "crc"),
    [(b"", "00000000"), (b"123456789", "839206e3"), (bytes(32), "aa36918a")],
)
def test_crc32c_check_values(data: bytes, crc: str) -> None:
    # The check value of CRC-32C, and the 32 zero bytes of RFC 3720 B.4, as stored.
    assert reader.crc32c(data).hex() == crc


TINY = VALID["tiny"]["extents"][0]
PLACE = "/".join(TINY[part] for part in ("namespace", "group", "key"))
EXTENT = f"{TINY['namespace']}/{TINY['group']}/{TINY['key'][:2]}/{TINY['key']}"


def edit_json(file: Path, edit: Edit) -> None:
    document = json.loads(file.read_text())
    edit(document["attributes"]["kvstore"])
    file.write_text(json.dumps(document))


def both_readers(root: Path) -> list[bytes | None]:
    """The bytes of tiny's extent by each reader; None: refused."""
    found: list[bytes | None] = [None, None]
    with contextlib.suppress(reader.Rejected):
        found[0] = reader.read(root, PLACE)[1].tobytes()
    with contextlib.suppress(StrictlyRejected):
        space = strict.Namespace(root, TINY["namespace"])
        found[1] = strict.Extent(space, TINY["group"], TINY["key"]).read().tobytes()
    return found


def move_slots(root: Path, stride: int, gap: int = 0) -> None:
    """Write tiny's shards anew: slots of 36 bytes at that stride, a gap in front of the index."""
    for name in ("c.0.0.0.0.0", "c.0.0.1.0.0"):
        shard = root / EXTENT / name
        old = shard.read_bytes()
        new = b"".join(old[36 * i : 36 * i + 36].ljust(stride, b"\0") for i in (0, 1)) + bytes(gap)
        index = np.array([0, 36, stride, 36], "<u8").tobytes()
        shard.write_bytes(new + index + reader.crc32c(index))
        size = shard.stat().st_size

        def edit(record: Any, size: int = size) -> None:
            record["chunk_stride"] = stride
            for about in record["shards"]:
                about["bytes"] = size

        edit_json(root / EXTENT / "zarr.json", edit)


def spoil_store(root: Path) -> None:
    edit_json(root / "zarr.json", put("version", "2.0"))


def add_to_identity(root: Path) -> None:
    edit_json(root / TINY["namespace"] / "zarr.json", put("identity.new", 1))


def add_beyond_64_bits(root: Path) -> None:
    edit_json(root / EXTENT / "zarr.json", put("new", [1 << 64]))


def swap_shards(root: Path) -> None:
    edit_json(root / EXTENT / "zarr.json", lambda record: record["shards"].reverse())


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_store,
        add_to_identity,
        add_beyond_64_bits,
        swap_shards,
        pytest.param(lambda root: move_slots(root, 36, gap=8), id="gap before the index"),
        pytest.param(lambda root: move_slots(root, 2 * 32 + 65_541), id="stride above the limit"),
    ],
)
def test_refuses_what_only_one_condition_forbids(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    shutil.copytree(VECTORS / "valid" / "tiny", tmp_path / "store")
    assert None not in both_readers(tmp_path / "store")
    spoil(tmp_path / "store")
    assert both_readers(tmp_path / "store") == [None, None]


def test_accepts_the_longest_stride(tmp_path: Path) -> None:
    shutil.copytree(VECTORS / "valid" / "tiny", tmp_path / "store")
    before = both_readers(tmp_path / "store")
    move_slots(tmp_path / "store", 2 * 32 + 65_540)
    assert both_readers(tmp_path / "store") == before


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("both") / "store"
    shutil.copytree(VECTORS / "valid" / "tiny", root)
    return root


def similar(value: Any) -> list[Any]:
    """Values that a careless reader might take for another."""
    match value:
        case bool():
            return [not value, int(value), None]
        case int():
            return [value - 1, value + 1, bool(value), float(value), str(value), 1 << 62, None]
        case str():
            return [value[:-1], f"{value}0", value.upper(), f"{value}\n", "", 0, None]
        case list():
            return [value[:-1], [*value, *value[:1]], value[::-1], {}, None]
        case dict():
            return [{}, [], value | {"new": 1}, None]
    return [0, "", "x", [], {}]


@pytest.mark.parametrize("folder", ["", TINY["namespace"], EXTENT])
def test_both_readers_refuse_the_same_records(tiny: Path, folder: str) -> None:
    file = tiny / folder / "zarr.json"
    whole = file.read_text()
    before, outcomes = both_readers(tiny), []
    try:
        for at in paths_of(json.loads(whole)):
            found = reduce(
                lambda inner, name: inner[int(name) if isinstance(inner, list) else name],
                at.split("."),
                json.loads(whole),
            )
            for edit in (drop(at), *(put(at, value) for value in similar(found))):
                document = json.loads(whole)
                edit(document)
                file.write_text(json.dumps(document))
                mine, theirs = both_readers(tiny)
                assert mine == theirs, at
                assert mine in (None, before[0])
                outcomes.append(mine)
    finally:
        file.write_text(whole)
    assert len(outcomes) > 40
    assert 0 < sum(outcome is None for outcome in outcomes) < len(outcomes)


def test_vectors_are_what_their_maker_writes() -> None:
    there = {
        path.relative_to(VECTORS).as_posix(): path.read_bytes()
        for path in VECTORS.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    assert make_vectors.generate() == there
    assert sum(map(len, there.values())) < 400_000


def test_reader_is_one_short_file_of_numpy_and_the_standard_library(tmp_path: Path) -> None:
    assert [path.name for path in SPEC.glob("*.py")] == ["reader.py"]
    assert len((SPEC / "reader.py").read_text().splitlines()) <= MOST_LINES
    shutil.copy(SPEC / "reader.py", tmp_path)
    code = (
        "import sys, runpy; runpy.run_path('reader.py', run_name='__main__'); "
        "names = {m.partition('.')[0] for m in sys.modules}; "
        "bad = names & {'kvstore', 'zarr', 'crc32c', 'torch', 'second_reader'}; "
        "assert not bad, bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(VECTORS / "valid" / "tiny")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [TINY["namespace"], PLACE]


def test_reader_as_a_command(tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, SPEC / "reader.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    root = VECTORS / "valid" / "tiny"
    done = run(root, PLACE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{reader.read(root, PLACE)[1]}\n"
    refused = run(tmp_path)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.count("\n") == 1
    assert "not-found" in refused.stderr


def test_both_readers_read_what_the_package_writes(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store")
    assert {p.count("/") for p in reader.listing(made.root)} == {0, 2}
    for path, values in made.values.items():
        name, group, _, key = path.split("/")
        array = reader.read(made.root, f"{name}/{group}/{key}")[1]
        assert array.tobytes() == values.tobytes(), path
        other = strict.Extent(strict.Namespace(made.root, name), group, key).read()
        assert array.tobytes() == other.tobytes()


def test_lists_no_extent_under_a_key_of_another_length(tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(VECTORS / "valid" / "tiny", root)
    other = (root / EXTENT).parent / TINY["key"][:32]
    shutil.copytree(root / EXTENT, other)
    assert read_whole(root) == VALID["tiny"]["extents"]
