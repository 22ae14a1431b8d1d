"""Tests the contract of eviction orders. Random moves run on each order of pagewire and on a model that handles one
page at a time, and the results are compared.
"""

from __future__ import annotations

import random
import runpy
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvcache import EvictionOrder, InvariantError, LruOrder, Retention
from kvcache.policies.hinted_order import HintedOrder
from kvcache.policies.quotas import QuotaOrder, TenantQuotas
from kvcache.retention import page_hints
from tests.kvcache.policies.hinted_idle import HintedIdle, said_of
from tests.programs import ROOT

PAGES = 24
# Twice the number of pages that a level of a hint is worth. The number is small, so that one eviction takes pages of
# several kinds.
LEAD = 2
QUOTA, QUOTAS = 0.2, {"big": 0.4}
SALTS = (None, "a", "b", "big")


class Model(list[int]):
    """A model of the LRU order: a list of the pages in the order of eviction."""

    def first(self) -> int:
        return self[0]

    def pop(self, _: object = 0) -> int:
        page = self.first()
        self.remove(page)
        self.forget(page)
        return page

    def forget(self, page: int) -> None:
        """Forgets the content of a page."""

    def moved(self, source: int, target: int) -> None: ...
    def renew(self, pages: list[int]) -> None: ...
    def hint(self, page: int, retention: Retention | None, now: float) -> None: ...
    def own(self, page: int, salt: str | None) -> None: ...


