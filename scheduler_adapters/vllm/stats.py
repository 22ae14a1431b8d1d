"""Statistics of our vLLM connector, for vLLM's log and for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from transfer.stats import PULL_BUCKETS, StatsSnapshot

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_COUNTS = {
    "failed_pulls": "Requests that could not be loaded, counted once over all ranks.",
    "malformed_params": "Requests with invalid kv_transfer_params.",
    "peer_prefix_tokens": "Prompt tokens whose blocks came from another engine's cache, counted once over all ranks.",
    "lent_blocks": "Cached blocks that were lent to engines that asked for them by hash.",
    "failed_handshakes": "Sources that gave no answer, or an unusable one.",
    "leases_read": "Leases that ended because all readers had read the pages.",
    "leases_expired": "Leases that expired before their pages were read.",
    "leases_other": "Leases that ended otherwise: refused by the reader, or aborted with their request.",
}
_LISTS = {
    "pull_seconds": ("Time of a rank's pull, from its start to its end.", PULL_BUCKETS["total_s"]),
    "post_seconds": ("The part of a rank's pull that posting took.", PULL_BUCKETS["post_s"]),
    "pull_bytes": ("Bytes of a rank's pull.", PULL_BUCKETS["num_bytes"]),
    "pull_runs": ("Descriptors of a rank's pull.", PULL_BUCKETS["num_runs"]),
}
# Metrics with the names and buckets of vLLM's own NIXL connector, so that existing dashboards work. Each of these
# metrics repeats the values of one of our metrics.
_POSTS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_RUNS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10_000, 20_000, 50_000)
_NIXL_COUNTS = {
    "nixl_num_failed_transfers": ("Requests that could not be loaded.", "failed_pulls"),
    "nixl_num_kv_expired_reqs": ("Leases of this engine that expired before their pages were read.", "leases_expired"),
}
_NIXL_LISTS = {
    "nixl_xfer_time_seconds": ("Time of a rank's pull.", _POSTS_S[1:], "pull_seconds"),
    "nixl_post_time_seconds": ("The part of a rank's pull that posting took.", _POSTS_S, "post_seconds"),
    "nixl_bytes_transferred": ("Bytes of a rank's pull.", tuple(2**i for i in range(11, 35, 2)), "pull_bytes"),
    "nixl_num_descriptors": ("Descriptors of a rank's pull.", _RUNS, "pull_runs"),
}


@dataclass
class PullStats(KVConnectorStats):
    """Events of one or more ranks in an interval: a count for each kind of event, and the figures of each pull."""

    def __post_init__(self) -> None:
        """Sets counts that are missing to zero, and lists that are missing to empty."""
        given = self.data
        self.reset()
        self.data |= given

    def reset(self) -> None:
        """Begins a new interval."""
        self.data: dict[str, Any] = dict.fromkeys(_COUNTS, 0) | {name: [] for name in _LISTS}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the events of another rank."""
        for name in (*_COUNTS, *_LISTS):
            self.data[name] += other.data[name]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns one figure for each statistic, for a log line."""
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
        """Whether there was no event."""
        return not any(self.data.values())


def pull_stats(now: StatsSnapshot, before: StatsSnapshot | None) -> PullStats:
    """Returns the events of a rank between two snapshots.

    If `before` is None, it returns all events since the rank started.
    """
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
    """The figures of `PullStats` as Prometheus metrics, under the names `vllm:pagewire_*` and `vllm:nixl_*`.

    The `vllm:nixl_*` metrics are left out if vLLM's own NIXL connector runs in the same `MultiConnector`, because that
    connector creates them itself.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: list[tuple[str, Any]] = []  # pairs: the name of a figure in our stats, and its counter
        self._histograms: list[tuple[str, Any]] = []
        for name, text in _COUNTS.items():
            self._counters.append((name, self._made(metric_types[Counter], f"pagewire_{name}", text)))
        for name, (text, buckets) in _LISTS.items():
            made = self._made(metric_types[Histogram], f"pagewire_{name}", text, buckets=list(buckets))
            self._histograms.append((name, made))
        with suppress(ValueError):  # if the first name is already registered, all of them are
            for name, (text, buckets, ours) in _NIXL_LISTS.items():
                self._histograms.append((ours, self._made(metric_types[Histogram], name, text, buckets=list(buckets))))
            for name, (text, ours) in _NIXL_COUNTS.items():
                self._counters.append((ours, self._made(metric_types[Counter], name, text)))

    def _made(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        metric = kind(name=f"vllm:{name}", documentation=text, labelnames=self._labelnames, **options)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Adds an interval of one engine."""
        for name, counters in self._counters:
            counters[engine_idx].inc(transfer_stats_data[name])
        for name, histograms in self._histograms:
            for figure in transfer_stats_data[name]:
                histograms[engine_idx].observe(figure)
