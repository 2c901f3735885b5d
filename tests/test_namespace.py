"""A namespace: keys that never meet, extents listed, removed, and moved away when damaged."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from support.pools import LAYOUTS
from support.world import ONE, World, make_world, small_group, store_all

import kvstore
from kvstore import Identity, KeyScheme, LayerGroup, Rank
from kvstore.errors import InvalidArgument, NotFound
from kvstore.paths import QUARANTINE


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two full extents and a short one, stored."""
    made = make_world(tmp_path)
    made.store_all()
    return made


def _damage(world: World, end: int = 1) -> None:
    shard = world.folder(end) / "c.0.0.0.0.0"
    data = bytearray(shard.read_bytes())
    data[3] ^= 0x10
    shard.write_bytes(data)


def _quarantined(world: World) -> list[Path]:
    return sorted((world.root / QUARANTINE).glob("*/*/*"))


# -- keys ----------------------------------------------------------------------------------------


def test_salts_never_meet(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    salts: list[bytes | None] = [None, b"a", b"b", b"ab", b"a\0"]
    chains = {salt: world.namespace.keys(world.tokens, salt=salt) for salt in salts}
    everything = [key for keys in chains.values() for key in keys]
    assert len(set(everything)) == len(salts) * 5
    for i, (salt, keys) in enumerate(chains.items()):
        assert world.namespace.match_prefix(keys).blocks == 0, salt
        _, truth = world.sequence(i, 5)
        store_all(world.namespace, ONE, keys, truth)
        one = world.seat()
        assert one.worker.load(keys, one.table).blocks == 5, salt
        one.expect(truth, 0, 20)
    assert chains[None] == world.namespace.keys(world.tokens, salt=b"")
    again = world.seat()
    assert again.worker.load(chains[b"a"], again.table).blocks == 5
    again.expect(world.sequence(1, 5)[1], 0, 20)
    assert not _quarantined(world)


def test_extra_keys_never_meet(world: World) -> None:
    plain = world.namespace.keys(world.tokens)
    lora = world.namespace.keys(world.tokens, extra=[b"lora-1"])
    image = world.namespace.keys(world.tokens, extra={2: [b"image"]})
    assert not set(plain) & set(lora)
    assert plain[:2] == image[:2]
    assert not set(plain[2:]) & set(image[2:])
    assert world.namespace.match_prefix(lora).blocks == 0
    assert world.namespace.match_prefix(image).blocks == 2


def test_an_engines_own_keys(tmp_path: Path) -> None:
    group = small_group()
    scheme = KeyScheme.opaque("vllm", algorithm="sha256_cbor", root=b"\7" * 8, key_bytes=20)
    store = kvstore.open(tmp_path, durable=False)
    namespace = store.namespace(Identity("m", 4, (group,), revision="r", key_scheme=scheme))
    hashes = [bytes([i]) * 20 for i in range(5)]
    keys = namespace.engine_keys(hashes)
    truth = make_world(tmp_path / "other").truth
    store_all(namespace, ONE, keys, truth)
    assert namespace.match_prefix(keys).blocks == 5
    assert namespace.record(keys[1]).parent == b"\7" * 8
    pool = LAYOUTS["packed-hnd"](group, 4, 4, 8, 4)
    assert namespace.worker(ONE, Rank(), pool.buffers).load(keys, range(5)).blocks == 5
    with pytest.raises(InvalidArgument, match="engine_keys"):
        namespace.keys([1, 2, 3, 4])
    for bad in ([b"x" * 19], [b"x" * 20] * 2):
        with pytest.raises(InvalidArgument):
            namespace.engine_keys(bad)


def test_engine_keys_are_for_namespaces_of_engine_keys(world: World) -> None:
    with pytest.raises(InvalidArgument, match="makes its own keys"):
        world.namespace.engine_keys([b"x" * 32])


# -- several groups ------------------------------------------------------------------------------


def test_groups_of_one_model_are_kept_apart(tmp_path: Path) -> None:
    full = small_group(name="full", layers=(0, 2))
    window = small_group(name="window", layers=(1, 3), window=8)
    namespace = kvstore.open(tmp_path, durable=False).namespace(
        Identity("m", 4, (full, window), revision="r")
    )
    with pytest.raises(InvalidArgument, match=r"several|no layer group None"):
        namespace.match_prefix(namespace.keys([1] * 8, group="full"))
    keys = namespace.keys(np.arange(20), group="full")
    truths = {g.name: make_world(tmp_path / g.name, g).truth for g in (full, window)}
    for group in (full, window):
        assert namespace.match_prefix(keys, group=group.name).blocks == 0
        store_all(namespace, ONE, keys, truths[group.name], group=group)
        assert namespace.match_prefix(keys, group=group.name).blocks == 5
    assert [e.group.name for e in namespace.extents()] == ["full"] * 3 + ["window"] * 3
    assert len(list(namespace.extents(group="window"))) == 3
    namespace.remove(keys[1], group="window")
    assert namespace.match_prefix(keys, group="full").blocks == 5
    assert namespace.match_prefix(keys, group="window").blocks == 0


# -- extents -------------------------------------------------------------------------------------


def test_extents_are_listed_and_only_they(world: World) -> None:
    listed = list(world.namespace.extents())
    assert [e.key for e in listed] == sorted(world.keys[i].hex() for i in world.ends())
    for extent in listed:
        assert (world.root / extent.path / "zarr.json").is_file()
        assert extent.namespace == world.namespace.name
        assert extent.group == world.group
        assert world.namespace.path(extent.key) == extent.path
    folder = world.folder(1).parent
    (folder / "README").write_text("a stray")
    (folder / ("0" * 64)).mkdir()
    (folder.parent / "zz").mkdir()
    misplaced = folder.parent / ("ff" if folder.name != "ff" else "fe") / world.folder(1).name
    misplaced.mkdir(parents=True)
    (misplaced / "zarr.json").write_text("{}")
    too_short = folder / (folder.name + "0" * 30)
    too_short.mkdir()
    (too_short / "zarr.json").write_text("{}")
    assert list(world.namespace.extents()) == listed


def test_records_say_what_extents_hold(world: World) -> None:
    for start, end in ((0, 1), (2, 3), (4, 4)):
        record = world.namespace.record(world.keys[end])
        assert record.blocks == tuple(world.keys[start : end + 1])
        assert record.start_block == start
        assert record.parent == world.keys.parent_of(start)
        assert record.writer.config == "tp=1"
        assert record.writer.session == "s"
        assert record.parallel_invariant
    with pytest.raises(NotFound):
        world.namespace.record(world.keys[0])
    for bad in ("xyz", "../../etc", "AB" * 32, b""):
        with pytest.raises(InvalidArgument, match="is not an extent's key"):
            world.namespace.record(bad)


def test_removed_is_a_miss_for_everyone_and_leaves_nothing(world: World) -> None:
    other = world.reopen()
    key = world.keys[1]
    assert world.namespace.remove(key.hex())
    assert not world.namespace.remove(key)
    assert other.namespace.match_prefix(world.keys).blocks == 0
    assert not world.folder(1).exists()
    assert not list((world.root / "__kvstore__" / "refs").rglob(world.keys[0].hex()))
    assert not list((world.root / "__kvstore__" / "trash").iterdir())
    one = world.seat()
    assert one.worker.load(world.keys, one.table).misses == dict.fromkeys(range(5), "not stored")
    assert one.pool.snapshot() == world.seat().pool.snapshot()


def test_removing_one_of_two_branches_keeps_the_others_hint(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    chains = [world.namespace.keys([0, 1, 2, 3, n, n, n, n]) for n in (7, 8)]
    for i, keys in enumerate(chains):
        store_all(world.namespace, ONE, keys, world.sequence(i, 2)[1])
    assert chains[0][0] == chains[1][0]
    assert world.namespace.remove(chains[1][1])
    # The hint for the block that both have names the first branch, which is still there.
    assert world.namespace.match_prefix(chains[1]).blocks == 1
    assert world.namespace.remove(chains[0][1])
    assert world.namespace.match_prefix(chains[1]).blocks == 0
    assert not list((tmp_path / "__kvstore__" / "refs").rglob(chains[0][0].hex()))


def test_a_hint_that_cannot_be_removed_is_no_failure(world: World) -> None:
    from kvstore.io import failpoints

    with failpoints.armed("posix.discard.before_rename", "error", skip=1):
        assert world.namespace.remove(world.keys[1])
    assert world.namespace.match_prefix(world.keys).blocks == 0


def test_a_damaged_record_can_be_removed(world: World) -> None:
    (world.folder(1) / "zarr.json").write_bytes(b"{")
    assert world.namespace.remove(world.keys[1])
    world.store_all(session="again")
    world.load_all()


# -- quarantine ----------------------------------------------------------------------------------


def test_damage_is_moved_away_once_with_its_reason(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    _damage(world)
    one = world.seat()
    with caplog.at_level(logging.ERROR, "kvstore"):
        result = one.worker.load(world.keys, one.table)
    assert result.blocks == 0
    assert sorted(result.misses) == [0, 1]
    (folder,) = _quarantined(world)
    reason = json.loads((folder / "reason.json").read_text())
    assert reason["key"] == world.keys[1].hex()
    assert reason["reason"] == result.misses[0]
    assert "layer 0, head 0: the chunk does not match its checksum" in reason["reason"]
    assert (folder / "extent" / "zarr.json").is_file()
    assert world.namespace.counters["quarantined"] == 1
    assert "quarantined extent" in caplog.text
    again = world.seat()
    assert again.worker.load(world.keys, again.table).misses[0] == "not stored"
    world.namespace.quarantine(world.keys[1], "again")
    assert world.namespace.counters["quarantined"] == 1
    assert _quarantined(world) == [folder]


def test_stored_anew_after_quarantine_and_damaged_anew(world: World) -> None:
    """Each damaged copy is moved away, not the first one only: else the second stays for ever."""
    for times in (1, 2, 3):
        _damage(world)
        one = world.seat()
        assert one.worker.load(world.keys, one.table).blocks == 0
        assert world.namespace.counters["quarantined"] == times
        assert len(_quarantined(world)) == times
        world.store_all(session=f"s{times}")
        world.load_all()


def test_read_only_stores_miss_and_move_nothing(world: World) -> None:
    _damage(world)
    reader = world.reopen(read_only=True)
    for _ in range(2):
        one = reader.seat()
        result = one.worker.load(world.keys, one.table)
        assert (result.blocks, sorted(result.misses)) == (0, [0, 1])
    assert not _quarantined(world)
    assert world.folder(1).exists()


def test_an_extent_that_needs_a_newer_release_is_left_alone(world: World) -> None:
    path = world.folder(1) / "zarr.json"
    stored = json.loads(path.read_text())
    stored["attributes"]["kvstore"]["version"] = "2.0"
    path.write_text(json.dumps(stored))
    one = world.seat()
    result = one.worker.load(world.keys, one.table)
    assert "format version 2.0; this release reads version 1.x" in result.misses[0]
    assert not _quarantined(world)
    stored["attributes"]["kvstore"]["version"] = "1.7"
    stored["attributes"]["kvstore"]["added later"] = {"x": 1}
    path.write_text(json.dumps(stored))
    world.load_all()
    stored["attributes"]["kvstore"]["must_understand"] = ["compressed"]
    path.write_text(json.dumps(stored))
    result = one.worker.load(world.keys, one.table)
    assert "needs the feature 'compressed'" in result.misses[0]
    assert not _quarantined(world)


def test_verify_agrees_with_loads(world: World) -> None:
    assert list(world.namespace.verify()) == []
    _damage(world)
    (fault,) = world.namespace.verify()
    assert fault.kind == "checksum"
    assert world.keys[1].hex() in fault.path


def test_a_group_must_be_the_namespaces(world: World) -> None:
    other: LayerGroup = small_group(name="x")
    with pytest.raises(InvalidArgument, match="no layer group 'x'"):
        world.namespace.match_prefix(world.keys, group=other.name)
