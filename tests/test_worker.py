"""A worker: partial loads, layers in turn, what stores and commits report, and misuse."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.pools import LAYOUTS, suits
from support.reference import Held
from support.world import ONE, Seat, World, make_world, seats, small_group, store_all
from tiny import GROUPS

import kvstore
from kvstore.buffers import PagedBuffers
from kvstore.device_scatter import DevicePages
from kvstore.errors import InvalidArgument, NotCertified
from kvstore.geometry import LayerGroup
from kvstore.identity import Identity
from kvstore.io.failpoints import armed
from kvstore.parallel import ParallelConfig, Rank
from kvstore.report import Missing

CONTEXT = ParallelConfig(tp=8, dcp=2, pcp=2, interleave=2)
SPLIT = ParallelConfig(tp=2, pp=2)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two full extents and a short one, stored."""
    made = make_world(tmp_path)
    made.store_all()
    return made


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n != "latent"])
def test_slices_in_the_middle_fill_their_own_blocks_only(world: World, layout: str) -> None:
    for config in (ONE, CONTEXT):
        for first, stop in ((1, 4), (2, 5), (3, 4), (0, 1), (4, 5)):
            for one in seats(world.namespace, config, total=23, layout=layout, session=None)[::5]:
                result = one.worker.load(world.keys[first:stop], one.table)
                assert (result.blocks, result.requested) == (stop - first, stop - first)
                one.expect(world.truth, 4 * first, 4 * stop)


@pytest.mark.parametrize("config", [ONE, SPLIT, CONTEXT], ids=str)
def test_some_layers(world: World, config: ParallelConfig) -> None:
    for one in seats(world.namespace, config, total=23, session=None):
        count = len(one.held.layers)
        for layers in (range(1), range(1, count), range(0), range(count)):
            fresh = world.seat(config, one.rank, session=None)
            result = fresh.worker.load(world.keys, fresh.table, layers=layers)
            assert result.blocks == 5
            fresh.expect(world.truth, 0, 20, layers)


@pytest.mark.parametrize("layers", [range(5), range(-1, 2), range(0, 4, 2), range(3, 1)])
def test_layers_out_of_range(world: World, layers: range) -> None:
    one = world.seat()
    before = one.pool.snapshot()
    with pytest.raises(InvalidArgument, match="not a range of the rank's 4 layers"):
        one.worker.load(world.keys, one.table, layers=layers)
    assert one.pool.snapshot() == before


@pytest.mark.parametrize("config", [ONE, SPLIT, CONTEXT], ids=str)
def test_layers_come_in_order_and_each_is_whole_when_it_comes(
    world: World, config: ParallelConfig
) -> None:
    for one in seats(world.namespace, config, total=23, session=None)[:4]:
        seen = []
        for layer, result in one.worker.load_layers(world.keys, one.table):
            seen.append(layer)
            assert result.blocks == 5
            here = one.pool.views[layer]
            twin = LAYOUTS[one.layout](
                one.group, len(one.held.layers), len(one.held.heads), one.pool.blocks, 4
            )
            one_twin = type(one)(**{**one.__dict__, "pool": twin})
            one_twin.fill(world.truth[:, :, :20])
            for name, view in here.items():
                assert np.array_equal(view, twin.views[layer][name])
        assert seen == list(range(len(one.held.layers)))
        one.expect(world.truth, 0, 20)


def test_layers_may_be_left_early(world: World) -> None:
    one = world.seat()
    threads = threading.active_count()
    layers = one.worker.load_layers(world.keys, one.table)
    assert next(layers)[0] == 0
    layers.close()
    assert threading.active_count() <= threads + 4  # the engine's own reading threads
    assert not [t for t in threading.enumerate() if t.name == "kvstore-layers"]
    done = [
        i
        for i in range(4)
        if (one.pool.views[i]["key"][one.table[0], 0, 0] == world.truth[i, 0, 0, :16]).all()
    ]
    assert done == list(range(len(done)))
    assert one.worker.load(world.keys, one.table).blocks == 5
    one.expect(world.truth, 0, 20)


def test_an_iterator_that_is_never_used_reads_nothing(world: World) -> None:
    one = world.seat()
    before = one.pool.snapshot()
    one.worker.load_layers(world.keys, one.table)
    assert one.pool.snapshot() == before


