"""Tests the stats: counters cover all time, percentiles cover the time since the last snapshot, and failures are
counted by kind.
"""

from __future__ import annotations

import pytest

from transfer.failures import FailureKind
from transfer.stats import FAILURES, PULL_BUCKETS, Buckets, PullRecord, TransferStats


def test_a_snapshot_has_all_totals_and_the_pulls_since_the_one_before() -> None:
    stats = TransferStats()
    empty = stats.snapshot()
    assert (empty.pulls, empty.interval_pulls, empty.total_ms, empty.post_ms, empty.mb_per_s) == (
        0,
        0,
        (0, 0),
        (0, 0),
        0,
    )
    first = [PullRecord(1_000_000 * at, at, 1e-3 * at, 1e-2 * at) for at in range(1, 12)]
    for record in first:
        stats.record(record)
    stats.failed_handshakes = 2
    stats.record_failure(FailureKind.TIMEOUT)
    found = stats.snapshot()
    assert found.records == tuple(first)
    assert (found.pulls, found.interval_pulls, found.num_bytes, found.num_runs) == (11, 11, 66_000_000, 66)
    assert found.total_ms == pytest.approx((60.0, 100.0))
    assert found.post_ms == pytest.approx((6.0, 10.0))
    assert found.mb_per_s == pytest.approx(100.0)
    assert (found.failed_pulls, found.failed_handshakes) == (1, 2)
    stats.record(PullRecord(2_000_000, 3, 4e-3, 5e-3))
    second = stats.snapshot()
    assert (second.pulls, second.interval_pulls, second.num_bytes, second.num_runs) == (12, 1, 68_000_000, 69)
    assert second.total_ms == pytest.approx((5.0, 5.0))
    assert second.post_ms == pytest.approx((4.0, 4.0))
    assert second.mb_per_s == pytest.approx(400.0)
    assert second.line() == (
        "pulls 1: p50/p90 5/5 ms, post 4/4 ms, 400 MB/s; in all 12 pulls, 68000000 bytes, 69 runs, 1 failed, "
        "2 handshakes failed, leases {}"
    )
    assert stats.snapshot().records == ()


def test_the_last_4096_pulls_of_an_interval_are_kept_and_all_are_counted() -> None:
    stats = TransferStats()
    for at in range(5000):
        stats.record(PullRecord(1, 1, 0.0, float(at)))
    found = stats.snapshot()
    assert (found.pulls, found.interval_pulls) == (5000, 4096)
    assert [found.records[at].total_s for at in (0, -1)] == [904.0, 4999.0]


def test_leases_end_read_or_expired_or_otherwise() -> None:
    stats = TransferStats()
    for reason in ("read", "expired (it lasts 5 s)", "expired", "revoked: read", "the owner gave it up", "reader"):
        stats.record_lease(reason)
    assert stats.snapshot().leases == {"read": 1, "expired": 2, "other": 3}


def test_a_figure_at_a_bound_lies_below_it() -> None:
    buckets = Buckets((1.0, 2.0))
    for figure in (0.5, 1.0, 1.5, 2.0, 2.5):
        buckets.add(figure)
    assert (buckets.counts, buckets.total) == ([2, 2, 1], 7.5)
    stats = TransferStats()
    stats.record(PullRecord(2048, 4, 1e-5, 1e-4))  # Each value is at the bound of a different bucket.
    for name in PULL_BUCKETS:
        by_hand = Buckets(PULL_BUCKETS[name])
        by_hand.add({"num_bytes": 2048, "num_runs": 4, "post_s": 1e-5, "total_s": 1e-4}[name])
        assert (stats.buckets[name].counts, stats.buckets[name].total) == (by_hand.counts, by_hand.total)


def test_a_failure_is_counted_by_its_kind_unless_its_owner_gave_it_up() -> None:
    stats = TransferStats()
    for kind in (*FailureKind, FailureKind.TIMEOUT):
        stats.record_failure(kind)
    assert dict(stats.failures) == {kind: 1 + (kind == "timeout") for kind in FAILURES}
    assert stats.snapshot().failed_pulls == len(FAILURES) + 1


def test_the_labels_are_these() -> None:
    assert (
        *("timeout", "lease_over", "handshake", "checks", "refused", "source_gone", "transport", "shutdown", "other"),
    ) == FAILURES
