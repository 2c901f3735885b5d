"""``kvstore convert``, on caches that the engine's own code wrote."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from support.commands import Run
from support.fs_caches import CANONICAL, LAYERS, TOKENS, Written, named, unpack

import kvstore


def stored(root: Path, cache: Written, namespace: str) -> list[np.ndarray]:
    """What zarr-python reads of each chunk: bits ``[layer, head, token, content]``."""
    with kvstore.open(root, create=False, read_only=True) as store:
        space = store.open_namespace(namespace)
        paths = [f"{store.location}/{space.path(key)}" for key in cache.hashes()]
    return [zarr.open_array(path, mode="r")[:][:, 0] for path in paths]


def blocks(source: Path) -> list[Path]:
    return sorted(source.rglob("*.bin"))


@pytest.mark.parametrize("cache", CANONICAL, ids=lambda c: c.name)
def test_every_element_is_where_it_belongs(run: Run, tmp_path: Path, cache: Written) -> None:
    source, root = unpack(cache.name, tmp_path), tmp_path / "store"
    before = {p: p.read_bytes() for p in blocks(source)}
    ran = run("convert", source, root, *cache.options, "--json")
    assert (ran.status, ran.err) == (0, "")
    out = ran.json
    assert (out["imported"], out["present"], out["refused"]) == (cache.chunks, 0, {})
    truth = cache.truth()
    assert out["bytes"] == truth.nbytes
    k = cache.chunk_blocks
    for i, chunk in enumerate(stored(root, cache, out["namespace"])):
        for layer, b in np.ndindex(LAYERS, k):
            part = chunk[layer, :, b * TOKENS : (b + 1) * TOKENS]
            np.testing.assert_array_equal(part, truth[layer, i * k + b])
    assert run("verify", root).status == 0
    assert {p: p.read_bytes() for p in blocks(source)} == before


def test_one_namespace_for_both_families(run: Run, tmp_path: Path) -> None:
    names = set()
    for name in ("nhd", "hnd", "split"):
        source = unpack(name, tmp_path)
        ran = run("convert", source, tmp_path / "store", *named(name).options, "--json")
        names.add(ran.json["namespace"])
    assert len(names) == 1


def test_a_second_call_goes_on(run: Run, tmp_path: Path) -> None:
    cache = named("nhd")
    source, root = unpack(cache.name, tmp_path), tmp_path / "store"
    last = blocks(source)[-1]
    away = tmp_path / "away"
    shutil.move(last, away)
    assert run("convert", source, root, *cache.options).out.startswith("imported 2 files")
    shutil.move(away, last)
    ran = run("convert", source, root, *cache.options, "--threads", "1", "--no-sync")
    assert ran.out.startswith("imported 1 file into namespace ")
    assert "2 were there already" in ran.out
    assert not list((root / "__kvstore__").glob("inflight/*/*/*"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: os.truncate(p, 4095), "has 4095 bytes, not 3072 and padding to a page"),
        (lambda p: os.truncate(p, 0), "has 0 bytes"),
        (lambda p: os.truncate(p, 2048), "has 2048 bytes"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"x"), "holds more than the sizes given"),
        (lambda p: (p.unlink(), p.symlink_to("/dev/zero")), "cannot be opened"),
        (lambda p: (p.unlink(), p.mkdir()), "is not a file"),
        (lambda p: (p.unlink(), os.mkfifo(p)), "is not a file"),
        (lambda p: p.rename(p.with_name("x.bin")), "its name or place"),
        (lambda p: p.rename(p.parent.parent / p.name), "its name or place"),
        (lambda p: p.rename(p.with_name("0" * 64 + ".bin")), "its name or place"),
    ],
)
def test_a_bad_file_is_refused_and_the_others_are_imported(
    run: Run, tmp_path: Path, damage: object, reason: str
) -> None:
    cache = named("nhd")
    source = unpack(cache.name, tmp_path)
    damage(blocks(source)[1])  # type: ignore[operator]
    ran = run("convert", source, tmp_path / "store", *cache.options, "--json")
    assert ran.status == 1
    assert ran.json["imported"] == 2
    assert [reason in r for r in ran.json["refused"]] == [True]
    assert len(ran.json["files"]) == 1
    text = run("convert", source, tmp_path / "other", *cache.options)
    assert text.status == 1
    assert "REFUSED" in text.out
    assert "refused 1: " in text.out


def test_leftovers_of_writers_are_passed_over(run: Run, tmp_path: Path) -> None:
    cache = named("nhd")
    source = unpack(cache.name, tmp_path)
    first = blocks(source)[0]
    first.with_name(first.name + "_123.tmp").write_bytes(b"half")
    assert run("convert", source, tmp_path / "store", *cache.options).status == 0


@pytest.mark.parametrize(
    "sizes",
    [
        ("--heads", "1", "--head-size", "16"),
        ("--heads", "2", "--head-size", "8"),
        ("--heads", "4", "--head-size", "16"),  # the row is that long, but for other heads
        ("--heads", "8", "--head-size", "16"),
        ("--latent", "16"),
    ],
)
def test_wrong_sizes_import_nothing(run: Run, tmp_path: Path, sizes: tuple[str, ...]) -> None:
    source = unpack("hnd", tmp_path)
    options = ("--revision", "r", "--pages", "packed", *sizes)
    ran = run("convert", source, tmp_path / "store", *options, "--json")
    assert ran.status == 1
    assert ran.json["imported"] == 0
    assert sum(ran.json["refused"].values()) == 2


def test_a_dry_run_makes_nothing(run: Run, tmp_path: Path) -> None:
    cache = named("nhd")
    source = unpack(cache.name, tmp_path)
    ran = run("convert", source, tmp_path / "store", *cache.options, "--dry-run")
    assert ran.status == 0
    assert ran.out.startswith("3 files could be imported into namespace ")
    assert not (tmp_path / "store").exists()


def test_sizes_and_digest_out_of_the_checkpoint(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights.safetensors").write_bytes(b"w")
    (model / "config.json").write_text(
        '{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}'
    )
    source = unpack("nhd", tmp_path)
    options = ("--weights", model, "--pages", "packed", "--json")
    ran = run("convert", source, tmp_path / "store", *options)
    assert (ran.status, ran.json["imported"]) == (0, 3)
    with kvstore.open(tmp_path / "store", read_only=True) as store:
        identity = store.open_namespace(ran.json["namespace"]).identity
    assert identity.weights_digest is not None
    assert identity.key_scheme.algorithm == "sha256"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--revision", "r", "--heads", "2", "--head-size", "16"), "give --pages packed"),
        (("--heads", "2", "--head-size", "16", "--pages", "packed"), "give --weights"),
        (("--revision", "r", "--pages", "packed"), "give the sizes of the cache"),
        (("--revision", "r", "--latent", "16", "--hash-algorithm", "xxhash"), "random root"),
        (("--revision", "r", "--latent", "16", "--hash-root", "x"), "not hexadecimal"),
        (("--revision", "r", "--latent", "16", "--variant", "x"), "NAME=VALUE"),
        (("--revision", "r", "--latent", "16", "--threads", "0"), "at least 1"),
    ],
)
def test_what_is_missing_is_asked_for(
    run: Run, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    ran = run("convert", unpack("latent", tmp_path), tmp_path / "store", *options)
    assert ran.status == 2
    assert message in ran.err
    assert not (tmp_path / "store").exists()


def test_hashes_of_another_length_are_refused(run: Run, tmp_path: Path) -> None:
    options = ("--revision", "r", "--latent", "16", "--hash-algorithm", "xxhash")
    source = unpack("latent", tmp_path)
    ran = run("convert", source, tmp_path / "store", *options, "--hash-root", "00" * 16, "--json")
    assert ran.status == 1
    (reason,) = ran.json["refused"]
    assert "a hash of 32 bytes, but those of xxhash have 16" in reason


def test_what_is_not_canonical_is_refused(run: Run, tmp_path: Path) -> None:
    source = unpack("direct", tmp_path)
    ran = run("convert", source, tmp_path / "store", *named("direct").options)
    assert ran.status == 2
    assert "was written without 'canonical_layout'" in ran.err
