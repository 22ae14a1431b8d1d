"""`SlabPool`: one memory for pages of tokens and for slabs, neighbouring pages that hold a recurrent state.

A slab is `slab_pages` pages from a multiple of it on, as much as a recurrent state takes. Pages are handed out as by
any pool. A slab is taken where its pages cost least: none is used, or all are idle and were used longest ago, in which
case they are evicted; or held ones are moved elsewhere. A slab that is given back is pages again. So no memory is set
apart for either, and the only loss is the part of a slab that a state does not fill.

Cached slabs (`CachedSlabs`) and idle pages are evicted by their last use: a slab goes where it was last used before the
page that was evicted last. Where there are hints, both were used so much later, or earlier, as their hints say, as far
as these are trusted, and a slab goes before the page that would go next. Slabs and pages that a tenant has above its
quota go before all others.
"""

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.eviction_order import BY_QUOTA, BY_TURN, EvictionOrder, Indices, Pages
from kvcache.pool.pages import PagePool

_HELD = 1 << 62


class CachedSlabs:
    """Cached slabs without a holder, least recently used first. This base has none, because no caller takes slabs."""

    @property
    def num_idle(self) -> int:
        """Slabs that may be given up."""
        return 0

    @property
    def oldest_use(self) -> int:
        """When the first of them was used, as `SlabPool.use_of` says."""
        return _HELD

    def give_up_oldest(self) -> None:
        """Forget the copy in the oldest slab, and give the slab back."""


class PageMoves:
    """The owner of all records of page ids, which can move held pages. This base moves none."""

    def staying(self) -> NDArray[np.bool_] | np.bool_:
        """The held pages that cannot be moved, `[num_pages + 1]`, or whether that is all of them."""
        return np.True_

    def move(self, sources: Pages, targets: Pages) -> None:
        """Copy the held `sources` to as many held `targets`, and name these in their place."""


def num_slabs(num_pages: int, slab_pages: int) -> int:
    """The slabs of a pool of so many pages: slab 0, which has the null page, is none."""
    return (num_pages + 1) // slab_pages - 1


