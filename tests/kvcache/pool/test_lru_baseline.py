from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from kvcache.pool.lru_baseline import HintShare, LruBaseline


def words(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint64)


def test_a_small_pool_is_followed_whole_and_exactly() -> None:
    rng, room = np.random.default_rng(0), 50
    baseline, lru = LruBaseline(room), OrderedDict[int, None]()
    assert baseline.rate == 1
    for _ in range(1500):
        head = int(rng.integers(0, 12)) * 1000
        prompt = [head + at for at in range(int(rng.integers(1, 9)))]
        run = 0
        while run < len(prompt) and prompt[run] in lru:
            run += 1
        assert baseline.visit(words(*prompt), room) == run
        for page in reversed(prompt):  # tail first, as a pool frees them
            lru.pop(page, None)
            lru[page] = None
        while len(lru) > room:
            lru.popitem(last=False)
    assert baseline.count(words(1, 2, 3)) == 3


def test_room_that_others_take_is_room_that_it_has_not() -> None:
    baseline = LruBaseline(10)
    baseline.visit(words(*range(10)), 10)
    assert baseline.visit(words(*range(20, 22)), 4) == 0
    assert baseline.visit(words(0, 1, 2), 4) == 2


def test_pages_brought_and_pages_taken_by_others_are_told() -> None:
    baseline = LruBaseline(10)
    baseline.touch(words(1, 2, 3))
    baseline.forget(words(2, 9))
    assert baseline.visit(words(1, 2, 3), 10) == 1
    baseline.clear()
    assert baseline.visit(words(1, 2, 3), 10) == 0


@pytest.mark.parametrize(("pages", "rate"), [(2047, 1), (2048, 2), (30_000, 16), (1 << 20, 1 << 10)])
def test_a_large_pool_is_sampled(pages: int, rate: int) -> None:
    assert LruBaseline(pages).rate == rate


def test_a_sample_counts_what_the_whole_would() -> None:
    rng, pages = np.random.default_rng(1), 16_384
    baseline, lru = LruBaseline(pages), OrderedDict[int, None]()
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


def test_a_share_that_shows_nothing_follows_what_the_largest_one_promises() -> None:
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


def test_a_promise_is_no_better_than_the_real_share_where_that_one_hits_as_much() -> None:
    share = HintShare(1000, 0.9)
    for _ in range(100):
        share.learn(4, 3, 10)
        assert share._promise <= 0


def test_a_promise_that_never_comes_true_costs_no_more_than_its_credit() -> None:
    """However long it lasts: a quarter of the pool, an eighth of it to lose the share, and a page in 100 lookups."""
    share, lost, looked = HintShare(1000, 0.95), 0, 0
    for _ in range(20_000):
        gained = -round(10 * share.value)
        share.learn(gained, 10, 10)
        lost, looked = lost - gained, looked + 10
        assert lost <= 250 + 1000 / 8 + 0.01 * looked
    assert lost > 1000  # it was believed again and again
