"""`HintedOrder`: an eviction order biased by retention hints, over another order. It frees no page.

A bounded share of the idle pages follows the hints. The rest follows the other order, as a rule plain LRU:

    release ──► recent: the newest (1 - share), LRU ──oldest──► older: one LRU order a kind of hint ──► evicted

`older` evicts the page of the lowest rank. The rank of a page is its place in the LRU order plus a lead, which its hint
gives in pool sizes. A page of a higher level lives longer by that lead, then goes as if it had no hint. So a hint
decays and never pins a page. Whatever the hints are, the cache keeps at least the pages that plain LRU keeps in a pool
that is smaller by the share. Rejected: strict classes, which pin pages; and leads without a share, as wrong hints would
cost without bound.

Hints have to earn their share (`HintShare`). Two baselines show what they are worth: the hits of plain LRU, and those
of hints that are fully trusted.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.eviction_order import BY_HINT, EvictionOrder, Indices, Pages, Reasons
from kvcache.pool.lru_order import LruOrder, OrderLog
from kvcache.retention import LEVEL_OF, LEVELS, NEUTRAL, SHARED, PageHints, Times, merge_codes

# The lead of one level, in pool sizes. On public traces a lead twice as long gives the same hits within 1 %, also if
# every fifth hint is wrong; half as long gives up to 4 % fewer.
_LEAD = 2
_LAST = 1 << 62
KINDS = SHARED + 1
"""The number of kinds of hint. Each kind has an LRU order."""

Words = NDArray[np.uint64]
"""The first word of each page's digest, in logical order. It nearly always tells two pages apart."""

# A baseline keeps at least this many pages, if the pool has as many. A smaller sample costs less and is less exact: on
# public traces, over three samplings, its hit rates were within 0.4 points of an unsampled LRU; 4,096 gave 0.2.
_LEAST_SAMPLE = 1024
_FIRST_SHARE = 0.2
_LEAST_SHARE = 0.02  # a share of 0 would ignore all hints, so they could never earn more
_STEP = 8.0
_CREDIT = 0.25  # the initial credit, as a share of the pool's pages
_CREDIT_OF_LOOKUPS = 0.01


class HintedOrder(EvictionOrder):
    """The idle pages of one pool in their order of eviction, see the module's docstring.

    `recent` holds the pages that are idle at present. `clock` returns seconds, for hints with a time to live.

    Attributes:
        share: the share of idle pages that follows hints; `trust` changes it.
    """

    def __init__(
        self, num_pages: int, recent: EvictionOrder, clock: Callable[[], float] = time.monotonic, share: float = 0.0
    ) -> None:
        self.share = share
        # The hint of each page. It is set while the page is not idle.
        self.codes = np.full(num_pages + 1, NEUTRAL, np.uint8)
        self._clock = clock
        self._num_pages = num_pages
        self._lead_pages = num_pages
        self._recent = recent
        self._log = OrderLog(num_pages, KINDS)
        self._older: dict[int, LruOrder] = {}  # by code
        self._settled = np.zeros(num_pages + 1, np.bool_)  # pages of `_older`
        self._since = np.zeros(num_pages + 1, np.int64)  # by page of `_older`: its place in the LRU order
        self._expires: Times = np.zeros(num_pages + 1)  # read only for kinds with a time to live
        self._places = 0
        self._renewed = 0  # pages that were put back: the next so many to settle keep their old places
        self.count = recent.count

    def trust(self, share: float) -> None:
        self.share = share

    def lead_by(self, pages: int) -> None:
        """Set the length of a lead to `_LEAD` times `pages` a level. The default is the whole pool."""
        self._lead_pages = pages

    def hint(self, pages: Pages, hints: PageHints | None) -> None:
        self.codes[pages] = merge_codes(self.codes[pages], None if hints is None else hints.codes)
        if hints is not None:
            self._expires[pages] = self._clock() + hints.lives

    def forget(self, pages: Pages) -> None:
        self.codes[pages] = NEUTRAL

    def renew(self, pages: Pages) -> None:  # the hints of renewed pages stay
        self._renewed += int(np.count_nonzero(self._settled[pages]))

    def moved(self, sources: Pages, targets: Pages) -> None:
        self.codes[targets] = self.codes[sources]
        self.forget(sources)
        self._expires[targets] = self._expires[sources]

    def append(self, pages: Pages | Indices) -> None:
        if not len(pages):  # only an added page can push recent pages into `_older`
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

    def leads(self, pages: Pages | Indices) -> NDArray[np.float64]:  # scaled by the share that hints have earned
        return (LEVEL_OF[self.codes[pages]].astype(np.float64) - NEUTRAL) * (_LEAD * self.share)

    def first_lead(self) -> float:
        page = np.array([self.first()], np.int32)
        over, _ = self._expired(int(self.codes[page[0]]), page, self._clock())
        return 0.0 if over else float(self.leads(page)[0])

    def first(self) -> int:
        return self._recent.first() if self.count == self._recent.count else self._older[self._lowest()[0]].first()

    def positions(self, pages: Indices) -> Indices:  # settled pages have negative positions, in LRU order
        return np.where(self._settled[pages], self._since[pages] - self._places, self._recent.positions(pages))

    def pages(self) -> Pages:
        return np.concatenate([*(order.pages() for order in self._older.values()), self._recent.pages()])

    def mend(self, pages: Indices) -> None:
        """As the base. Pages that followed hints still come before the others."""
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
        """Move `pages`, the oldest of `recent`, to the orders of their hints."""
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
        """Pop the pages of the lowest rank: pages of one kind, up to `most`, that all rank below every other kind."""
        chosen, bound, now = self._lowest()
        order = self._older[chosen]
        pages = order.oldest(most)
        over, alike = self._expired(chosen, pages, now)
        lead = 0 if over else self._lead(chosen)
        below = int(np.searchsorted(self._since[pages[:alike]], bound - lead))
        pages = order.pop(max(1, below))
        self._settled[pages] = False
        self.count -= len(pages)
        return pages

    def _lowest(self) -> tuple[int, int, float]:
        """The kind whose oldest page has the lowest rank, the lowest rank of the other kinds, and the present time."""
        now = self._clock()
        ranks: list[tuple[int, int]] = []
        for code, order in self._older.items():
            if order.count:
                head = order.oldest(1)
                lead = 0 if self._expired(code, head, now)[0] else self._lead(code)
                ranks.append((int(self._since[head[0]]) + lead, code))
        (_, chosen), (bound, _) = sorted([*ranks, (_LAST, 0)])[:2]
        return chosen, bound, now

    def _lead(self, code: int) -> int:
        return (int(LEVEL_OF[code]) - NEUTRAL) * _LEAD * self._lead_pages

    def _expired(self, code: int, pages: Pages, now: float) -> tuple[bool, int]:
        """Whether the hint of the first of `pages`, oldest first, has expired, and for how many in a row that holds.

        A kind has one class of time to live, so a page never waits long behind one whose hint lives longer.
        """
        if code == SHARED or code < LEVELS:
            return False, len(pages)
        over = self._expires[pages] <= now
        others = (over != over[0]).nonzero()[0]
        return bool(over[0]), int(others[0]) if others.size else len(pages)


