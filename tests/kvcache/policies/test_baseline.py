"""Baselines are simulated caches. They show how many hits there would be without hints, and how many hits hints
gain.
"""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest

from kvcache import PagedKVCacheManager, Retention, TextContext
from kvcache.policies.baseline import Baseline
from kvcache.policies.hint_share import HintShare
from kvcache.retention import NEUTRAL, PageHints
from tests.kvcache.build import manager_of

KEEP, DROP = Retention(session_continues=True), Retention(session_continues=False)
SESSIONS, ROUNDS = 5, 6


def words(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint64)


def test_a_small_pool_is_followed_whole_and_exactly() -> None:
    rng, room = np.random.default_rng(0), 50
    baseline, lru = Baseline(room), OrderedDict[int, None]()
    assert baseline.rate == 1
    for _ in range(1500):
        head = int(rng.integers(0, 12)) * 1000
        prompt = [head + at for at in range(int(rng.integers(1, 9)))]
        run = 0
        while run < len(prompt) and prompt[run] in lru:
            run += 1
        assert baseline.visit(words(*prompt), room) == run
        for page in reversed(prompt):  # A pool also frees the last page of a prompt first.
            lru.pop(page, None)
            lru[page] = None
        while len(lru) > room:
            lru.popitem(last=False)
    assert baseline.count(words(1, 2, 3)) == 3


def test_a_baseline_has_no_room_for_pages_that_running_requests_take() -> None:
    baseline = Baseline(10)
    baseline.visit(words(*range(10)), 10)
    assert baseline.visit(words(*range(20, 22)), 4) == 0
    assert baseline.visit(words(0, 1, 2), 4) == 2


def test_a_baseline_is_told_of_pages_that_are_loaded_and_of_pages_that_are_forgotten() -> None:
    baseline = Baseline(10)
    baseline.touch(words(1, 2, 3))
    baseline.forget(words(2, 9))
    assert baseline.visit(words(1, 2, 3), 10) == 1
    baseline.clear()
    assert baseline.visit(words(1, 2, 3), 10) == 0


@pytest.mark.parametrize(("pages", "rate"), [(2047, 1), (2048, 2), (30_000, 16), (1 << 20, 1 << 10)])
def test_a_large_pool_is_sampled(pages: int, rate: int) -> None:
    assert Baseline(pages).rate == rate


def test_a_sample_counts_about_as_many_hits_as_the_whole_pool() -> None:
    rng, pages = np.random.default_rng(1), 16_384
    baseline, lru = Baseline(pages), OrderedDict[int, None]()
    names = rng.integers(0, 1 << 63, (400, 128), dtype=np.uint64)
    counted = exact = 0
    for _ in range(2000):
        prompt = names[int(rng.exponential(60)) % 400]
        counted += baseline.visit(prompt, pages) * baseline.rate
        exact += len(prompt) if int(prompt[0]) in lru else 0
        for page in reversed(prompt.tolist()):
            lru.pop(page, None)
            lru[page] = None
        while len(lru) > pages:
            lru.popitem(last=False)
    assert exact > 100_000
    assert abs(counted - exact) < 0.03 * exact


def test_a_share_is_earned_and_lost_by_the_page() -> None:
    share = HintShare(1000, 0.9)
    for gained, value in ((0, 0.2), (10, 0.28), (-5, 0.24), (500, 0.9), (-500, 0.02)):
        share.learn(gained, 0, 10)
        assert share.value == pytest.approx(value)
    assert HintShare(1000, 0.1).value == 0.1
    none = HintShare(1000, 0.01)
    none.learn(-100, 0, 100)
    assert none.value == 0.01


def test_a_share_without_gains_of_its_own_follows_what_the_largest_share_promises() -> None:
    share = HintShare(1000, 0.9)
    for _ in range(20):
        share.learn(0, 10, 10)
    assert share.value == 0.9
    for _ in range(25):
        share.learn(-5, -5, 10)
    assert share.value == 0.02
    for _ in range(60):
        share.learn(0, 10, 10)
    assert share.value == 0.9


