# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Even if a caller's own eviction order is faulty, the pool gives away only idle pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import (
    EvictionOrder,
    InterruptedCallError,
    InvalidParamsError,
    InvariantError,
    KVCacheParams,
    LruOrder,
    PagedKVCacheManager,
    TextContext,
)
from kvcache.policies.over_order import CheckedOrder

PAGES = 12


class Wrong(LruOrder):
    """An order that returns wrong pages. `spoil` changes the pages that the order is about to return."""

    spoil: Callable[[np.ndarray], Any] | None = None

    def pop(self, count: int) -> Any:
        pages = super().pop(count)
        spoil, self.spoil = self.spoil, None
        return pages if spoil is None else spoil(pages)

    def pop_one(self) -> int:
        return int(self.pop(1)[0])


def manager_of(orders: list[Wrong]) -> PagedKVCacheManager:
    def make(num_pages: int) -> Wrong:
        orders.append(Wrong(num_pages))
        return orders[-1]

    params = KVCacheParams(torch.int64, 1, 1, enable_prefix_caching=True, page_size=4, eviction_order=make)
    return PagedKVCacheManager(params, 3, 40, 1, ["cpu"], available_cache_memory=PAGES * 4 * 8 * 2)


def with_pages(num_pages: int) -> EvictionOrder:
    order = LruOrder(num_pages)
    order.append(np.array([1, 2], np.int32))
    return order


def serve(manager: PagedKVCacheManager, first: int, length: int = 16, name: str = "r") -> TextContext:
    context = TextContext(np.arange(first, first + length), 40, name)
    manager.external_claim(name)
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    return context


WORST: dict[str, tuple[Callable[[np.ndarray, np.ndarray], Any], str]] = {
    "a page that a request holds": (lambda pages, held: np.array([*pages[1:], held[0]]), "which is not idle"),
    "the null page": (lambda pages, _: np.array([*pages[1:], 0]), "page 0, which is not idle"),
    "a page that there is not": (lambda pages, _: np.array([*pages[1:], PAGES + 1]), "page 13, which is not idle"),
    "a page below 0": (lambda pages, _: np.array([*pages[1:], -1]), "page -1, which is not idle"),
    "a page twice": (lambda pages, _: np.array([*pages[1:], pages[1]]), "a page twice"),
    "too few": (lambda pages, _: pages[1:], "page numbers are needed"),
    "too many": (lambda pages, held: np.array([*pages, held[0]]), "page numbers are needed"),
    "a list": (lambda pages, _: pages.tolist(), "page numbers are needed"),
    "no integers": (lambda pages, _: pages.astype(float), "page numbers are needed"),
    "nothing": (lambda *_: None, "page numbers are needed"),
}


@pytest.mark.parametrize("case", WORST)
def test_a_page_that_is_not_idle_is_never_allocated_and_recover_repairs_the_order(case: str) -> None:
    orders: list[Wrong] = []
    manager = manager_of(orders)
    spoil, message = WORST[case]
    serve(manager, 0, name="gone")
    manager.release("gone")
    serve(manager, 100, name="held")
    held = manager.get_req_blocks("held")
    orders[0].spoil = lambda pages: spoil(pages, np.array(held))
    new = TextContext(np.arange(200, 223), 40, "new")
    manager.external_claim("new")
    with pytest.raises(InvariantError, match=f"eviction order Wrong: pop.* returned .*{message}"):
        manager.maybe_reserve(new)
    with pytest.raises(InterruptedCallError, match="maybe_reserve was interrupted"):
        manager.maybe_reserve(new)
    assert manager.recover().released == ("held", "new")
    manager.check()
    assert manager.num_free_blocks == manager.total_num_pages
    serve(manager, 300, 24, "later")
    manager.check()


def test_allocated_pages_cannot_be_changed_by_the_order_afterwards() -> None:
    class Keeps(Wrong):
        def pop(self, count: int) -> Any:
            self.kept = super().pop(count)
            return self.kept

    keeps = Keeps(PAGES)
    order = CheckedOrder(PAGES, keeps)
    order.append(np.array([3, 4, 5], np.int32))
    pages = order.pop(2)
    keeps.kept[:] = 5
    assert pages.tolist() == [3, 4]
    keeps.spoil = lambda _: np.array([4])
    with pytest.raises(InvariantError, match=r"pop\(1\) returned page 4, which is not idle"):
        order.pop(1)


def test_a_wrong_count_is_named_by_check_and_has_no_effect() -> None:
    order = CheckedOrder(PAGES, lies := Wrong(PAGES))
    order.append(np.array([3, 4], np.int32))
    lies.count = 99
    assert order.count == 2
    with pytest.raises(InvariantError, match="eviction order Wrong: count is 99, but 2 pages are idle"):
        order.check()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: None, r"eviction_order\(12\) returned None: an EvictionOrder is needed"),
        (lambda _: [1, 2], r"eviction_order\(12\) returned \[1, 2\]: an EvictionOrder is needed"),
        (with_pages, "eviction order LruOrder starts with 2 pages"),
    ],
)
def test_an_object_that_is_not_an_empty_order_is_refused_at_the_start(make: Callable[[int], Any], message: str) -> None:
    params = KVCacheParams(torch.int64, 1, 1, enable_prefix_caching=True, page_size=4, eviction_order=make)
    with pytest.raises(InvalidParamsError, match=message):
        PagedKVCacheManager(params, 3, 40, 1, ["cpu"], available_cache_memory=PAGES * 4 * 8 * 2)
