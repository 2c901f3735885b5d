"""``kvstore convert``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Run

import kvstore

DATA = Path(__file__).resolve().parents[1] / "data" / "vllm_fs"
SIZES = ("--heads", "2", "--head-size", "4")


def test_import_and_again(run: Run, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ran = run("convert", DATA / "nhd", store, "--revision", "r", *SIZES)
    assert ran.status == 0
    assert "2 chunks imported (768 B), 0 there already, 0 refused" in ran.out
    again = run("convert", DATA / "nhd", store, "--revision", "r", *SIZES, "--json").json
    (cache,) = again["caches"]
    assert (cache["imported"], cache["present"], again["refused"]) == (0, 2, [])
    with kvstore.open(store, read_only=True) as opened:
        assert list(opened.namespaces()) == [cache["namespace"]]


def test_a_checkpoint_says_which_weights_and_sizes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "a.safetensors").write_bytes(b"weights")
    text = {"num_key_value_heads": 2, "num_attention_heads": 4, "hidden_size": 16}
    (model / "config.json").write_text(json.dumps({"text_config": text}))
    ran = run("convert", DATA / "nhd", tmp_path / "store", "--weights", model, "--json")
    assert ran.json["caches"][0]["imported"] == 2
    with kvstore.open(tmp_path / "store") as store:
        identity = store.open_namespace(ran.json["caches"][0]["namespace"]).identity
    assert (identity.groups[0].heads, identity.revision) == (2, None)
    assert identity.weights_digest is not None
    (model / "config.json").write_text("{}")
    ran = run("convert", DATA / "nhd", tmp_path / "store", "--weights", model)
    assert ran.status == 2
    assert "does not say how large" in ran.err


def test_what_is_refused_makes_the_status_1(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "caches"
    for name in ("nhd", "direct"):
        shutil.copytree(DATA / name, source, dirs_exist_ok=True)
    ran = run("convert", source, tmp_path / "store", "--revision", "r", *SIZES, "--json")
    assert ran.status == 1
    assert ran.json["caches"][0]["imported"] == 2
    assert "not in canonical form" in ran.json["refused"][0]["reason"]
    chunk = next(source.rglob("*.bin"))
    chunk.write_bytes(b"short")
    ran = run("convert", source, tmp_path / "other", "--revision", "r", *SIZES)
    assert ran.status == 1
    assert "refused" in ran.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (SIZES, "--weights"),
        (("--revision", "r"), "--head-size"),
        (("--revision", "r", *SIZES, "--variant", "x"), "NAME=VALUE"),
        (("--revision", "r", *SIZES, "--hash-root", "xy"), "hexadecimal"),
        (("--revision", "r", *SIZES, "--hash-algorithm", "xxhash"), "PYTHONHASHSEED"),
        (("--revision", "r", *SIZES, "--threads", "0"), "--threads"),
        (("--revision", "r", "--heads", "-2", "--head-size", "4"), "heads is -2"),
    ],
)
def test_wrong_calls(run: Run, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    ran = run("convert", DATA / "nhd", tmp_path / "store", *options)
    assert ran.status == 2
    assert words in ran.err
    assert not (tmp_path / "store").exists()


def test_seeds_and_variants_are_part_of_the_identity(run: Run, tmp_path: Path) -> None:
    names = set()
    for options in (
        (),
        ("--hash-seed", "7"),
        ("--hash-algorithm", "sha256_cbor"),
        ("--hash-root", "00" * 32),
        ("--variant", "quantization=fp8"),
        ("--model", "other"),
    ):
        common = (DATA / "nhd", tmp_path / "store", "--revision", "r", *SIZES)
        names.add(run("convert", *common, *options, "--json").json["caches"][0]["namespace"])
    assert len(names) == 6


def test_the_engine_is_not_needed(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['vllm'] = None\nfrom kvstore.cli.main import main\n"
        f"sys.exit(main(['convert', {str(DATA / 'nhd')!r}, {str(tmp_path / 's')!r}, '--revision', "
        f"'r', '--heads', '2', '--head-size', '4']))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
