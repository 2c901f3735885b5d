"""Shards and chunks larger than the staging memory: stored and loaded, one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.world import ONE, make_world, small_group

from kvstore import ParallelConfig, runtime, write
from kvstore.io import staging
from kvstore.io.failpoints import armed

SHARED = ParallelConfig(tp=4, dcp=2, interleave=2)


@pytest.mark.parametrize("direct", ["never", "always"])
@pytest.mark.parametrize("config", [ONE, SHARED], ids=["whole", "shared"])
def test_larger_than_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: ParallelConfig, direct: str
) -> None:
    bound = staging.SMALLEST
    monkeypatch.setattr(runtime, "WRITE_STAGING_BYTES", bound)
    group = small_group(heads=2, shard_heads=2, block_tokens=256, head_size=128)
    assert group.chunk_bytes() > bound
    world = make_world(
        tmp_path, group, blocks=5, extra_tokens=0, direct=direct, max_staging_bytes=bound, threads=2
    )
    tokens = {"tokens": 64}
    world.store_all(config, **tokens)
    world.load_all(config, **tokens)
    world.load_all(ParallelConfig(tp=2), **tokens)
    assert list(world.namespace.verify()) == []


def test_a_shared_shard_is_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered a few chunks at a time, with the checksum of the whole."""
    group = small_group()
    monkeypatch.setattr(write, "RUN_BYTES", 2 * group.chunk_bytes())
    config = ParallelConfig(pcp=2, interleave=4)
    world = make_world(tmp_path, group)
    with armed("posix.write_into.before_write", lambda: None) as where:
        world.store_all(config)
    # 4 shards an extent: of two full ones two parts by each of two ranks, of the half one a single
    # part, and for each the sealing.
    assert where.reached == 2 * 4 * (2 * 2 + 1) + 4 * (2 + 1)
    world.load_all(config)
    assert list(world.namespace.verify()) == []
