"""Statistics of transfers: counters of data, time and failures, and records of the latest pulls."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

import msgspec
import numpy as np

from transfer.failures import FailureKind

_LAST = 4096
PULL_BUCKETS: dict[str, tuple[float, ...]] = {
    "total_s": tuple(1e-4 * 2**i for i in range(17)),
    "post_s": tuple(1e-5 * 2**i for i in range(15)),
    "num_bytes": tuple(float(2**i) for i in range(11, 36, 2)),
    "num_runs": tuple(float(4**i) for i in range(10)),
}
"""Upper bounds of the histogram buckets of pulls, by field of `PullRecord`."""
FAILURES = tuple(kind for kind in FailureKind if kind is not FailureKind.CANCELLED)
"""The kinds of failures that are counted."""


class Buckets:
    """The buckets of a Prometheus histogram, and the sum of the observed values.

    Attributes:
        bounds: upper bounds, ascending and inclusive.
        counts: number of values in each bucket. The last entry counts the values above all bounds.
        total: sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    def add(self, figure: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, figure)] += 1
        self.total += figure


class PullRecord(msgspec.Struct, frozen=True):
    """The figures of one successful pull by one rank. Times are in seconds."""

    num_bytes: int
    num_runs: int
    post_s: float
    total_s: float


class StatsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Counters at one moment, and percentiles over the pulls since the last snapshot.

    Attributes:
        pulls: number of successful pulls. A pull by several ranks counts once for each rank.
        failed_pulls: number of requests whose pull failed.
        failed_handshakes: number of sources that gave no answer, or an unusable one.
        leases: number of ended leases by outcome: "read", "expired" or "other".
        num_bytes: bytes read in total.
        num_runs: NIXL descriptors posted in total, one for each run of bytes.
        interval_pulls: number of successful pulls since the last snapshot, at most 4,096.
        records: the `PullRecord` of each pull that `interval_pulls` counts. The next three fields summarise these
            records.
        total_ms: p50 and p90 of the duration of a pull, in milliseconds.
        post_ms: p50 and p90 of the time that posting a pull took, in milliseconds.
        mb_per_s: bytes of all pulls divided by the sum of their durations, in 1e6 bytes per second.
    """

    pulls: int
    failed_pulls: int
    failed_handshakes: int
    leases: dict[str, int]
    num_bytes: int
    num_runs: int
    interval_pulls: int
    records: tuple[PullRecord, ...]
    total_ms: tuple[float, float]
    post_ms: tuple[float, float]
    mb_per_s: float

    def line(self) -> str:
        """Formats the figures as one line for a log."""
        return (
            f"pulls {self.interval_pulls}: p50/p90 {self.total_ms[0]:.3g}/{self.total_ms[1]:.3g} ms, "
            f"post {self.post_ms[0]:.3g}/{self.post_ms[1]:.3g} ms, {self.mb_per_s:.4g} MB/s; "
            f"in all {self.pulls} pulls, {self.num_bytes} bytes, {self.num_runs} runs, {self.failed_pulls} failed, "
            f"{self.failed_handshakes} handshakes failed, leases {self.leases}"
        )


class TransferStats:
    """Counts what one replica does. One thread writes. Any other thread may read the attributes at any time.

    Attributes:
        failed_handshakes: number of sources that gave no answer, or an unusable one.
        failures: number of requests whose pull failed, by kind (`FAILURES`).
        leases: number of ended leases by outcome: "read", "expired" or "other".
        buckets: histograms of the ranks' successful pulls, by field of `PullRecord`.
    """

    def __init__(self) -> None:
        self.failed_handshakes = 0
        self.failures: Counter[FailureKind] = Counter()
        self.leases: Counter[str] = Counter()
        self.buckets = {name: Buckets(bounds) for name, bounds in PULL_BUCKETS.items()}
        self._of_pulls = tuple(self.buckets[name] for name in ("total_s", "post_s", "num_bytes", "num_runs"))
        self._last: deque[PullRecord] = deque(maxlen=_LAST)

    @property
    def num_bytes(self) -> int:
        """Bytes read in total."""
        return int(self.buckets["num_bytes"].total)

    def record(self, pull: PullRecord) -> None:
        """Counts a successful pull of one rank."""
        total_s, post_s, num_bytes, num_runs = self._of_pulls
        # `Buckets.add` is inlined here, because the call would take twice as long
        total_s.counts[bisect_left(total_s.bounds, pull.total_s)] += 1
        total_s.total += pull.total_s
        post_s.counts[bisect_left(post_s.bounds, pull.post_s)] += 1
        post_s.total += pull.post_s
        num_bytes.counts[bisect_left(num_bytes.bounds, pull.num_bytes)] += 1
        num_bytes.total += pull.num_bytes
        num_runs.counts[bisect_left(num_runs.bounds, pull.num_runs)] += 1
        num_runs.total += pull.num_runs
        self._last.append(pull)

    def record_failure(self, kind: FailureKind) -> None:
        """Counts a request whose pull failed. A pull that its owner cancelled is not counted."""
        if kind is not FailureKind.CANCELLED:
            self.failures[kind] += 1

    def record_lease(self, reason: str) -> None:
        """Counts a lease that has ended. The reason decides whether it counts as "read", "expired" or "other"."""
        self.leases[reason if reason == "read" else "expired" if reason.startswith("expired") else "other"] += 1

    def snapshot(self) -> StatsSnapshot:
        """Returns the counters and begins a new interval."""
        records, self._last = list(self._last), deque(maxlen=_LAST)
        seconds = sum(record.total_s for record in records)
        return StatsSnapshot(
            pulls=sum(self.buckets["total_s"].counts),
            failed_pulls=self.failures.total(),
            failed_handshakes=self.failed_handshakes,
            leases=dict(self.leases),
            num_bytes=self.num_bytes,
            num_runs=int(self.buckets["num_runs"].total),
            interval_pulls=len(records),
            records=tuple(records),
            total_ms=_percentiles([record.total_s for record in records]),
            post_ms=_percentiles([record.post_s for record in records]),
            mb_per_s=sum(record.num_bytes for record in records) / seconds / 1e6 if seconds else 0.0,
        )


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    if not seconds:
        return (0.0, 0.0)
    p50, p90 = np.percentile(seconds, [50, 90]) * 1e3
    return (float(p50), float(p90))
