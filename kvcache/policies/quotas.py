"""`QuotaOrder`: evicts idle pages of tenants above their quotas first, the oldest pages of each tenant first.

A tenant is a `cache_salt`; pages of requests without a salt have no tenant. A quota limits only idle pages, because
limiting running requests is the scheduler's task. An idle page above the quota stays findable until its memory is
needed.

If the pool also caches states in slabs, each cached state counts towards its tenant's quota as the number of pages in
its slab. In the records of quotas, the number of the slab's first page stands for the slab.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.eviction_order import BY_QUOTA, BY_TURN, EvictionOrder, Indices, Pages, Reasons
from kvcache.policies.over_order import OverOrder
from kvcache.pool.lru_order import LruOrder, OrderLog

# the most tenants with idle pages that have a quota of their own; all further tenants share one quota
MOST_TENANTS = 1024
_NOBODY, _OTHERS = 0, 1


class TenantQuotas:
    """The idle pages of each tenant, oldest first, and the quota of each tenant.

    A quota is a share of the pool's pages. `shares` has the shares of individual salts. `share` is the share of every
    other salt.
    """

    def __init__(self, num_pages: int, share: float, shares: Mapping[str, float]) -> None:
        self._num_pages = num_pages
        self._share = share
        self._shares = shares
        self._log = OrderLog(num_pages, MOST_TENANTS)
        self._owner = np.zeros(num_pages + 1, np.int16)
        self._ids: dict[str, int] = {}
        self._salts = {_OTHERS: ""}
        self._orders = {_OTHERS: LruOrder(num_pages, self._log)}
        self._quotas = {_OTHERS: int(share * num_pages)}
        self._over: set[int] = set()
        self.slab_pages = 1
        self._is_slab = np.zeros(num_pages + 1, np.bool_)
        self._slabs: Counter[int] = Counter()  # the number of idle slabs of each tenant

    def of_pool(self, num_pages: int) -> "TenantQuotas":
        """Returns quotas with the same shares for another pool."""
        return TenantQuotas(num_pages, self._share, self._shares)

    def own(self, pages: Pages, salt: str | None) -> None:
        """Assign `pages`, which are not idle, to the tenant of `salt`. None means no tenant."""
        self._owner[pages] = _NOBODY if salt is None else self._id_of(salt)

    def ownerless(self, pages: Pages) -> NDArray[np.bool_]:
        """Returns a mask of the pages that have no tenant yet."""
        return self._owner[pages] == _NOBODY

    def disown(self, pages: Pages) -> None:
        """Record that `pages` have left the cache. They have no tenant until `own` assigns one."""
        self._owner[pages] = _NOBODY

    def moved(self, sources: Pages, targets: Pages) -> None:
        """Record that the content of `sources` was moved to `targets`, which get the tenants of `sources`.

        None of these pages is idle.
        """
        self._owner[targets] = self._owner[sources]
        self._owner[sources] = _NOBODY

    def append(self, pages: Pages | Indices, *, slabs: bool = False, old: bool = False) -> None:
        """Record that `pages` became idle. They are now the newest idle pages of their tenants.

        With `old`, they are the oldest ones. With `slabs`, each of `pages` stands for a slab.
        """
        owners = self._owner[pages]
        for owner in set(owners.tolist()) - {_NOBODY}:
            mine = pages[owners == owner]
            order = self._orders[owner]
            (order.append_old if old else order.append)(mine)
            if slabs:
                self._is_slab[mine] = True
                self._slabs[owner] += len(mine)
            self._weigh(owner)

    def remove(self, pages: Pages | Indices) -> None:
        owners = self._owner[pages]
        for owner in set(owners.tolist()) - {_NOBODY}:
            mine = pages[owners == owner]
            self._orders[owner].remove(mine)
            self._forget_slabs(owner, mine)
            self._weigh(owner)

    def pop_surplus(self, most: int, *, slabs: bool = False) -> Pages:
        """Remove and return at most `most` pages above their tenants' quotas, the oldest pages of each tenant first.

        A page is taken only if no slab of its tenant is older. With `slabs`, slabs are taken instead, and only if no
        page of their tenant is older.
        """
        taken: list[Pages] = []
        for owner in sorted(self._over):
            order = self._orders[owner]
            if slabs or self._slabs[owner]:
                taken += self._pop_each(owner, most - sum(map(len, taken)), slabs=slabs)
            else:
                taken.append(order.pop(min(most - sum(map(len, taken)), order.count - self._quotas[owner])))
            self._weigh(owner)
        return np.concatenate(taken) if taken else np.zeros(0, np.int32)

    def _pop_each(self, owner: int, most: int, *, slabs: bool) -> list[Pages]:
        """Pop up to `most` surplus entries of a tenant that has both pages and slabs.

        Pops slabs with `slabs`, otherwise pages. Stops before the first entry of the other kind.
        """
        order, taken = self._orders[owner], list[Pages]()
        while len(taken) < most and self._surplus(owner) > 0 and self._is_slab[order.first()] == slabs:
            taken.append(order.pop(1))
            self._forget_slabs(owner, taken[-1])
        return taken

    def first(self, *, slabs: bool = False) -> int:
        """Returns the page that `pop_surplus` would take first. With `slabs`, returns the first page of a slab.

        Returns 0 if no tenant is above its quota.
        """
        firsts = (self._orders[owner].first() for owner in sorted(self._over))
        return next((page for page in firsts if self._is_slab[page] == slabs), 0)

    def clear(self) -> None:
        """Empty the records of idle pages and slabs. Pages keep their tenants."""
        known = {_OTHERS, *self._ids.values()}
        for owner in self._orders.keys() - known:
            del self._orders[owner]
        for salt, owner in self._ids.items():
            self._salts[owner] = salt
            self._quotas[owner] = int(self._shares.get(salt, self._share) * self._num_pages)
        self._log.orders[:] = self._orders.values()
        self._log.clear()
        self._over.clear()
        self._slabs.clear()
        self._is_slab[:] = False

    def check(self, idle: Pages, *, slabs: bool) -> None:
        owned = idle[self._owner[idle] != _NOBODY]
        found = np.concatenate([order.pages() for order in self._orders.values()])
        found = found[self._is_slab[found] == slabs]
        if not np.array_equal(np.sort(owned), np.sort(found)):
            raise InvariantError(f"quotas: {len(owned)} idle pages have a tenant, but {len(found)} are counted")
        for owner, order in self._orders.items():
            pages = order.pages()
            wrong = (self._owner[pages] != owner).any() or self._slabs[owner] != np.count_nonzero(self._is_slab[pages])
            if wrong or (self._surplus(owner) > 0) != (owner in self._over):
                raise InvariantError(f"quotas: the counts of tenant {self._salts[owner]!r} are wrong")
        self._orders[_OTHERS].check()

    def _surplus(self, owner: int) -> int:
        return self._orders[owner].count + self._slabs[owner] * (self.slab_pages - 1) - self._quotas[owner]

    def _forget_slabs(self, owner: int, gone: Pages | Indices) -> None:
        """Subtract the slabs that are among the entries `gone` from the tenant's number of idle slabs."""
        if self._slabs[owner]:
            self._slabs[owner] -= int(np.count_nonzero(self._is_slab[gone]))
            self._is_slab[gone] = False

    def _weigh(self, owner: int) -> None:
        if self._surplus(owner) > 0:
            self._over.add(owner)
        else:
            self._over.discard(owner)

    def _id_of(self, salt: str) -> int:
        owner = self._ids.get(salt)
        if owner is None and (owner := self._new_id()) != _OTHERS:
            self._ids[salt], self._salts[owner] = owner, salt
            self._quotas[owner] = int(self._shares.get(salt, self._share) * self._num_pages)
        return owner

    def _new_id(self) -> int:
        """Returns an id for a tenant: a new id, the id of a tenant without idle pages, or the shared id `_OTHERS`."""
        if len(self._orders) < MOST_TENANTS:
            owner = len(self._orders) + 1
            self._orders[owner] = LruOrder(self._num_pages, self._log)
            return owner
        free = next((owner for owner, order in self._orders.items() if not order.count and owner != _OTHERS), _OTHERS)
        if free != _OTHERS:
            del self._ids[self._salts[free]]
        return free


