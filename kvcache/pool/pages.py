"""`PagePool`: the state of every page of one replica. Only this file frees pages.

A page is in exactly one state:

    fresh ──allocate──► held ──release──► fresh            never published: its content is not needed
                         │  ▲
                 publish │  │ hold (a prefix hit)
                         ▼  │
                       held ──release──► idle ──evict──► held
                                         published, findable, may be evicted: least recently used first

A writer is a transfer that may still write to a page. A page with a writer is neither fresh nor idle, even without a
holder. A page that loses its last holder while a step is in flight is *parked*: the step counts as its writer.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.eviction_order import BY_TURN, EvictionOrder, Pages
from kvcache.pool.index import INDEX, NO_PAGE, Digests, PrefixIndex
from kvcache.pool.journal import BY_RESET
from kvcache.pool.lru_order import LruOrder
from kvcache.pool.versions import PageVersions, SeveralVersions

_ONE = np.array(1, np.int32)  # an array, because numpy takes twice as long with a Python int


class PageMoves:
    """Moves held pages, and updates all records of their ids.

    This base class moves none. It serves pools without slabs.
    """

    def claimed(self, row: int) -> None:
        """Record that a new request has claimed the row."""

    def fetched(self, rows: NDArray[np.int64] | slice) -> None:
        """Record that a model reads the pages of `rows` until `step` is called for these rows."""

    def stepped(self, rows: NDArray[np.int64] | slice) -> None:
        """Record that the model has run `rows`, and does not read their pages any more."""

    def told(self, row: int) -> None:
        """Record that another process knows the ids of the row's pages.

        These pages are not moved while the row is claimed.
        """

    def staying(self) -> NDArray[np.bool_] | np.bool_:
        """Returns a mask, bool `[num_pages + 1]`, of the pages that cannot be moved while they are held.

        A single bool applies to all pages.
        """
        return np.True_

    def move(self, sources: Pages, targets: Pages) -> None:
        """Copy each held page of `sources` to a held page of `targets`, and replace its id in every record."""


class PagePool:
    """The holders and writers of pages 1 to `num_pages`, and the free pages, in arrays. Page 0 is the null page.

    Attributes:
        idle: the eviction order of the idle pages. `follow` replaces it.
        moves: the object that moves held pages when a slab needs room. It learns which pages must stay.

    Examples:
        >>> pool = PagePool(4, digest_words=1)
        >>> prompt, digests = pool.allocate(2), np.array([[7], [8]], np.uint64)
        >>> _ = pool.index.publish(prompt, digests)
        >>> pool.release(prompt)  # both pages are idle: free, but a later request finds them
        >>> pool.free_count, pool.index.match(digests).tolist()
        (4, [1, 2])
        >>> pool.allocate(3).tolist()  # the last page of the prompt is evicted first
        [2, 3, 4]
        >>> pool.index.match(digests).tolist()
        [1]
    """

    beside = 0  # the number of pages that each request takes for its state, in addition to its token pages
    width = 1.0  # the memory of all cached content, in pages, divided by the number of published pages

    def __init__(self, num_pages: int, digest_words: int, order: EvictionOrder | None = None) -> None:
        self.num_pages = num_pages
        self.holders = np.zeros(num_pages + 1, np.int32)
        self.writers = np.zeros(num_pages + 1, np.int16)
        self._writing = 0  # the sum of `writers`; usually 0, so the pages need not be tested one by one
        self.index = PrefixIndex(num_pages, digest_words)
        self.idle = order or LruOrder(num_pages)
        # A stack whose top is its end. It is filled in descending order, so the first pages handed out are 1, 2, 3 and
        # so on.
        self._fresh = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._fresh_count = num_pages
        self.evictions = 0
        self.journal = self.index.journal
        self.moves = PageMoves()
        self.versions = PageVersions()  # the version of the weights of each page
        # For each step in flight, oldest first: the pages that were released while that step was the newest.
        self.parked: list[list[NDArray[np.intp]]] = []

    @property
    def free_count(self) -> int:
        """The number of pages that `allocate` can return: fresh and idle pages."""
        return self._fresh_count + self.idle.count

    def set_version(self, number: int) -> None:
        """Say that pages which are published from now on are of the version of the weights with this `number`.

        The first version has the number 0. Pages of other versions that become idle are evicted before all others.
        """
        if not self.versions.differ:
            self.versions = versions = SeveralVersions(self.num_pages)
            self.journal.read(versions)
        self.versions.begin(number)

    def follow(self, order: EvictionOrder) -> None:
        """Use `order` as the eviction order. It must hold exactly the pages that are idle now."""
        self.idle = order

    def allocate(self, count: int) -> Pages:
        """Allocate `count` pages, each with one holder.

        Returns the pages in ascending order, so that consecutive pages are copied as one run.
        """
        if count == 1:
            return np.array([self.allocate_one()], np.int32)
        evicted = count - self._fresh_count
        if evicted > 0:
            # The fresh pages are taken before the eviction. During an eviction, readers of the journal may free pages,
            # which are then pushed onto the stack of fresh pages.
            fresh, self._fresh_count = self._fresh[: self._fresh_count].copy(), 0
            pages = self._evict_next(evicted)
            if fresh.size:
                pages = np.sort(np.concatenate((fresh, pages)))
        else:
            self._fresh_count -= count
            pages = self._fresh[self._fresh_count : self._fresh_count + count].copy()
            pages.sort()  # `sort` takes half the time of `np.sort`
        self.holders[pages.astype(INDEX)] = _ONE
        return pages

    def allocate_one(self) -> int:
        """Do the same as `allocate(1)` in a sixth of the time. Used when a request grows by a page."""
        if self._fresh_count:
            self._fresh_count -= 1
            page = int(self._fresh[self._fresh_count])
        else:
            told = self.journal
            page = int(self._pop_and_tell(1)[0]) if told.gone else self.idle.pop_one()
            self.index.withdraw_one(page)
            self.evictions += 1
            if told.going:
                for save in told.going:
                    save(np.array([page], np.int32))
        self.holders[page] = 1
        return page

    def next_evicted(self) -> int:
        """Returns the page that `allocate_one` would evict.

        Returns 0 if a page is fresh, if none is free, or if the page cannot be predicted.
        """
        return 0 if self._fresh_count or not self.idle.count else self.idle.first()

    # ---- room for one page, which `SlabStates` takes from another pool

    @property
    def num_held(self) -> int:
        """The number of pages with a holder or a writer."""
        return self.num_pages - self.free_count

    @property
    def has_room(self) -> bool:
        """Whether `make_room(moving=True)` would return True."""
        return self.free_count > 0

    @property
    def room_may_cost(self) -> bool:
        """Whether `make_room` may evict pages of another pool, from which it takes the memory."""
        return False

    def make_room(self, *, moving: bool) -> bool:  # noqa: ARG002 - all pages are here
        """Returns whether a page can be allocated now. A pool that takes its memory from another pool takes it now.

        `moving` allows held pages of the other pool to be moved. A pool with its own memory ignores `moving`.
        """
        return self.has_room

    # ---- holders and writers

    def hold(self, pages: Pages) -> None:
        """Add a holder to each of `pages`, which are distinct and published or held."""
        at = pages.astype(INDEX)
        holders = self.holders[at]
        if np.count_nonzero(holders) or (self._writing and np.count_nonzero(self.writers[at])):
            idle = at[(holders == 0) & (self.writers[at] == 0)]
            self.holders[at] = holders + 1
        # In the usual case, no running request shares pages of the prompt. `count_nonzero` takes a third of a
        # comparison's time.
        else:
            idle, self.holders[at] = at, _ONE
        if idle.size:
            self.idle.remove(idle)

    def release(self, pages: Pages) -> None:
        """Drop one holder of each of `pages`, which are distinct and in logical order.

        A page without holders and writers becomes free. The last page is released first, and is therefore evicted
        first, because a hit on a page needs all pages before it.
        """
        at = pages.astype(INDEX)
        holders = self.holders[at] - _ONE
        self.holders[at] = holders
        if np.count_nonzero(holders):
            at = at[holders == 0]
        self._let_go(at[::-1])

    def release_each(self, pages: Pages) -> None:
        """Do the same as `release`. A page may occur several times, once for each holder to drop."""
        at = pages.astype(INDEX)
        # If each page has one holder, no page can occur twice in `pages`.
        if not np.count_nonzero(self.holders[at] != _ONE):
            self.release(pages)
            return
        first = np.unique(at, return_index=True)[1]
        np.subtract.at(self.holders, at, 1)
        at = at[np.sort(first)]
        self._let_go(at[self.holders[at] == 0][::-1])

    def rewrite(self, pages: Pages, digests: Digests, write: Callable[[Pages], None]) -> Pages:
        """Let `write` replace the content of idle `pages`. Then publish them under `digests` as the newest pages.

        Returns the page that now has each digest. If this is an older page, the rewritten page is fresh.
        """
        self.idle.renew(pages)
        self.idle.remove(pages)
        self.idle.forget(pages)
        self.index.withdraw(pages)
        write(pages)  # the index must not find pages whose content is being replaced
        kept = self.index.publish(pages, digests)
        self._free(pages.astype(INDEX))
        return kept

    def add_writer(self, pages: Pages) -> None:
        """Add a writer to held `pages`: a transfer that may write to these pages until `drop_writer` is called."""
        self.writers[pages] += 1
        self._writing += len(pages)

    def drop_writer(self, pages: Pages) -> None:
        """Drop a writer, after its transfer has stopped writing. A page without holders and writers becomes free."""
        self.writers[pages] -= 1
        self._writing -= len(pages)
        if np.count_nonzero(unused := self._unused(pages)):
            self._let_go(pages[unused][::-1].astype(INDEX))

    def begin_step(self) -> None:
        """Record that a step is in flight. Pages that are released from now on become free only when it has ended."""
        self.parked.append([])

    def end_step(self, at: int) -> None:
        """Record that the step with the index `at` among the steps in flight has ended.

        The pages that were parked for this step become free. If an older step is still in flight, these pages are
        parked for the older step instead, because the older step may also read them.
        """
        parked = self.parked.pop(at)
        if at:
            self.parked[at - 1] += parked
            return
        for pages in parked:
            self.writers[pages] -= 1
            self._writing -= len(pages)
            if np.count_nonzero(unused := self._unused(pages)):
                self._free(pages[unused])

    def would_be_taken(self, pages: Pages) -> int:
        """Returns how many of `pages` are free now. `hold(pages)` lowers `free_count` by this number."""
        return int(np.count_nonzero(self._unused(pages)))

    def would_be_freed(self, pages: Pages) -> int:
        """Returns how many of `pages` would become free by `release`: the pages with one holder and no writer.

        Returns 0 if a step is in flight.
        """
        if self.parked:
            return 0
        return int(np.count_nonzero((self.holders[pages] == 1) & (self.writers[pages] == 0)))

    def forget(self) -> None:
        """Withdraw every published page from the index, also pages that are in use. Idle pages become fresh.

        A page in use keeps its holders and writers, and becomes fresh when the last of them is gone.
        """
        idle = self.idle.pop(self.idle.count)
        used = self.index.published.copy()
        used[idle] = False
        in_use = np.flatnonzero(used).astype(np.int32)
        self.index.withdraw(idle)
        self.index.withdraw(in_use)
        self.idle.forget(in_use)
        for tell in self.journal.gone:
            tell(idle, BY_RESET)
        self._push_fresh(idle[::-1])

    def check(self, holders: NDArray[np.int64], writers: NDArray[np.int64]) -> None:
        """Compare the pool with a recount of each page's holders and writers, `[num_pages + 1]`.

        Raises `InvariantError` at the first difference.
        """
        for name, have, want in (("holders", self.holders, holders), ("writers", self.writers, writers)):
            for page in np.flatnonzero(have != want)[:1]:
                raise InvariantError(f"page {page} has {have[page]} {name}, but {want[page]} are counted")
        if self._writing != writers.sum():
            raise InvariantError(f"pages have {writers.sum()} writers, but {self._writing} are counted")
        fresh, idle = self._fresh[: self._fresh_count], self.idle.pages()
        state = np.bincount(fresh, minlength=self.num_pages + 1) + np.bincount(idle, minlength=self.num_pages + 1)
        state += (holders > 0) | (writers > 0)
        for page in np.flatnonzero(state[1:] != 1)[:1] + 1:
            raise InvariantError(
                f"page {page} is in {state[page]} of the states fresh, idle and used: exactly one is needed"
            )
        for page in idle[~self.index.published[idle]][:1]:
            raise InvariantError(f"page {page} is idle, but not published")
        for page in fresh[self.index.published[fresh]][:1]:
            raise InvariantError(f"page {page} is fresh, but published")
        if state[0] or self.index.published[0]:
            raise InvariantError("the null page is in use")
        self.idle.check()
        self.index.check()

    def rebuild(self, holders: NDArray[np.int64], writers: NDArray[np.int64]) -> None:
        """Build the pool anew after an interrupt. Pages stay published, and nothing else of before is trusted.

        `holders` and `writers`, `[num_pages + 1]`, are the counts of each page. The eviction order is kept as far as it
        is known. Pages that become idle now come last in it.
        """
        was_idle = (self.holders == 0) & (self.writers == 0)
        self.holders[:], self.writers[:] = holders, writers
        self._writing = int(writers.sum())
        self.index.rebuild()
        unused = (holders == 0) & (writers == 0)
        unused[NO_PAGE] = False
        idle = unused & self.index.published
        older, newer = np.flatnonzero(idle & was_idle), np.flatnonzero(idle & ~was_idle)
        with suppress(Exception):  # a caller's own order, which the interrupt may have left half changed
            older = older[np.argsort(self.idle.positions(older), kind="stable")]
        self.idle.clear()
        # The pages of a prompt have ascending numbers, and its last page must be evicted first.
        self.idle.append(np.concatenate((older, newer[::-1])))
        self._fresh_count = 0
        self._push_fresh(np.flatnonzero(unused & ~idle)[::-1])

    def _evict_next(self, count: int) -> Pages:
        """Evict the next `count` pages. Returns them in ascending order."""
        told = self.journal
        evicted = self._pop_and_tell(count) if told.gone else self.idle.pop(count)
        pages = evicted.copy()
        pages.sort()  # sorted before the pages are withdrawn, because neighbouring pages share cache lines
        self.index.withdraw(pages)
        self.evictions += count
        for save in told.going:
            save(evicted)
        return pages

    def _pop_and_tell(self, count: int) -> Pages:
        """Pop the next pages of the order, and tell readers why each was evicted."""
        pages, reasons = self.idle.pop_explained(count)
        for tell in self.journal.gone:
            tell(pages, BY_TURN if reasons is None else reasons)
        return pages

    def _unused(self, pages: Pages | NDArray[np.intp]) -> NDArray[np.bool_]:
        at = pages.astype(INDEX)
        return (self.holders[at] == 0) & (self.writers[at] == 0)

    def _let_go(self, pages: NDArray[np.intp]) -> None:
        """Free the pages without a writer among `pages`, which have lost their last holder.

        If a step is in flight, all of them are parked, because the step may still read and write them.
        """
        if self.parked:
            self.writers[pages] += 1
            self._writing += len(pages)
            self.parked[-1].append(pages)
            return
        if self._writing and np.count_nonzero(writers := self.writers[pages]):
            pages = pages[writers == 0]
        self._free(pages)

    def _free(self, pages: NDArray[np.intp]) -> None:
        published = self.index.published[pages]
        every = np.count_nonzero(published) == len(published)
        idle = pages if every else pages[published]
        if self.versions.differ and np.count_nonzero(old := self.versions.are_old(idle)):
            self.idle.append_old(idle[old])
            idle = idle[~old]
        self.idle.append(idle)
        if not every:
            self._push_fresh(pages[~published])

    def _push_fresh(self, pages: Pages | NDArray[np.intp]) -> None:
        self._fresh[self._fresh_count : self._fresh_count + len(pages)] = pages
        self._fresh_count += len(pages)


class HeldPages(NamedTuple):
    """Pages that the caller holds in one pool: a replica's pool of token pages, or its pool of state pages."""

    pool: PagePool
    pages: Pages

    def release(self) -> None:
        """Release the pages."""
        self.pool.release(self.pages)


HoldersOf = Callable[[PagePool], NDArray[np.int64]]
"""Returns how many holders of one kind, such as leases, each page of a pool has: int64 `[num_pages + 1]`."""
