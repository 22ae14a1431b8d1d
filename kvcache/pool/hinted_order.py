"""`HintedOrder`: wraps another eviction order, and biases it by the retention hints of requests.

A bounded share of the idle pages follows the hints. The other pages follow the wrapped order, usually plain LRU:

    release ──► recent: the newest (1 - share), LRU ──oldest──► older: one LRU order per kind of hint ──► evicted

`older` evicts the page of the lowest rank. The rank of a page is its position in the LRU order plus the lead of its
hint. The lead says how much longer a page is kept than a page without a hint. A negative lead means a shorter time. The
unit is the pool's size, and time passes with each released page. A page whose lead is used up is evicted as if it had
no hint. So a hint decays and never pins a page. If a share of the pages follows hints, the cache still keeps at least
the pages that plain LRU would keep in a pool that is smaller by this share. Two designs were rejected. Strict classes
of hints would pin pages. If all pages could follow hints, wrong hints could cost any number of hits.

The share grows only while hints gain page hits (`HintShare`). To learn whether hints help, two caches are simulated.
The first cache is plain LRU. In the second cache, the largest allowed share of the idle pages follows hints.
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

Words = NDArray[np.uint64]
"""The first word of each page's digest, in logical order. It nearly always tells two pages apart."""

# A baseline (a simulated cache) keeps at least this many pages, if the pool has as many. A smaller sample costs less
# and is less exact. On public traces, over three samplings, hit rates with this sample were within 0.4 points of an
# unsampled LRU; with 4,096 pages they were within 0.2 points.
_LEAST_SAMPLE = 1024
_FIRST_SHARE = 0.2
_LEAST_SHARE = 0.02  # above 0, because a share of 0 could never grow: without pages, hints gain no hits
_STEP = 8.0
_CREDIT = 0.25  # the initial credit (see `HintShare`), as a share of the pool's pages
_CREDIT_OF_LOOKUPS = 0.01


class HintedOrder(EvictionOrder):
    """The idle pages of one pool in their order of eviction. The module's docstring explains the order.

    `recent` must hold exactly the pages that are idle now. `clock` returns seconds, for hints with a time to live.

    Attributes:
        share: the share of idle pages that follows hints. `trust` changes it.
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
        self._places = 0
        # The number of pages of `_older` that are replaced by newer pages (`renew`). The next pages that move to
        # `_older`, as many as this number, do not advance `_places`. So renewals do not age the other pages.
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
        return np.where(self._settled[pages], self._since[pages] - self._places, self._recent.positions(pages))

    def pages(self) -> Pages:
        return np.concatenate([*(order.pages() for order in self._older.values()), self._recent.pages()])

    def mend(self, pages: Indices) -> None:
        """Make the order contain exactly `pages`. Pages that followed hints before the interrupt come first."""
        settled = self._settled[pages]
        older = pages[settled]
        self._recent.mend(pages[~settled])
        recent = self._recent.pop(self._recent.count)
        self._log.clear()
        self._settled[:] = False
        self._renewed = self.count = 0
        self.append(np.concatenate((older[np.argsort(self._since[older], kind="stable")].astype(np.int32), recent)))

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
        self._since[pages] = self._places + np.maximum(0, np.arange(len(pages)) - renewed)
        self._places += len(pages) - renewed
        self._settled[pages] = True
        codes = self.codes[pages]
        for code in set(codes.tolist()):
            if code not in self._older:
                self._older[code] = LruOrder(self._num_pages, self._log)
            self._older[code].append(pages[codes == code])

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


class Baseline:
    """A pool of `num_pages` pages, simulated over a sample of page digests. `share` of its idle pages follows hints.

    With a share of 0, the baseline is a plain LRU.

    It keeps one in `rate` digests as a sample. The digest decides whether a page is in the sample, so the sample has
    either all uses of a page or none. The counts of such a sample scale to the whole pool (C. Waldspurger and others,
    "Efficient MRC construction with SHARDS", FAST 2015).

    The real cache shows what hints gain only at their current share. If that share is too small to keep any page until
    its next request, right hints gain nothing and look like wrong hints. A baseline with the largest share
    distinguishes the two cases.
    """

    def __init__(self, num_pages: int, share: float = 0.0) -> None:
        self.rate = 1
        while num_pages // (2 * self.rate) >= _LEAST_SAMPLE:
            self.rate *= 2
        # A digest is in the sample if its first word has none of these bits set. The prefix index uses other bits for
        # its buckets.
        self.mask = np.uint64((self.rate - 1) << 32)
        self._most = most = num_pages // self.rate
        self._room = most  # how many pages the sample may keep, as of the last visit
        self._order = HintedOrder(most, LruOrder(most), share=share)
        self._ids: dict[int, int] = {}  # for each word, the id that stands for the page
        self._words = [0] * (most + 1)  # by id, the word
        self._free = [*range(most, 0, -1)]

    def count(self, words: Words) -> int:
        """Returns how many of `words` are in the sample."""
        return len(self._sampled(words))

    def visit(self, words: Words, room: int) -> int:
        """Record that a request asks for the pages with these `words`, which become the newest pages.

        Returns how many pages of the sample were hits, from the first one on, before the first miss.

        `room` is the number of pages of the pool that can currently be used for caching.
        """
        self._room = min(self._most, max(1, room // self.rate))
        sample = words[self._sampled(words)].tolist()
        found = next((at for at, word in enumerate(sample) if word not in self._ids), len(sample))
        self._append(self._take(sample))
        return found

    def widen(self, width: float) -> None:
        """Adjust the leads to a pool that also caches states.

        On average, each published page stands for `width` pages of memory (see `PagePool.width`). A lead is measured
        in pages of memory. The baseline holds only published pages, so the baseline divides the lead by `width`.
        """
        self._order.lead_by(max(1, int(self._most / width)))

    def touch(self, words: Words) -> None:
        """Record a use of the pages with these `words`. The first page counts as the most recently used page."""
        self._append(self._take(words[self._sampled(words)].tolist()))

    def leave(self, words: Words, hints: PageHints | None) -> None:
        """Record that a request releases these pages. `hints` are the request's hints for these pages, or None."""
        at = self._sampled(words)
        pages = self._take(words[at].tolist())
        if hints is not None:  # `_take` may have dropped the last pages of `at`
            at = at[: len(pages)]
            hints = hints.of(at)
        self._order.hint(pages, hints)
        self._append(pages)

    def forget(self, words: Words) -> None:
        """Remove the pages with these `words`, which left the pool for a reason other than an eviction."""
        gone = {self._ids[word] for word in words.tolist() if word in self._ids}
        if gone:
            pages = np.array([*gone], np.int32)
            self._order.remove(pages)
            self._order.forget(pages)
            self._drop(pages)

    def clear(self) -> None:
        self._drop(self._order.pop(self._order.count))

    def _sampled(self, words: Words) -> NDArray[np.intp]:
        return (words & self.mask == 0).nonzero()[0]

    def _take(self, words: list[int]) -> Pages:
        """Remove the simulated pages with these words from the order, and return the ids of the pages.

        A page without an id gets a new id. If the baseline is full, the new pages evict other pages. If there are more
        words than the baseline may keep, the last words are dropped.
        """
        del words[self._room :]
        if len(set(words)) < len(words):  # only an attacker can make several pages with the same first word
            words = []
        ids = self._ids
        known = np.array([ids[word] for word in words if word in ids], np.int32)
        if known.size:
            self._order.remove(known)
        surplus = len(words) + self._order.count - self._room
        if surplus > 0:
            self._drop(self._order.pop(surplus))
        if len(known) == len(words):
            return known
        for word in words:
            if word not in ids:
                ids[word] = page = self._free.pop()
                self._words[page] = word
        return np.array([ids[word] for word in words], np.int32)

    def _append(self, pages: Pages) -> None:
        self._order.append(pages[::-1])  # reversed, because a pool releases a request's last page first

    def _drop(self, pages: Pages) -> None:
        gone: list[int] = pages.tolist()
        for page in gone:
            del self._ids[self._words[page]]
        self._free += gone


