"""Tests which page is evicted next while hints are trusted. `tests.kvcache.test_eviction_order` has the random
moves.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import InvariantError, LruOrder, Retention
from kvcache.eviction_order import BY_HINT
from kvcache.policies.hinted_order import HintedOrder
from kvcache.retention import NEUTRAL, PageHints, page_hints

POOL = 30
LAST, FIRST = Retention(session_continues=True), Retention(session_continues=False)


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def said(order: HintedOrder, hint: Retention | None, *ids: int) -> None:
    """Ends a request that has used these pages and has this hint."""
    order.hint(pages(*ids), hint and page_hints(hint, len(ids), 1))
    order.append(pages(*ids))


def order_of(share: float = 1.0, **options: object) -> HintedOrder:
    return HintedOrder(POOL, LruOrder(POOL), share=share, **options)  # pyright: ignore[reportArgumentType] - passed on


def test_pop_explained_returns_the_reason_for_each_page() -> None:
    order = order_of()
    said(order, FIRST, 1)
    said(order, None, 2)
    said(order, LAST, 3)
    gone, reasons = order.pop_explained(3)
    assert gone.tolist() == [1, 2, 3]
    assert reasons.tolist() == [BY_HINT, 0, 0]


def test_a_hint_decays_and_never_pins() -> None:
    order = order_of()
    said(order, LAST, 1)
    for _ in range(4 * POOL - 2):
        said(order, None, 2)
        order.remove(pages(2))
    said(order, None, 3)
    assert order.pop(1).tolist() == [3]  # Page 3 is still evicted just before the other pages.
    said(order, None, 3)
    said(order, None, 4)
    assert order.pop(3).tolist() == [3, 1, 4]


def test_appending_no_pages_does_not_change_which_pages_follow_hints() -> None:
    order = order_of(0.5)
    order.append(pages(1, 2, 3, 4))
    order.remove(pages(1, 2))
    before = order.positions(np.array([3, 4])).tolist()
    order.append(pages())
    assert order.positions(np.array([3, 4])).tolist() == before


def test_a_page_that_moves_takes_its_hint_and_its_time_along() -> None:
    now = [0.0]
    order = order_of(clock=lambda: now[0])
    stays, ends = Retention(session_continues=True, ttl_s=100.0), Retention(session_continues=True, ttl_s=5.0)
    order.hint(pages(1, 2), page_hints(stays, 2, 1))
    order.hint(pages(3), page_hints(ends, 1, 1))
    order.moved(pages(1, 3), pages(11, 13))
    assert order.codes[[1, 3]].tolist() == [NEUTRAL] * 2
    order.append(pages(13, 11, 2))
    said(order, None, 4)
    now[0] = 6.0
    assert order.pop(4).tolist() == [13, 4, 11, 2]


def test_with_any_hints_the_order_keeps_the_pages_that_lru_keeps_in_a_pool_smaller_by_the_share() -> None:
    rng, share = np.random.default_rng(1), 0.25
    order, lru, free = order_of(share), list[int](), [*range(1, POOL + 1)]
    for _ in range(3000):
        page = int(rng.integers(1, POOL + 1))
        if page in free:  # The page is missing. If no page is free, the miss evicts another page.
            free.remove(page)
            if not free:
                free += order.pop(1).tolist()
        else:
            order.remove(pages(page))
        lru = [*[other for other in lru if other != page], page]
        order.hint(pages(page), PageHints(rng.integers(0, 5, 1).astype(np.uint8), np.full(1, np.inf)))
        order.append(pages(page))
        assert set(lru[-int((1 - share) * order.count) :]) <= set(order.pages().tolist())


def test_check_names_an_inconsistent_order() -> None:
    order = order_of()
    said(order, LAST, 1, 2)
    with pytest.raises(InvariantError, match="3 pages were asked for, but it holds 2"):
        order.pop(3)
    order.codes[1] = NEUTRAL
    with pytest.raises(InvariantError, match="another kind"):
        order.check()
    order = order_of()
    said(order, LAST, 1, 2)
    order.count = 3
    with pytest.raises(InvariantError, match="holds 2 pages, but count is 3"):
        order.check()


def test_leads_are_in_pool_sizes_of_the_share_and_that_of_the_next_page_ends_with_its_time() -> None:
    now = [0.0]
    order = order_of(0.5, clock=lambda: now[0])
    order.hint(pages(1), page_hints(Retention(session_continues=False, ttl_s=5.0), 1, 1))
    order.hint(pages(2), page_hints(LAST, 1, 1))
    order.hint(pages(4), page_hints(Retention(priority=75), 1, 1))
    order.append(pages(1, 2, 3, 4))
    # One level of a hint counts twice the number of pages in the pool. The share of 0.5 halves this number.
    assert order.leads(pages(1, 2, 3, 4)).tolist() == [-2.0, 2.0, 0.0, 1.0]
    assert order.first_lead() == -2.0
    now[0] = 6.0
    assert order.first() == 1
    assert order.first_lead() == 0.0


def test_pages_that_follow_hints_are_placed_before_those_that_do_not_each_by_age() -> None:
    order = order_of(0.5)
    said(order, LAST, 5, 4)
    said(order, None, 3)
    said(order, FIRST, 2)
    said(order, None, 1, 6)
    before, after = order.positions(np.array([5, 4, 3])), order.positions(np.array([2, 1, 6]))
    assert before.tolist() == [-3, -2, -1]
    assert (np.diff(after) > 0).all()
    assert after[0] >= 0


def test_pages_put_back_in_several_calls_take_no_new_places() -> None:
    order = order_of()
    said(order, None, 1, 2, 3, 4)
    order.renew(pages(1))
    order.renew(pages(2))
    order.remove(pages(1, 2))
    order.append(pages(11, 12))
    order.append(pages(13))
    assert order.positions(np.array([3, 4, 11, 12, 13])).tolist() == [-3, -2, -1, -1, -1]
