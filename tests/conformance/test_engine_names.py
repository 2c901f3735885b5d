"""Names, small objects, discarding: what every engine does alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import EngineCase, together

from kvstore.errors import Corrupt, InvalidArgument, NotFound, StorageError
from kvstore.io.protocol import ByteRange, Engine


def nothing(_index: int, _offset: int, _data: memoryview) -> None:
    """Consume and forget."""


CALLS: dict[str, Callable[[Engine, str], object]] = {
    "exists": lambda engine, path: engine.exists(path),
    "size": lambda engine, path: engine.size(path),
    "list_dir": lambda engine, path: engine.list_dir(path),
    "get": lambda engine, path: engine.get(path, 10),
    "create": lambda engine, path: engine.create(path, b"x"),
    "write": lambda engine, path: engine.write(path, [b"x"]),
    "write_into": lambda engine, path: engine.write_into(path, 1, [(0, b"x")]),
    "sync": lambda engine, path: engine.sync([path]),
    "rename from": lambda engine, path: engine.rename(path, "y"),
    "rename to": lambda engine, path: engine.rename("there", path),
    "link from": lambda engine, path: engine.link(path, "y"),
    "link to": lambda engine, path: engine.link("there", path),
    "publish from": lambda engine, path: engine.publish(path, "y"),
    "publish to": lambda engine, path: engine.publish("folder", path),
    "discard": lambda engine, path: engine.discard(path),
}
WRITING = set(CALLS) - {"exists", "size", "list_dir", "get"}


def test_an_object_is_there_after_it_was_made(engine: Engine):
    assert not engine.exists("a/b/c.json")
    assert engine.create("a/b/c.json", b"hello")
    assert engine.exists("a/b/c.json")
    assert engine.size("a/b/c.json") == 5
    assert engine.get("a/b/c.json", 5) == b"hello"
    assert not engine.exists("a/b/c")
    assert not engine.exists("a/b/c.json/d")


def test_an_empty_object_is_an_object(engine: Engine):
    assert engine.create("a/done", b"")
    assert engine.exists("a/done")
    assert engine.size("a/done") == 0
    assert engine.get("a/done", 0) == b""
    engine.write("b", [])
    assert engine.get("b", 0) == b""


def test_names_are_listed_sorted_and_one_level_deep(engine: Engine):
    for path in ("g/b", "g/a", "g/c/deep", "g/10", "g/9"):
        engine.create(path, b"")
    assert engine.list_dir("g") == ["10", "9", "a", "b", "c"]
    assert engine.list_dir("") == ["g"]


def test_a_folder_that_is_not_there_is_empty(engine: Engine):
    engine.create("file", b"")
    assert engine.list_dir("nothing/here") == []
    assert engine.list_dir("file") == []
    assert engine.list_dir("file/below") == []


@pytest.mark.parametrize("path", ["absent", "no/such/folder", "file/below", "folder"])
def test_what_is_not_an_object_is_not_found(engine: Engine, path: str):
    engine.create("file", b"")
    engine.create("folder/inside", b"")
    with pytest.raises(NotFound, match=path):
        engine.size(path)
    with pytest.raises(NotFound, match=path):
        engine.get(path, 10)


def test_get_takes_no_more_than_its_limit(engine: Engine):
    engine.write("record", [b"x" * 100])
    assert len(engine.get("record", 100)) == 100
    with pytest.raises(Corrupt, match="record"):
        engine.get("record", 99)


def test_create_keeps_what_is_there(engine: Engine):
    assert engine.create("a/record", b"first")
    assert not engine.create("a/record", b"second")
    assert engine.get("a/record", 10) == b"first"
    assert engine.list_dir("a") == ["record"]


OUTSIDE = ("/etc/passwd", "../up", "a/../../up", "a/..", "..", ".", "a//b", "a/", "./a", "a/.")
OUTSIDE += ("a/./b", "/", "a\0b")


@pytest.mark.parametrize("call", CALLS)
def test_a_path_out_of_the_root_is_refused(engine: Engine, call: str):
    engine.create("there", b"")
    engine.create("folder/inside", b"")
    for path in OUTSIDE:
        with pytest.raises(InvalidArgument):
            CALLS[call](engine, path)
    assert engine.list_dir("") == ["folder", "there"]


@pytest.mark.parametrize("call", sorted(set(CALLS) - {"list_dir", "sync"}))
def test_the_root_itself_is_no_object(engine: Engine, call: str):
    engine.create("there", b"")
    engine.create("folder/inside", b"")
    with pytest.raises(InvalidArgument):
        CALLS[call](engine, "")


def test_dots_inside_a_name_are_fine(engine: Engine):
    for name in ("c.0.0.0.0.0", "a..b", "..a", "a..", "...", ".hidden"):
        assert engine.create(f"x/{name}", b"")
        assert engine.exists(f"x/{name}")
    assert len(engine.list_dir("x")) == 6


@pytest.mark.parametrize("call", sorted(WRITING))
def test_read_only_refuses_to_write(case: EngineCase, location: str, call: str):
    with_rights = case.open(location)
    with_rights.create("there", b"12")
    with_rights.create("folder/inside", b"")
    with_rights.close()
    engine = case.open(location, read_only=True)
    assert engine.read_only
    with pytest.raises(InvalidArgument, match="read-only"):
        CALLS[call](engine, "folder" if call == "publish from" else "there")
    assert engine.list_dir("") == ["folder", "there"]
    assert engine.get("there", 10) == b"12"
    assert engine.read([ByteRange("there", 0, 2)], nothing) == [None]
    engine.close()


def test_nothing_works_after_close(case: EngineCase, location: str):
    engine = case.open(location)
    engine.create("there", b"")
    engine.close()
    engine.close()
    for call in CALLS.values():
        with pytest.raises(StorageError, match="closed"):
            call(engine, "there")
    with pytest.raises(StorageError, match="closed"):
        engine.read([ByteRange("there", 0, 0)], nothing)


def test_it_says_what_it_is(engine: Engine, location: str):
    assert engine.name
    assert engine.location == location
    assert not engine.read_only


# -- discard --------------------------------------------------------------------------------------


def test_discard_removes_an_object(engine: Engine):
    engine.create("a/x", b"1")
    engine.create("a/y", b"2")
    assert engine.discard("a/x")
    assert not engine.exists("a/x")
    assert engine.list_dir("a") == ["y"]
    assert not engine.discard("a/x")


def test_discard_removes_a_folder_with_all_in_it(engine: Engine):
    for path in ("a/b/1", "a/b/c/2", "a/other"):
        engine.create(path, b"1")
    assert engine.discard("a/b")
    assert not engine.exists("a/b")
    assert not engine.exists("a/b/c/2")
    assert engine.list_dir("a") == ["other"]
    assert not engine.discard("a/b")
    assert not engine.discard("a/b/1")


def test_what_was_discarded_can_be_made_again(engine: Engine):
    engine.create("a/b/1", b"old")
    engine.discard("a/b")
    assert engine.create("a/b/1", b"new")
    assert engine.get("a/b/1", 3) == b"new"


# -- several processes ----------------------------------------------------------------------------


# -- what dead processes left ---------------------------------------------------------------------


def test_a_footprint_is_of_all_that_is_below(engine: Engine):
    engine.create("a/x", b"123")
    engine.create("a/b/y", b"45")
    engine.create("other", b"6")
    assert [engine.footprint(path).nbytes for path in ("a", "a/b", "a/x")] == [5, 2, 3]
    assert all(-5 < engine.footprint(path).age < 60 for path in ("a", "a/x"))
    with pytest.raises(NotFound):
        engine.footprint("a/z")
    with pytest.raises(InvalidArgument):
        engine.footprint("../a")


def test_where_nobody_died_there_are_no_leavings(engine: Engine):
    engine.create("a/x", b"123")
    engine.write("a/b/y", [b"45"])
    engine.discard("a/b")
    assert engine.leavings(0) == []


def _create_all(
    rank: int, start: Callable[[], object], case: EngineCase, location: str, count: int
) -> list[int]:
    engine = case.open(location)
    start()
    won = [i for i in range(count) if engine.create(f"race/{i}", b"%d" % rank * 1000)]
    engine.close()
    return won


def test_of_several_processes_that_create_one_wins(case: EngineCase, location: str):
    count = 200
    won = together(3, _create_all, case, location, count)
    assert sorted(i for mine in won for i in mine) == list(range(count))
    assert sum(map(bool, won)) > 1, "no race took place"
    engine = case.open(location)
    for rank, mine in enumerate(won):
        for i in mine:
            assert engine.get(f"race/{i}", 1000) == b"%d" % rank * 1000
    assert len(engine.list_dir("race")) == count
    engine.close()


def _discard_all(
    rank: int, start: Callable[[], object], case: EngineCase, location: str, count: int
) -> list[int]:
    engine = case.open(location)
    start()
    order = range(count) if rank % 2 else reversed(range(count))
    won = [i for i in order if engine.discard(f"race/{i}")]
    engine.close()
    return won


def test_of_several_processes_that_discard_one_does(case: EngineCase, location: str):
    count = 60
    engine = case.open(location)
    for i in range(count):
        engine.create(f"race/{i}/x", b"")
    won = together(3, _discard_all, case, location, count)
    assert sorted(i for mine in won for i in mine) == list(range(count))
    assert engine.list_dir("race") == []
    engine.close()
