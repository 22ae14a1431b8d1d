from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from kvcache.shadow import HintShare, LruShadow


def words(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint64)


def test_a_small_pool_is_shadowed_whole_and_exactly() -> None:
    rng, room = np.random.default_rng(0), 50
    shadow, lru = LruShadow(room), OrderedDict[int, None]()
    assert shadow.rate == 1
    for _ in range(1500):
        head = int(rng.integers(0, 12)) * 1000
        prompt = [head + at for at in range(int(rng.integers(1, 9)))]
        run = 0
        while run < len(prompt) and prompt[run] in lru:
            run += 1
        assert shadow.visit(words(*prompt), room) == run
        for page in reversed(prompt):  # tail first, as a pool frees them
            lru.pop(page, None)
            lru[page] = None
        while len(lru) > room:
            lru.popitem(last=False)
    assert shadow.count(words(1, 2, 3)) == 3


def test_room_that_others_take_is_room_that_it_has_not() -> None:
    shadow = LruShadow(10)
    shadow.visit(words(*range(10)), 10)
    assert shadow.visit(words(*range(20, 22)), 4) == 0
    assert shadow.visit(words(0, 1, 2), 4) == 2


def test_pages_brought_and_pages_taken_by_others_are_told() -> None:
    shadow = LruShadow(10)
    shadow.touch(words(1, 2, 3))
    shadow.forget(words(2, 9))
    assert shadow.visit(words(1, 2, 3), 10) == 1
    shadow.clear()
    assert shadow.visit(words(1, 2, 3), 10) == 0


@pytest.mark.parametrize(("pages", "rate"), [(2047, 1), (2048, 2), (30_000, 16), (1 << 20, 1 << 10)])
def test_a_large_pool_is_sampled(pages: int, rate: int) -> None:
    assert LruShadow(pages).rate == rate


def test_a_sample_counts_what_the_whole_would() -> None:
    rng, pages = np.random.default_rng(1), 16_384
    shadow, lru = LruShadow(pages), OrderedDict[int, None]()
    names = rng.integers(0, 1 << 63, (400, 128), dtype=np.uint64)
    counted = exact = 0
    for _ in range(2000):
        prompt = names[int(rng.exponential(60)) % 400]
        counted += shadow.visit(prompt, pages) * shadow.rate
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
    assert share.value == 0.2
    share.learn(10)
    assert share.value == pytest.approx(0.28)
    share.learn(-5)
    assert share.value == pytest.approx(0.24)
    share.learn(500)
    assert share.value == 0.9
    share.learn(-500)
    assert share.value == 0.02
    assert HintShare(1000, 0.1).value == 0.1
    none = HintShare(1000, 0.01)
    none.learn(-100)
    assert none.value == 0.01
