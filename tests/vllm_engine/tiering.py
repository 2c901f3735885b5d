"""The engine's tiered offloading without its GPU workers: they are played by copies in memory.

Everything else is the engine's own: the managers, the factory, the primary tier's shared memory,
and the mappings that say where each rank's bytes belong.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    derive_canonical_mappings,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.gpu_worker import _build_copy_plan
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

TOKENS = 8
LAYERS = 3
SIZE = 16


def key_of(number: int, group: int = 0) -> Any:
    """An offload key."""
    return make_offload_key(bytes([number]) * 32, group)


class Model:
    """What a model's caches look like to each rank.

    Args:
        heads: KV heads; 0 for latent attention.
        tp: tensor parallel ranks.
        layout: the engine's name of the cache layout.
        split: keys and values in two planes.
        dtype: of the cache.
        backwards: layers are registered from the last to the first.
        tokens: of an engine block.
        size: elements of a key, or of a latent.
    """

    def __init__(
        self,
        heads: int = 4,
        tp: int = 1,
        layout: str = "LBNHC",
        *,
        split: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        backwards: bool = False,
        tokens: int = TOKENS,
        size: int = SIZE,
    ) -> None:
        self.tokens, self.size = tokens, size
        self.heads, self.tp, self.layout, self.split, self.dtype = heads, tp, layout, split, dtype
        numbers = range(LAYERS)[::-1] if backwards else range(LAYERS)
        self.names = tuple(f"model.layers.{i}.self_attn.attn" for i in numbers)
        self.numbers = tuple(numbers)
        if heads:
            self.local = max(1, heads // tp)
            self.spec: Any = FullAttentionSpec(
                block_size=tokens, num_kv_heads=self.local, head_size=size, dtype=dtype
            )
        else:
            self.local = 1
            self.spec = MLAAttentionSpec(
                block_size=tokens, num_kv_heads=1, head_size=size, dtype=dtype
            )
        self.content = 2 * size if heads else size

    def first_head(self, rank: int) -> int:
        """First head of a rank."""
        return rank * self.heads // self.tp if self.heads else 0

    def pages(self, truth: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
        """A rank's caches for ``truth`` [layer, block, head, token, content], as layers' views."""
        first = self.first_head(rank)
        out = {}
        for place, number in enumerate(self.numbers):
            mine = truth[number, :, first : first + self.local]  # [block, head, token, content]
            out[self.names[place]] = self._laid_out(mine)
        return out

    def _laid_out(self, mine: torch.Tensor) -> torch.Tensor:
        if self.split:
            mine = torch.stack(mine.chunk(2, dim=-1), 1)  # [block, 2, head, token, size]
        if self.layout == "LBNHC":
            # A new tensor, whose strides say the order even where there is but one head.
            turned = mine.transpose(-2, -3)
            laid_out = torch.empty(turned.shape, dtype=mine.dtype).copy_(turned)
            return laid_out if self.split else laid_out.transpose(-2, -3)
        laid_out = torch.empty(mine.shape, dtype=mine.dtype).copy_(mine)
        return laid_out.transpose(-2, -3) if self.split else laid_out

    def mappings(self, rank: int, caches: dict[str, torch.Tensor], blocks: int) -> Any:
        """The engine's own mappings of a rank's pages into canonical ones."""
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.tp,
                prefill_context_parallel_size=1,
                decode_context_parallel_size=1,
                cp_kv_cache_interleave_size=1,
                world_size=self.tp,
                rank=rank,
            ),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: self.heads or 1),
        )
        group = SimpleNamespace(kv_cache_spec=self.spec, layer_names=self.names)
        kv_cache_config = SimpleNamespace(num_blocks=blocks, kv_cache_groups=[group])
        return derive_canonical_mappings(config, kv_cache_config, caches)


class Tiered:
    """One engine's offloading.

    Args:
        model: its caches.
        tier: configuration of the tier, the real factory's.
        chunk_blocks: engine blocks of a chunk.
        rows: rows of the primary tier.
        canonical: whether canonical rows are asked for, and
        agnostic: whether the engine certified them.
        extra: on top of ``kv_connector_extra_config``.
    """

    def __init__(
        self,
        model: Model,
        tier: dict[str, Any],
        *,
        chunk_blocks: int = 1,
        rows: int = 8,
        canonical: bool = True,
        agnostic: bool = True,
        name: str = "org/tiny",
        events: bool = False,
    ) -> None:
        self.model, self.chunk_blocks = model, chunk_blocks
        page = model.spec.page_size_bytes
        replicated = canonical and agnostic and not model.heads
        copies = 1 if replicated else model.tp
        row = -(-page * LAYERS * chunk_blocks * copies // 4096) * 4096
        self.config = OffloadingConfig(
            groups=(OffloadingGroupConfig(model.tokens, model.names, 0),),
            worker_kv_bytes_per_block=page * LAYERS,
            enable_kv_cache_events=events,
            extra_config={
                "cpu_bytes_to_use": row * rows,
                "secondary_tiers": [tier],
                "canonical_layout": canonical,
            },
            engine_id=uuid.uuid4().hex,
            model=OffloadingModelConfig(name, str(model.dtype).removeprefix("torch.")),
            cache=OffloadingCacheConfig(model.tokens, chunk_blocks),
            parallel=OffloadingParallelConfig(
                rank=0,
                world_size=model.tp,
                tp_size=model.tp,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=agnostic,
            ),
            replicated_layout=replicated,
            canonical_layout=canonical,
            kv_cache_layout=model.layout,
        )
        self.spec = TieringOffloadingSpec(self.config)
        self.manager: Any = self.spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self._requests = 0

    def request(self) -> ReqContext:
        """A new request."""
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """End a step of the scheduler."""
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def settle(self, seconds: float = 30) -> None:
        """Step until nothing is under way."""
        deadline = time.monotonic() + seconds
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, "work is pending for ever"
            time.sleep(0.002)
            self.step()

    def store(self, keys: Sequence[Any], truth: torch.Tensor) -> None:
        """Store chunks: ``truth`` [layer, block, head, token, content], chunk by chunk."""
        context = self.request()
        output = self.manager.prepare_store(keys, context)
        assert list(output.keys_to_store) == list(keys)
        for rank in range(self.model.tp):
            self._copy(output.store_spec.block_ids, truth, rank, to_rows=True)
        self.manager.complete_store(keys, context)
        self.settle()
        self.manager.on_request_finished(context)

    def find(self, keys: Sequence[Any], context: ReqContext, seconds: float = 30) -> list[str]:
        """What lookups of keys come to in the end, by name of the result."""
        deadline = time.monotonic() + seconds
        waiting = (LookupResult.RETRY, LookupResult.HIT_PENDING)
        while True:
            found = [self.manager.lookup(key, context) for key in keys]
            self.step()
            if not any(f in waiting for f in found):
                return [f.name for f in found]
            assert time.monotonic() < deadline, f"lookups never end: {found}"
            time.sleep(0.002)

    def load(self, keys: Sequence[Any], rank: int = 0) -> torch.Tensor:
        """Load chunks that are all there; what a rank gets, ``[layer, block, head, token, c]``."""
        context = self.request()
        assert self.find(keys, context) == ["HIT"] * len(keys)
        spec = self.manager.prepare_load(keys, context)
        model = self.model
        blocks = len(keys) * self.chunk_blocks
        heads = model.heads or 1
        got = torch.zeros(LAYERS, blocks, heads, model.tokens, model.content, dtype=model.dtype)
        self._copy(spec.block_ids, got, rank, to_rows=False)
        self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)
        first = model.first_head(rank)
        return got[:, :, first : first + model.local]

    def evict(self) -> None:
        """Empty the primary tier."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # since 0.33, promotions wait for it
            self.manager.on_reset_flushed()

    def close(self) -> None:
        """Shut down."""
        self.manager.shutdown()

    def _copy(self, rows: Any, truth: torch.Tensor, rank: int, *, to_rows: bool) -> None:
        """Play a rank's GPU worker."""
        model, k = self.model, self.chunk_blocks
        blocks = truth.shape[1]
        caches = model.pages(truth, rank)
        region = SharedOffloadRegion(
            self.config.engine_id,
            self.spec.num_chunks,
            0 if self.config.replicated_layout else rank,
            self.spec.kv_bytes_per_chunk,
            self.spec.cpu_page_size_per_worker,
        )
        mappings = model.mappings(rank, caches, blocks)
        canonical = self.config.canonical_layout
        for place, name in enumerate(model.names):
            page = model.spec.page_size_bytes
            local = caches[name].new_empty(0).view(torch.int8)
            local.set_(caches[name].untyped_storage(), 0, (blocks, page), (page, 1))
            mapping = mappings[name]
            if canonical:
                size = mapping.canonical_page_size_bytes
                view = region.create_next_canonical_view(k * size)
                plan = _build_copy_plan(CanonicalKVCacheRef(place, page, mapping), gpu_to_cpu=True)
                runs = list(
                    zip(plan.frag_offsets_src, plan.frag_offsets_dst, plan.frag_sizes, strict=True)
                )
            else:
                size = page
                view = region.create_next_worker_view(k * size)
                runs = [(0, 0, page)]
            for block in range(blocks):
                row, base = int(rows[block // k]), block % k * size
                writes = not canonical or mapping.is_writer(row * k + block % k)
                for src, dst, count in runs:
                    here = local[block, int(src) : int(src) + int(count)]
                    there = view[row, base + int(dst) : base + int(dst) + int(count)]
                    if not to_rows:
                        here.copy_(there)
                    elif writes:
                        there.copy_(here)
            if not to_rows:
                self._take(caches[name], truth, place, rank)
            view = there = None
        region.cleanup()

    def _take(self, cache: torch.Tensor, truth: torch.Tensor, place: int, rank: int) -> None:
        model = self.model
        first = model.first_head(rank)
        if model.split:
            cache = torch.cat(cache.transpose(2, 3).unbind(1), -1)
        truth[model.numbers[place], :, first : first + model.local] = cache


def truth_of(model: Model, blocks: int, seed: int = 1) -> torch.Tensor:
    """Random caches of a whole model."""
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, blocks, model.heads or 1, model.tokens, model.content)
    return torch.randn(shape, generator=generator).to(model.dtype)
