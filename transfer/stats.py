"""What was moved, how long it took, and what went wrong: counters, and the figures of the last pulls."""

from __future__ import annotations

from collections import Counter, deque

import msgspec
import numpy as np

_LAST = 4096


class PullRecord(msgspec.Struct, frozen=True):
    """One pull of one rank that ended well. Seconds and bytes."""

    num_bytes: int
    num_runs: int
    post_s: float
    total_s: float


class StatsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Counters at one moment, and percentiles over the pulls since the last snapshot.

    Attributes:
        pulls: pulls of ranks that ended well.
        failed_pulls: requests whose pull failed.
        failed_handshakes: sources that did not answer, or not well.
        leases: ended leases, by how they ended: "read", "expired", or "other".
        num_bytes: read in all.
        num_runs: descriptors posted in all.
        interval_pulls: pulls since the last snapshot; at most the last 4,096 are kept.
        records: each of these.
        total_ms: p50 and p90 of the time from the start of such a pull to its end.
        post_ms: likewise, of the time that its posts took.
        mb_per_s: bytes over time of such pulls, each counted alone, in 1e6 bytes a second.
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
        """One line for a log."""
        return (
            f"pulls {self.interval_pulls}: p50/p90 {self.total_ms[0]:.3g}/{self.total_ms[1]:.3g} ms, "
            f"post {self.post_ms[0]:.3g}/{self.post_ms[1]:.3g} ms, {self.mb_per_s:.4g} MB/s; "
            f"in all {self.pulls} pulls, {self.num_bytes} bytes, {self.num_runs} runs, {self.failed_pulls} failed, "
            f"{self.failed_handshakes} handshakes failed, leases {self.leases}"
        )


class TransferStats:
    """Counts what one replica does. Single-threaded.

    Attributes:
        failed_handshakes: sources that did not answer, or not well.
    """

    def __init__(self) -> None:
        self.failed_handshakes = 0
        self._pulls = self._failed = self._bytes = self._runs = 0
        self._leases: Counter[str] = Counter()
        self._last: deque[PullRecord] = deque(maxlen=_LAST)

    def record(self, pull: PullRecord) -> None:
        """Counts a rank's pull that has ended well."""
        self._pulls += 1
        self._bytes += pull.num_bytes
        self._runs += pull.num_runs
        self._last.append(pull)

    def record_failure(self) -> None:
        """Counts a request whose pull failed."""
        self._failed += 1

    def record_lease(self, reason: str) -> None:
        """Counts a lease that has ended."""
        self._leases[reason if reason == "read" else "expired" if reason.startswith("expired") else "other"] += 1

    def snapshot(self) -> StatsSnapshot:
        """Returns the counters, and begins a new interval."""
        records, self._last = list(self._last), deque(maxlen=_LAST)
        seconds = sum(record.total_s for record in records)
        return StatsSnapshot(
            pulls=self._pulls,
            failed_pulls=self._failed,
            failed_handshakes=self.failed_handshakes,
            leases=dict(self._leases),
            num_bytes=self._bytes,
            num_runs=self._runs,
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
