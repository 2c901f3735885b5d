"""A medium that fails at each named point of stores and commits: nothing wrong, nothing lost."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.world import ONE, World, files_below, make_world, seats

import kvstore
from kvstore import ParallelConfig
from kvstore.errors import StorageError
from kvstore.io.failpoints import armed

SHARED = ParallelConfig(tp=8, dcp=2, interleave=2)
"""Every shard is filled by several ranks."""

SOURCE = Path(kvstore.__file__).parent
POINTS = sorted(
    {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r'\breach\("([a-z_.]+)"\)', path.read_text())
        if path.name != "failpoints.py"
    }
)
ONLY_SHARED = {
    "commit.before_seal",
    "commit.after_seal",
    "store.before_mark",
    "posix.rename.before_rename",
    "posix.rename.after_rename",
    "posix.write_into.before_write",
    "posix.write_into.after_write",
}
AFTER = ("commit.after_publish", "posix.publish.after_rename", "posix.discard")
"""Points that are reached when an extent is visible already."""

CODES = (errno.ENOSPC, errno.EIO, errno.EROFS)


def test_every_named_point_is_known_here() -> None:
    assert len(POINTS) >= 20
    assert set(POINTS) > ONLY_SHARED
    assert all(any(p.startswith(a) for p in POINTS) for a in AFTER)


def _all(world: World, config: ParallelConfig, **options: Any) -> None:
    """Every rank stores, then every rank commits, as engines do."""
    everyone = seats(world.namespace, config, total=23, **options)
    for one in everyone:
        one.fill(world.truth)
        one.worker.store(world.keys, one.table)
    for one in everyone[:2]:
        one.worker.commit(world.keys)


def _attempt(world: World, config: ParallelConfig) -> StorageError | None:
    """The same, and the error that ended it."""
    try:
        _all(world, config)
    except StorageError as error:
        return error
    return None


def _strays(world: World) -> list[str]:
    """Files that no finished work should leave."""
    return [
        str(p.relative_to(world.root))
        for p in files_below(world.root)
        if p.name.startswith(".tmp-") or "inflight" in p.parts
    ]


@pytest.mark.parametrize("skip", [0, 1, 4])
@pytest.mark.parametrize("config", [ONE, SHARED], ids=["whole", "shared"])
@pytest.mark.parametrize("point", POINTS)
def test_fails_and_goes_on(tmp_path: Path, point: str, config: ParallelConfig, skip: int) -> None:
    world = make_world(tmp_path)
    code = CODES[(POINTS.index(point) + skip) % 3]
    error = StorageError(code, os.strerror(code))
    failed = 0
    with armed(point, error, skip=skip) as where:
        for _ in range(2):
            caught = _attempt(world, config)
            failed += caught is not None
            assert caught is None or caught.errno == code
            if where.reached == 1 > skip and not point.startswith(AFTER):
                assert not list(world.namespace.extents())
        reached = where.reached
    if config is ONE and point in ONLY_SHARED:
        assert (reached, failed) == (0, 0)
        return
    assert reached > 0
    # Removing what is of no use any more may fail in silence; everything else says so.
    assert failed or reached <= skip or point.startswith("posix.discard")
    for extent in world.namespace.extents():
        assert extent.key in {world.keys[i].hex() for i in world.ends()}
    one = world.seat(layout="by-part")
    found = world.namespace.match_prefix(world.keys).blocks
    result = one.worker.load(world.keys, one.table)
    assert result.blocks == found
    one.expect(world.truth, 0, 4 * found)
    _all(world, config)
    _all(world, config)
    world.load_all()
    assert not (world.root / "__kvstore__" / "quarantine").exists()
    assert not _strays(world)
    trash = world.root / "__kvstore__" / "trash"
    assert point == "posix.discard.after_rename" or not list(trash.iterdir())
    assert list(world.namespace.verify()) == []


@pytest.mark.parametrize("call", ["pwritev", "fsync", "rename", "link", "mkdir", "ftruncate"])
@pytest.mark.parametrize("config", [ONE, SHARED], ids=["whole", "shared"])
def test_system_calls_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, config: ParallelConfig
) -> None:
    """As the operating system says it, not as a failpoint does."""
    world = make_world(tmp_path, durable=call == "fsync")
    real: Callable[..., Any] = getattr(os, call)
    for nth in (0, 1, 3, 7):
        seen = 0

        def fail(*args: Any, _nth: int = nth, **options: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen > _nth:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            caught = _attempt(world, config)
            assert caught is None or "free space on that file system" in str(caught)
        found = world.namespace.match_prefix(world.keys).blocks
        one = world.seat()
        assert one.worker.load(world.keys, one.table).blocks == found
        one.expect(world.truth, 0, 4 * found)
    _all(world, config)
    world.load_all()


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def short(fd: int, views: Any, offset: int) -> int:
        return real(fd, [memoryview(views[0])[: max(1, len(views[0]) // 3)]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    for config in (ONE, SHARED):
        world = make_world(tmp_path / str(config.tp))
        _all(world, config)
        world.load_all()
