"""Simulates the division of a pull between sources. The links have any speed, and sources may fail."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.replica.block_table import PageCopy
from transfer.pull.pull_state import PullEvent
from transfer.pull.shared_pull import SharedPull, SourcePages

SIZE, BYTES = 16, 1 << 16


def held(name: str, pages: int) -> SourcePages:
    source: Any = SimpleNamespace(contact=("tcp://there", name))
    return SourcePages(source, [PageCopy(range(pages), range(pages), (0, pages * SIZE))], ())


def pull_of(pages: list[int]) -> SharedPull:
    sources = [held(f"s{number}", count) for number, count in enumerate(pages)]
    group: Any = SimpleNamespace(state=False)
    shared = SharedPull("k", sources, [group], [BYTES], (SIZE, SIZE), can_shorten=True)
    for number, source in enumerate(sources):
        shared.add(f"part {number}", source, sources[0], (0.0, 0.0))
    return shared


def simulated(shared: SharedPull, rates: list[float], fails: dict[int, float]) -> tuple[PullEvent, float]:
    """Simulates a pull whose parts are read at the given rates. Some sources fail at the given times. Returns the last
    event and its time.
    """
    now, ends, read = 0.0, dict[int, float](), list[int]()
    while True:
        for number, part in enumerate(shared.parts):
            if part.run is None and not part.error and (run := shared.next_run(part, now)) is not None:
                shared.begin(part, run, now)
                ends[number] = now + 1e-4 + shared.num_bytes(run) / rates[number]
        event = shared.outcome()
        if event is not None and event.safe:
            assert len(read) == len(set(read)), "no page is read twice unless its source has failed"
            return event, now
        assert ends, "somebody goes on"
        number = min(ends, key=lambda one: min(ends[one], fails.get(one, ends[one])))
        part = shared.parts[number]
        assert part.run is not None
        if fails.get(number, 1e9) < ends[number]:
            now = max(now, fails[number])
            shared.failed(part, PullEvent(part.key, "it is gone", safe=True))
        else:
            now = ends[number]
            read += range(*part.run)
            shared.passed(part, now)
        del ends[number]


@pytest.mark.parametrize("seed", range(40))
def test_every_page_is_read_once_whatever_the_links_and_whoever_fails(seed: int) -> None:
    rng = random.Random(seed)
    count, pages = rng.randint(2, 4), rng.randint(1, 2000)
    whole = [pages, *(rng.choice((pages, rng.randint(1, pages))) for _ in range(count - 1))]
    rates = [10.0 ** rng.uniform(6, 10) for _ in range(count)]
    fails = {number: rng.uniform(0.0, 0.1) for number in range(count) if rng.random() < 0.3}
    event, _ = simulated(pull_of(whole), rates, fails)
    got = sum(share.num_bytes for share in event.shares) // BYTES
    if not event.error:
        assert got >= (event.stop // SIZE or pages)
    if not fails:
        assert (event.error, event.stop, got) == ("", 0, pages)
    if fails and event.error:
        assert any(share.error for share in event.shares)


@pytest.mark.parametrize(("rates", "within"), [((1e8, 1e8), 1.1), ((1e8, 1e7), 1.15), ((1e8, 1e6), 1.3)])
def test_two_sources_take_hardly_longer_than_an_ideal_division(rates: tuple[float, float], within: float) -> None:
    pages = 1024
    event, seconds = simulated(pull_of([pages, pages]), list(rates), {})
    assert event.error == ""
    assert seconds < within * pages * BYTES / sum(rates)


def test_a_source_much_slower_than_the_other_is_asked_for_little() -> None:
    event, _ = simulated(pull_of([256, 256]), [1e9, 1e5], {})
    assert event.shares[1].num_bytes <= 4 * BYTES
