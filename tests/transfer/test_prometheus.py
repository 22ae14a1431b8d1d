"""A scrape agrees with the leases and pulls of exchanges. The exchanges run over real sockets and NIXL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.scrape import faults, scraped, text_of, value
from tests.transfer.pull.test_ownership import Reader, Side
from transfer.prometheus import TransferCollector
from transfer.pull.replica import LeaseOver
from transfer.stats import FAILURES, PULL_BUCKETS, Buckets

QUICK = {"handshake_timeout_s": 5.0, "heartbeat_s": 0.1, "dead_after_s": 1.0}


@pytest.fixture
def side() -> Iterator[Callable[..., Any]]:
    made: list[Side] = []

    def make(kind: type[Side], name: str) -> Side:
        made.append(kind(name, exchange={"replica_options": QUICK}))
        return made[-1]

    yield make
    for one in made:
        one.exchange.close()
        one.manager.close()


def test_both_sides_of_a_pull_are_counted(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    source.compute()
    offer = source.offer()
    mine, theirs = TransferCollector(reader.exchange, engine="d"), TransferCollector(source.exchange)
    assert value(scraped(theirs), "pagewire_leases", replica=0) == 1
    _, pending = reader.reserve(source.manager.block_table("r"))
    reader.open(offer)
    reader.until(lambda: value(scraped(mine), "pagewire_open_pulls") == 1)
    reader.exchange.read(0, "k", pending, last=True)
    assert not reader.end(source)[0].error
    source.until(lambda: source.of(LeaseOver))

    found, books = scraped(mine), reader.exchange.threads[0].snapshot()
    (record,) = books.records
    for name, figure in {
        "seconds": record.total_s,
        "post_seconds": record.post_s,
        "bytes": record.num_bytes,
        "runs": record.num_runs,
    }.items():
        assert value(found, f"pagewire_pull_{name}_sum", engine="d") == figure
        assert value(found, f"pagewire_pull_{name}_count") == books.pulls == 1
    assert value(found, "pagewire_pull_bytes_sum") == reader.exchange.totals()[0] > 0
    assert value(found, "pagewire_pull_busy_seconds_total") == reader.exchange.pull_seconds > 0
    assert value(found, "pagewire_open_pulls") == value(found, "pagewire_failed_pulls_total") == 0
    told = scraped(theirs)
    assert value(told, "pagewire_leases") == 0
    assert value(told, "pagewire_ended_leases_total", how="read") == value(told, "pagewire_ended_leases_total") == 1
    assert value(told, "pagewire_reader_notes_total", verdict="accepted") == 1
    assert value(told, "pagewire_handshake_queries_total", answer="answered") == source.exchange.queries["answered"] > 0
    for collector in (mine, theirs):
        assert list(faults(text_of(collector))) == []


def test_failures_are_counted_by_kind(side: Any) -> None:
    """The four failures are: no source at the address, an ended lease, pages that never come, and a source that
    disappears.
    """
    source, reader = side(Side, "p"), side(Reader, "d")
    source.compute()
    offer = source.offer()
    table = source.manager.block_table("r")
    _, pending = reader.reserve(table)
    reader.exchange.open_pull(0, "nobody", offer._replace(address="tcp://127.0.0.1:9"), 20.0)
    reader.exchange.open_pull(0, "slow", offer, 0.4)
    reader.exchange.open_pull(0, "late", offer, 20.0)
    for key in ("nobody", "slow"):
        assert reader.end(source, key)[0].error
    source.exchange.revoke(offer, "given up")
    source.until(lambda: source.of(LeaseOver))
    reader.exchange.read(0, "late", pending, last=True)
    assert "no longer held the pages" in reader.end(source, "late")[0].error
    other = source.exchange.offer("r", 30.0)
    reader.exchange.open_pull(0, "gone", other, 20.0)
    reader.until(lambda: value(scraped(TransferCollector(reader.exchange)), "pagewire_open_pulls") == 1)
    source.exchange.close()
    assert reader.end(reader, "gone")[0].error
    found = scraped(TransferCollector(reader.exchange))
    kinds = {kind: value(found, "pagewire_failed_pulls_total", reason=kind) for kind in map(str, FAILURES)}
    assert kinds.pop("source_gone") == 1
    assert kinds.pop("handshake") == kinds.pop("timeout") == kinds.pop("lease_over") == 1
    assert not any(kinds.values())
    assert reader.exchange.totals()[1] == 4
    reader.manager.cancel_import(pending)


def test_a_failed_pull_is_in_quarantine_while_something_of_it_is_in_flight(side: Any) -> None:
    reader = side(Reader, "d")
    replica = reader.exchange.threads[0].replica
    pull = type("Pull", (), {"error": "it failed", "refusal": ""})()
    replica.__dict__["_pulls"] = {"k": pull}  # Between two polls the thread may have such a pull.
    found = scraped(TransferCollector(reader.exchange))
    replica.__dict__["_pulls"] = {}
    assert value(found, "pagewire_quarantined_pulls") == 1
    assert value(found, "pagewire_open_pulls") == 0


@pytest.mark.parametrize("bounds", PULL_BUCKETS.values())
def test_a_figure_counts_in_the_first_bucket_that_it_is_not_above(bounds: tuple[float, ...]) -> None:
    buckets = Buckets(bounds)
    for figure in (*bounds, bounds[-1] * 2, bounds[0] * 1.5):
        buckets.add(figure)
    assert buckets.counts == [1, 2, *[1] * (len(bounds) - 1)]
    assert buckets.total == sum((*bounds, bounds[-1] * 2, bounds[0] * 1.5))