class FoundAgain(Model):
    """A model of the order in the documentation's example: pages that were found again are evicted after all other
    pages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def first(self) -> int:
        return next((page for page in self if page not in self.found), self[0])

    def remove(self, page: int) -> None:
        super().remove(page)
        self.found.add(page)

    def forget(self, page: int) -> None:
        self.found.discard(page)


class Biased(HintedIdle):
    """A model of orders by hints, by quotas, or by both."""

    def __init__(self) -> None:
        super().__init__(LEAD, self.tenant)
        self.tenants: dict[int, str | None] = {}
        self.has_quotas = False

    def tenant(self, page: int) -> str | None:
        return self.tenants.get(page)

    def quota_of(self, tenant: str) -> int:
        return int(QUOTAS.get(tenant, QUOTA) * PAGES) if self.has_quotas else PAGES

    def pop(self, _: object = 0) -> int:
        page = super().pop()
        self.tenants.pop(page, None)
        return page

    def forget(self, page: int) -> None:
        self.said.pop(page, None)
        self.tenants.pop(page, None)

    def moved(self, source: int, target: int) -> None:
        for known in (self.said, self.tenants):
            known.pop(target, None)
            if source in known:
                known[target] = known.pop(source)  # type: ignore[index]

    def hint(self, page: int, retention: Retention | None, now: float) -> None:  # type: ignore[override]
        super().hint(page, retention and said_of(retention, 0, 4, now))

    def own(self, page: int, salt: str | None) -> None:
        self.tenants[page] = salt

    def clear(self) -> None:
        del self[:]
        self.older.clear()
        self.renewed = 0


class Case(NamedTuple):
    """An order, its model, the share of pages that may follow hints, and the damage that a test does before it repairs
    the order.
    """

    order: EvictionOrder
    model: Any
    trust: Callable[[float], None] = lambda _: None
    clear: Callable[[], None] = lambda: None


class Now:
    seconds = 0.0


def plain(_: Now) -> Case:
    return Case(LruOrder(PAGES), Model())


def of_the_example(_: Now) -> Case:
    names = runpy.run_path(str(ROOT / "examples/scan_resistant_order.py"))
    return Case(names["FoundAgainLast"](PAGES), FoundAgain())


def hinted(now: Now) -> Case:
    order, model = HintedOrder(PAGES, LruOrder(PAGES), lambda: now.seconds), Biased()
    order.lead_by(LEAD)
    model.now, model.share = lambda: now.seconds, lambda: order.share
    return Case(order, model, order.trust)


def owned(now: Now) -> Case:
    return with_quotas(plain(now)._replace(model=Biased()))


def hinted_and_owned(now: Now) -> Case:
    return with_quotas(hinted(now))


def with_quotas(case: Case) -> Case:
    quotas, model = TenantQuotas(PAGES, QUOTA, QUOTAS), case.model
    model.order_of_tenants = lambda: [*quotas._ids]  # pyright: ignore[reportPrivateUsage]
    model.has_quotas = True
    order = QuotaOrder(case.order, quotas)
    return Case(order, model, order.trust, quotas.clear)


ORDERS = (hinted, owned, plain, hinted_and_owned, of_the_example)


class Moves:
    """Random moves, made on an order and on its model."""

    def __init__(self, seed: int, make: Callable[[Now], Case]) -> None:
        self.rng, self.now = random.Random(seed), Now()
        self.order, self.model, self.trust_order, self.clear = make(self.now)
        self.seen: Counter[str] = Counter()

    def move(self) -> None:
        self.now.seconds += self.rng.choice([0.0, 0.0, 3.0])
        moves = [self.come, self.come, self.leave, self.leave, self.use, self.evict, self.evict]
        self.rng.choice([*moves, self.lose, self.renew, self.change_places, self.trust, self.begin_anew])()

    def away(self, most: int = 5) -> list[int]:
        away = [page for page in range(1, PAGES + 1) if page not in self.model]
        return self.rng.sample(away, min(len(away), self.rng.randint(0, most)))

    def there(self) -> list[int]:
        return self.rng.sample(self.model, min(len(self.model), self.rng.randint(0, 4)))

    def come(self) -> None:
        self.append(self.away())

    def append(self, pages: list[int]) -> None:
        self.order.append(ids(pages) if self.rng.random() < 0.5 else np.array(pages, np.intp))
        for page in pages:
            self.model.append(page)

    def remove(self, pages: list[int]) -> None:
        self.order.remove(np.array(pages, np.int32))
        for page in pages:
            self.model.remove(page)

    def leave(self) -> None:
        """A request leaves, and gives its pages a tenant and a hint."""
        pages, salt = self.away(), self.rng.choice(SALTS)
        said = Retention(self.rng.choice([True, False, None]), self.rng.choice([0, 50, 75]), self.rng.choice([None, 9]))
        hint = self.rng.choice([None, said, said])
        self.order.own(ids(pages), salt)
        self.order.hint(ids(pages), hint and page_hints(hint, len(pages), 4))
        for page in pages:
            self.model.own(page, salt)
            self.model.hint(page, hint, self.now.seconds)
        self.append(pages)
        self.seen["said"] += len(pages)

    def use(self) -> None:
        self.remove(self.there())

    def evict(self) -> None:
        count = self.rng.randint(0, min(6, len(self.model)))
        self.seen["evicted"] += count
        expected = [self.model.pop() for _ in range(count)]
        if count == 1 and self.rng.random() < 0.5:
            assert [self.order.pop_one()] == expected
        elif self.rng.random() < 0.5:
            pages, reasons = self.order.pop_explained(count)
            assert pages.tolist() == expected
            assert reasons is None or len(reasons) == count
        else:
            assert self.order.pop(count).tolist() == expected

    def lose(self) -> None:
        """Removes pages from the order and makes it forget their contents, as if they had been evicted without asking
        the order.
        """
        pages = self.there()
        self.remove(pages)
        self.order.forget(ids(pages))
        for page in pages:
            self.model.forget(page)
        self.seen["lost"] += len(pages)

    def renew(self) -> None:
        pages = self.there()
        self.order.renew(ids(pages))
        self.model.renew(pages)
        self.remove(pages)
        self.append(pages)

    def change_places(self) -> None:
        away = self.away(8)
        half = len(away) // 2
        sources, targets = away[:half], away[half : 2 * half]
        for target in targets:  # The mover of a page has allocated an empty page as its target.
            self.model.forget(target)
        self.order.forget(ids(targets))
        self.order.moved(ids(sources), ids(targets))
        for source, target in zip(sources, targets, strict=True):
            self.model.moved(source, target)
            self.model.forget(source)
        self.order.forget(ids(sources))
        self.seen["moved"] += half

    def trust(self) -> None:
        self.trust_order(self.rng.choice([0.0, 0.3, 0.95, 1.0]))

    def begin_anew(self) -> None:
        """Empties the order after an interrupt. The set of idle pages has changed since the interrupt."""
        pages = [*self.there(), *self.away()]
        self.clear()
        self.order.clear()
        self.model.clear()
        self.append(pages)
        self.seen["appended again"] += len(pages)

    def compare(self) -> None:
        order, model = self.order, self.model
        order.check()
        assert order.count == len(model)
        assert sorted(order.pages().tolist()) == sorted(model)
        if not model:
            return
        assert order.first() == model.first()
        assert order.due() in (0, model.first())
        every = np.array(model, np.intp)
        assert len(order.positions(every)) == len(order.leads(every)) == len(every)
        if order.by_age:
            assert order.pages().tolist() == model
            assert (np.diff(order.positions(every)) > 0).all()
            assert not order.leads(every).any()
        assert isinstance(order.first_lead(), float)


def ids(pages: list[int]) -> np.ndarray:
    return np.array(pages, np.int32)


@pytest.mark.few(2)
@pytest.mark.parametrize("make", ORDERS)
def test_random_moves_agree_with_the_model(make: Callable[[Now], Case]) -> None:
    moves = Moves(0, make)
    for _ in range(1000):
        moves.move()
        moves.compare()
    assert min(moves.seen.values()) > 100, moves.seen


@pytest.mark.parametrize("make", ORDERS)
def test_a_wrong_count_is_named(make: Callable[[Now], Case]) -> None:
    order = make(Now()).order
    order.append(ids([3, 4]))
    order.count = 3
    with pytest.raises(InvariantError, match="idle order: .*2"):
        order.check()
