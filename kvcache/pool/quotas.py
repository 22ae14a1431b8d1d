"""Tenant quotas: the idle pages that a tenant has above its quota go first, its oldest ones before the others.

A tenant is a `cache_salt`; requests without one are nobody's. A quota bounds idle pages alone: what runs is the
scheduler's to admit, and an idle page above its quota stays findable until its place is needed.
"""

from collections.abc import Mapping

import numpy as np

from kvcache.errors import InvariantError
from kvcache.pool.idle_order import IdleOrder, Indices, OrderLog, Pages

MOST_TENANTS = 1024  # with idle pages at a time; those beyond share one quota
_NOBODY, _OTHERS = 0, 1


class TenantQuotas:
    """The idle pages of each tenant, oldest first, and its share of the pool: one for all, or by salt."""

    def __init__(self, num_pages: int, share: float, shares: Mapping[str, float]) -> None:
        self._num_pages = num_pages
        self._share = share
        self._shares = shares
        self._log = OrderLog(num_pages, MOST_TENANTS)
        self._owner = np.zeros(num_pages + 1, np.int16)
        self._ids: dict[str, int] = {}
        self._salts = {_OTHERS: ""}
        self._orders = {_OTHERS: IdleOrder(num_pages, self._log)}
        self._quotas = {_OTHERS: int(share * num_pages)}
        self._over: set[int] = set()

    def own(self, pages: Pages, salt: str | None) -> None:
        """`pages`, not idle, are the tenant's."""
        self._owner[pages] = _NOBODY if salt is None else self._id_of(salt)

    def disown(self, pages: Pages) -> None:
        """`pages` have left the pool's cache: what comes into them is nobody's until somebody says whose."""
        self._owner[pages] = _NOBODY

    def moved(self, sources: Pages, targets: Pages) -> None:
        """What is in `sources`, not idle, is in `targets` by now, whose tenant goes along."""
        self._owner[targets] = self._owner[sources]

    def append(self, pages: Pages | Indices) -> None:
        """`pages` are idle now, the youngest of their tenants'."""
        owners = self._owner[pages]
        for owner in set(owners.tolist()) - {_NOBODY}:
            self._orders[owner].append(pages[owners == owner])
            self._weigh(owner)

    def remove(self, pages: Pages | Indices) -> None:
        owners = self._owner[pages]
        for owner in set(owners.tolist()) - {_NOBODY}:
            self._orders[owner].remove(pages[owners == owner])
            self._weigh(owner)

    def pop_surplus(self, most: int) -> Pages:
        """Take out pages above their tenants' quotas, each tenant's oldest first, `most` at most."""
        taken: list[Pages] = []
        for owner in sorted(self._over):
            order = self._orders[owner]
            taken.append(order.pop(min(most, order.count - self._quotas[owner])))
            most -= len(taken[-1])
            self._weigh(owner)
        return np.concatenate(taken) if taken else np.zeros(0, np.int32)

    def check(self, idle: Pages) -> None:
        owned = idle[self._owner[idle] != _NOBODY]
        found = np.concatenate([order.pages() for order in self._orders.values()])
        if not np.array_equal(np.sort(owned), np.sort(found)):
            raise InvariantError(f"quotas: {len(owned)} idle pages have a tenant, {len(found)} are counted")
        for owner, order in self._orders.items():
            if (self._owner[order.pages()] != owner).any() or (order.count > self._quotas[owner]) != (
                owner in self._over
            ):
                raise InvariantError(f"quotas: the books of tenant {self._salts[owner]!r} are wrong")
        self._orders[_OTHERS].check()

    def _weigh(self, owner: int) -> None:
        if self._orders[owner].count > self._quotas[owner]:
            self._over.add(owner)
        else:
            self._over.discard(owner)

    def _id_of(self, salt: str) -> int:
        owner = self._ids.get(salt)
        if owner is None:
            owner = self._new_id()
            if owner == _OTHERS:
                return owner
            self._ids[salt], self._salts[owner] = owner, salt
            self._quotas[owner] = int(self._shares.get(salt, self._share) * self._num_pages)
        return owner

    def _new_id(self) -> int:
        """An id that nobody has: a new one, or that of a tenant without idle pages; else that of all others."""
        if len(self._orders) < MOST_TENANTS:
            owner = len(self._orders) + 1
            self._orders[owner] = IdleOrder(self._num_pages, self._log)
            return owner
        free = next((owner for owner, order in self._orders.items() if not order.count and owner != _OTHERS), _OTHERS)
        if free != _OTHERS:
            del self._ids[self._salts[free]]
        return free