def test_a_layer_that_fails_is_a_miss_from_there_on(world: World) -> None:
    shard = world.folder(1) / "c.1.0.0.0.0"  # layers 2 and 3 of the first extent
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.write_bytes(data)
    one = world.seat()
    blocks = [r.blocks for _, r in one.worker.load_layers(world.keys, one.table)]
    assert blocks == [5, 5, 0, 0]


@pytest.mark.parametrize("kind", GROUPS)
def test_every_kind_of_group_there_and_back(tmp_path: Path, kind: str) -> None:
    group = GROUPS[kind]()
    config, rank = ONE, Rank()
    if kind == "opaque":
        config, rank = ParallelConfig(tp=2), Rank(tp=1)
        group = LayerGroup.opaque(
            name="rank1",
            layers=(0, 1),
            page_bytes=24,
            block_tokens=4,
            parallel=config.describe(rank),
        )
    world = make_world(tmp_path, group, blocks=7)
    names = [n for n in LAYOUTS if suits(n, group, group.heads) and n != "contiguous"]
    for writer, reader in zip(names, [*names[1:], names[0]], strict=True):
        tokens = 1 if kind == "opaque" else 4
        if kind == "opaque":
            one = _opaque_seat(world, config, rank, writer)
            other = _opaque_seat(world, config, rank, reader)
        else:
            one = world.seat(layout=writer, tokens=tokens)
            other = world.seat(layout=reader, tokens=2 * tokens)
        one.fill(world.truth)
        one.worker.store(world.keys, one.table)
        assert one.worker.commit(world.keys).complete
        assert other.worker.load(world.keys, other.table).blocks == len(world.keys)
        other.expect(world.truth, 0, len(world.keys) * group.page_tokens)
        for extent in list(world.namespace.extents()):
            assert extent.path.split("/")[1] == group.name
            world.namespace.remove(extent.key)


def _opaque_seat(world: World, config: ParallelConfig, rank: Rank, layout: str) -> Seat:
    pool = LAYOUTS[layout](world.group, 2, 1, 9, 1)
    worker = world.namespace.worker(config, rank, pool.buffers, session="s")
    table = np.random.default_rng(4).permutation(9)[:7]
    mine = Held(range(2), range(1), 1, 1, 0)
    return Seat(world.group, rank, mine, layout, pool, table, worker, 7, 0)


def test_opaque_pages_are_for_one_rank_of_one_config(tmp_path: Path) -> None:
    group = LayerGroup.opaque(
        name="r", layers=(0,), page_bytes=8, block_tokens=4, parallel="tp=2;rank=0.0.1"
    )
    world = make_world(tmp_path, group)
    pool = LAYOUTS["packed-hnd"](group, 1, 1, 5, 1)
    world.namespace.worker(ParallelConfig(tp=2), Rank(tp=1), pool.buffers, session="s")
    for config, rank in (
        (ParallelConfig(tp=2), Rank()),
        (ParallelConfig(tp=4), Rank(tp=1)),
        (ONE, Rank()),
    ):
        with pytest.raises(NotCertified, match="opaque and belongs to"):
            world.namespace.worker(config, rank, pool.buffers, session="s")


def test_a_stage_without_layers_of_the_group_hits_like_the_others(world: World) -> None:
    config = ParallelConfig(pp=2, pp_layers=(4, 0))
    one = world.seat(config, Rank(0))
    idle = world.namespace.worker(config, Rank(1), PagedBuffers.empty(world.group), session="s")
    assert idle.load(world.keys, []).blocks == 5
    assert idle.load(world.keys, one.table).bytes_read == 0
    assert list(idle.load_layers(world.keys, [])) == []
    keys, truth = world.sequence(3, 5)
    one.fill(truth)
    assert idle.store(keys, []).extents == 0
    assert one.worker.store(keys, one.table).extents == 3
    assert len(idle.commit(keys).committed) == 3
    assert idle.load(keys, []).blocks == 5