class QuotaOrder(OverOrder):
    """Wraps `order`: pages above the `quotas` are evicted before any page of `order`.

    With `slab_pages`, the entries of `order` are slabs instead of pages. Each slab consists of `slab_pages` pages of
    another pool, and `quotas` are the quotas of that pool.

    Examples:
        >>> order = QuotaOrder(LruOrder(8), TenantQuotas(8, share=0.25, shares={}))  # two pages for each tenant
        >>> order.own(np.array([1]), "ada")
        >>> order.own(np.array([2, 3, 4]), "bob")
        >>> order.append(np.array([1, 2, 3, 4]))
        >>> order.pop(4).tolist()  # bob is above his quota by one page
        [2, 1, 3, 4]
    """

    def __init__(self, order: EvictionOrder, quotas: TenantQuotas, slab_pages: int = 0) -> None:
        super().__init__(order)
        self._quotas, self._of_slabs, self._unit = quotas, slab_pages > 0, max(1, slab_pages)
        quotas.slab_pages = max(quotas.slab_pages, slab_pages)

    def own(self, pages: Pages, salt: str | None) -> None:
        self._quotas.own(self._named(pages), salt)

    def append(self, pages: Pages | Indices) -> None:
        self._append(pages, old=False)

    def append_old(self, pages: Pages | Indices) -> None:
        self._append(pages, old=True)

    def _append(self, pages: Pages | Indices, *, old: bool) -> None:
        if not len(pages):
            return
        self._quotas.append(self._named(pages), slabs=self._of_slabs, old=old)
        (self._order.append_old if old else self._order.append)(pages)
        self.count = self._order.count

    def remove(self, pages: Pages | Indices) -> None:
        self._quotas.remove(self._named(pages))
        self._order.remove(pages)
        self.count = self._order.count

    def pop(self, count: int) -> Pages:
        return self.pop_explained(count)[0]

    def pop_explained(self, count: int) -> tuple[Pages, Reasons]:
        if count > self.count:
            raise InvariantError(f"idle order: {count} pages were asked for, but it holds {self.count}")
        surplus = self._quotas.pop_surplus(count, slabs=self._of_slabs) // np.int32(self._unit)
        if surplus.size:
            self._order.remove(surplus)
            self.forget(surplus)
        rest, reasons = self._order.pop_explained(count - len(surplus))
        if reasons is None:
            reasons = np.full(len(rest), BY_TURN, np.uint8)
        self._quotas.remove(self._named(rest))
        self._quotas.disown(self._named(rest))
        self.count = self._order.count
        return np.concatenate((surplus, rest)), np.concatenate((np.full(len(surplus), BY_QUOTA, np.uint8), reasons))

    def forget(self, pages: Pages) -> None:
        self._order.forget(pages)
        self._quotas.disown(self._named(pages))

    def moved(self, sources: Pages, targets: Pages) -> None:
        self._order.moved(sources, targets)
        self._quotas.moved(self._named(sources), self._named(targets))

    def due(self) -> int:
        return self._quotas.first(slabs=self._of_slabs) // self._unit

    def first(self) -> int:
        return self.due() or self._order.first()

    def clear(self) -> None:
        """Remove all entries of this order. The caller must clear the quotas, which several orders may share."""
        self._order.clear()
        self.count = 0

    def check(self) -> None:
        self._order.check()
        if self.count != self._order.count:
            raise InvariantError(f"idle order: holds {self._order.count} pages, but count is {self.count}")
        self._quotas.check(self._named(self.pages()), slabs=self._of_slabs)

    def _named(self, pages: Pages | Indices) -> NDArray[Any]:
        """Returns the ids under which `pages` are in the records of quotas.

        If the entries of this order are slabs, the id of a slab is the number of its first page.
        """
        return pages * self._unit