class LruBaseline:
    """A plain LRU of digests for a pool of `num_pages` pages. It keeps only one digest in `rate`, as a sample.

    The sample is by digest: all uses of a page are in it, or none is. The counts of such a sample scale to the whole
    pool (C. Waldspurger and others, "Efficient MRC construction with SHARDS", FAST 2015).
    """

    def __init__(self, num_pages: int) -> None:
        self.rate = 1
        while num_pages // (2 * self.rate) >= _LEAST_SAMPLE:
            self.rate *= 2
        # A digest is in the sample if its first word has none of these bits. The prefix index uses other bits.
        self.mask = np.uint64((self.rate - 1) << 32)
        self._room = max(1, num_pages // self.rate)  # at the last visit
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def count(self, words: Words) -> int:
        """The number of `words` that are in the sample."""
        return len(self._sample(words))

    def visit(self, words: Words, room: int) -> int:
        """A request asks for these pages, which are the newest from now on. Returns how many sampled ones it finds.

        Counts the run of hits from the first page. `room`: pages of the pool that can hold cached pages at present.
        """
        self._room = max(1, room // self.rate)
        sample, kept = self._sample(words), self._kept
        found = next((at for at, word in enumerate(sample) if word not in kept), len(sample))
        self._touch(sample)
        return found

    def touch(self, words: Words) -> None:
        """These pages were used; the first one counts as used last."""
        self._touch(self._sample(words))

    def forget(self, words: Words) -> None:
        """These pages left the pool for another reason than eviction."""
        for word in self._sample(words):
            self._kept.pop(word, None)

    def clear(self) -> None:
        self._kept.clear()

    def _touch(self, sample: list[int]) -> None:
        kept = self._kept
        for word in reversed(sample):
            kept[word] = None
            kept.move_to_end(word)
        while len(kept) > self._room:
            kept.popitem(last=False)

    def _sample(self, words: Words) -> list[int]:
        if self.rate == 1:
            return words.tolist()
        return words[words & self.mask == 0].tolist()


class HintedBaseline:
    """The hinted order of a pool, at a fixed `share`, over the same sample of digests as an `LruBaseline`.

    The real cache shows only what hints are worth at their present share. If that share is too small to keep any page
    until its next request, right hints gain nothing and look like wrong ones. This baseline tells the two apart. Its
    methods mean the same as those of `LruBaseline`.
    """

    def __init__(self, num_pages: int, rate: int, mask: np.uint64, share: float) -> None:
        most = max(1, num_pages // rate)
        self.rate, self.mask = rate, mask
        self._order = HintedOrder(most, LruOrder(most), share=share)
        self._most = most
        self._room = most  # at the last visit
        self._ids: dict[int, int] = {}  # the id of each word
        self._words = np.zeros(most + 1, np.uint64)  # the word of each id
        self._free = [*range(most, 0, -1)]

    def visit(self, words: Words, room: int) -> int:
        self._room = min(self._most, max(1, room // self.rate))
        sample = words[self._sampled(words)].tolist()
        found = next((at for at, word in enumerate(sample) if word not in self._ids), len(sample))
        self._append(self._take(sample))
        return found

    def widen(self, width: float) -> None:
        """A lead is counted in pages of the pool; each page of this order stands for `width` of them."""
        self._order.lead_by(max(1, int(self._most / width)))

    def touch(self, words: Words) -> None:
        self._append(self._take(words[self._sampled(words)].tolist()))

    def leave(self, words: Words, hints: PageHints | None) -> None:
        """A request releases these pages, with `hints` for them, or None."""
        at = self._sampled(words)
        pages = self._take(words[at].tolist())
        if hints is not None:  # `_take` may have dropped the end
            at = at[: len(pages)]
            hints = hints.of(at)
        self._order.hint(pages, hints)
        self._append(pages)

    def forget(self, words: Words) -> None:
        gone = {self._ids[word] for word in words.tolist() if word in self._ids}
        if gone:
            pages = np.array([*gone], np.int32)
            self._order.remove(pages)
            self._drop(pages)

    def clear(self) -> None:
        self._drop(self._order.pop(self._order.count))

    def _sampled(self, words: Words) -> NDArray[np.intp]:
        return np.flatnonzero(words & self.mask == 0)

    def _take(self, words: list[int]) -> Pages:
        """Take these pages out of the order, evicting others to add new ones. Drops the end if there are too many."""
        del words[self._room :]
        if len(set(words)) < len(words):  # different pages with equal first words: only an attacker makes those
            words = []
        known = [self._ids[word] for word in words if word in self._ids]
        if known:
            self._order.remove(np.array(known, np.int32))
        surplus = len(words) + self._order.count - self._room
        if surplus > 0:
            self._drop(self._order.pop(surplus))
        return np.array([self._page_of(word) for word in words], np.int32)

    def _append(self, pages: Pages) -> None:
        if pages.size:
            self._order.append(pages[::-1])  # tail first, as a pool frees them

    def _page_of(self, word: int) -> int:
        page = self._ids.get(word)
        if page is None:
            page = self._ids[word] = self._free.pop()
            self._words[page] = word
        return page

    def _drop(self, pages: Pages) -> None:
        self._order.forget(pages)
        for page, word in zip(pages.tolist(), self._words[pages].tolist(), strict=True):
            del self._ids[word]
            self._free.append(page)


class HintShare:
    """The share of a pool's idle pages that follows hints. Hints have to earn it.

    Each page hit that plain LRU would have missed adds `_STEP` pages to the share. Each hit that plain LRU would have
    had and the cache missed takes `_STEP` away. So wrong hints lose their share after they have cost an eighth of it,
    in pages, and right hints have the largest share after a few times the pool's pages. On public traces at 1,000 to
    30,000 blocks, hints that are all inverted lose at most 0.6 points of hit rate against plain LRU.

    A share too small to keep a hinted page until its next request hits nothing, and would never change, whatever the
    hints are worth. So a baseline tries the largest share beside the real one. While the baseline is ahead of plain LRU
    and of the real share, the share follows the baseline. That promise is believed on credit. Pages that the real cache
    hits less than plain LRU use up the credit, which begins as a part of the pool and grows by a part of the lookups.
    The credit bounds the cost of a promise that does not come true.

    Attributes:
        value: the share now, 0.0 to `most`.
    """

    def __init__(self, num_pages: int, most: float) -> None:
        self._num_pages = num_pages
        self._most = most
        self._promise = 0.0  # the pages by which the largest share leads plain LRU and the real share
        self._credit = _CREDIT * num_pages
        self.value = min(most, _FIRST_SHARE)

    def learn(self, gained: int, promised: int, looked: int) -> None:
        """Adjust the share after a lookup of `looked` pages.

        `gained`: hits of the cache minus those of plain LRU. `promised`: the same for the largest share.
        """
        learned = promised if self._promise > 0 and self._credit > 0 else gained
        most = self._num_pages / _STEP
        self._promise = min(most, max(-most, self._promise + promised - max(gained, 0)))
        credit = _CREDIT * self._num_pages
        self._credit = min(credit, max(-credit, self._credit + gained + _CREDIT_OF_LOOKUPS * looked))
        self.value = min(self._most, max(_LEAST_SHARE, self.value + _STEP * learned / self._num_pages))