class HintShare:
    """The share of a pool's idle pages that follows hints. The share grows only while hints gain page hits.

    Each page hit that plain LRU would have missed adds `_STEP` pages to the share. Each page hit that plain LRU would
    have had, and that the cache missed, takes `_STEP` pages away. So wrong hints lose their share when they have cost
    as many hits as an eighth of the share's pages. Right hints reach the largest share after a number of page lookups
    that is a few times the pool's size. On public traces, with pools of 1,000 to 30,000 pages, hints that are all
    inverted lose at most 0.6 percentage points of hit rate against plain LRU.

    A small share may not keep a hinted page until its next request. Then even good hints gain no hits, and the share
    would never grow. Therefore a baseline (a simulated cache) follows hints with the largest share. While the baseline
    has more hits than both plain LRU and the real cache, the hits of the baseline adjust the share instead of the hits
    of the real cache.

    The hits of the baseline are only a promise, so they count only while there is credit. Each hit that plain LRU has
    and the real cache misses uses up credit. The initial credit is a part of the pool's size. The credit grows by a
    part of the number of pages that requests look up. So the credit bounds the cost of a promise that does not come
    true.

    Attributes:
        value: the current share, from 0.0 to `most`.
    """

    def __init__(self, num_pages: int, most: float) -> None:
        self._num_pages = num_pages
        self._most = most
        # the number of page hits by which the largest share is ahead of both plain LRU and the real cache
        self._promise = 0.0
        self._credit = _CREDIT * num_pages
        self.value = min(most, _FIRST_SHARE)

    def learn(self, gained: int, promised: int, looked: int) -> None:
        """Adjust the share after requests have looked up `looked` pages.

        `gained` is the number of page hits of the real cache, minus the page hits of plain LRU. `promised` is the
        number of page hits that the largest share would have had, minus the page hits of plain LRU.
        """
        learned = promised if self._promise > 0 and self._credit > 0 else gained
        most = self._num_pages / _STEP
        self._promise = min(most, max(-most, self._promise + promised - max(gained, 0)))
        credit = _CREDIT * self._num_pages
        self._credit = min(credit, max(-credit, self._credit + gained + _CREDIT_OF_LOOKUPS * looked))
        self.value = min(self._most, max(_LEAST_SHARE, self.value + _STEP * learned / self._num_pages))
