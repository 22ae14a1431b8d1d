"""What the loop writes down of a pool while somebody watches, and what follows: evictions, and the prefix tree."""

import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.pages import PagePool
from kvcache.watched import EvictionRow, TreeRow

_ENTRIES = 1 << 15  # that wait for the thread; beyond that the oldest are lost
_EVICTED = 1 << 16  # pages of which it is seen that they are asked for again
_SHOWN = 32
_SPREAD_S = 0.25  # evictions of one reason within this time are shown as one
REASONS = ("LRU", "hint", "quota", "reset")  # the first three as `HintedOrder.reasons` has them


class PoolEntry(NamedTuple):
    """Something that happened to pages; `words` name their content, `more` is as `pool.pages.PageNews` has it."""

    what: str
    at: float
    pages: NDArray[np.int32]
    more: NDArray[Any] | None
    words: NDArray[np.uint64]


class PoolLog:
    """What the loop calls: it appends, and nothing else."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entries: deque[PoolEntry] = deque(maxlen=_ENTRIES)

    def begin(self) -> None:
        """Have everything written down from now on."""
        self._pool.idle.explains = True  # there may be another order since the last call
        self._pool.told = self._note

    def end(self) -> None:
        self._pool.told = None
        self._pool.idle.explains = False
        self._entries.clear()

    def take(self) -> list[PoolEntry]:
        return [self._entries.popleft() for _ in range(len(self._entries))]

    def _note(self, what: str, pages: NDArray[np.int32], more: NDArray[Any] | None) -> None:
        # An evicted page keeps its digest until it is published again.
        self._entries.append(PoolEntry(what, time.monotonic(), pages, more, self._pool.index.words_of(pages)))


@dataclass(slots=True)
class _Evicted:
    """Pages that were evicted together, and how many of them were published again."""

    at: float
    pool: str
    reason: str
    first: str
    pages: int = 0
    again: int = 0


class EvictionBook:
    """The last evictions of all pools, and which of their pages were asked for again."""

    def __init__(self) -> None:
        self.pages: Counter[str] = Counter()  # by reason
        self.again: Counter[str] = Counter()
        self._last: deque[_Evicted] = deque(maxlen=_SHOWN)
        self._of_word: OrderedDict[int, _Evicted] = OrderedDict()

    def apply(self, pool: str, entry: PoolEntry) -> None:
        if entry.what == "published":
            for word in entry.words.tolist() if self._of_word else ():
                if (found := self._of_word.pop(word, None)) is not None:
                    found.again += 1
                    self.again[found.reason] += 1
        elif entry.what != "found":
            codes = np.zeros(len(entry.pages), np.uint8) if entry.more is None else entry.more
            if entry.what == "reset":
                codes = np.full(len(entry.pages), len(REASONS) - 1)
            for code in set(codes.tolist()):
                self._book(pool, REASONS[code], entry.at, entry.words[codes == code].tolist())

    def _book(self, pool: str, reason: str, at: float, words: list[int]) -> None:
        group = next((one for one in reversed(self._last) if (one.pool, one.reason) == (pool, reason)), None)
        if group is None or at - group.at > _SPREAD_S:
            group = _Evicted(at, pool, reason, f"{words[0]:016x}")
            self._last.append(group)
        group.pages += len(words)
        self.pages[reason] += len(words)
        self._of_word.update(dict.fromkeys(words[-_EVICTED:], group))
        while len(self._of_word) > _EVICTED:
            self._of_word.popitem(last=False)

    def rows(self) -> tuple[EvictionRow, ...]:
        """The last first."""
        now = time.monotonic()
        return tuple(
            EvictionRow(
                age_s=now - one.at,
                pool=one.pool,
                reason=one.reason,
                pages=one.pages,
                again=one.again,
                first=one.first[:8],
            )
            for one in reversed(self._last)
        )


class PrefixTree:
    """Which page comes before which of a pool, as far as it was published, or in a row, since somebody watches.

    A page's `born` is the number of the entry that published it: a page that is younger than one that follows it holds
    something else by now.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._parent = np.zeros(pool.num_pages + 1, np.int32)
        self._born = np.zeros(pool.num_pages + 1, np.uint32)
        self._hits = np.zeros(pool.num_pages + 1, np.uint32)
        self._clock = 1

    def add_row(self, pages: NDArray[np.int32]) -> None:
        """Published pages of a request, from its first on, that was there before anybody watched."""
        new = self._born[pages] == 0
        self._plant(pages[new], np.concatenate((pages[:1] * 0, pages[:-1]))[new])

    def apply(self, entry: PoolEntry) -> None:
        if entry.what == "found":
            self._hits[entry.pages] += 1
        elif entry.what == "published" and entry.more is not None:
            self._clock += 1
            self._plant(entry.pages, entry.more)

    def _plant(self, pages: NDArray[np.int32], parents: NDArray[np.int32]) -> None:
        self._parent[pages], self._born[pages], self._hits[pages] = parents, self._clock, 0

    def rows(self, pool: str, most: int) -> tuple[TreeRow, ...]:
        """The parts between branchings that have the most pages, with those that follow; each after its parent."""
        known = np.flatnonzero(self._pool.index.published & (self._born > 0))
        if not known.size:
            return ()
        up = np.zeros(len(self._parent), np.int32)
        parents = self._parent[known]
        there = self._pool.index.published[parents] & (self._born[parents] <= self._born[known])
        up[known] = np.where(there & (self._born[parents] > 0), parents, 0)
        branches = np.bincount(up[known], minlength=len(up))
        is_head = (up[known] == 0) | (branches[up[known]] > 1)
        heads = known[is_head]
        first = up.copy()  # of each page the first one of its part: by doubling the steps that are taken at once
        first[heads] = heads
        while not np.array_equal(further := first[first], first):
            first = further
        own = np.bincount(first[known], minlength=len(up))
        before = first[up[heads]]
        below = _with_below(heads, before, own)
        chosen = np.argsort(-below[heads], kind="stable")[:most]
        return tuple(
            TreeRow(pool=pool, page=page, parent=parent, pages=int(own[page]), below=int(below[page]), hits=hits)
            for page, parent, hits in zip(
                heads[chosen].tolist(), before[chosen].tolist(), self._hits[heads[chosen]].tolist(), strict=True
            )
        )


def _with_below(heads: NDArray[np.intp], before: NDArray[np.int32], own: NDArray[np.intp]) -> NDArray[np.intp]:
    """Pages of each part with all that follow it: level by level, from the deepest up."""
    level, reached = np.zeros(len(own), np.int32), before == 0
    levels = [reached]
    level[heads[reached]] = 1
    while (reached := (level[before] == len(levels)) & (level[heads] == 0)).any():
        level[heads[reached]] = len(levels) + 1
        levels.append(reached)
    below = own.copy()
    for reached in levels[:0:-1]:
        np.add.at(below, before[reached], below[heads[reached]])
    return below
