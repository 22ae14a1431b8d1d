"""A scrape of a manager agrees with the manager's own figures, even while the serving loop runs."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache import TextContext
from kvcache.endpoints.families import Family, FamilyCollector
from kvcache.endpoints.prometheus import ManagerCollector
from kvcache.tiers.page_files import FileRefusal
from tests.kvcache.replica.test_imports import prefilled, receiver
from tests.kvcache.served import Served
from tests.scrape import Scrape, faults, scraped, text_of, value

HEAD = range(40)


def books(manager: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Returns the manager's own figures as the samples that a scrape must contain."""
    metrics = manager._replicas.metrics
    totals = {
        "pagewire_file_written_pages_total": metrics.file_blocks_written,
        "pagewire_file_read_pages_total": metrics.file_blocks_read,
        "pagewire_refused_files_total": metrics.files_refused,
        "pagewire_host_pages": manager.total_num_host_pages,
        "pagewire_host_cached_pages": round(manager.host_committed_block_pct * manager.total_num_host_pages),
    }
    return {(name, ()): float(figure) for name, figure in totals.items()}


def assert_as_booked(manager: Any, found: Scrape) -> None:
    manager.check()
    metrics = manager.metrics
    assert books(manager).items() <= found.items()
    assert value(found, "pagewire_prompt_tokens_total", source="computed") == metrics.input_tokens
    assert value(found, "pagewire_prompt_tokens_total", source="cached") == metrics.cache_tokens
    assert value(found, "pagewire_evicted_pages_total") == metrics.evictions
    assert value(found, "pagewire_host_stored_pages_total") == metrics.d2h_blocks_copied
    assert value(found, "pagewire_host_loaded_pages_total") == metrics.h2d_blocks_copied
    assert value(found, "pagewire_pages", state="held") == manager.num_held_blocks
    assert value(found, "pagewire_pages") == manager.total_num_pages
    assert value(found, "pagewire_page_usage_ratio") / manager.num_replicas == pytest.approx(manager.used_blocks_pct)
    assert value(found, "pagewire_leased_pages") == manager.num_leased_blocks
    cached = manager.num_blocks_by_weights
    current = cached.pop(manager.weights)
    assert value(found, "pagewire_cached_pages", weights="current") == current
    assert value(found, "pagewire_cached_pages", weights="older") == sum(cached.values())
    assert value(found, "pagewire_weights_switches_total") == manager._replicas.rows.weights.now.switches
    for why in FileRefusal:
        assert value(found, "pagewire_file_refused_pages_total", reason=why.value) == getattr(
            metrics, f"file_blocks_{why}"
        )
    assert value(found, "pagewire_cache_unread_families_total") == 0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-3, "file_tier_key": "m"}
    it = Served(16, 20, dp=2, params=files)
    yield it
    it.manager.check()
    it.manager.close()


def test_cached_pages_are_told_by_the_weights_that_computed_them(served: Served) -> None:
    manager = served.manager
    served.serve(HEAD, replica=0)
    manager.set_weights("b")
    assert_as_booked(manager, scraped(ManagerCollector(manager)))
    served.serve(range(100, 120), replica=1)
    found = scraped(ManagerCollector(manager))
    assert_as_booked(manager, found)
    told = [
        value(found, "pagewire_cached_pages", weights=one, replica=at) for one in ("current", "older") for at in (0, 1)
    ]
    assert told == [0, 5, 10, 0]
    assert value(found, "pagewire_weights_switches_total") == 1
    manager.set_weights(None)
    found = scraped(ManagerCollector(manager))
    assert value(found, "pagewire_cached_pages", weights="older") == 5
    assert value(found, "pagewire_weights_switches_total") == 2


def test_every_figure_of_a_scrape_is_that_of_the_manager(served: Served) -> None:
    manager = served.manager
    collector = ManagerCollector(manager, engine="7")
    for replica in (0, 1, 1):
        served.serve(HEAD, replica=replica)
    plain = scraped(ManagerCollector(manager))
    assert_as_booked(manager, plain)
    assert [value(plain, "pagewire_pages", replica=0, state=state) for state in ("held", "idle", "empty")] == [0, 10, 6]
    for _ in range(6):
        served.fill(12)
    manager.flush_tiers()
    served.serve(HEAD)
    kept = served.claim([*range(500, 530)], replica=1)
    assert manager.maybe_reserve(kept)
    served.run(kept)
    lease = manager.lease(kept.request_id)
    manager.release(kept.request_id)
    running = served.claim(range(600, 610))
    assert manager.maybe_reserve(running)

    found = scraped(collector)
    assert {dict(labels)["engine"] for _, labels in found} == {"7"}
    plain = scraped(ManagerCollector(manager))
    assert_as_booked(manager, plain)
    for counter in ("evicted_pages", "host_stored_pages", "host_loaded_pages", "file_written_pages", "file_read_pages"):
        assert value(plain, f"pagewire_{counter}_total") > 0
    assert value(plain, "pagewire_claimed_requests", replica=0) == 1
    assert value(plain, "pagewire_leased_pages", replica=1) == 8
    assert value(plain, "pagewire_prompt_tokens_total", replica=1, source="cached") == 36
    assert list(faults(text_of(collector))) == []
    manager.end_lease(lease)

    before, _ = scraped(collector), manager.reset_metrics()
    assert value(scraped(collector), "pagewire_evicted_pages_total") == value(before, "pagewire_evicted_pages_total")


