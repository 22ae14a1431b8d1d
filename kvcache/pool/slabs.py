"""`SlabPool`: one memory for token pages and for slabs. A slab is a run of pages that holds a recurrent state.

A slab has `slab_pages` pages, as many as a state needs, and begins at a multiple of `slab_pages`. Pages are allocated
as in any pool. The pool takes the slab that costs least. A slab of fresh pages costs nothing. If there is none, the
pool takes the slab whose idle pages were used least recently, and evicts these pages. If every slab has held pages, the
pool moves the held pages of one slab elsewhere. When a slab is given back, its pages are fresh again. So no memory is
reserved for pages or slabs. The only loss is the part of a slab that its state does not fill.

Cached slabs (`SlabStates`) and idle pages are evicted in one order, which `SlabUses` knows.
"""

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.eviction_order import BY_QUOTA, BY_TURN, EvictionOrder, Indices, Pages
from kvcache.pool.pages import PagePool
from kvcache.pool.slab_uses import HELD, SlabUses


def num_slabs(num_pages: int, slab_pages: int) -> int:
    """Returns the number of slabs in a pool of `num_pages` pages. Slab 0 contains the null page and does not count."""
    return max(0, (num_pages + 1) // slab_pages - 1)


class SlabPool(PagePool):
    """A pool in which pages can be taken as slabs.

    Slab s, with s > 0, consists of `slab_pages` pages from page `s * slab_pages` on. Each page of a taken slab has one
    holder. The owner of the pool sets `moves`.

    Attributes:
        uses: when each page and each cached slab was last used.
        cached: the states in taken slabs. The states without a holder are cached, and can be evicted.

        page    0  1  2  3 │ 4  5  6  7 │ 8  9 10 11      12 pages with the null page, slabs of 4 pages
        slab    0          │ 1          │ 2               slab 0 has the null page and is never taken

    Examples:
        >>> pool = SlabPool(11, digest_words=1, slab_pages=4)
        >>> slab = pool.take_slab()
        >>> slab, pool.free_count
        (2, 7)
        >>> pool.give_back(slab)
        >>> pool.free_count
        11
    """

    def __init__(self, num_pages: int, digest_words: int, slab_pages: int, order: EvictionOrder | None = None) -> None:
        super().__init__(num_pages, digest_words, order)
        self.slab_pages = self.beside = slab_pages
        self.num_slabs = num_slabs(num_pages, slab_pages)
        self.taken = np.zeros(self.num_slabs + 1, np.bool_)
        self.moved = 0  # the number of pages that were moved so far to make room for slabs
        self.uses = SlabUses(self, slab_pages, self.num_slabs)
        # The fresh pages are a section of this stack. The section moves up when slabs are taken from its lower end, and
        # down when they are given back. `_bottom`, the start of the section, is never above the number of pages in all
        # taken slabs.
        self._stack: Pages = np.concatenate((self._fresh, np.zeros(slab_pages, np.int32)))
        self._bottom = 0
        self._index = np.arange(num_pages, -1, -1)  # the index of each fresh page in `_stack`
        self._fresh: Pages = self._stack
        self.follow(self.idle)
        self.cached = SlabStates(self)

    @property
    def free_count(self) -> int:
        """The number of pages that `allocate` can return: fresh pages, idle pages, and pages of evictable slabs."""
        return self._fresh_count + self.idle.count + self.cached.num_idle * self.slab_pages

    def follow(self, order: EvictionOrder) -> None:
        super().follow(order)
        self.uses.follow(order)

    def allocate(self, count: int) -> Pages:
        if count == 1:
            return np.array([self.allocate_one()], np.int32)
        self._make_room(count)
        pages = super().allocate(count)
        self.uses.last_evicted = max(self.uses.last_evicted, int(self.uses.used[pages].max(initial=0)))
        return pages

    def allocate_one(self) -> int:
        if not self._fresh_count:
            self._make_room(1)
        page = super().allocate_one()
        self.uses.last_evicted = max(self.uses.last_evicted, self.uses.used.item(page))
        return page

    # ---- slabs

    def take_slab(self, *, moving: bool = True) -> int:
        """Take a slab and return its number. Returns 0 if there is none, or if a cached slab has to be evicted first.

        If every slab has held pages, `moving` allows the held pages of one slab to be moved elsewhere.
        """
        chosen, age = self.uses.oldest_slab()
        if age and self._evict_due():
            chosen, age = self.uses.oldest_slab()
        if age and self.cached.num_idle and self.cached.oldest_use <= age:
            return 0
        if age == HELD:
            chosen = self._cheapest_to_move() if moving else 0
        if chosen:
            self._clear(chosen)
        return chosen

    def can_take_slab(self) -> bool:
        """Whether `take_slab` would return a slab, either now or after all cached slabs are evicted."""
        return self.cached.num_idle > 0 or self.uses.oldest_slab()[1] < HELD or self._cheapest_to_move() > 0

    @property
    def has_fresh_slab(self) -> bool:
        """Whether `take_slab` would find a slab of fresh pages, so that nothing has to be evicted or moved."""
        return not self.uses.oldest_slab()[1]

    @property
    def width(self) -> float:
        """The number of cached pages, including the pages of cached slabs, divided by the number of published pages."""
        published = np.count_nonzero(self.index.published)
        return 1.0 + self.cached.num_idle * self.slab_pages / published if published else 1.0

    def give_back(self, slab: int) -> None:
        """Return a taken slab to the pool. Its pages become fresh."""
        pages = self._pages_of(slab)
        self.taken[slab] = False
        self.holders[pages] = 0
        if self._bottom < self.slab_pages:
            self._push_fresh(pages[::-1])
            return
        self.uses.clear(pages)
        # These pages are put at the bottom of the stack, so that they are the last to be allocated as single pages.
        self._lie_from(self._bottom - self.slab_pages, self._fresh_count + self.slab_pages)
        self._fresh[: self.slab_pages] = pages[::-1]
        self._index[pages[::-1]] = np.arange(self._bottom, self._bottom + self.slab_pages)

    def check(self, holders: NDArray[np.int64], writers: NDArray[np.int64]) -> None:
        """Compare the pool with a recount. Also check that the pages of taken slabs have no other holder."""
        of_slabs = np.flatnonzero(np.repeat(self.taken, self.slab_pages))
        holders[of_slabs] += 1
        super().check(holders, writers)
        for page in of_slabs[(holders[of_slabs] != 1) | (writers[of_slabs] != 0)][:1]:
            raise InvariantError(
                f"page {page} is in slab {page // self.slab_pages}, which a state has taken, but the page is also held"
            )
        used = self.uses.used
        for page in self.idle.pages()[used[self.idle.pages()] == 0][:1]:
            raise InvariantError(f"page {page} is idle, but the time of its release is not recorded")
        fresh = self._fresh[: self._fresh_count]
        for page in fresh[used[fresh] != 0][:1]:
            raise InvariantError(f"page {page} is fresh, but was used at {used[page]}")
        for page in fresh[self._index[fresh] != self._bottom + np.arange(len(fresh))][:1]:
            raise InvariantError(
                f"page {page} is fresh, but the stack has another page at the index {self._index[page]}"
            )
        for slab in range(1, self.num_slabs + 1):
            if self.uses.ages[slab] > (age := self.uses.age_of(slab)):
                raise InvariantError(
                    f"slab {slab} was last used at {age}, before its recorded bound {self.uses.ages[slab]}"
                )

    def rebuild(self, holders: NDArray[np.int64], writers: NDArray[np.int64]) -> None:
        """Build the pool anew after an interrupt. The pool in `cached` must be built first: it marks the slabs in use.

        The pages of these slabs must have no other holder.
        """
        holders[np.flatnonzero(np.repeat(self.taken, self.slab_pages))] += 1
        self._lie_from(0, 0)
        self.uses.begin_with(self.index.published)
        super().rebuild(holders, writers)

    # ---- inside

    def _free(self, pages: NDArray[np.intp]) -> None:
        self.uses.release(pages)
        super()._free(pages)

    def _push_fresh(self, pages: Pages | Indices) -> None:
        self.uses.clear(pages)
        top = self._bottom + self._fresh_count
        self._index[pages] = np.arange(top, top + len(pages))
        super()._push_fresh(pages)

    def _lie_from(self, bottom: int, count: int) -> None:
        """Make the section of fresh pages in `_stack` begin at the index `bottom` and have `count` pages."""
        self._bottom, self._fresh_count = bottom, count
        self._fresh = self._stack[bottom:]

    def _take_fresh(self, pages: Pages) -> None:
        """Remove `pages` from the section of fresh pages in `_stack`.

        Fresh pages from the lower end of the section fill the gaps.
        """
        at, above = self._index[pages], self._bottom + len(pages)
        lower = np.zeros(len(pages), np.bool_)
        lower[at[at < above] - self._bottom] = True
        others, moved = self._fresh[: len(pages)][~lower], np.sort(at[at >= above])
        self._stack[moved] = others
        self._index[others] = moved
        self._lie_from(above, self._fresh_count - len(pages))

    def _make_room(self, count: int) -> None:
        """Evict cached slabs until `count` pages are fresh or idle.

        Also evicts slabs that were last used before the page that would be evicted next, as long as too few pages are
        fresh.
        """
        cached = self.cached
        while count > self._fresh_count and cached.num_idle:
            if count <= self._fresh_count + self.idle.count and cached.oldest_use > self.uses.next_page():
                return
            cached.give_up_oldest()

    def _cheapest_to_move(self) -> int:
        """Returns the slab with the fewest held pages, if all its held pages can be moved to free pages elsewhere.

        Returns 0 if there is none.
        """
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
        """Empty a slab for a state: evict its idle pages, and move its held pages elsewhere."""
        pages = self._pages_of(slab)
        unused = pages[self._unused(pages)]
        idle = self.index.published[unused]
        if (evicted := unused[idle]).size:  # these pages may not be the next pages in the order
            self.idle.remove(evicted)
            self.idle.forget(evicted)
            self._drop(evicted)
        self._take_fresh(unused[~idle])
        held = pages[self.holders[pages] > 0]
        self.holders[pages[self.holders[pages] == 0]] = 1
        self.taken[slab] = True
        if held.size:
            # Pending copies are finished before the move, because they name these pages by their current ids.
            for save in self.journal.going:
                save(held)
            targets = self.allocate(len(held))
            self.holders[targets] = self.holders[held]
            self.moves.move(held, targets)
            self.versions.moved(held, targets)
            self.idle.moved(held, targets)
            self.holders[held] = 1
            self.moved += len(held)

    def _evict_due(self) -> bool:
        """Evict idle pages of the tenants that are above their quotas. The oldest pages of a tenant are evicted first.

        For each tenant, the eviction stops at the tenant's oldest idle slab. Returns whether any page was evicted.
        """
        evicted = False
        while self.idle.due():
            pages = self.idle.pop(1)
            self._drop(pages, BY_QUOTA)
            self._push_fresh(pages)
            evicted = True
        return evicted

    def _drop(self, pages: Pages, why: int = BY_TURN) -> None:
        """Withdraw `pages` from the index, and notify readers. The pages have already left the eviction order."""
        self.index.withdraw(pages)
        self.evictions += len(pages)
        for save in self.journal.going:
            save(pages)
        for tell in self.journal.gone:
            tell(pages, why)

    def _pages_of(self, slab: int) -> Pages:
        return np.arange(slab * self.slab_pages, (slab + 1) * self.slab_pages, dtype=np.int32)


class SlabStates(PagePool):
    """The pool of states in slabs: page s of this pool is slab s of `slabs`.

    A slab is given back as soon as its state has no holder and is not published. In this pool, slabs that are not taken
    count as held, because token pages use them.
    """

    def __init__(self, slabs: SlabPool) -> None:
        super().__init__(slabs.num_slabs, slabs.index.digest_words)
        self._slabs = slabs
        self._fresh_count, self.holders[1:] = 0, 1

    @property
    def num_idle(self) -> int:
        """The number of cached states that can be evicted."""
        return self.idle.count

    @property
    def oldest_use(self) -> int:
        """The last use of the cached state that is evicted next, as `SlabUses.next_of` defines it."""
        uses = self._slabs.uses
        return uses.next_of(self.idle, uses.of_slabs)

    def give_up_oldest(self) -> None:
        """Evict the cached state that `oldest_use` describes, and give its slab back to the pool."""
        self.release(np.array([self.allocate_one()], np.int32))

    @property
    def num_held(self) -> int:
        return int(np.count_nonzero(self._slabs.taken)) - self.num_idle

    @property
    def has_room(self) -> bool:
        return self._slabs.can_take_slab()

    @property
    def room_may_cost(self) -> bool:
        return not self._slabs.has_fresh_slab

    def next_evicted(self) -> int:
        return 0

    def make_room(self, *, moving: bool) -> bool:
        """Returns whether a state page can be allocated now. Takes a slab from the token pages if possible.

        No slab is taken if a cached state must be evicted first.
        """
        if slab := self._slabs.take_slab(moving=moving):
            self.holders[slab] = 0
            super()._push_fresh(np.array([slab], np.int32))
        return self.free_count > 0

    def check(self, holders: NDArray[np.int64], writers: NDArray[np.int64]) -> None:
        """Compare the pool of the taken slabs with a recount. Also check that no taken slab is fresh."""
        self._hold_others(holders)
        super().check(holders, writers)
        if self._fresh_count:
            raise InvariantError(f"{self._fresh_count} pages are free, but were not returned to their slabs")

    def rebuild(self, holders: NDArray[np.int64], writers: NDArray[np.int64]) -> None:
        """Build the pool anew after an interrupt. A slab is taken if it has a holder or a writer, or is published."""
        published, uses = self.index.published, self._slabs.uses
        self._slabs.taken[1:] = ((holders > 0) | (writers > 0) | published)[1:]
        uses.release_slabs(np.flatnonzero(published & (uses.of_slabs == 0)))
        self._hold_others(holders)
        super().rebuild(holders, writers)

    def _hold_others(self, holders: NDArray[np.int64]) -> None:
        holders[1:] += ~self._slabs.taken[1:]

    def _free(self, pages: NDArray[np.intp]) -> None:
        self._slabs.uses.release_slabs(pages)
        super()._free(pages)

    def _push_fresh(self, pages: Pages | NDArray[np.intp]) -> None:
        for page in sorted(pages.tolist()):
            self.holders[page] = 1
            self._slabs.give_back(page)
