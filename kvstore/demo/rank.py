"""One rank: the process that holds one rank's pages, and nothing else of the cache.

It imports torch and the store, never the model's code, and it sees its own buffers only.
"""

from __future__ import annotations

import json
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

import kvstore
from kvstore.demo.bits import Bits
from kvstore.demo.job import SESSION, Job, RankReport
from kvstore.demo.placement import POISON
from kvstore.elements import element
from kvstore.errors import KVStoreError


def serve(connection: Connection, text: str) -> None:
    """Do one job: get ready, say so, wait for the word, work, report.

    Args:
        connection: to the process that started this one.
        text: the job's JSON.
    """
    try:
        report = _work(Job.from_json(text), connection)
        connection.send_bytes(report.to_json().encode())
    except BaseException as error:  # noqa: BLE001 - whatever it was, the starter tells the user
        if not isinstance(error, KVStoreError):
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        connection.send_bytes(json.dumps({"error": text}).encode())
    finally:
        connection.close()


def _work(job: Job, connection: Connection) -> RankReport:
    torch.set_num_threads(1)
    loading = job.action == "load"
    pool = _pool(job, loading=loading)
    with kvstore.open(job.root, create=False, read_only=loading) as store:
        namespace = store.namespace(job.facts.identity(job.writer), create=False)
        keys = namespace.keys(job.tokens)
        buffers = _buffers(job, pool)
        worker = namespace.worker(job.parallel, job.rank, buffers, session=SESSION)
        connection.send_bytes(b"ready")
        connection.recv_bytes()
        started = time.monotonic()
        if loading:
            loaded = worker.load(keys, job.blocks)
            ended = time.monotonic()
            pool.tofile(job.pool)
            troubles = [f"block {block}: {reason}" for block, reason in loaded.misses.items()]
            return RankReport(started, ended, loaded.blocks, loaded.bytes_placed, troubles)
        stored = worker.store(keys, job.blocks)
        ended = time.monotonic()
        blocks = len(keys) - stored.unstored_blocks
        return RankReport(started, ended, blocks, stored.bytes_written, [])


def _pool(job: Job, *, loading: bool) -> Bits:
    kind = np.dtype(f"u{element(job.facts.element).itemsize}")
    if loading:
        pool = np.empty(job.shape, kind)
        pool.view(np.uint8).fill(POISON)
        return pool
    return np.fromfile(Path(job.pool), kind).reshape(job.shape)


def _buffers(job: Job, pool: Bits) -> kvstore.PagedBuffers:
    group = job.facts.identity(job.writer).group()
    # As bytes in between, for NumPy has no bfloat16.
    whole = torch.from_numpy(pool.view(np.uint8)).view(element(job.facts.element).torch_dtype())
    layers = list(whole)
    if job.parts == "split":
        return kvstore.PagedBuffers.split(group, layers, order=job.order)
    flat = [layer.flatten(-2) for layer in layers]
    return kvstore.PagedBuffers.packed(group, flat, order=job.order)