def test_pages_that_something_in_flight_may_write_are_counted_until_it_ends(make: Any) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    context = receiver(target)
    pending = target.import_block_table(context, table)
    collector = ManagerCollector(target)
    assert value(scraped(collector), "pagewire_open_imports") == 1
    assert value(scraped(collector), "pagewire_quarantined_pages") == 0
    copier = target.copier(pending)
    target.release(context.request_id)
    target.cancel_import(pending)
    assert value(scraped(collector), "pagewire_quarantined_pages") == len(pending.parts[0].dst_pages) == 5
    copier.give_up()
    assert value(scraped(collector), "pagewire_quarantined_pages") == 0
    assert value(scraped(collector), "pagewire_open_imports") == 0


@pytest.fixture
def _often() -> Iterator[None]:
    """Makes the interpreter switch threads so often that values change between two reads of a scrape."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_often")
def test_a_scrape_beside_the_loop_raises_nothing_and_no_counter_goes_back(make: Any) -> None:
    """While the loop runs, two figures of a scrape may belong to different steps. Each figure alone is right. All
    figures agree after the loop has stopped.
    """
    manager = make(24, page_size=4, checks=False, host_slots=8)
    collector, over = ManagerCollector(manager), threading.Event()
    found: list[Scrape] = []

    def scrape() -> None:
        while not over.is_set() or len(found) < 20:
            found.append(scraped(collector))

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        for number in range(600):
            context = TextContext([*range(8), number, *range(9, 20)], 256, f"r{number}")
            with manager.claim(context):
                assert manager.maybe_reserve(context)
                manager.fetch([context])
                context.update(1)
                manager.step([context])
                lease = manager.lease(context.request_id)
            manager.end_lease(lease)
    finally:
        over.set()
        scraper.join()
    for before, after in itertools.pairwise(found):
        for (name, labels), figure in after.items():
            assert figure >= (before[name, labels] if name.endswith("_total") else 0), name
    assert_as_booked(manager, scraped(collector))


def test_a_figure_that_cannot_be_read_is_left_out_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(source: Any) -> Any:
        yield (), source
        raise RuntimeError("the book is gone")

    good = Family("pagewire_good_things", "gauge", "What can be read.", (), lambda source: [((), source)])
    bad = Family("pagewire_bad_things", "gauge", "What cannot.", (), broken)
    collector = FamilyCollector("test", lambda: 5, (bad, good), {"engine": "0"})
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            text = text_of(collector)
    assert [record.getMessage() for record in caplog.records] == ["metric pagewire_bad_things cannot be read"]
    found = scraped(collector)
    assert "pagewire_bad_things" not in text
    assert value(found, "pagewire_good_things") == 5
    assert value(found, "pagewire_test_unread_families_total", engine="0") == 4


def test_a_histogram_has_cumulative_buckets_and_their_sum() -> None:
    family = Family("pagewire_x_seconds", "histogram", "X.", (), lambda _: [((), ((0.5, 2.0), (3, 0, 1), 9.5))])
    found = scraped(FamilyCollector("test", lambda: None, (family,), {}))
    assert [value(found, "pagewire_x_seconds_bucket", le=le) for le in ("0.5", "2.0", "+Inf")] == [3, 3, 4]
    assert value(found, "pagewire_x_seconds_count") == 4
    assert value(found, "pagewire_x_seconds_sum") == 9.5


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (Family("pagewire_pull_ms", "gauge", "X.", (), lambda _: [((), 1)]), "ms is no base unit"),
        (Family("pagewire_pullTime", "gauge", "X.", (), lambda _: [((), 1)]), "lower case"),
        (Family("pagewire_pulls_count", "gauge", "X.", (), lambda _: [((), 1)]), "for another type"),
        (Family("pagewire_pulls", "gauge", "pulls", (), lambda _: [((), 1)]), "no sentence"),
        (Family("pagewire_used_ratio", "gauge", "X.", (), lambda _: [((), 40)]), "a share of 40"),
        (Family("pagewire_pulls_gauge", "gauge", "X.", (), lambda _: [((), 1)]), "the word for a type"),
        (Family("pagewire_pulls", "gauge", "X.", ("Rank",), lambda _: [(("0",), 1)]), "label 'Rank'"),
    ],
)
def test_the_naming_rules_find_each_violation(family: Family, said: str) -> None:
    assert any(said in fault for fault in faults(text_of(FamilyCollector("test", lambda: None, (family,), {}))))