def test_as_on_a_device(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.worker.pages_of", DevicePages)
    keys, truth = world.sequence(3, 5)
    store_all(world.namespace, CONTEXT, keys, truth, layout="packed-nhd")
    for layout in ("split-2b-nhd", "blnhc"):
        for one in seats(world.namespace, SPLIT, total=20, layout=layout):
            assert isinstance(one.worker._loader._pages, DevicePages)
            assert one.worker.load(keys, one.table).blocks == 5
            one.expect(truth, 0, 20)


def test_what_reports_say(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    config = ParallelConfig(tp=8)  # two ranks for each head
    everyone = seats(world.namespace, config, total=23)
    size = world.group.token_bytes
    written, elected = 0, 0
    for one in everyone[:-2]:
        one.fill(world.truth)
        report = one.worker.store(world.keys, one.table)
        assert (report.extents + report.not_elected, report.present) == (3, 0)
        assert report.unstored_blocks == 0
        assert report.seconds > 0
        written += report.bytes_written
        elected += report.extents
    assert elected == 9
    partial = everyone[0].worker.commit(world.keys)
    assert (partial.committed, partial.already, partial.complete) == ([], [], False)
    assert [m.key for m in partial.missing] == [world.keys[i].hex() for i in world.ends()]
    for missing in partial.missing:
        elect = int(missing.key[:16], 16) % 2
        assert missing == Missing(
            missing.key, ("c.0.0.1.0.0", "c.1.0.1.0.0"), (f"0.0.{6 + elect}",)
        )
        assert f"rank 0.0.{6 + elect} (pp.pcp.tp)" in str(missing)
    for one in everyone[-2:]:
        one.fill(world.truth)
        written += one.worker.store(world.keys, one.table).bytes_written
    assert written == 4 * 4 * 20 * size
    whole = everyone[3].worker.commit(world.keys)
    assert whole.committed == [world.keys[i].hex() for i in world.ends()]
    assert whole.complete
    again = everyone[3].worker.commit(world.keys)
    assert (again.committed, again.already) == ([], whole.committed)
    repeat = everyone[0].worker.store(world.keys, everyone[0].table)
    assert (repeat.extents, repeat.present, repeat.bytes_written) == (0, 3, 0)
    assert world.namespace.counters["stored_bytes"] == written


def test_loads_are_counted(world: World) -> None:
    world.namespace.remove(world.keys[3])
    one = world.seat()
    result = one.worker.load(world.keys, one.table)
    assert (result.blocks, result.requested, sorted(result.misses)) == (2, 5, [2, 3, 4])
    assert set(result.misses.values()) == {"not stored"}
    assert result.engine == "posix"
    placed = 4 * 4 * 8 * world.group.token_bytes
    assert result.bytes_placed == placed
    assert placed < result.bytes_read < 2 * placed
    counters = world.namespace.counters
    assert (counters["hit_blocks"], counters["miss_blocks"]) == (2, 3)
    assert counters["loaded_bytes"] == placed


def test_a_sequence_is_stored_from_extent_boundaries_on(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    one = world.seat()
    one.fill(world.truth)
    report = one.worker.store(world.keys[1:5], one.table, tail=False)
    assert (report.extents, report.unstored_blocks) == (1, 2)
    assert len(one.worker.commit(world.keys[1:5], tail=False).committed) == 1
    assert world.namespace.match_prefix(world.keys).blocks == 0
    assert world.namespace.match_prefix(world.keys[2:]).blocks == 2
    record = world.namespace.record(world.keys[3])
    assert (record.start_block, record.parent) == (2, world.keys[1])


def test_invalid_block_ids_where_nothing_moves(world: World) -> None:
    one = world.seat()
    table = one.table.copy()
    table[[0, 1, 4]] = (-1, 10**12, -7)
    assert one.worker.load(world.keys[2:4], table).blocks == 2
    one.expect(world.truth, 8, 16)
    with pytest.raises(InvalidArgument, match=r"block_ids\[1\]"):
        one.worker.load(world.keys[1:4], table)
    one.expect(world.truth, 8, 16)


def test_a_store_that_is_refused_leaves_no_job_running(tmp_path: Path) -> None:
    """The second extent's blocks are not in the table; the first was handed to threads already."""
    world = make_world(tmp_path)
    one = world.seat()
    one.fill(world.truth)
    with armed("store.before_shard", "pause:0.05") as point:
        with pytest.raises(InvalidArgument, match="block_ids has 2 entries"):
            one.worker.store(world.keys, one.table[:2])
        reached = point.reached
        one.pool.memory[0][:] = 0
        threading.Event().wait(0.2)
        assert point.reached == reached
    one.fill(world.truth)
    one.worker.store(world.keys, one.table)
    assert one.worker.commit(world.keys).complete
    world.load_all()


def test_misuse(world: World) -> None:
    one = world.seat()
    silent = world.seat(SPLIT, Rank(), session=None)
    for call in (
        lambda: silent.worker.store(world.keys, silent.table),
        lambda: silent.worker.commit(world.keys),
    ):
        with pytest.raises(InvalidArgument, match="the session that they share"):
            call()
    with pytest.raises(InvalidArgument, match="not one of tp=2"):
        world.seat(ParallelConfig(tp=2), Rank(tp=2))
    with pytest.raises(InvalidArgument, match="1-D sequence"):
        one.worker.load(world.keys, [[0, 1]])
    other = small_group(name="other")
    pool = LAYOUTS["packed-hnd"](other, 4, 4, 4, 4)
    with pytest.raises(InvalidArgument, match="no layer group 'other'"):
        world.namespace.worker(ONE, Rank(), pool.buffers)
    changed = small_group(head_size=4)
    pool = LAYOUTS["packed-hnd"](changed, 4, 4, 4, 4)
    with pytest.raises(InvalidArgument, match="another layer group 'kv'"):
        world.namespace.worker(ONE, Rank(), pool.buffers)
    with pytest.raises(InvalidArgument, match="session"):
        world.seat(SPLIT, Rank(), session="s" * 5000)


def test_a_rank_stands_in_for_one_that_holds_the_same(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    config = ParallelConfig(tp=8)
    everyone = seats(world.namespace, config, total=23)
    for one in everyone:
        one.fill(world.truth)
        if one.rank.tp != 3:
            one.worker.store(world.keys, one.table)
    waiting = everyone[0].worker.commit(world.keys).missing
    assert waiting
    assert {rank for m in waiting for rank in m.ranks} == {"0.0.3"}
    with pytest.raises(InvalidArgument, match=r"0\.0\.4 cannot stand in for rank 0\.0\.3"):
        everyone[4].worker.store(world.keys, everyone[4].table, stand_in_for=Rank(tp=3))
    report = everyone[2].worker.store(world.keys, everyone[2].table, stand_in_for=Rank(tp=3))
    assert report.extents == len(waiting)
    assert everyone[0].worker.commit(world.keys).complete
    world.load_all(layout="packed-nhd")


def test_no_keys_no_work(world: World) -> None:
    one = world.seat()
    assert one.worker.load(world.keys[:0], []).blocks == 0
    assert one.worker.store(world.keys[:0], []).extents == 0
    assert one.worker.commit(world.keys[:0]).complete
    assert list(one.worker.load_layers(world.keys[:0], [])) != []
    assert world.namespace.match_prefix(world.keys[:0]).blocks == 0


@pytest.mark.parametrize("call", ["load", "load_layers", "store"])
def test_buffers_that_have_moved_are_not_touched(tmp_path: Path, call: str) -> None:
    group = GROUPS["gqa"]()
    layers = [torch.zeros(3, 4, 4, 16, dtype=torch.bfloat16) for _ in range(4)]
    identity = Identity("moved", model_layers=4, groups=(group,), revision="1")
    with kvstore.open(tmp_path) as store:
        namespace = store.namespace(identity)
        worker = namespace.worker(ONE, Rank(), PagedBuffers.packed(group, layers))
        layers[1].share_memory_()
        with pytest.raises(InvalidArgument, match="elsewhere"):
            getattr(worker, call)(namespace.keys(range(8)), [0, 1])


def test_a_worker_made_before_a_fork_stores_in_the_child(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, signal, sys
        import kvstore, torch
        group = kvstore.LayerGroup.attention_kv(layers=1, heads=1, head_size=8, block_tokens=4)
        identity = kvstore.Identity("fork", model_layers=1, groups=(group,), revision="1")
        namespace = kvstore.open(sys.argv[1]).namespace(identity)
        pages = [torch.zeros(4, 1, 4, 16, dtype=torch.bfloat16)]
        buffers = kvstore.PagedBuffers.packed(group, pages)
        worker = namespace.worker(kvstore.ParallelConfig(), kvstore.Rank(), buffers)
        worker.store(namespace.keys(range(8)), [0, 1])
        child = os.fork()
        if not child:
            signal.alarm(20)
            keys = namespace.keys(range(8, 16))
            worker.store(keys, [0, 1])
            os._exit(0 if worker.commit(keys).complete else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0