class SlabPool(PagePool):
    """A pool some of whose pages are taken as slabs. Slab s is the pages from `s * slab_pages` on, slab 0 never taken.

    The pages of a slab that is taken have one holder. Whoever takes slabs sets `cached`, and calls `move_by`.
    """

    def __init__(self, num_pages: int, digest_words: int, slab_pages: int, order: EvictionOrder | None = None) -> None:
        super().__init__(num_pages, digest_words, order)
        self.slab_pages = self.beside = slab_pages
        self.num_slabs = num_slabs(num_pages, slab_pages)
        self.taken = np.zeros(self.num_slabs + 1, np.bool_)
        self.cached = CachedSlabs()
        self.moves = PageMoves()
        self.moved = 0  # pages, so far
        self.clock = 1  # counts the pages that were let go
        self._used = np.zeros(num_pages + 1, np.int64)  # of idle pages, by this clock; of fresh ones 0
        # How much later they were used, by what was said of them when they were let go; None: by age alone.
        self._later: Indices | None = None
        self._last_evicted = 0  # the last use of the page that was evicted last
        # A lower bound on the last use of each slab's youngest page; `_ages_back` has the last slab first. Uses do not
        # update it, so the oldest slab is checked before it is taken.
        self._ages = np.zeros(num_pages // slab_pages + 1, np.int64)
        self._ages_back = self._ages[self.num_slabs : 0 : -1]
        # The fresh pages lie in a part of this that moves up as slabs are taken from below, and down as they come back:
        # by less than the pages of one more slab than are taken.
        self._stack: Pages = np.concatenate((self._fresh, np.zeros(slab_pages, np.int32)))
        self._bottom = 0
        self._place = np.arange(num_pages, -1, -1)  # of each fresh page where it lies
        self._fresh: Pages = self._stack

    @property
    def free_count(self) -> int:
        """Pages that `allocate` can hand out: the fresh and the idle ones, and those of slabs that may be given up."""
        return self._fresh_count + self.idle.count + self.cached.num_idle * self.slab_pages

    def allocate(self, count: int) -> Pages:
        if count == 1:
            return np.array([self.allocate_one()], np.int32)
        self._make_room(count)
        pages = super().allocate(count)
        self._last_evicted = max(self._last_evicted, int(self._used[pages].max(initial=0)))
        return pages

    def allocate_one(self) -> int:
        if not self._fresh_count:
            self._make_room(1)
        page = super().allocate_one()
        self._last_evicted = max(self._last_evicted, self._used.item(page))
        return page

    def move_by(self, moves: PageMoves) -> None:
        """Held pages give way to slabs from now on, as far as `moves` can move them."""
        self.moves = moves

    # ---- slabs

    def take_slab(self, *, moving: bool = True) -> int:
        """A slab whose pages have no holder by now; 0 if there is none, or if a cached slab would have to go first.

        `moving`: held pages may be moved out of it, where every slab has some.
        """
        chosen, age = self._oldest_slab()
        if age and self._evict_due():
            chosen, age = self._oldest_slab()
        if age and self.cached.num_idle and self.cached.oldest_use <= age:
            return 0
        if age == _HELD:
            chosen = self._cheapest_to_move() if moving else 0
        if chosen:
            self._clear(chosen)
        return chosen

    def can_take_slab(self) -> bool:
        """Whether `take_slab` would give one, or could once all that is cached in slabs is given up."""
        if self.cached.num_idle:
            return True
        return self._oldest_slab()[1] < _HELD or self._cheapest_to_move() > 0

    @property
    def has_fresh_slab(self) -> bool:
        """Whether `take_slab` takes one of fresh pages, and nothing is evicted or moved for it."""
        return not self._oldest_slab()[1]

    def use_of(self, order: EvictionOrder, used: Indices) -> int:
        """When what goes next of an order was used, later or earlier as its hint says; below 0 if a quota is full.

        `used`: by the clock. A hint counts as it stands now, and not once its time is over.
        """
        if due := order.due():
            return int(used[due]) - _HELD
        return int(used[order.first()]) + int(order.first_lead() * self.num_pages)

    @property
    def width(self) -> float:
        """Pages that are cached, those of slabs with them, for each that is published."""
        published = np.count_nonzero(self.index.published)
        return 1.0 + self.cached.num_idle * self.slab_pages / published if published else 1.0

    def give_back(self, slab: int) -> None:
        """The slab is pages again, fresh ones."""
        pages = self._pages_of(slab)
        self.taken[slab] = False
        self.holders[pages] = 0
        if self._bottom < self.slab_pages:
            self._push_fresh(pages[::-1])
            return
        if self._later is not None:
            self._later[pages] = 0
        self._ages[slab] = self._used[pages] = 0  # below all others: it is the last to be handed out page by page
        self._lie_from(self._bottom - self.slab_pages, self._fresh_count + self.slab_pages)
        self._fresh[: self.slab_pages] = pages[::-1]
        self._place[pages[::-1]] = np.arange(self._bottom, self._bottom + self.slab_pages)

    def check(self, holders: NDArray[np.int64], writers: NDArray[np.int64]) -> None:
        """As the base, for the slabs too: their pages have no other holder."""
        of_slabs = np.flatnonzero(np.repeat(self.taken, self.slab_pages))
        holders[of_slabs] += 1
        super().check(holders, writers)
        for page in of_slabs[(holders[of_slabs] != 1) | (writers[of_slabs] != 0)][:1]:
            raise InvariantError(f"page {page} is in slab {page // self.slab_pages}, which is taken, and held besides")
        for page in self.idle.pages()[self._used[self.idle.pages()] == 0][:1]:
            raise InvariantError(f"page {page} is idle, but nobody knows since when")
        fresh = self._fresh[: self._fresh_count]
        for page in fresh[self._used[fresh] != 0][:1]:
            raise InvariantError(f"page {page} is fresh, but was used at {self._used[page]}")
        for page in fresh[self._place[fresh] != self._bottom + np.arange(len(fresh))][:1]:
            raise InvariantError(f"page {page} is fresh, and lies elsewhere than at {self._place[page]}")
        for slab in range(1, self.num_slabs + 1):
            if self._ages[slab] > self._age_of(slab):
                raise InvariantError(f"slab {slab} was used at {self._age_of(slab)}, and is taken to be younger")

    def mend(self, holders: NDArray[np.int64], writers: NDArray[np.int64]) -> None:
        """As the base. `taken` already marks the slabs in use; the pages of those have no other holder."""
        holders[np.flatnonzero(np.repeat(self.taken, self.slab_pages))] += 1
        super().mend(holders, writers)

    def _begin_with(self, fresh: NDArray[np.intp], idle: NDArray[np.intp]) -> None:
        self._lie_from(0, 0)
        self._ages[:] = 0
        self._used[idle[self._used[idle] == 0]] = self.clock
        super()._begin_with(fresh, idle)

    # ---- inside

    def _free(self, pages: NDArray[np.intp]) -> None:
        self.clock += max(1, len(pages))
        self._used[pages] = self._ages[pages // self.slab_pages] = self.clock
        if not self.idle.by_age:
            if self._later is None:
                self._later = np.zeros(self.num_pages + 1, np.int64)
            leads = (self.idle.leads(pages) * self.num_pages).astype(np.int64)
            self._later[pages] = np.maximum(leads, 1 - self.clock)
            self._ages[pages // self.slab_pages] = self.clock + self._later[pages]
        super()._free(pages)

    def _push_fresh(self, pages: Pages | Indices) -> None:
        self._used[pages] = self._ages[pages // self.slab_pages] = 0
        if self._later is not None:
            self._later[pages] = 0
        top = self._bottom + self._fresh_count
        self._place[pages] = np.arange(top, top + len(pages))
        super()._push_fresh(pages)

    def _lie_from(self, bottom: int, count: int) -> None:
        """The fresh pages are `count` from `bottom` on."""
        self._bottom, self._fresh_count = bottom, count
        self._fresh = self._stack[bottom:]

    def _take_fresh(self, pages: Pages) -> None:
        """These are fresh no more: from the bottom others come to where they lay."""
        at, above = self._place[pages], self._bottom + len(pages)
        lower = np.zeros(len(pages), np.bool_)
        lower[at[at < above] - self._bottom] = True
        others, places = self._fresh[: len(pages)][~lower], np.sort(at[at >= above])
        self._stack[places] = others
        self._place[others] = places
        self._lie_from(above, self._fresh_count - len(pages))

    def _make_room(self, count: int) -> None:
        """Give up cached slabs where idle pages are too few, or younger."""
        cached = self.cached
        while count > self._fresh_count and cached.num_idle:
            if count <= self._fresh_count + self.idle.count and cached.oldest_use > self._next_use():
                return
            cached.give_up_oldest()

    def _next_use(self) -> int:
        """When the page that goes next was used; without hints the one that went last tells it well enough."""
        return self.use_of(self.idle, self._used) if self._later is not None else self._last_evicted

    def _oldest_slab(self) -> tuple[int, int]:
        """The slab whose pages were used longest ago, the last of these, and when; `_HELD`: all have held pages."""
        while True:
            slab = self.num_slabs - int(self._ages_back.argmin())
            age = self._age_of(slab)
            if age == self._ages[slab]:
                return slab, age
            self._ages[slab] = age

    def _age_of(self, slab: int) -> int:
        """When the youngest page of the slab was used; `_HELD` where one is."""
        pages = slice(slab * self.slab_pages, (slab + 1) * self.slab_pages)
        if np.count_nonzero(self.holders[pages]) or np.count_nonzero(self.writers[pages]):
            return _HELD
        used = self._used[pages] if self._later is None else self._used[pages] + self._later[pages]
        return int(used.max())

    def _cheapest_to_move(self) -> int:
        """The slab of the fewest held pages, all of which can move to free ones elsewhere; 0: there is none."""
        if self._fresh_count + self.idle.count < self.slab_pages:
            return 0
        in_slabs = slice(self.slab_pages, (self.num_slabs + 1) * self.slab_pages)
        held = (self.holders[in_slabs] > 0).reshape(-1, self.slab_pages).sum(axis=1)
        stays = np.broadcast_to(self.moves.staying(), len(self.holders))[in_slabs]
        stays = stays.reshape(-1, self.slab_pages).any(axis=1)
        of_slabs = np.where(stays, self.num_pages, held)
        slab = self.num_slabs - int(of_slabs[::-1].argmin())
        return slab if of_slabs[slab - 1] < self.num_pages else 0

    def _clear(self, slab: int) -> None:
        """Evict, or move away, what is in the pages of a slab, and take it."""
        pages = self._pages_of(slab)
        unused = pages[self._unused(pages)]
        idle = self.index.published[unused]
        self._evict(unused[idle])
        self._take_fresh(unused[~idle])
        held = pages[self.holders[pages] > 0]
        self.holders[pages[self.holders[pages] == 0]] = 1
        self.taken[slab] = True
        if held.size:
            for save in self.journal.going:  # whoever is to copy them knows them by where they lie
                save(held)
            targets = self.allocate(len(held))
            self.holders[targets] = self.holders[held]
            self.moves.move(held, targets)
            self.idle.moved(held, targets)
            self.holders[held] = 1
            self.moved += len(held)

    def _evict(self, pages: Pages) -> None:
        """Idle pages go, whichever is next in their order."""
        if not pages.size:
            return
        self.idle.remove(pages)
        self.idle.forget(pages)
        self._drop(pages)

    def _evict_due(self) -> bool:
        """Evict the pages that tenants have above their quotas, up to the first slab; whether there were some."""
        evicted = False
        while self.idle.due():
            pages = self.idle.pop(1)
            self._drop(pages, BY_QUOTA)
            self._push_fresh(pages)
            evicted = True
        return evicted

    def _drop(self, pages: Pages, why: int = BY_TURN) -> None:
        """These left the order: they are found no more."""
        self.index.withdraw(pages)
        self.evictions += len(pages)
        for save in self.journal.going:
            save(pages)
        for tell in self.journal.gone:
            tell(pages, why)

    def _pages_of(self, slab: int) -> Pages:
        return np.arange(slab * self.slab_pages, (slab + 1) * self.slab_pages, dtype=np.int32)


class SlabStates(PagePool, CachedSlabs):
    """The states in slabs: page s of this pool is slab s of `slabs`.

    A slab is given back as soon as nobody holds its state, and nobody can find it. Slabs that are not taken count as
    held, as the pages of tokens hold them.
    """

    def __init__(self, slabs: SlabPool) -> None:
        super().__init__(slabs.num_slabs, slabs.index.digest_words)
        self._slabs = slabs
        self._fresh_count, self.holders[1:] = 0, 1
        self._used = np.zeros(slabs.num_slabs + 1, np.int64)  # of copies, by the clock of the slabs
        slabs.cached = self

    @property
    def num_idle(self) -> int:
        return self.idle.count

    @property
    def oldest_use(self) -> int:
        return self._slabs.use_of(self.idle, self._used)

    def give_up_oldest(self) -> None:
        self.release(np.array([self.allocate_one()], np.int32))

    def take(self, *, moving: bool) -> bool:
        """Take a slab that the pages of tokens can do without; False: a copy has to go for one, or there is none.

        `moving`: held pages may be moved for it.
        """
        if slab := self._slabs.take_slab(moving=moving):
            self.holders[slab] = 0
            super()._push_fresh(np.array([slab], np.int32))
        return slab > 0

    def check(self, holders: NDArray[np.int64], writers: NDArray[np.int64]) -> None:
        """As the base, of pages that are taken; and none of these is free."""
        self._hold_others(holders)
        super().check(holders, writers)
        if self._fresh_count:
            raise InvariantError(f"{self._fresh_count} pages are free, and not given back")

    def mend(self, holders: NDArray[np.int64], writers: NDArray[np.int64]) -> None:
        """As the base. Those of these pages that are held or published are taken, and no other."""
        published = self.index.published
        self._slabs.taken[1:] = ((holders > 0) | (writers > 0) | published)[1:]
        self._used[published & (self._used == 0)] = self._slabs.clock
        self._hold_others(holders)
        super().mend(holders, writers)

    def _hold_others(self, holders: NDArray[np.int64]) -> None:
        holders[1:] += ~self._slabs.taken[1:]

    def _free(self, pages: NDArray[np.intp]) -> None:
        self._used[pages] = self._slabs.clock
        super()._free(pages)

    def _push_fresh(self, pages: Pages | NDArray[np.intp]) -> None:
        for page in sorted(pages.tolist()):
            self.holders[page] = 1
            self._slabs.give_back(page)
