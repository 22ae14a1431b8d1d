"""When room is needed, pages of other weights go before pages of the current ones, whatever hints and quotas say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcache import EvictionOrder, LruOrder, Retention, TextContext
from kvcache.policies.hinted_order import HintedOrder
from kvcache.policies.over_order import CheckedOrder
from kvcache.policies.quotas import QuotaOrder, TenantQuotas
from kvcache.pool.lru_order import CHUNK
from kvcache.retention import page_hints
from tests.kvcache.build import manager_of, run_once
from tests.kvcache.test_weights import begun, found, made, step

MANY = 3 * CHUNK


def hinted() -> HintedOrder:
    order = HintedOrder(MANY, LruOrder(MANY), share=1.0)
    order.hint(np.arange(1, MANY), page_hints(Retention(session_continues=True), pages=MANY - 1, page_size=16))
    return order


ORDERS: dict[str, Callable[[], EvictionOrder]] = {
    "lru": lambda: LruOrder(MANY),
    "hints": hinted,
    "quotas": lambda: QuotaOrder(LruOrder(MANY), TenantQuotas(MANY, share=1.0, shares={})),
    "a caller's own": lambda: CheckedOrder(MANY, LruOrder(MANY)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_old_pages_are_popped_first(order: str) -> None:
    idle = ORDERS[order]()
    idle.append(np.arange(1, 9))
    idle.append_old(np.array([20, 21]))
    idle.append_old(np.array([30, 31, 32]))
    idle.remove(np.array([31, 4]))
    idle.check()
    assert idle.count == 11
    assert sorted(idle.pop(4).tolist()) == [20, 21, 30, 32]
    assert idle.pop(2).tolist() == [1, 2]
    idle.append_old(np.array([40]))
    assert (idle.first(), idle.pop_one(), idle.pop_one()) == (40, 40, 3)


@pytest.mark.parametrize("order", ORDERS)
def test_any_number_of_old_pages_has_room(order: str) -> None:
    idle, random = ORDERS[order](), np.random.default_rng(0)
    old, new = set[int](), set[int]()
    for _ in range(60):
        free = np.array([*({*range(1, MANY)} - old - new)])
        some = random.permutation(free)[: int(random.integers(1, CHUNK))]
        if random.random() < 0.6:
            idle.append_old(some)
            old |= {*some.tolist()}
        else:
            idle.append(some)
            new |= {*some.tolist()}
        gone = {*idle.pop(int(random.integers(0, len(old) + len(new) + 1))).tolist()}
        assert gone <= old or old <= gone
        old, new = old - gone, new - gone
    idle.check()


@pytest.mark.parametrize("params", [{}, {"tenant_quota": 0.9}, {"eviction_order": LruOrder}], ids=str)
def test_pages_of_before_that_are_used_last_still_go_first(params: dict[str, Any]) -> None:
    manager = made(pages=8, params=params)
    runs = begun(manager, [*range(9)])
    manager.set_weights("b")
    run_once(manager, [*range(100, 109)])
    manager.release(runs.request_id)  # its two pages are the newest
    begun(manager, [*range(200, 220)])
    manager.check()
    assert found(manager, [*range(100, 109)]) == 8
    manager.set_weights("a")
    assert found(manager, [*range(9)]) < 8


def test_a_tenant_above_its_quota_loses_its_pages_of_before_first() -> None:
    manager = made(pages=16, params={"tenant_quotas": {"t": 0.25}})
    runs = TextContext([*range(9)], 200, cache_salt="t")
    manager.external_claim(runs.request_id)
    assert manager.maybe_reserve(runs)
    step(manager, [runs])
    manager.set_weights("b")
    run_once(manager, [*range(100, 109)], cache_salt="t")
    run_once(manager, [*range(200, 209)], cache_salt="t")
    manager.release(runs.request_id)  # the tenant now has six idle pages, and may keep four
    run_once(manager, [*range(300, 348)])
    manager.check()
    assert [*manager.num_blocks_by_weights.values()] == [0, 16]
    assert manager.admission(TextContext([*range(100, 109)], 200, cache_salt="t")).cached_pages == 2


@pytest.mark.parametrize("slabs", [False, True])
def test_old_pages_of_a_tenant_are_its_oldest(*, slabs: bool) -> None:
    quotas = TenantQuotas(MANY, share=0.0, shares={})
    order = QuotaOrder(LruOrder(MANY), quotas, slab_pages=2 if slabs else 0)
    order.own(np.arange(1, 9), "ada")
    order.append(np.arange(1, 5))
    order.append_old(np.array([5, 6]))
    order.check()
    assert order.pop(3).tolist() == [5, 6, 1]
    assert order.due() == 2


def test_hints_do_not_keep_pages_of_before() -> None:
    manager = made(pages=8)
    run_once(manager, [*range(9)], retention=Retention(session_continues=True))
    context = begun(manager, [*range(9)])
    context.retention = Retention(session_continues=True)
    manager.set_weights("b")
    run_once(manager, [*range(100, 109)])
    manager.release(context.request_id)
    begun(manager, [*range(200, 220)])
    assert found(manager, [*range(100, 109)]) == 8


def test_pages_of_both_versions_go_first() -> None:
    manager = made(pages=10)
    runs = begun(manager, [*range(6)])
    manager.set_weights("b")
    step(manager, [runs], 8)
    run_once(manager, [*range(100, 109)])
    manager.release(runs.request_id)
    begun(manager, [*range(200, 230)])
    assert found(manager, [*range(100, 109)]) == 8


def test_a_version_that_comes_back_is_the_current_one() -> None:
    manager = made(pages=8)
    runs = begun(manager, [*range(9)])
    manager.set_weights("b")
    run_once(manager, [*range(100, 109)])
    manager.set_weights("a")
    manager.release(runs.request_id)
    begun(manager, [*range(200, 220)])
    assert found(manager, [*range(9)]) == 8


def test_a_manager_without_versions_has_no_numbers() -> None:
    manager = manager_of()
    run_once(manager, [*range(9)])
    assert not manager._replicas.each[0].pool.versions.differ
