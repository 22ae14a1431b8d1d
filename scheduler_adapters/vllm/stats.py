"""Figures of our vLLM connector: as vLLM logs them, and as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from transfer.stats import StatsSnapshot

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_COUNTS = {
    "failed_pulls": "Requests that could not be loaded, each once, whatever its ranks.",
    "failed_handshakes": "Sources that did not answer, or not well.",
    "leases_read": "Leases that ended because all readers had read.",
    "leases_expired": "Leases that ran out: their pages were given up unread.",
    "leases_other": "Leases that ended in another way: refused, or with their request.",
}
_LISTS = {
    "pull_seconds": ("Time of a rank's pull, from its start to its end.", tuple(1e-4 * 2**i for i in range(17))),
    "post_seconds": ("Part of it that posting took.", tuple(1e-5 * 2**i for i in range(15))),
    "pull_bytes": ("Bytes of a rank's pull.", tuple(float(2**i) for i in range(11, 36, 2))),
    "pull_runs": ("Descriptors of a rank's pull.", tuple(float(4**i) for i in range(10))),
}


@dataclass
class PullStats(KVConnectorStats):
    """What has happened on one rank or on several in an interval: counts, and a figure of each pull."""

    def __post_init__(self) -> None:
        """What is not given has not happened."""
        given = self.data
        self.reset()
        self.data |= given

    def reset(self) -> None:
        """Begins a new interval."""
        self.data: dict[str, Any] = dict.fromkeys(_COUNTS, 0) | {name: [] for name in _LISTS}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds what has happened elsewhere."""
        for name in (*_COUNTS, *_LISTS):
            self.data[name] += other.data[name]
        return self

    def reduce(self) -> dict[str, int | float]:
        """One figure each, for a line of a log."""
        counts: dict[str, int | float] = {name: count for name in _COUNTS if (count := self.data[name])}
        seconds, moved = self.data["pull_seconds"], self.data["pull_bytes"]
        if not seconds:
            return counts
        p50, p90 = (float(np.percentile(seconds, at)) * 1e3 for at in (50, 90))
        return counts | {
            "pulls": len(seconds),
            "p50 ms": round(p50, 3),
            "p90 ms": round(p90, 3),
            "mean post ms": round(fmean(self.data["post_seconds"]) * 1e3, 3),
            "mean MB": round(sum(moved) / len(moved) / 1e6, 3),
            "MB/s of a pull": round(sum(moved) / sum(seconds) / 1e6, 1),
            "mean runs": round(fmean(self.data["pull_runs"]), 1),
        }

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())


def pull_stats(now: StatsSnapshot, before: StatsSnapshot | None) -> PullStats:
    """Returns what has happened on a rank since an earlier snapshot, or since its start: counters only grow."""
    earlier = {} if before is None else _counts(before)
    data: dict[str, Any] = {name: count - earlier.get(name, 0) for name, count in _counts(now).items()}
    data["pull_seconds"] = [record.total_s for record in now.records]
    data["post_seconds"] = [record.post_s for record in now.records]
    data["pull_bytes"] = [record.num_bytes for record in now.records]
    data["pull_runs"] = [record.num_runs for record in now.records]
    return PullStats(data=data)


def _counts(snapshot: StatsSnapshot) -> dict[str, int]:
    leases = {f"leases_{kind}": count for kind, count in snapshot.leases.items()}
    return {"failed_handshakes": snapshot.failed_handshakes} | leases


class PullMetrics(KVConnectorPromMetrics):
    """The same figures as Prometheus metrics, named `vllm:pagewire_*`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters: dict[str, Any] = {
            name: create_metric_per_engine(
                counter(name=f"vllm:pagewire_{name}", documentation=text, labelnames=labelnames), per_engine_labelvalues
            )
            for name, text in _COUNTS.items()
        }
        self._histograms: dict[str, Any] = {
            name: create_metric_per_engine(
                histogram(
                    name=f"vllm:pagewire_{name}", documentation=text, buckets=list(buckets), labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for name, (text, buckets) in _LISTS.items()
        }

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Books an interval of one engine."""
        for name, counters in self._counters.items():
            counters[engine_idx].inc(transfer_stats_data[name])
        for name, histograms in self._histograms.items():
            for figure in transfer_stats_data[name]:
                histograms[engine_idx].observe(figure)
