"""`HintedOrder` beside a model of one page at a time: random moves, every page goes when it should."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache import Retention
from kvcache.pool.idle_order import MOST_ORDERS, IdleOrder, OrderLog
from kvcache.pool.retention import HintedOrder, page_hints
from tests.kvcache.hinted_idle import HintedIdle, said_of

PAGES, LEAD = 24, 2  # a hint is worth a few pages' turns, so that pages of several kinds go at a time


class Both:
    """An order, and its model."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now, self.renewed = random.Random(seed), 0.0, 0
        self.order = HintedOrder(PAGES, IdleOrder(PAGES, OrderLog(PAGES, MOST_ORDERS)), clock=lambda: self.now)
        self.order.lead_pages, self.order.share = LEAD, self.rng.choice([0.2, 0.8, 0.95])
        self.model = HintedIdle(LEAD, lambda _: None)
        self.model.now, self.model.share = lambda: self.now, lambda: self.order.share

    def away(self) -> list[int]:
        away = [page for page in range(1, PAGES + 1) if page not in self.model]
        return self.rng.sample(away, min(len(away), self.rng.randint(1, 4)))

    def there(self) -> list[int]:
        return self.rng.sample(self.model, min(len(self.model), self.rng.randint(0, 3)))

    def append(self, pages: list[int]) -> None:
        self.order.append(np.array(pages, np.int32))
        for page in pages:
            self.model.append(page)

    def remove(self, pages: list[int]) -> None:
        self.order.remove(np.array(pages, np.int32))
        for page in pages:
            self.model.remove(page)

    def come(self) -> None:
        self.append(self.away())

    def hint(self) -> None:
        if pages := self.away():
            said = Retention(self.rng.choice([True, False, None]), 50, self.rng.choice([None, 10.0]))
            self.order.hint(np.array(pages, np.int32), page_hints(said, len(pages), 4))
            for page in pages:
                self.model.hint(page, said_of(said, 0, 4, self.now))
            self.append(pages)

    def take(self) -> None:
        self.remove(self.there())

    def renew(self) -> None:
        pages = self.there()
        self.order.renew(np.array(pages, np.int32))
        self.model.renew(pages)
        self.renewed += self.model.renewed
        self.remove(pages)
        self.append(pages)

    def pop(self) -> None:
        if count := self.rng.randint(0, min(6, len(self.model))):
            assert self.order.first() == self.model.first()
        assert self.order.pop(count).tolist() == [self.model.pop() for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_random_moves_beside_a_model(seed: int) -> None:
    both = Both(seed)
    for _ in range(3000):
        both.now += both.rng.choice([0.0, 0.0, 3.0])
        both.rng.choice([both.come, both.hint, both.hint, both.take, both.renew, both.pop])()
        both.order.check()
        assert both.order.count == len(both.model)
    assert both.renewed > 20
    assert both.model.seen["evicted before its turn"] > 20
