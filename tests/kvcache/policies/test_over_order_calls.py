"""An order that wraps another order passes on every call that it does not answer. It passes copies of arrays."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from kvcache import EvictionOrder, InvariantError, LruOrder
from kvcache.eviction_order import Indices, Pages, Reasons
from kvcache.policies.over_order import CheckedOrder, OverOrder
from kvcache.policies.quotas import QuotaOrder

PAGES = 12
CALLS = {name for name, one in vars(EvictionOrder).items() if isinstance(one, FunctionType) and name[0] != "_"}
NO_ANSWER = {"forget", "moved", "renew", "hint", "own", "trust"}
HANDED_ON = sorted(CALLS & vars(OverOrder).keys())


def ids(*pages: int) -> Pages:
    return np.array(pages, np.int32)


def noting(name: str) -> Callable[..., object]:
    def call(self: Any, *given: object) -> object:
        self.noted.append((name, given))
        return f"answer of {name}"

    return call


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_call_reaches_the_wrapped_order_and_returns_its_answer(name: str) -> None:
    below: Any = type("Noting", (EvictionOrder,), {one: noting(one) for one in CALLS})()
    over: Any = type("Over", (OverOrder,), {one: noting(one) for one in ("append", "clear", "pop", "remove")})(below)
    noted: list[object] = []
    below.noted = noted
    given = tuple(object() for _ in range(getattr(EvictionOrder, name).__code__.co_argcount - 1))
    answer = getattr(over, name)(*given)
    assert noted == [(name, given)]
    assert answer == (None if name in NO_ANSWER else f"answer of {name}")


@pytest.mark.parametrize("over", [CheckedOrder, QuotaOrder])
def test_an_order_that_wraps_another_passes_on_every_call(over: type[OverOrder]) -> None:
    by_pop = {"pop_one"}
    assert vars(over).keys() | vars(OverOrder).keys() | by_pop >= CALLS


class Spoils(LruOrder):
    """An order that overwrites every array that it gets, after it has used the array."""

    def append(self, pages: Pages | Indices) -> None:
        super().append(pages)
        pages[:] = 0

    def remove(self, pages: Pages | Indices) -> None:
        super().remove(pages)
        pages[:] = 0


def test_an_order_that_overwrites_its_arguments_changes_no_array_of_its_caller() -> None:
    order = CheckedOrder(PAGES, Spoils(PAGES))
    some = ids(3, 4, PAGES)
    order.append(some)
    assert some.tolist() == [3, 4, PAGES]
    order.remove(gone := ids(4))
    assert gone.tolist() == [4]
    order.check()


def test_pages_that_left_or_are_missing_after_a_repair_are_not_idle() -> None:
    order = CheckedOrder(PAGES, below := LruOrder(PAGES))
    order.append(ids(3, 4, 5))
    order.remove(ids(3))
    below.append(ids(3))
    with pytest.raises(InvariantError, match="page 3, which is not idle"):
        order.pop(3)
    order.clear()
    assert (order.count, below.count) == (0, 0)
    order.append(ids(4))
    assert order.count == 1
    order.check()
    below.append(ids(5))
    with pytest.raises(InvariantError, match="page 5, which is not idle"):
        order.pop(2)


class Names(LruOrder):
    """An order for which a test sets the next page, the page that must be evicted, and the reasons of evictions."""

    next = must = 0
    reasons: Any = None

    def first(self) -> int:
        return self.next

    def due(self) -> int:
        return self.must

    def pop_explained(self, count: int) -> tuple[Pages, Reasons | None]:
        return self.pop(count), self.reasons


def test_the_page_that_an_order_names_is_idle_or_the_call_fails() -> None:
    order = CheckedOrder(PAGES, below := Names(PAGES))
    order.append(ids(3, 4))
    assert order.due() == 0
    below.next, below.must = 4, 3
    assert (order.first(), order.due()) == (4, 3)
    below.next = below.must = 5
    with pytest.raises(InvariantError, match=r"first\(\) returned page 5, which is not idle"):
        order.first()
    with pytest.raises(InvariantError, match=r"due\(\) returned page 5, which is not idle"):
        order.due()


@pytest.mark.parametrize("odd", [-1, 0, PAGES + 1, 1 << 40])
def test_every_page_is_idle_and_those_beside_the_pool_are_not(odd: int) -> None:
    order = CheckedOrder(PAGES, below := Names(PAGES))
    every = np.arange(1, PAGES + 1, dtype=np.int32)
    order.append(every)
    below.next = odd
    with pytest.raises(InvariantError, match=rf"first\(\) returned page {odd}, which is not idle"):
        order.first()
    assert order.pop(PAGES - 1).tolist() == every[:-1].tolist()
    assert order.count == 1


class Lists(LruOrder):
    """An order with a wrong list of its pages or with a wrong check."""

    listed: Any = None
    is_broken = False

    def pages(self) -> Pages:
        return super().pages() if self.listed is None else self.listed

    def check(self) -> None:
        if self.is_broken:
            raise InvariantError("broken")


def test_check_looks_at_the_listed_pages_and_at_the_order_itself() -> None:
    order = CheckedOrder(PAGES, below := Lists(PAGES))
    order.append(ids(3, 4))
    order.check()
    below.listed = ids(3, 5)
    with pytest.raises(InvariantError, match=r"pages\(\) returned page 5, which is not idle"):
        order.check()
    below.listed, below.is_broken = None, True
    with pytest.raises(InvariantError, match="broken"):
        order.check()


@pytest.mark.parametrize("reasons", [[0, 1], np.zeros(1, np.uint8), np.zeros((2, 1), np.uint8)])
def test_there_are_as_many_reasons_as_pages_or_none(reasons: object) -> None:
    order = CheckedOrder(PAGES, below := Names(PAGES))
    order.append(ids(3, 4, 5, 6))
    pages, none = order.pop_explained(1)
    assert (pages.tolist(), none) == ([3], None)
    below.reasons = np.array([2], np.uint8)
    pages, one = order.pop_explained(1)
    assert pages.tolist() == [4]
    assert one is below.reasons
    below.reasons = reasons
    with pytest.raises(InvariantError, match=r"pop_explained\(2\) returned the reasons"):
        order.pop_explained(2)
