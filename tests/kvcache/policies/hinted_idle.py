"""A model of the eviction order with hints and quotas. It handles one page at a time, and consists of plain dicts.

It is written from the documentation of `kvcache.retention` and `kvcache.policies.quotas`. Two things are taken from the
manager. One is the share of the pages that follow hints, because the manager learns it. The other is the order in which
tenants above their quotas lose pages, because it is not specified.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcache import RangeRetention, Retention
from kvcache.policies.hinted_order import HintedOrder
from kvcache.policies.hints import ReplicaHints
from kvcache.pool.pages import PagePool
from kvcache.replica.policy import ReplicaPolicy


def hinted_order(pool: PagePool) -> HintedOrder | None:
    """Returns the part of a pool's order that follows hints, which quotas may wrap. Returns None before the first
    hint.
    """
    order = getattr(pool.idle, "_order", pool.idle)
    return order if isinstance(order, HintedOrder) else None


def trust(hints: ReplicaPolicy, share: float) -> None:
    """Sets the share of the idle pages that follows hints, as if hints had been right or wrong for a while."""
    assert isinstance(hints, ReplicaHints)
    hints._share.value = share
    hints._pool.idle.trust(share)


class Said(NamedTuple):
    """The hint of a page: a level from 0 (evicted first) to 4, a class of time to live, and the time at which the hint
    ends.
    """

    level: int = 2
    lives: int = 0
    until: float = math.inf

    def rank(self, since: int, num_pages: int, now: float) -> int:
        """Returns the page's place in the eviction order. Each level of a hint moves the place by twice the number of
        pages in the pool.
        """
        return since + (0 if self.until <= now else (self.level - 2) * 2 * num_pages)


NOTHING = Said()
# An earlier hint put the page first, but the page was used again. From then on, no hint puts it first any more.
SHARED = Said(lives=7)


def said_of(retention: Retention, page: int, page_size: int, now: float) -> Said:
    """Returns a request's hint for one of its pages: the hint of the last range that contains the page, or the hint of
    the whole request if no range contains it.
    """
    spoken: Retention | RangeRetention = retention
    for one in retention.ranges:
        if one.start <= page * page_size and (one.end is None or (page + 1) * page_size <= one.end):
            spoken = one
    level = 2 + {True: 2, False: -2, None: 0}[spoken.session_continues] + round((spoken.priority - 50) / 25)
    level = min(4, max(0, level))
    if spoken.ttl_s is None:
        return Said(level)
    return Said(level, min(6, max(1, math.ceil(math.log(spoken.ttl_s, 4)))), now + spoken.ttl_s)


class HintedIdle(list[Any]):
    """The idle pages of a model, least recently used first. `pop` removes the page that is evicted next."""

    def __init__(self, num_pages: int, tenant_of: Callable[[Any], str | None]) -> None:
        super().__init__()
        self.num_pages, self.tenant_of = num_pages, tenant_of
        self.share: Callable[[], float] = lambda: 0.0  # The function returns how many of these pages follow hints.
        # The function returns the tenants above their quotas, in the order in which they lose pages.
        self.order_of_tenants: Callable[[], list[str]] = list
        self.now: Callable[[], float] = lambda: 0.0
        self.quotas: dict[str, float] = {}
        self.quota = 1.0
        self.said: dict[Any, Said] = {}
        # The pages that follow hints. Each has its position among all pages that have ever followed hints.
        self.older: dict[Any, int] = {}
        self.places = self.renewed = 0
        self.seen: Counter[str] = Counter()

    def hint(self, page: Any, said: Said | None) -> None:
        """Records the hint for a page that a request leaves. `None` means that the request has no hint."""
        before = self.said.get(page, NOTHING)
        refuted = before.level < 2
        if said is None:
            self.said[page] = SHARED if refuted else before
        else:
            self.said[page] = SHARED if said.level < 2 and (refuted or before == SHARED) else said

    def append(self, page: Any) -> None:
        super().append(page)
        recent = [one for one in self if one not in self.older]
        for oldest in recent[: max(0, len(recent) - int((1.0 - self.share()) * len(self)))]:
            self.older[oldest] = self.places
            self.places += not self.renewed
            self.renewed = max(0, self.renewed - 1)

    def renew(self, pages: list[Any]) -> None:
        """Records that the content of these pages is about to be replaced."""
        self.renewed += sum(page in self.older for page in pages)

    def remove(self, page: Any) -> None:
        super().remove(page)
        self.older.pop(page, None)

    def clear(self) -> None:
        for page in self:
            self.said.pop(page, None)
        self.older.clear()
        super().clear()

    def pop(self, _: object = 0) -> Any:
        page, oldest = self.first(), self[0]
        self.seen["evicted before its turn"] += page != oldest
        self.remove(page)
        self.said.pop(page, None)
        return page

    def quota_of(self, tenant: str) -> int:
        return int(self.quotas.get(tenant, self.quota) * self.num_pages)

    def first(self) -> Any:
        pages_of: dict[str, list[Any]] = {tenant: [] for tenant in self.order_of_tenants()}
        for page in self:
            if (tenant := self.tenant_of(page)) is not None:
                pages_of.setdefault(tenant, []).append(page)
        for tenant, mine in pages_of.items():
            if len(mine) > self.quota_of(tenant):
                self.seen["evicted above a quota"] += 1
                return mine[0]
        if not self.older:
            return self[0]
        heads: dict[tuple[int, int], Any] = {}  # For each kind of hint, the oldest page with this hint.
        for page in sorted(self.older, key=lambda one: self.older[one]):
            heads.setdefault(self.said.get(page, NOTHING)[:2], page)
        now = self.now()
        ranked = [
            (self.said.get(page, NOTHING).rank(self.older[page], self.num_pages, now), lives, level, page)
            for (level, lives), page in heads.items()
        ]
        page = min(ranked)[3]
        self.seen["evicted after its time"] += self.said.get(page, NOTHING).until <= now
        return page
