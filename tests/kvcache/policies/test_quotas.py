"""Tests whose pages are evicted first with quotas, and how many. `tests.kvcache.test_eviction_order` has the random
moves.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import InvariantError, LruOrder, Retention
from kvcache.eviction_order import BY_HINT, BY_QUOTA, BY_TURN
from kvcache.policies.hinted_order import HintedOrder
from kvcache.policies.quotas import QuotaOrder, TenantQuotas
from kvcache.retention import page_hints

POOL = 30


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def owned(order: QuotaOrder, quotas: TenantQuotas, salt: str | None, *ids: int) -> None:
    quotas.own(pages(*ids), salt)
    order.append(pages(*ids))


def test_a_tenant_s_pages_are_evicted_up_to_its_oldest_slab_and_its_slabs_up_to_its_oldest_page() -> None:
    quotas = TenantQuotas(POOL, 0.0, {})
    quotas.own(pages(1, 2, 3), "a")
    quotas.own(pages(8), "a")
    quotas.append(pages(1, 2))
    quotas.append(pages(8), slabs=True)
    quotas.append(pages(3))
    assert quotas.pop_surplus(10, slabs=True).size == 0
    assert quotas.pop_surplus(10).tolist() == [1, 2]
    assert quotas.pop_surplus(10).size == 0
    assert quotas.pop_surplus(10, slabs=True).tolist() == [8]
    assert quotas.pop_surplus(10).tolist() == [3]


def test_tenants_beyond_the_number_of_places_share_one_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.policies.quotas.MOST_TENANTS", 3)
    quotas = TenantQuotas(POOL, 0.1, {})
    order = QuotaOrder(LruOrder(POOL), quotas)
    owned(order, quotas, None, 30)
    for number, salt in enumerate("abcd", 1):
        owned(order, quotas, salt, number, 10 + number)
        order.check()
    assert order.pop(1).tolist() == [3]  # "c" and "d" share one quota and have four pages together.
    order.remove(pages(1, 11))
    owned(order, quotas, "e", 5, 6, 7, 8)  # "e" gets the entry of "a", which has no pages left.
    order.check()
    assert order.pop(1).tolist() == [5]
    owned(order, quotas, "a", 1, 11)  # "a" now shares one quota with other tenants.
    order.check()
    assert order.pop(2).tolist() == [13, 4]


def test_broken_quota_books_are_named() -> None:
    quotas = TenantQuotas(POOL, 0.1, {})
    order = QuotaOrder(LruOrder(POOL), quotas)
    owned(order, quotas, "a", 1, 2)
    quotas.own(pages(2), "b")
    with pytest.raises(InvariantError, match="tenant 'a' are wrong"):
        order.check()
    quotas.own(pages(2), None)
    with pytest.raises(InvariantError, match="1 idle pages have a tenant, but 2 are counted"):
        order.check()


def test_pop_explained_says_which_pages_were_evicted_for_a_quota() -> None:
    quotas = TenantQuotas(POOL, 0.1, {})
    order = QuotaOrder(HintedOrder(POOL, LruOrder(POOL), share=1.0), quotas)
    owned(order, quotas, "a", 1, 2, 3, 4)  # The quota of "a" is three of 30 pages.
    order.hint(pages(5), page_hints(Retention(session_continues=False), 1, 1))
    order.append(pages(5))
    gone, reasons = order.pop_explained(3)
    assert gone.tolist() == [1, 5, 2]
    assert reasons.tolist() == [BY_QUOTA, BY_HINT, BY_TURN]
    plain = QuotaOrder(LruOrder(POOL), quotas)
    owned(plain, quotas, "b", 11, 12, 13, 14)
    gone, reasons = plain.pop_explained(2)
    assert (gone.tolist(), reasons.tolist()) == ([11, 12], [BY_QUOTA, BY_TURN])


class Told(LruOrder):
    """An order that records the calls about pages that are not idle."""

    def __init__(self) -> None:
        super().__init__(POOL)
        self.news: list[list[list[int]]] = []

    def forget(self, pages: np.ndarray) -> None:
        self.news.append([pages.tolist()])

    def moved(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self.news.append([sources.tolist(), targets.tolist()])


@pytest.mark.parametrize("slab_pages", [0, 4])
def test_calls_about_the_content_of_pages_reach_the_wrapped_order(slab_pages: int) -> None:
    quotas = TenantQuotas(POOL, 0.1, {})
    order = QuotaOrder(told := Told(), quotas, slab_pages)
    order.own(pages(3, 4), "a")
    order.moved(pages(3, 4), pages(7, 6))
    order.forget(pages(7))
    assert told.news == [[[3, 4], [7, 6]], [[7]]]
    whose = pages(3, 4, 6, 7) * max(1, slab_pages)
    assert quotas.ownerless(whose).tolist() == [True, True, False, True]


def test_an_order_that_wraps_another_begins_with_its_pages() -> None:
    inner = LruOrder(POOL)
    inner.append(pages(3, 4))
    order = QuotaOrder(HintedOrder(POOL, inner), TenantQuotas(POOL, 0.1, {}))
    assert order.count == 2
    order.check()
    assert order.pop(2).tolist() == [3, 4]