def test_nothing_is_promised_if_the_present_share_gains_as_much() -> None:
    share = HintShare(1000, 0.9)
    for _ in range(100):
        share.learn(4, 3, 10)
        assert share._promise <= 0


def test_a_promise_that_never_comes_true_costs_no_more_than_its_credit() -> None:
    """The cost of wrong hints is bounded, even if the hints promise gains forever. The bound is the sum of three terms:
    a quarter of the pool, an eighth of the pool until the share is lost, and one page for every 100 lookups.
    """
    share, lost, looked = HintShare(1000, 0.95), 0, 0
    for _ in range(20_000):
        gained = -round(10 * share.value)
        share.learn(gained, 10, 10)
        lost, looked = lost - gained, looked + 10
        assert lost <= 250 + 1000 / 8 + 0.01 * looked
    assert lost > 1000  # The number of lookups is so large that the wrong hints are trusted again and again.


# ---- the baseline that trusts all hints: it keeps the hinted pages in a pool of any size


def baseline_of(pages: int, share: float = 0.5) -> Baseline:
    return Baseline(pages, share)


def said(level: int, count: int) -> PageHints:
    return PageHints(np.full(count, level, np.uint8), np.full(count, np.inf))


def test_the_hinted_baseline_keeps_hinted_pages() -> None:
    baseline = baseline_of(10, 0.8)
    baseline.visit(words(1, 2, 3), 10)
    baseline.leave(words(1, 2, 3), said(4, 3))
    for first in range(100, 130, 3):
        assert baseline.visit(words(first, first + 1, first + 2), 10) == 0
        baseline.leave(words(first, first + 1, first + 2), said(0, 3))
    assert baseline.visit(words(1, 2, 3, 4), 10) == 3


def test_the_first_pages_of_a_prompt_longer_than_the_room_are_kept() -> None:
    baseline = baseline_of(10, 0.0)
    assert baseline.visit(words(*range(30)), 6) == 0
    assert baseline.visit(words(*range(30)), 6) == 6
    baseline.leave(words(*range(30)), PageHints(np.full(30, NEUTRAL, np.uint8), np.full(30, 1.0)))
    assert baseline.visit(words(*range(30)), 6) == 6


def test_the_hinted_baseline_is_also_told_of_pages_that_are_loaded_and_forgotten() -> None:
    baseline = baseline_of(10)
    baseline.touch(words(1, 2, 3))
    baseline.forget(words(2, 9, 2))
    assert baseline.visit(words(1, 2, 3), 10) == 1
    baseline.clear()
    assert baseline.visit(words(1, 2, 3), 10) == 0
    baseline._order.check()


def test_pages_that_one_word_does_not_tell_apart_break_nothing() -> None:
    baseline = baseline_of(10)
    for _ in range(3):
        baseline.visit(words(1, 2, 1), 10)
        baseline.leave(words(1, 2, 1), said(4, 3))
        baseline._order.check()
    baseline.visit(words(1, 2), 10)
    baseline.forget(words(1, 1))
    assert baseline.visit(words(2), 10) == 1


def test_any_sequence_of_calls_leaves_the_hinted_baseline_consistent() -> None:
    rng, baseline = random.Random(0), baseline_of(12)
    for _ in range(600):
        prompt = words(*rng.sample(range(40), rng.randint(0, 15)))
        move = rng.choice(["visit", "leave", "leave", "touch", "forget", "clear"] if rng.random() < 0.1 else ["visit"])
        if move == "visit":
            baseline.visit(prompt, rng.randint(1, 12))
        elif move == "leave":
            baseline.leave(prompt, rng.choice([None, said(rng.randint(0, 4), len(prompt))]))
        elif move == "clear":
            baseline.clear()
        else:
            getattr(baseline, move)(prompt)
        baseline._order.check()
        pages = baseline._order.pages().tolist()
        assert sorted(baseline._ids.values()) == sorted(pages)
        assert sorted([*pages, *baseline._free]) == [*range(1, 13)]
        assert {baseline._words[page]: page for page in pages} == baseline._ids


