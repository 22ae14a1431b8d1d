"""Baselines: hits that plain LRU, or full trust in hints, would have had; and the share that hints earn by them."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from kvcache.eviction_order import Pages
from kvcache.pool.hinted_order import HintedOrder
from kvcache.pool.lru_order import LruOrder
from kvcache.retention import PageHints

Words = NDArray[np.uint64]
"""The first word of each page's digest, in logical order: enough to tell pages apart, nearly always."""

# Pages that a baseline keeps, at least, where the pool has as many. Fewer cost less and say less: on public traces, by
# three samplings, hit rates stayed within 0.4 points of those with every page looked at, with 4,096 within 0.2.
_LEAST_SAMPLE = 1024
_FIRST_SHARE = 0.2
_LEAST_SHARE = 0.02  # what is never asked could never prove right again
_STEP = 8.0
_CREDIT = 0.25  # of the pool's pages
_CREDIT_OF_LOOKUPS = 0.01


class LruBaseline:
    """A plain LRU of digests, of as many pages as the pool has: one digest in `rate`, and so many times less room.

    The sample is by digest, so a page is in it at each of its uses or at none; counts of such a sample stand for the
    whole (C. Waldspurger and others, "Efficient MRC construction with SHARDS", FAST 2015).
    """

    def __init__(self, num_pages: int) -> None:
        self.rate = 1
        while num_pages // (2 * self.rate) >= _LEAST_SAMPLE:
            self.rate *= 2
        # None of these bits is set in the first word of a digest that is looked at: others than the prefix index takes.
        self.mask = np.uint64((self.rate - 1) << 32)
        self._room = max(1, num_pages // self.rate)  # as of the last visit
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def count(self, words: Words) -> int:
        """How many of `words` are looked at."""
        return len(self._sample(words))

    def visit(self, words: Words, room: int) -> int:
        """A request comes for these pages: how many of those looked at it finds, from the first on. They stay.

        `room`: pages of the pool that can hold what can be found, now.
        """
        self._room = max(1, room // self.rate)
        sample, kept = self._sample(words), self._kept
        found = next((at for at, word in enumerate(sample) if word not in kept), len(sample))
        self._touch(sample)
        return found

    def touch(self, words: Words) -> None:
        """These pages were used, the first of them last."""
        self._touch(self._sample(words))

    def forget(self, words: Words) -> None:
        """These pages left the pool by another's decision than that of any order."""
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
    """The order of a pool's hints at a `share` of its own, over the same sample of digests as an `LruBaseline` has.

    The real cache shows what hints are worth at the share that they have now. A share may be too small to hold any page
    until it is asked for again, and then right hints show nothing: this baseline tells them from wrong ones. Its calls
    mean what those of an `LruBaseline` mean.
    """

    def __init__(self, num_pages: int, rate: int, mask: np.uint64, share: float) -> None:
        most = max(1, num_pages // rate)
        self.rate, self.mask = rate, mask
        self._order = HintedOrder(most, LruOrder(most), share=share)
        self._most = most
        self._room = most  # as of the last visit
        self._ids: dict[int, int] = {}  # by word
        self._words = np.zeros(most + 1, np.uint64)  # by id
        self._free = [*range(most, 0, -1)]

    def visit(self, words: Words, room: int) -> int:
        self._room = min(self._most, max(1, room // self.rate))
        sample = words[self._sampled(words)].tolist()
        found = next((at for at, word in enumerate(sample) if word not in self._ids), len(sample))
        self._append(self._take(sample))
        return found

    def widen(self, width: float) -> None:
        """A page of this order stands for so many of the pool."""
        self._order.lead_by(max(1, int(self._most / width)))

    def touch(self, words: Words) -> None:
        self._append(self._take(words[self._sampled(words)].tolist()))

    def leave(self, words: Words, hints: PageHints | None) -> None:
        """A request leaves these pages and says `hints` of them, or nothing."""
        at = self._sampled(words)
        pages = self._take(words[at].tolist())
        if hints is not None:  # of those that were taken
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
        """Take these pages out of the order, or make them by evicting the first. Drops the end of too many words."""
        del words[self._room :]
        if len(set(words)) < len(words):  # pages that their first words do not tell apart: made to mislead us
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
    """Which share of a pool may follow hints. It is earned.

    A page hit that plain LRU would have missed adds to the share, one that it would have had takes away from it, each
    `_STEP` pages' worth. So wrong hints lose an eighth of the share that they had, in pages, and are out; right ones
    have all that may be had after a few times the pool's pages. Measured on public traces at 1,000 to 30,000 blocks:
    with hints that are all inverted the loss against plain LRU is 0.6 points of hit rate at most.

    A share that holds less than what is hinted comes again for may hit nothing at all, and would stay as it is whatever
    the hints are worth. So the largest share is tried beside the real one: while it promises more hits than plain LRU
    and the real share have, the share follows what it promises. A promise is believed on credit. Pages that the real
    cache hits less than plain LRU use the credit up; it is a part of the pool, and grows by a part of the lookups. That
    bounds what a promise that does not come true can cost.

    Attributes:
        value: the share now, 0.0 to `most`.
    """

    def __init__(self, num_pages: int, most: float) -> None:
        self._num_pages = num_pages
        self._most = most
        self._promise = 0.0  # pages by which the largest share is ahead of the others
        self._credit = _CREDIT * num_pages
        self.value = min(most, _FIRST_SHARE)

    def learn(self, gained: int, promised: int, looked: int) -> None:
        """Adjust the share after a lookup of `looked` pages.

        `gained`: hits above those of plain LRU; `promised`: the same for hints at their largest share.
        """
        learned = promised if self._promise > 0 and self._credit > 0 else gained
        most = self._num_pages / _STEP
        self._promise = min(most, max(-most, self._promise + promised - max(gained, 0)))
        credit = _CREDIT * self._num_pages
        self._credit = min(credit, max(-credit, self._credit + gained + _CREDIT_OF_LOOKUPS * looked))
        self.value = min(self._most, max(_LEAST_SHARE, self.value + _STEP * learned / self._num_pages))
