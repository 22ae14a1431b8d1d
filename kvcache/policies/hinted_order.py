"""`HintedOrder`: wraps another eviction order, and biases it by the retention hints of requests.

A bounded share of the idle pages follows the hints. The other pages follow the wrapped order, usually plain LRU:

    release ──► recent: the newest (1 - share), LRU ──oldest──► older: one LRU order per kind of hint ──► evicted

`older` evicts the page of the lowest rank. The rank of a page is its position in the LRU order plus the lead of its
hint. The lead says how much longer a page is kept than a page without a hint. A negative lead means a shorter time. The
unit is the pool's size, and time passes with each released page. A page whose lead is used up is evicted as if it had
no hint. So a hint decays and never pins a page. If a share of the pages follows hints, the cache still keeps at least
the pages that plain LRU would keep in a pool that is smaller by this share. Two designs were rejected. Strict classes
of hints would pin pages. If all pages could follow hints, wrong hints could cost any number of hits.

`HintShare` sets the share.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.eviction_order import BY_HINT, EvictionOrder, Indices, Pages, Reasons
from kvcache.pool.lru_order import LruOrder, OrderLog
from kvcache.retention import LEVEL_OF, LEVELS, NEUTRAL, SHARED, PageHints, Times, merge_codes

# The lead of one level above the neutral one, in pool sizes. On public traces, twice this lead changes the hits by at
# most 1 %, even if every fifth hint is wrong. Half this lead gives up to 4 % fewer hits.
_LEAD = 2
_LAST = 1 << 62
KINDS = SHARED + 1
"""The number of kinds of hint (codes of `kvcache.retention`). The pages of each kind have an LRU order of their own."""


class HintedOrder(EvictionOrder):
    """The idle pages of one pool in their order of eviction. The module's docstring explains the order.

    `recent` must hold exactly the pages that are idle now. `clock` returns seconds, for hints with a time to live.

    Attributes:
        share: the share of idle pages that follows hints. `trust` changes it.

    Examples:
        >>> from kvcache.retention import Retention, page_hints
        >>> order = HintedOrder(4, LruOrder(4), share=1.0)
        >>> order.hint(np.array([1, 2]), page_hints(Retention(session_continues=True), pages=2, page_size=16))
        >>> order.append(np.array([1, 2, 3, 4]))
        >>> order.pop(4).tolist()  # pages 1 and 2 are older, but their session continues
        [3, 4, 1, 2]
    """

    def __init__(
        self, num_pages: int, recent: EvictionOrder, clock: Callable[[], float] = time.monotonic, share: float = 0.0
    ) -> None:
        self.share = share
        # The code of each page's hint. It is set before the page becomes idle.
        self.codes = np.full(num_pages + 1, NEUTRAL, np.uint8)
        self._clock = clock
        self._num_pages = num_pages
        self._lead_pages = num_pages
        self._recent = recent
        self._log = OrderLog(num_pages, KINDS)
        self._older: dict[int, LruOrder] = {}  # by kind of hint
        self._settled = np.zeros(num_pages + 1, np.bool_)  # for each page, whether it is in `_older`
        self._since = np.zeros(num_pages + 1, np.int64)  # the position of each page of `_older` in the LRU order
        # For each page, the time at which its hint expires. Read only for kinds of hints with a time to live.
        self._expires: Times = np.zeros(num_pages + 1)
        self._positions = 0
        self._before_all = -(1 << 61)  # less than every position that `_since` has, and than every rank
        # The number of pages of `_older` that are replaced by newer pages (`renew`). The next pages that move to
        # `_older`, as many as this number, do not advance `_positions`. So renewals do not age the other pages.
        self._renewed = 0
        self.count = recent.count

    def trust(self, share: float) -> None:
        self.share = share

    def lead_by(self, pages: int) -> None:
        """Set the factor of all leads, in pages: one level of a hint is a lead of `_LEAD * pages` pages.

        The default is the size of the pool.
        """
        self._lead_pages = pages

    def hint(self, pages: Pages, hints: PageHints | None) -> None:
        self.codes[pages] = merge_codes(self.codes[pages], None if hints is None else hints.codes)
        if hints is not None:
            self._expires[pages] = self._clock() + hints.lives

    def forget(self, pages: Pages) -> None:
        self.codes[pages] = NEUTRAL

    def renew(self, pages: Pages) -> None:  # `codes` stays unchanged, so each page keeps its hint
        self._renewed += int(np.count_nonzero(self._settled[pages]))

    def moved(self, sources: Pages, targets: Pages) -> None:
        self.codes[targets] = self.codes[sources]
        self.forget(sources)
        self._expires[targets] = self._expires[sources]

    def append(self, pages: Pages | Indices) -> None:
        if not len(pages):  # pages move to `_older` only when other pages are added
            return
        self._recent.append(pages)
        self.count += len(pages)
        excess = self._recent.count - int((1.0 - self.share) * self.count)
        if excess > 0:
            self._settle(self._recent.pop(excess))

    def append_old(self, pages: Pages | Indices) -> None:
        self.count += len(pages)
        self.codes[pages] = NEUTRAL
        self._before_all -= 1
        self._since[pages] = self._before_all
        self._settled[pages] = True
        self._older_of(NEUTRAL).append_old(pages)

    def remove(self, pages: Pages | Indices) -> None:
        self.count -= len(pages)
        settled = self._settled[pages]
        if not settled.any():
            self._recent.remove(pages)
            return
        older, recent = pages[settled], pages[~settled]
        self._recent.remove(recent)
        self._settled[older] = False
        codes = self.codes[older]
        for code in set(codes.tolist()):
            self._older[code].remove(older[codes == code])

    def pop(self, count: int) -> Pages:
        gone = self._pop(count)
        self.codes[gone] = NEUTRAL
        return gone

    def pop_explained(self, count: int) -> tuple[Pages, Reasons]:
        gone = self._pop(count)
        reasons = (LEVEL_OF[self.codes[gone]] < NEUTRAL).astype(np.uint8) * np.uint8(BY_HINT)
        self.codes[gone] = NEUTRAL
        return gone, reasons

    def leads(self, pages: Pages | Indices) -> NDArray[np.float64]:
        """Returns the lead of each page in pool sizes: a constant lead for each level of the hint, times `share`.

        `HintShare` raises `share` while hints gain hits, and lowers `share` while hints lose hits. So if hints were
        often wrong, all leads are small.
        """
        return (LEVEL_OF[self.codes[pages]].astype(np.float64) - NEUTRAL) * (_LEAD * self.share)

    def first_lead(self) -> float:
        page = np.array([self.first()], np.int32)
        lead, _ = self._lead(int(self.codes[page[0]]), page, self._clock())
        return lead / self._lead_pages * self.share

    def first(self) -> int:
        return self._recent.first() if self.count == self._recent.count else self._older[self._lowest()[0]].first()

    def positions(self, pages: Indices) -> Indices:  # pages in `_older` have negative positions, in their LRU order
        return np.where(self._settled[pages], self._since[pages] - self._positions, self._recent.positions(pages))

    def pages(self) -> Pages:
        return np.concatenate([*(order.pages() for order in self._older.values()), self._recent.pages()])

    def clear(self) -> None:
        self._recent.clear()
        self._log.clear()
        self._settled[:] = False
        self._renewed = self.count = 0

    def check(self) -> None:
        self._recent.check()
        if self.count != len(self.pages()) or int(self._settled.sum()) != self.count - self._recent.count:
            raise InvariantError(f"idle order: holds {len(self.pages())} pages, but count is {self.count}")
        for code, order in self._older.items():
            order.check()
            pages = order.pages()
            if not (self._settled[pages].all() and (self.codes[pages] == code).all()):
                raise InvariantError(f"idle order: a page of another kind is in the order of kind {code}")
            if (np.diff(self._since[pages]) < 0).any():
                raise InvariantError(f"idle order: the pages of kind {code} are not sorted by age")

    def _pop(self, count: int) -> Pages:
        if count > self.count:
            raise InvariantError(f"idle order: {count} pages were asked for, but it holds {self.count}")
        taken: list[Pages] = []
        while count and self.count > self._recent.count:
            taken.append(self._pop_older(count))
            count -= len(taken[-1])
        if count:
            taken.append(self._recent.pop(count))
            self.count -= count
        return taken[0] if len(taken) == 1 else np.concatenate(taken) if taken else np.zeros(0, np.int32)

    def _settle(self, pages: Pages) -> None:
        """Move `pages`, which were the oldest of `recent`, to the order in `_older` for their kind of hint."""
        renewed = min(self._renewed, len(pages))
        self._renewed -= renewed
        self._since[pages] = self._positions + np.maximum(0, np.arange(len(pages)) - renewed)
        self._positions += len(pages) - renewed
        self._settled[pages] = True
        codes = self.codes[pages]
        for code in set(codes.tolist()):
            self._older_of(code).append(pages[codes == code])

    def _older_of(self, code: int) -> LruOrder:
        """Returns the order of this kind of hint in `_older`."""
        if code not in self._older:
            self._older[code] = LruOrder(self._num_pages, self._log)
        return self._older[code]

    def _pop_older(self, most: int) -> Pages:
        """Pop up to `most` pages of the lowest ranks.

        All popped pages have one kind of hint. Each of them ranks below every page of every other kind.
        """
        chosen, bound, now = self._lowest()
        order = self._older[chosen]
        pages = order.oldest(most)
        lead, alike = self._lead(chosen, pages, now)
        below = int(np.searchsorted(self._since[pages[:alike]], bound - lead))
        pages = order.pop(max(1, below))
        self._settled[pages] = False
        self.count -= len(pages)
        return pages

    def _lowest(self) -> tuple[int, int, float]:
        """Find the kind of hint whose oldest page has the lowest rank.

        Returns that kind, the lowest rank among the other kinds, and the current time.
        """
        now = self._clock()
        ranks: list[tuple[int, int]] = []
        for code, order in self._older.items():
            if order.count:
                head = order.oldest(1)
                ranks.append((int(self._since[head[0]]) + self._lead(code, head, now)[0], code))
        (_, chosen), (bound, _) = sorted([*ranks, (_LAST, 0)])[:2]
        return chosen, bound, now

    def _lead(self, code: int, pages: Pages, now: float) -> tuple[int, int]:
        """Returns the lead of the first page in pages, and how many pages in a row have the same lead.

        The count begins with the first page. An expired hint has no lead. All `pages` have hints of kind `code`, and
        are sorted, oldest first. All hints of a kind have similar times to live. So a page whose hint has expired never
        waits long behind a page whose hint still holds.
        """
        lead = (int(LEVEL_OF[code]) - NEUTRAL) * _LEAD * self._lead_pages
        if code == SHARED or code < LEVELS:
            return lead, len(pages)
        over = self._expires[pages] <= now
        others = (over != over[0]).nonzero()[0]
        return 0 if over[0] else lead, int(others[0]) if others.size else len(pages)