def test_both_baselines_of_a_sampled_pool_keep_one_page_in_rate() -> None:
    for baseline in (Baseline(4099), Baseline(4099, 0.5)):
        assert baseline.rate == 4
        baseline.touch(words(*range(2000)))  # The sample contains every small number.
        assert baseline.visit(words(*range(2000)), 4099) == 1024
        baseline.visit(words(*range(10)), 15)
        assert baseline.visit(words(*range(10)), 15) == 3


@pytest.mark.parametrize(("width", "longer"), [(1.0, 20), (2.0, 10), (4.0, 4), (100.0, 2)])
def test_a_lead_is_shorter_if_each_page_stands_for_more_memory(width: float, longer: int) -> None:
    """Plain LRU evicts a page after ten other pages. The hint keeps the page while `longer` more pages arrive."""
    for others, found in ((9 + longer, 1), (10 + longer, 0)):
        baseline = baseline_of(10, 1.0)
        baseline.widen(width)
        baseline.leave(words(1), said(NEUTRAL + 1, 1))
        for other in range(100, 100 + others):
            baseline.leave(words(other), None)
        assert baseline.visit(words(1), 10) == found


# ---- over pool sizes, through the manager


class Load:
    """A few sessions that return in every round, and other prompts that never return."""

    def __init__(self, pages: int, sessions: float, others: float, pool: int | None = None) -> None:
        """`sessions` and `others` say how many pages the sessions and the other prompts use in one round, as multiples
        of `pages`.

        The manager has `pool` pages if `pool` is given, otherwise `pages`.
        """
        self.length = max(1, round(sessions * pages / SESSIONS))
        self.once = max(1, pages // 12)
        self.between = max(1, round(others * pages / self.once / SESSIONS))
        self.manager: PagedKVCacheManager = manager_of(
            pool or pages, checks=False, rows=1, max_seq_len=4 * pages + 8, params={"hash_algorithm": "xxh3_128"}
        )
        self.names = SESSIONS

    def rounds(self, count: int, sessions: Retention | None, others: Retention | None) -> list[int]:
        """Returns for each round the number of cached pages that the sessions have found."""
        hits = []
        for _ in range(count):
            hits.append(0)
            for name in range(SESSIONS):
                hits[-1] += self._serve(name, self.length, sessions)
                for _ in range(self.between):
                    self.names += 1
                    self._serve(self.names, self.once, others)
        return hits

    def _serve(self, name: int, pages: int, retention: Retention | None) -> int:
        context = TextContext(np.full(4 * pages + 1, name, np.int32), 4 * pages + 2, retention=retention)
        with self.manager.claim(context):
            assert self.manager.maybe_reserve(context)
            found = context.start_idx // 4
            context.update(0)
            self.manager.step([context])
        return found


@pytest.mark.each_value
@pytest.mark.parametrize(("sessions", "others"), [(0.2, 0.6), (0.32, 2.5), (0.7, 0.6)])
@pytest.mark.parametrize("pages", [8, 30, 100, 1000, 10_000])
def test_hints_in_pools_of_any_size(pages: int, sessions: float, others: float) -> None:
    """With right hints there are as many hits as the pool has room for.

    Wrong hints cost as much as a slightly smaller pool.
    """
    plain = Load(pages, sessions, others).rounds(ROUNDS, None, None)
    load = Load(pages, sessions, others)
    right = load.rounds(ROUNDS, KEEP, DROP)
    assert right[-1] == SESSIONS * load.length
    assert sum(right) >= sum(plain)
    load.rounds(4, DROP, KEEP)
    assert load.rounds(ROUNDS, KEEP, DROP)[-1] == SESSIONS * load.length  # the share recovers
    # The share never falls below 0.02 or one page. Each lost page has reduced the share by eight pages.
    least = Load(pages, sessions, others, pages - 1 - pages // 50).rounds(ROUNDS, None, None)
    wrong = Load(pages, sessions, others).rounds(ROUNDS, DROP, KEEP)
    assert sum(wrong) >= sum(least) - 2 * SESSIONS * load.length
