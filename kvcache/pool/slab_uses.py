"""`SlabUses`: when each page and each cached slab of one memory was last used. So both are evicted in one order.

    clock ─►   41     42     43    44    45
              slab    page   page  page  page     a slab weighs as much as `slab_pages` pages
               ▲ evicted next: it was last used before every idle page

Without hints, the page or slab with the lowest last use is evicted next. With hints, each has a sum: its last use plus
the lead of its hint, which is multiplied by the share of idle pages that follow hints. A lead of 1.0 counts as many
uses as the memory has pages. A page or slab above its tenant's quota comes before all others.
"""

import numpy as np
from numpy.typing import NDArray

from kvcache.eviction_order import EvictionOrder, Indices, Pages
from kvcache.pool.pages import PagePool

HELD = 1 << 62
"""The age of a slab with a held page, later than every use."""


class SlabUses:
    """The last use of each page of `pool`, and of each of its slabs of `slab_pages` pages.

    Attributes:
        clock: one more than the number of pages released so far.
        used: for each idle page, the clock at its last use; 0 for a fresh page. int64 `[num_pages + 1]`.
        turn: for each page, the sum of its last use and of the lead that its hint had at its release. While the order
            has no leads, this is the same array as `used`.
        of_slabs: for each cached slab, the clock at its last use. int64 `[num_slabs + 1]`.
        last_evicted: the last use of the page that was evicted last.
    """

    def __init__(self, pool: PagePool, slab_pages: int, num_slabs: int) -> None:
        self._pool = pool
        self._slab_pages, self._num_slabs = slab_pages, num_slabs
        self.clock = 1
        self.used = self.turn = np.zeros(pool.num_pages + 1, np.int64)
        self.of_slabs = np.zeros(num_slabs + 1, np.int64)
        self.last_evicted = 0
        # For each slab, a lower bound for the last use of its most recently used page. Holding a page does not update
        # this bound, so `oldest_slab` checks the slab that it finds. `_ages_back` is a reversed view.
        self.ages = np.zeros(pool.num_pages // slab_pages + 1, np.int64)
        self._ages_back = self.ages[num_slabs:0:-1]

    def follow(self, order: EvictionOrder) -> None:
        """Record that `order` is the pool's order from now on."""
        if not order.by_age:
            self.turn = self.turn.copy()

    def release(self, pages: Indices) -> None:
        """Record that `pages` are released now."""
        self.clock += max(1, len(pages))
        self.used[pages] = self.ages[pages // self._slab_pages] = self.clock
        order = self._pool.idle
        if not order.by_age:
            leads = (order.leads(pages) * self._pool.num_pages).astype(np.int64)
            self.turn[pages] = self.ages[pages // self._slab_pages] = np.maximum(self.clock + leads, 1)

    def release_slabs(self, slabs: Indices) -> None:
        """Record that the states in `slabs` are released now."""
        self.of_slabs[slabs] = self.clock

    def clear(self, pages: Pages | Indices) -> None:
        """Record that `pages` are fresh."""
        self.used[pages] = self.turn[pages] = self.ages[pages // self._slab_pages] = 0

    def begin_with(self, published: NDArray[np.bool_]) -> None:
        """Begin anew with these published pages, which keep their last uses. An unknown use counts as a use now."""
        self.ages[:] = 0
        unknown = published & (self.used == 0)
        self.used[unknown] = self.turn[unknown] = self.clock

    def next_page(self) -> int:
        """Returns when the page that is evicted next was last used, plus the lead of its hint."""
        # Without hints, the last use of the page evicted last is close enough to that of the next page.
        return self.last_evicted if self._pool.idle.by_age else self.next_of(self._pool.idle, self.used)

    def next_of(self, order: EvictionOrder, used: NDArray[np.int64]) -> int:
        """Returns when the page or slab that `order` evicts next was last used, plus the lead of its hint.

        `used` has the last use of each page or slab. The result is negative if the page or slab is above its tenant's
        quota. An expired hint has no lead.
        """
        if due := order.due():
            return int(used[due]) - HELD
        return int(used[order.first()]) + int(order.first_lead() * self._pool.num_pages)

    def oldest_slab(self) -> tuple[int, int]:
        """Returns the least recently used slab of pages, and its last use.

        The use is `HELD` if every slab has a held page. It is 0 for a slab of fresh pages.
        """
        while True:
            slab = self._num_slabs - int(self._ages_back.argmin())
            age = self.age_of(slab)
            if age == self.ages[slab]:
                return slab, age
            self.ages[slab] = age

    def age_of(self, slab: int) -> int:
        """Returns when a page of the slab was last used. Returns `HELD` if a page of the slab is held."""
        pages = slice(slab * self._slab_pages, (slab + 1) * self._slab_pages)
        if np.count_nonzero(self._pool.holders[pages]) or np.count_nonzero(self._pool.writers[pages]):
            return HELD
        return int(self.turn[pages].max())
