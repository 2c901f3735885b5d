"""Bulk writing, renaming and publishing: what every engine does alike."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from engines import EngineCase, together

from kvstore.errors import Corrupt, InvalidArgument, NotFound
from kvstore.io.protocol import Engine

MIB = 1 << 20


def test_pieces_follow_one_another(engine: Engine):
    pieces = [b"abc", bytearray(b"de"), memoryview(b"fgh")[1:], b"", np.arange(3, dtype=np.uint8)]
    engine.write("a/b", pieces)
    assert engine.get("a/b", 100) == b"abcdegh\0\1\2"
    assert engine.size("a/b") == 10


def test_many_pieces_and_wide_elements(engine: Engine):
    block = np.arange(5000 * 7, dtype=np.float32).reshape(5000, 7)
    engine.write("a", list(block))
    assert engine.get("a", MIB) == block.tobytes()
    engine.write("a", [block])
    assert engine.get("a", MIB) == block.tobytes()
    engine.write_into("b", block.nbytes, [(28 * i, row) for i, row in enumerate(block)][::-1])
    assert engine.get("b", MIB) == block.tobytes()


def test_memory_with_gaps_is_refused(engine: Engine):
    with pytest.raises(InvalidArgument, match="contiguous"):
        engine.write("a", [np.zeros((4, 4), np.uint8)[:, ::2]])
    with pytest.raises(InvalidArgument, match="str"):
        engine.write("a", ["text"])
    assert not engine.exists("a")


def test_a_write_replaces_the_whole(engine: Engine):
    engine.write("a", [b"long" * 1000])
    engine.write("a", [b"short"])
    assert engine.get("a", 10) == b"short"


def _write_versions(
    rank: int, start: Callable[[], object], case: EngineCase, location: str, seconds: float
) -> int:
    engine = case.open(location)
    versions = [bytes([65 + v]) * (MIB + v) for v in range(4)]
    if rank == 0:
        engine.write("shared", [versions[0]])
    start()
    rounds = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if rank < 2:
            version = versions[rank + rounds % 2 * 2]
            engine.write("shared", [version[:1000], version[1000:]])
        else:
            assert engine.get("shared", 2 * MIB) in versions
            assert engine.list_dir("") == ["shared"]
        rounds += 1
    engine.close()
    return rounds


def test_nobody_sees_part_of_a_write(case: EngineCase, location: str):
    rounds = together(3, _write_versions, case, location, 0.7)
    assert min(rounds) > 5, "too few rounds to see anything"


# -- objects that several fill --------------------------------------------------------------------


def test_runs_land_where_they_belong(engine: Engine):
    engine.write_into("a/p", 20, [(5, b"bb"), (0, b"aaaaa"), (15, b"")])
    engine.write_into("a/p", 20, [(18, b"cc")])
    assert engine.get("a/p", 20) == b"aaaaabb" + bytes(11) + b"cc"
    engine.sync(["a/p", "a"])


def test_an_object_without_a_byte_can_be_filled(engine: Engine):
    engine.write_into("p", 0, [])
    assert engine.size("p") == 0
    engine.write_into("q", 7, [])
    assert engine.get("q", 7) == bytes(7)


@pytest.mark.parametrize("run", [(-1, b"x"), (10, b"x"), (8, b"xyz")])
def test_a_run_outside_is_refused(engine: Engine, run: tuple[int, bytes]):
    with pytest.raises(InvalidArgument, match="fit"):
        engine.write_into("p", 10, [run])


@pytest.mark.parametrize("size", [9, 11, 0])
def test_writers_must_agree_on_the_size(engine: Engine, size: int):
    engine.write_into("p", 10, [(0, b"0123456789")])
    with pytest.raises(Corrupt, match="10 bytes"):
        engine.write_into("p", size, [])
    assert engine.get("p", 10) == b"0123456789"


def test_an_object_is_not_made_when_not_asked(engine: Engine):
    with pytest.raises(NotFound, match="a/p"):
        engine.write_into("a/p", 10, [(0, b"1")], create=False)
    assert engine.list_dir("") == []
    engine.write_into("a/p", 10, [])
    engine.write_into("a/p", 10, [(0, b"1")], create=False)
    assert engine.get("a/p", 10) == b"1" + bytes(9)


def _fill(
    rank: int, start: Callable[[], object], case: EngineCase, location: str, size: int, run: int
) -> None:
    engine = case.open(location)
    start()
    for name in range(5):
        mine = range(rank * run, size, 3 * run)
        for at in mine[::7]:  # a few, one by one
            engine.write_into(f"f/{name}", size, [(at, bytes([65 + rank]) * min(run, size - at))])
        rest = [at for i, at in enumerate(mine) if i % 7]
        engine.write_into(
            f"f/{name}", size, [(at, bytes([65 + rank]) * min(run, size - at)) for at in rest]
        )
    engine.sync([f"f/{name}" for name in range(5)])
    engine.close()


def test_several_processes_fill_one_object(case: EngineCase, location: str):
    size, run = 300_001, 1000
    together(3, _fill, case, location, size, run)
    engine = case.open(location)
    expected = (b"A" * run + b"B" * run + b"C" * run) * (size // (3 * run) + 1)
    for name in range(5):
        assert engine.get(f"f/{name}", size) == expected[:size]
    engine.close()


# -- names of finished things ---------------------------------------------------------------------


def test_rename_gives_an_object_its_final_name(engine: Engine):
    engine.write("in/a.part", [b"new"])
    engine.write("out/a", [b"old"])
    engine.rename("in/a.part", "out/a")
    assert engine.get("out/a", 3) == b"new"
    assert not engine.exists("in/a.part")
    engine.rename("out/a", "made/by/rename")
    assert engine.get("made/by/rename", 3) == b"new"


def test_rename_of_nothing_is_not_found(engine: Engine):
    with pytest.raises(NotFound, match=r"a\.part"):
        engine.rename("in/a.part", "out/a")


def test_link_gives_a_second_name_that_outlives_the_first(engine: Engine):
    engine.write("ns/abcd/zarr.json", [b"first"])
    assert engine.link("ns/abcd/zarr.json", "refs/ab/abcd")
    assert not engine.link("ns/abcd/zarr.json", "refs/ab/abcd")
    assert engine.discard("ns/abcd")
    assert engine.get("refs/ab/abcd", 10) == b"first"
    with pytest.raises(NotFound, match="zarr"):
        engine.link("ns/abcd/zarr.json", "refs/ab/other")
    engine.write("ns/other/zarr.json", [b"second"])
    assert not engine.link("ns/other/zarr.json", "refs/ab/abcd")
    assert engine.get("refs/ab/abcd", 10) == b"first"


def test_publish_moves_a_folder_whole(engine: Engine):
    engine.write("in/array/c.0", [b"shard"])
    engine.create("in/array/zarr.json", b"{}")
    assert engine.publish("in/array", "ns/kv/ab/abcd")
    assert engine.list_dir("ns/kv/ab/abcd") == ["c.0", "zarr.json"]
    assert engine.get("ns/kv/ab/abcd/c.0", 5) == b"shard"
    assert not engine.exists("in/array")


def test_publish_keeps_what_is_there(engine: Engine):
    engine.write("ns/abcd/zarr.json", [b"first"])
    engine.write("in/array/zarr.json", [b"second"])
    engine.write("in/array/more", [b""])
    assert not engine.publish("in/array", "ns/abcd")
    assert engine.get("ns/abcd/zarr.json", 10) == b"first"
    assert engine.list_dir("ns/abcd") == ["zarr.json"]
    assert engine.list_dir("in/array") == ["more", "zarr.json"]


def test_publish_of_nothing_is_not_found(engine: Engine):
    with pytest.raises(NotFound, match="in/array"):
        engine.publish("in/array", "ns/abcd")
    engine.write("ns/abcd/zarr.json", [b"first"])
    with pytest.raises(NotFound, match="in/array"):
        engine.publish("in/array", "ns/abcd")
    assert engine.get("ns/abcd/zarr.json", 10) == b"first"


def _publish_all(
    rank: int, start: Callable[[], object], case: EngineCase, location: str, count: int
) -> list[int]:
    engine = case.open(location)
    for i in range(count):
        engine.write(f"in/{rank}/{i}/shard", [b"%d" % rank])
        engine.write(f"in/{rank}/{i}/zarr.json", [b"%d" % rank])
    start()
    won = [i for i in range(count) if engine.publish(f"in/{rank}/{i}", f"out/{i % 7}/{i}")]
    engine.close()
    return won


def test_of_several_processes_that_publish_one_wins(case: EngineCase, location: str):
    count = 100
    won = together(3, _publish_all, case, location, count)
    assert sorted(i for mine in won for i in mine) == list(range(count))
    engine = case.open(location)
    for rank, mine in enumerate(won):
        for i in mine:
            for name in ("shard", "zarr.json"):
                assert engine.get(f"out/{i % 7}/{i}/{name}", 1) == b"%d" % rank
            assert engine.list_dir(f"in/{rank}/{i}") == []
        losers = set(range(count)) - set(mine)
        assert {int(name) for name in engine.list_dir(f"in/{rank}")} == losers
    engine.close()


def _publish_the_same(
    _rank: int, start: Callable[[], object], case: EngineCase, location: str, count: int
) -> list[bool | None]:
    engine = case.open(location)
    start()
    answers: list[bool | None] = []
    for i in range(count):
        try:
            answers.append(engine.publish(f"in/{i}", f"out/{i}"))
        except NotFound:
            answers.append(None)
    engine.close()
    return answers


def test_a_folder_is_published_once_however_many_ask(case: EngineCase, location: str):
    count = 100
    engine = case.open(location)
    for i in range(count):
        engine.write(f"in/{i}/zarr.json", [b"{}"])
    answers = together(3, _publish_the_same, case, location, count)
    for of_one in zip(*answers, strict=True):
        assert sorted(map(str, of_one)) == ["None", "None", "True"]
    assert engine.list_dir("in") == []
    engine.close()
