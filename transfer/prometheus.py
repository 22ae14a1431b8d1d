"""Prometheus metrics of leases and pulls: `REGISTRY.register(TransferCollector(exchange, engine="0"))`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, get_args

from kvcache.endpoints.families import Family, FamilyCollector, Histogram, Sample
from transfer.pull.exchange import PageExchange
from transfer.pull.lease import Verdict
from transfer.pull.replica import ReplicaTransfer
from transfer.pull.thread import TransferThread
from transfer.stats import FAILURES
from transfer.watch import Transfers
from transfer.wire.handshake import QueryOutcome

_REPLICA = ("replica",)
_VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
T = TypeVar("T")


def _each(read: Callable[[TransferThread], float | Histogram]) -> Callable[[Transfers], Iterator[Sample]]:
    """Returns a function that yields one sample for each replica."""
    return lambda owner: (((number,), read(thread)) for number, thread in enumerate(owner.threads))


def _by(label: Sequence[T], read: Callable[[ReplicaTransfer, T], float]) -> Callable[[Transfers], Iterator[Sample]]:
    """Returns a function that yields one sample for each replica and each value of a label."""
    return lambda owner: (
        ((number, value), read(thread.replica, value)) for number, thread in enumerate(owner.threads) for value in label
    )


def _of_pulls(name: str, field: str, text: str) -> Family:
    """Returns the histogram of a field of `PullRecord`."""

    def read(thread: TransferThread) -> Histogram:
        buckets = thread.replica.stats.buckets[field]
        return buckets.bounds, buckets.counts.copy(), buckets.total

    return Family(name, "histogram", text, _REPLICA, _each(read))


def _queries(owner: PageExchange) -> Iterator[Sample]:
    return (((count,), owner.queries[count]) for count in get_args(QueryOutcome))


def _lent(owner: PageExchange) -> Iterator[Sample]:
    return (((replica,), pages) for replica, pages in enumerate(owner.lending.lent_by_replica))


FAMILIES = (
    _of_pulls("pagewire_pull_seconds", "total_s", "Duration of a rank's successful pull, from its start to its end."),
    _of_pulls(
        "pagewire_pull_post_seconds", "post_s", "The part of pagewire_pull_seconds that was spent on posting READs."
    ),
    _of_pulls("pagewire_pull_bytes", "num_bytes", "Bytes of a rank's successful pull."),
    _of_pulls("pagewire_pull_runs", "num_runs", "NIXL descriptors of a rank's successful pull."),
    Family(
        "pagewire_pull_busy_seconds_total",
        "counter",
        "Time in which at least one READ was under way, or a source was waited for.",
        _REPLICA,
        _each(lambda thread: thread.pull_seconds),
    ),
    Family(
        "pagewire_failed_pulls_total",
        "counter",
        "Requests whose pull failed, by kind of reason; the log has each reason.",
        ("replica", "reason"),
        _by(FAILURES, lambda replica, kind: replica.stats.failures[kind]),
    ),
    Family(
        "pagewire_open_pulls",
        "gauge",
        "Pulls that are active or wait for their source.",
        _REPLICA,
        _each(lambda thread: thread.replica.num_pulls[0]),
    ),
    Family(
        "pagewire_quarantined_pulls",
        "gauge",
        "Failed pulls with transfers in flight that may still write to their pages.",
        _REPLICA,
        _each(lambda thread: thread.replica.num_pulls[1]),
    ),
    Family(
        "pagewire_failed_handshakes_total",
        "counter",
        "Sources that gave no answer, or an unusable one.",
        _REPLICA,
        _each(lambda thread: thread.replica.stats.failed_handshakes),
    ),
    Family("pagewire_leases", "gauge", "Open leases.", _REPLICA, _each(lambda thread: len(thread.replica.leases))),
    Family(
        "pagewire_ended_leases_total",
        "counter",
        "Leases that have ended, by outcome: read by all readers, expired unread, or other (refused, revoked).",
        ("replica", "how"),
        _by(("read", "expired", "other"), lambda replica, how: replica.stats.leases[how]),
    ),
    Family(
        "pagewire_reader_notes_total",
        "counter",
        "Readers' notes about leases, by verdict.",
        ("replica", "verdict"),
        _by(_VERDICTS, lambda replica, verdict: replica.leases.counts[verdict]),
    ),
)
OF_EXCHANGE = (
    Family(
        "pagewire_lent_pages_total",
        "counter",
        "Pages leased to readers that asked for them by content.",
        _REPLICA,
        _lent,
    ),
    Family(
        "pagewire_handshake_queries_total",
        "counter",
        "Queries of peers to this process's engines, by outcome.",
        ("answer",),
        _queries,
    ),
)


class TransferCollector(FamilyCollector):
    """Collects the leases, pulls and handshakes of an exchange, or the leases and pulls of a `NixlConnectorWorker`.

    `labels` are added to every sample, for example `engine="0"`. A scrape raises nothing; see `FamilyCollector`.
    """

    def __init__(self, source: PageExchange | Transfers, **labels: object) -> None:
        families = (*FAMILIES, *OF_EXCHANGE) if isinstance(source, PageExchange) else FAMILIES
        super().__init__("transfer", lambda: source, families, labels)
