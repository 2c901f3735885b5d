"""``kvstore show``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.commands import Run
from support.made import Made, flip, make_store
from tiny import opaque_group


@pytest.fixture
def extent(made: Made) -> str:
    return made.extents("kv")[1]


def test_an_extent(run: Run, made: Made, extent: str) -> None:
    ran = run("show", made.root, Path(extent).name[:8])
    assert (ran.status, ran.err) == (0, "")
    for text in (
        f"extent {Path(extent).name}",
        "blocks      4 to 7, of 4 tokens",
        "tokens      16 to 31 of the sequence",
        "layer 4, block 4, head 4, token 4, content 16",
        "uint16, content key:bfloat16[8] value:bfloat16[8]",
        "written by  tests, tp=1",
        "checksums: 16 chunks of 512 B, all match",
    ):
        assert text in ran.out
    assert ran.out.count("  ok    ok     ok\n") == 4
    assert ran.out.count(" key    bfloat16") == 4
    assert "FAULT" not in ran.out


def test_an_extent_as_json(run: Run, made: Made, extent: str) -> None:
    found = run("show", made.root, extent, "--json").json
    record = made.records[extent]
    assert found["path"] == extent
    assert found["key"] == Path(extent).name
    assert found["blocks"] == [k.hex() for k in record.blocks]
    assert found["parent"] == record.parent.hex()
    assert found["array"]["shape"] == [4, 4, 4, 4, 16]
    assert found["array"]["shard_shape"] == [2, 4, 2, 4, 16]
    assert found["array"]["data_type"] == "uint16"
    assert found["parts"][1] == {"name": "value", "element": "bfloat16", "count": 8}
    assert [(s["name"], s["bytes"]) for s in found["shards"]] == list(record.shards.items())
    assert found["checksums"] == {"chunks": 16, "damaged": 0, "unchecked": 0}
    assert found["faults"] == []
    assert len(found["statistics"]) == 8
    first = found["statistics"][0]
    key = made.values[extent][0, ..., :16].copy().view("<u2").astype(np.uint32) << 16
    true = key.view(np.float32)
    assert (first["layer"], first["part"], first["count"]) == (0, "key", 512)
    assert first["maximum"] == true[np.isfinite(true)].max()
    assert run("show", made.root, extent, "--json", "--no-stats").json["statistics"] is None


def test_damage_is_shown_where_it_is(run: Run, made: Made, extent: str) -> None:
    flip(made.root / extent / "c.0.0.1.0.0", 8)
    (made.root / extent / "c.1.0.0.0.0").unlink()
    index = made.root / extent / "c.1.0.1.0.0"
    flip(index, 8 * (index.stat().st_size - 1))
    ran = run("show", made.root, Path(extent).name)
    assert ran.status == 1
    rows = {line.split()[0]: line.split()[3:] for line in ran.out.splitlines() if "c." in line[:2]}
    assert rows == {
        "c.0.0.0.0.0": ["ok", "ok", "ok"],
        "c.0.0.1.0.0": ["ok", "ok", "DAMAGED"],
        "c.1.0.0.0.0": ["MISSING", "not", "checked", "not", "checked"],
        "c.1.0.1.0.0": ["ok", "DAMAGED", "ok"],
    }
    assert "16 chunks of 512 B, 1 damaged, 4 not checked" in ran.out
    assert "FAULT  checksum  c.0.0.1.0.0: layer 0, head 2: " in ran.out
    assert "no statistics: " in ran.out
    found = run("show", made.root, extent, "--json")
    assert found.status == 1
    assert found.json["checksums"] == {"chunks": 16, "damaged": 1, "unchecked": 4}
    assert [f["kind"] for f in found.json["faults"]] == ["checksum", "missing", "index"]
    assert [len(s["faults"]) for s in found.json["shards"]] == [0, 1, 1, 1]
    assert found.json["statistics"] is None


def test_a_damaged_record_is_an_error(run: Run, made: Made, extent: str) -> None:
    (made.root / extent / "zarr.json").write_bytes(b"{}")
    ran = run("show", made.root, Path(extent).name)
    assert (ran.status, ran.out) == (1, "")
    assert "'attributes' is missing" in ran.err


def test_a_namespace(run: Run, made: Made) -> None:
    ran = run("show", made.root, "tiny")
    assert ran.status == 0
    for text in (
        "model           Tiny/Model-1.5B (test)",
        "revision        0123abc",
        f"fingerprint     {made.identity.fingerprint}",
        "sliding_window (32)",
        "key:float16[4] value:float16[4]",
    ):
        assert text in ran.out
    found = run("show", made.root, made.name, "--json").json
    assert found["fingerprint"] == made.identity.fingerprint
    assert found["groups"] == made.identity.to_json()["groups"]


def test_opaque_pages_name_who_may_use_them(run: Run, tmp_path: Path) -> None:
    made = make_store(tmp_path / "opaque", [opaque_group()], blocks=2)
    ran = run("show", made.root, Path(made.extents("rank0")[0]).name)
    assert "only for    tp=2 rank 0" in ran.out


def test_what_may_be_meant(run: Run, two: Made) -> None:
    """The same prompt has the same keys in both namespaces."""
    shared = next(Path(e).name for e in two.extents("kv") if two.records[e].start_block == 0)
    ran = run("show", two.root, shared)
    assert ran.status == 2
    assert "may be any of" in ran.err
    assert "NAMESPACE/KEY" in ran.err
    assert run("show", two.root, f"other/{shared[:6]}").status == 0
    assert run("show", two.root, "other", shared[:6]).status == 0
    assert run("show", two.root, "other", "00000000").status == 2
    assert run("show", two.root, f"{two.name}/kv/{shared[:2]}/{shared}").status == 0
    for unknown in ("ffffffffffff", "nothing", "tiny/0", "tiny/xyz12", "none/" + shared):
        assert run("show", two.root, unknown).status == 2
