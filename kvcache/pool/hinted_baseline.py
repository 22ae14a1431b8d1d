"""What the pool would hit if its hints were trusted as far as they may be, counted beside the real cache.

The real cache shows what hints are worth at the share that they have now. A share may be too small to hold any page
until it is asked for again, and then right hints show nothing: this baseline tells them from wrong ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.idle_order import MOST_ORDERS, IdleOrder, OrderLog, Pages
from kvcache.pool.lru_baseline import Words
from kvcache.pool.retention import NEUTRAL, HintedOrder, PageHints


class HintedBaseline:
    """The order of a pool's hints at a `share` of its own, over the same sample of digests as an `LruBaseline` has."""

    def __init__(self, num_pages: int, rate: int, mask: np.uint64, share: float) -> None:
        most = max(1, num_pages // rate)
        self.rate, self.mask = rate, mask
        self._order = HintedOrder(most, IdleOrder(most, OrderLog(most, MOST_ORDERS)))
        self._order.share = share
        self._most = most
        self._room = most  # as of the last visit
        self._ids: dict[int, int] = {}  # by word
        self._words = np.zeros(most + 1, np.uint64)  # by id
        self._free = [*range(most, 0, -1)]

    def visit(self, words: Words, room: int) -> int:
        """As of an `LruBaseline`."""
        self._room = min(self._most, max(1, room // self.rate))
        sample = words[self._sampled(words)].tolist()
        found = next((at for at, word in enumerate(sample) if word not in self._ids), len(sample))
        self._append(self._take(sample))
        return found

    def touch(self, words: Words) -> None:
        """These pages were used, the first of them last."""
        self._append(self._take(words[self._sampled(words)].tolist()))

    def leave(self, words: Words, hints: PageHints | None) -> None:
        """A request leaves these pages and says `hints` of them, or nothing."""
        at = self._sampled(words)
        pages = self._take(words[at].tolist())
        if hints is not None:  # of those that were taken
            at = at[: len(pages)]
            hints = PageHints(hints.codes[at], None if hints.lives is None else hints.lives[at])
        self._order.hint(pages, hints)
        self._append(pages)

    def forget(self, words: Words) -> None:
        """These pages left the pool by another's decision than that of any order."""
        gone = {self._ids[word] for word in words.tolist() if word in self._ids}
        if gone:
            pages = np.array([*gone], np.int32)
            self._order.remove(pages)
            self._drop(pages)

    def clear(self) -> None:
        """Every page left."""
        self._drop(self._order.pop(self._order.count))

    def _sampled(self, words: Words) -> NDArray[np.intp]:
        return np.flatnonzero(words & self.mask == 0)

    def _take(self, words: list[int]) -> Pages:
        """Take these pages out of the order, or make them, in place of what goes first. Of too many the head."""
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
        self._order.codes[pages] = NEUTRAL
        for page, word in zip(pages.tolist(), self._words[pages].tolist(), strict=True):
            del self._ids[word]
            self._free.append(page)
