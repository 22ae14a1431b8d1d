"""A replica asks the tiers below the host, the nearest tier first. It informs all of these tiers of the uses and
changes of pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from kvcache.copies import PageMover
from kvcache.pool.index import Digests
from kvcache.pool.pages import PagePool
from kvcache.pool.pages_below import Asked
from kvcache.tiers.host_tier import HostTier, LowerTier, ReplicaTier

# These are five pages. Each page has the name of the tier that has it.
HOST, FILE, OBJECT, UNKNOWN, NOWHERE = 1, 2, 3, 4, 5
EVERY = (HOST, FILE, OBJECT, UNKNOWN, NOWHERE)


def names(*pages: int) -> Digests:
    return np.array([[[page, ~page & 0xFF] for page in pages]], np.uint64)


def mask(*pages: int) -> Asked:
    return np.array([[page in pages for page in EVERY]])


class Tier(LowerTier):
    """A substitute for a lower tier. It has the pages `has`, may have the pages `perhaps`, and records its calls."""

    def __init__(self, host: HostTier, has: Iterable[int], perhaps: Iterable[int] = (), *, asks: bool = False) -> None:
        super().__init__(host, "test")
        self.pages, self.perhaps, self.asks = {*has}, {*perhaps}, asks
        self.news = 0
        self.looked: list[list[int]] = []
        self.noted: list[tuple[object, ...]] = []

    def words(self, digests: Digests, asked: Asked) -> list[int]:
        return digests[asked][:, 0].tolist()

    @property
    def generation(self) -> int:
        return self.news

    def has_of(self, digests: Digests, asked: Asked, *, perhaps: bool) -> Asked:
        self.looked.append(self.words(digests, asked))
        found = self.pages | (self.perhaps if perhaps else set[int]())
        return asked & np.isin(digests[..., 0], [*found])

    def ask(self, digests: Digests, perhaps: Asked) -> bool:
        self.noted.append(("ask", self.words(digests, perhaps)))
        return bool(perhaps.any())

    def fetch(self, digests: Digests, wanted: Asked, *, wait: bool, gain: int) -> None:
        self.noted.append(("fetch", self.words(digests, wanted), wait, gain))

    def brings(self, digests: Digests, wanted: Asked) -> bool:  # noqa: ARG002
        return bool(wanted.any())

    def used(self, digests: Digests) -> None:
        self.noted.append(("used", digests[:, 0].tolist()))

    def ended(self, digests: Digests) -> None:
        self.noted.append(("ended", digests[..., 0].tolist()))

    def counts(self, noun: str) -> Mapping[str, int]:
        return {f"file_{noun}_read": self.read}

    def tick(self) -> None: ...
    def flush(self) -> None: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
    def check(self) -> None: ...
    def _fail(self, error: OSError) -> None:
        raise error


class Below:
    """A replica over a host tier with one page, a tier of files, and a tier of objects that is partly unknown."""

    def __init__(self) -> None:
        self.host = HostTier([8], 4, 2, pinned=False)
        slot = self.host.pool.allocate(2)
        self.host.pool.index.publish(slot, names(HOST, 9)[0])
        self.host.pool.release(slot)
        self.files = Tier(self.host, [FILE])
        self.objects = Tier(self.host, [OBJECT, FILE], [UNKNOWN], asks=True)
        self.tier = ReplicaTier(self.host, PagePool(8, 2), PageMover([], None))
        self.tier.lower.extend([self.files, self.objects])  # The replica's tier reads the host's list of lower tiers.


def test_a_page_is_looked_up_tier_by_tier_until_one_has_it() -> None:
    below = Below()
    assert np.array_equal(below.tier.has(names(*EVERY), mask(*EVERY)), mask(HOST, FILE, OBJECT))
    assert below.files.looked == [[FILE, OBJECT, UNKNOWN, NOWHERE]]
    assert below.objects.looked == [[OBJECT, UNKNOWN, NOWHERE]]
    assert np.array_equal(below.tier.may_have(names(*EVERY), mask(*EVERY)), mask(HOST, FILE, OBJECT, UNKNOWN))
    assert np.array_equal(below.tier.host_has(names(*EVERY), mask(*EVERY)), mask(HOST))
    assert np.array_equal(below.tier.has(names(*EVERY), mask(FILE, NOWHERE)), mask(FILE)), (
        "the store was asked for no other page"
    )
    assert np.array_equal(below.tier.host_has(names(*EVERY), mask(FILE)), mask())


def test_only_the_store_is_asked_and_only_for_pages_that_no_nearer_tier_has() -> None:
    below = Below()
    assert below.tier.ask(names(*EVERY), mask(HOST, FILE, UNKNOWN, NOWHERE))
    assert below.files.noted == []
    assert below.objects.noted == [("ask", [UNKNOWN])]
    assert not below.tier.ask(names(*EVERY), mask(HOST, FILE, NOWHERE))
    below.objects.asks = False
    assert not below.tier.ask(names(*EVERY), mask(UNKNOWN))
    assert len(below.objects.noted) == 2


@pytest.mark.parametrize("wait", [True, False])
def test_each_tier_loads_the_pages_that_it_has_and_no_nearer_tier_has(wait: bool) -> None:
    below = Below()
    assert below.tier.to_host(names(*EVERY), mask(HOST, FILE, OBJECT), 7, wait=wait)
    assert below.files.noted == [("fetch", [FILE], wait, 7)]
    assert below.objects.noted == [("fetch", [OBJECT], wait, 7)]
    for of_tier in (below.files, below.objects):
        of_tier.noted.clear()
    assert not below.tier.to_host(names(*EVERY), mask(HOST), 7, wait=wait)
    assert below.files.noted == below.objects.noted == []
    assert not below.tier.to_host(names(*EVERY), mask(NOWHERE), 7, wait=wait)


def test_pages_loaded_to_the_host_evict_no_page_that_is_needed_with_them() -> None:
    below = Below()
    pool = below.host.pool
    (needed,), (other,) = pool.index.find(names(HOST)[0]), pool.index.find(names(9)[0])
    below.tier.touch(names(9)[0])
    assert pool.idle.pages().tolist() == [needed, other]
    below.tier.to_host(names(*EVERY), mask(HOST, FILE), 1, wait=False)
    assert pool.idle.pages().tolist() == [other, needed]


def test_a_change_in_any_tier_makes_a_waiting_request_look_again() -> None:
    below = Below()
    assert below.tier.fetches
    assert below.tier.asks
    before = below.tier.generation
    for news, tier in enumerate((below.files, below.objects), 1):
        tier.news += 1
        assert below.tier.answers == news
        assert below.tier.generation == before + news
    below.host.pool.index.clear()
    assert below.tier.generation == before + 3
    below.objects.asks = False
    assert not below.tier.asks
    below.tier.lower.clear()
    assert not below.tier.fetches


def test_every_tier_is_told_of_uses_and_ends_in_their_order() -> None:
    below = Below()
    below.tier.waiting.append((np.zeros(0, np.int32), names(FILE, OBJECT)))
    below.tier.used(names(HOST, FILE)[0])
    expected = [("ended", [[FILE, OBJECT]]), ("used", [HOST, FILE])]
    assert below.files.noted == below.objects.noted == expected
    assert not below.tier.waiting


@pytest.mark.parametrize(
    ("tail", "ends"), [(0, [[FILE, OBJECT, UNKNOWN]]), (2, [[FILE, OBJECT], [FILE, OBJECT, UNKNOWN]])]
)
def test_a_tier_is_told_the_pages_of_a_request_that_ends_and_with_tails_each_end(
    tail: int, ends: list[list[int]]
) -> None:
    below = Below()
    tier = ReplicaTier(below.host, PagePool(8, 2), PageMover([], None))
    below.objects.longest_tail = tail
    pages = tier.pool.allocate(3)
    tier.pool.index.publish(pages, names(FILE, OBJECT, UNKNOWN)[0])
    tier.lower[:] = [below.objects]
    tier.leave(0, pages, names(FILE, OBJECT, UNKNOWN)[0], lambda found: found[:, 0] == OBJECT)
    assert below.objects.noted == [("used", [FILE, OBJECT, UNKNOWN]), *(("ended", [each]) for each in ends)]


def test_the_longest_tail_is_that_of_the_tier_with_the_longest_one() -> None:
    below = Below()
    assert below.tier.longest_tail == 0
    below.objects.longest_tail = 3
    assert below.tier.longest_tail == 3, "files have no tails"
