"""What the connector counts, in the engine's own statistics and Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTERS = {
    "lookups": "Requests whose prefix was looked up",
    "lookup_hit_tokens": "Tokens of prefixes that were found stored",
    "loads_declined": "Hits too short to be worth loading",
    "load_requests": "Requests that a load was started for",
    "load_tokens": "Tokens asked of the store",
    "load_bytes": "Bytes placed into KV blocks, summed over ranks",
    "load_seconds": "Seconds that loads took, summed over ranks",
    "load_failed_blocks": "KV blocks that could not be loaded and were computed, summed over ranks",
    "store_jobs": "Store jobs given to the ranks",
    "store_bytes": "Bytes written to the store, summed over ranks",
    "store_seconds": "Seconds that stores took, summed over ranks",
    "store_failed": "Store jobs that failed",
    "store_deferred": "Store jobs put off because too many KV blocks were held back",
    "extents_committed": "Extents made visible",
    "step_seconds": "Seconds that the connector took from engine steps",
}
GAUGES = {
    "step_seconds_max": "Longest time that the connector took from one engine step, of late",
    "held_blocks": "KV blocks held back by stores under way",
}


@dataclass
class StoreStats(KVConnectorStats):  # type: ignore[misc]  # the engine's base is untyped here
    """Counts since the last report: sums, and for gauges the largest or the latest."""

    def reset(self) -> None:
        """Forget what was counted."""
        self.data: dict[str, Any] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count something."""
        self.data[name] = self.data.get(name, 0) + amount

    def highest(self, name: str, value: float) -> None:
        """Keep the largest value."""
        self.data[name] = max(self.data.get(name, 0), value)

    def now(self, name: str, value: float) -> None:
        """Keep the latest value."""
        self.data[name] = value

    def took(self, seconds: float) -> None:
        """Count time taken from an engine step."""
        self.add("step_seconds", seconds)
        self.highest("step_seconds_max", seconds)

    def take(self) -> StoreStats | None:
        """What was counted, which starts anew; None when it is nothing."""
        if not self.data:
            return None
        taken = StoreStats(data=self.data)
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's counts."""
        for name, value in other.data.items():
            self._ways.get(name, self.add)(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the engine's log line."""
        return {name: round(value, 4) for name, value in sorted(self.data.items())}

    @property
    def _ways(self) -> dict[str, Callable[[str, float], None]]:
        return {"step_seconds_max": self.highest, "held_blocks": self.now}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class StorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same in Prometheus, as ``vllm:kvstore_...``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics: dict[str, Any] = {
            name: self._counter_cls(
                name=f"vllm:kvstore_{name}_total",
                documentation=f"{text} (kvstore).",
                labelnames=self._labelnames,
            )
            for name, text in COUNTERS.items()
        }
        for name, text in GAUGES.items():
            self._metrics[name] = self._gauge_cls(
                name=f"vllm:kvstore_{name}",
                documentation=f"{text} (kvstore).",
                labelnames=self._labelnames,
                multiprocess_mode="mostrecent",
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what was counted."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics.get(name)
            if metric is None:
                continue
            child = metric.labels(*labels) if labels else metric
            (child.set if name in GAUGES else child.inc)(value)
