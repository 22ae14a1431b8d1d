"""Quotas for slabs. A slab counts as all of its pages. Random moves are compared with a model of plain lists."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache import InvariantError, LruOrder
from kvcache.eviction_order import Pages
from kvcache.policies.quotas import QuotaOrder, TenantQuotas

SLAB_PAGES, SLABS, PAGES = 4, 10, 43
# In a pool of 43 pages, "a" has a quota of two slabs, "b" of four slabs and "c" of none.
QUOTAS = {"a": 0.2, "b": 0.4, "c": 0.0}


def ids(*slabs: int) -> Pages:
    return np.array(slabs, np.int32)


class Moves:
    """An order of slabs with quotas, and its model: the idle slabs, the oldest first, and their tenants."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.quotas = TenantQuotas(PAGES, 1.0, QUOTAS)
        self.order = QuotaOrder(LruOrder(SLABS), self.quotas, SLAB_PAGES)
        self.idle: list[int] = []
        self.tenants: dict[int, str] = {}
        self.known: list[str] = []  # The tenants in the order of their first pages.
        self.evicted_above = 0

    def some(self, among: list[int]) -> list[int]:
        return self.rng.sample(among, min(len(among), self.rng.randint(0, 3)))

    def away(self) -> list[int]:
        return self.some([slab for slab in range(1, SLABS + 1) if slab not in self.idle])

    def own(self) -> None:
        slabs, salt = self.away(), self.rng.choice([None, *QUOTAS])
        self.order.own(ids(*slabs), salt)
        for slab in slabs:
            self.tenants.pop(slab, None)
            if salt:
                self.tenants[slab] = salt
        if salt and salt not in self.known:
            self.known.append(salt)

    def append(self) -> None:
        slabs = self.away()
        self.order.append(ids(*slabs))
        self.idle += slabs

    def remove(self) -> None:
        slabs = self.some(self.idle)
        self.order.remove(ids(*slabs))
        self.idle = [slab for slab in self.idle if slab not in slabs]

    def lose(self) -> None:
        slabs = self.away()
        self.order.forget(ids(*slabs))
        for slab in slabs:
            self.tenants.pop(slab, None)

    def move(self) -> None:
        away = self.away()
        if len(away) > 1:
            source, target = away[:2]
            self.order.moved(ids(source), ids(target))
            self.tenants.pop(target, None)
            if source in self.tenants:
                self.tenants[target] = self.tenants.pop(source)

    def begin_anew(self) -> None:
        slabs = sorted([*self.some(self.idle), *self.away()])
        self.quotas.clear()
        self.order.clear()
        self.order.append(ids(*slabs))
        self.idle = slabs

    def due(self) -> int:
        for salt in self.known:
            mine = [slab for slab in self.idle if self.tenants.get(slab) == salt]
            if len(mine) * SLAB_PAGES > int(QUOTAS[salt] * PAGES):
                return mine[0]
        return 0

    def pop(self) -> None:
        expected: list[int] = []
        for _ in range(self.rng.randint(0, min(3, len(self.idle)))):
            due = self.due()
            self.evicted_above += bool(due)
            expected.append(due or self.idle[0])
            self.idle.remove(expected[-1])
            self.tenants.pop(expected[-1], None)
        assert self.order.pop(len(expected)).tolist() == expected

    def compare(self) -> None:
        self.order.check()
        assert self.order.count == len(self.idle)
        assert self.order.due() == self.due()
        if self.idle:
            assert self.order.first() == (self.due() or self.idle[0])
        every = [*range(1, SLABS + 1)]
        named = ids(*every) * SLAB_PAGES
        assert self.quotas.ownerless(named).tolist() == [slab not in self.tenants for slab in every]


def test_any_sequence_of_calls_agrees_with_a_model_of_lists() -> None:
    moves = Moves()
    for _ in range(3000):
        moves.rng.choice([moves.own, moves.append, moves.append, moves.remove, moves.lose, moves.move, moves.pop])()
        if moves.rng.random() < 0.02:
            moves.begin_anew()
        moves.compare()
    assert moves.evicted_above > 50


@pytest.mark.parametrize("most", range(6))
def test_no_more_pages_of_several_tenants_are_evicted_than_requested(most: int) -> None:
    for slabs in (True, False):
        quotas = TenantQuotas(PAGES, 0.0, {})
        for first, salt in ((1, "a"), (4, "b")):
            quotas.own(ids(first, first + 1, first + 2), salt)
            quotas.append(ids(first, first + 1, first + 2), slabs=slabs)
        assert quotas.pop_surplus(most, slabs=slabs).tolist() == [1, 2, 3, 4, 5, 6][:most]


def test_a_wrong_count_of_slabs_is_named() -> None:
    moves = Moves()
    moves.order.own(ids(3), "b")
    moves.order.append(ids(3))
    moves.quotas.disown(ids(3 * SLAB_PAGES))
    with pytest.raises(InvariantError, match="0 idle pages have a tenant, but 1 are counted"):
        moves.order.check()


def test_an_inconsistency_in_the_wrapped_order_is_named() -> None:
    below = LruOrder(SLABS)
    order = QuotaOrder(below, TenantQuotas(PAGES, 1.0, QUOTAS), SLAB_PAGES)
    order.append(ids(3))
    below.log.live[:] = 0
    with pytest.raises(InvariantError, match="1 pages name an entry, the orders count 1 pages and the chunks 0"):
        order.check()
