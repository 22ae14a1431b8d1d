"""The loop's record of a watched pool, and what is computed from it: the last evictions, and the prefix tree."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.eviction_order import Pages, Reasons
from kvcache.pool.journal import PageReader
from kvcache.pool.pages import PagePool
from kvcache.watch.messages import EvictionRow, TreeRow

Words: TypeAlias = NDArray[np.uint64]

_ENTRIES = 1 << 15  # how many entries may wait for the thread of `ManagerWatch`; if there are more, the oldest are lost
_EVICTED = 1 << 16  # how many evicted pages are remembered, in order to notice when one is published again
_SHOWN = 32
_SPREAD_S = 0.25  # in seconds: evictions of a pool that have the same reason and lie within this time are shown as one
_PUBLISHED = -1  # marks a publication in arrays that have the number of each eviction
_NO_WORDS = np.zeros(0, np.uint64)
REASONS = ("LRU", "hint", "quota", "reset")  # the reasons for evictions, at the index that the journal uses


class PoolEntry(NamedTuple):
    """One entry of the record: `what` happened to `pages` at the time `at`. `words` identify the pages' content.

    If the pages were evicted, `more` has the reasons. If they were published, `more` has the page before each page in
    its prompt. If a request has found the pages, `words` and `more` are empty, because nothing reads them.
    """

    what: str
    at: float
    pages: NDArray[np.int32]
    more: NDArray[Any]
    words: Words


class PoolLog(PageReader):
    """The record of one pool, to which the loop appends entries."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entries: deque[PoolEntry] = deque(maxlen=_ENTRIES)

    def begin(self) -> None:
        """Start recording."""
        self._pool.journal.read(self)

    def end(self) -> None:
        self._pool.journal.end(self)
        self._entries.clear()

    def take(self, most: int) -> list[PoolEntry]:
        """Remove the oldest entries, at most `most`, and return them in order."""
        return [self._entries.popleft() for _ in range(min(most, len(self._entries)))]

    def __len__(self) -> int:
        return len(self._entries)

    def found(self, pages: Pages) -> None:
        self._entries.append(PoolEntry("found", time.monotonic(), pages, _NO_WORDS, _NO_WORDS))

    def followed(self, pages: Pages, parents: Pages) -> None:
        self._entries.append(PoolEntry("published", time.monotonic(), pages, parents, self._pool.index.words_of(pages)))

    def gone(self, pages: Pages, why: Reasons | int) -> None:
        # An evicted page keeps its digest until new content is published in the page.
        words = self._pool.index.words_of(pages)
        self._entries.append(PoolEntry("gone", time.monotonic(), pages, np.asarray(why), words))


@dataclass(slots=True)
class _Evicted:
    """Pages that were evicted together, and the number of them that were published again."""

    number: int
    at: float
    pool: str
    reason: str
    first: str
    pages: int = 0
    again: int = 0


class EvictionBook:
    """The last evictions of all pools. Counts how many of the evicted pages were published again.

    The loop may write a thousand entries between two snapshots. It would be too slow to look up each page in a dict,
    because the endpoint's thread and the loop share the interpreter lock. Instead, many entries are applied at once by
    sorting them with numpy. The loop can run during the sort.
    """

    def __init__(self) -> None:
        self.pages: Counter[str] = Counter()  # by reason
        self.again: Counter[str] = Counter()
        self._last: deque[_Evicted] = deque(maxlen=_SHOWN)
        self._latest: dict[tuple[str, str], _Evicted] = {}  # for each pool and reason, the last eviction
        self._count = 0  # how many evictions were counted so far, which is also the number of the next eviction
        # The last evicted pages that have not been published again: `_words` has their words, ascending, and `_numbers`
        # has the number of each page's eviction.
        self._words = _NO_WORDS
        self._numbers: NDArray[np.int64] = np.zeros(0, np.int64)
        self._by_number: dict[int, _Evicted] = {}

    def apply(self, pool: str, entries: Sequence[PoolEntry]) -> None:
        """Count the evictions and publications in these entries of a pool."""
        words, numbers = list[Words](), list[int]()
        for entry in entries:
            if entry.what == "published":
                words.append(entry.words)
                numbers.append(_PUBLISHED)
            elif entry.what != "found":
                for reason, evicted in _by_reason(entry):
                    words.append(evicted[-_EVICTED:])
                    numbers.append(self._book(pool, reason, entry.at, evicted))
        if numbers and (self._words.size or max(numbers) != _PUBLISHED):
            lengths = [len(some) for some in words]
            self._count_again(np.concatenate(words), np.repeat(np.array(numbers, np.int64), lengths))

    def _book(self, pool: str, reason: str, at: float, words: Words) -> int:
        one = self._latest.get((pool, reason))
        if one is None or at - one.at > _SPREAD_S:
            one = self._latest[pool, reason] = _Evicted(self._count, at, pool, reason, f"{int(words[0]):016x}")
            self._by_number[one.number] = one
            self._last.append(one)
            self._count += 1
        one.pages += len(words)
        self.pages[reason] += len(words)
        return one.number

    def _count_again(self, words: Words, numbers: NDArray[np.int64]) -> None:
        """Find the evicted pages that were published again, and add them to the counts of their evictions.

        The items of `words` stand for the contents of pages that were evicted or published, in order of time. `numbers`
        has the number of each eviction, and `_PUBLISHED` for each publication. The evictions that are already known are
        put before the new items. Then a stable sort by word puts each item right after the previous item with the same
        content.
        """
        words, numbers = np.concatenate((self._words, words)), np.concatenate((self._numbers, numbers))
        order = np.argsort(words, kind="stable")
        words, numbers = words[order], numbers[order]
        follows, is_evicted = words[1:] == words[:-1], numbers != _PUBLISHED
        again = numbers[:-1][follows & is_evicted[:-1] & ~is_evicted[1:]]
        for number, count in zip(*(each.tolist() for each in np.unique(again, return_counts=True)), strict=True):
            one = self._by_number[number]
            one.again += count
            self.again[one.reason] += count
        is_evicted[:-1] &= ~follows
        self._words, self._numbers = words[is_evicted], numbers[is_evicted]
        if len(self._words) > _EVICTED:
            youngest = np.sort(np.argpartition(self._numbers, -_EVICTED)[-_EVICTED:])
            self._words, self._numbers = self._words[youngest], self._numbers[youngest]
        known = {*np.unique(self._numbers).tolist(), *(one.number for one in self._latest.values())}
        self._by_number = {number: self._by_number[number] for number in known}

    def rows(self) -> tuple[EvictionRow, ...]:
        """Returns the last evictions, newest first."""
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


def _by_reason(entry: PoolEntry) -> list[tuple[str, Words]]:
    """Returns the words of the evicted pages of an entry, grouped by the reason for the eviction.

    An entry nearly always has only one reason.
    """
    if not entry.words.size:
        return []
    codes = set(entry.more.reshape(-1).tolist())
    if len(codes) == 1:
        return [(REASONS[codes.pop()], entry.words)]
    return [(REASONS[code], entry.words[entry.more == code]) for code in codes]


class PrefixTree:
    """Records, for each page of a pool, the page that precedes it in a prompt.

    The tree has all pages that have been published or in a row since snapshots began. `_born` has, for each page, the
    number of the entry that published it. If a page's parent has a higher number than the page itself, the parent has
    since been overwritten with other content.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._parent = np.zeros(pool.num_pages + 1, np.int32)
        self._born = np.zeros(pool.num_pages + 1, np.uint32)
        self._hits = np.zeros(pool.num_pages + 1, np.uint32)
        self._clock = 1

    def add_row(self, pages: NDArray[np.int32]) -> None:
        """Add the published pages of one request, in order. They may have been published before snapshots began."""
        new = self._born[pages] == 0
        self._plant(pages[new], np.concatenate((pages[:1] * 0, pages[:-1]))[new], self._clock)

    def apply(self, entries: Sequence[PoolEntry]) -> None:
        """Apply many entries at once. If a page is published twice in them, the later publication counts."""
        found, found_at = list[NDArray[np.int32]](), list[int]()
        pages, parents, born = list[NDArray[np.int32]](), list[NDArray[Any]](), list[int]()
        for entry in entries:
            if entry.what == "found":
                found.append(entry.pages)
                found_at.append(self._clock)
            elif entry.what == "published":
                self._clock += 1
                pages.append(entry.pages)
                parents.append(entry.more)
                born.append(self._clock)
        if pages:
            self._plant(np.concatenate(pages), np.concatenate(parents), _each(born, pages))
        if found:
            # A hit on a page before its last publication was a hit on its former content.
            hits, at = np.concatenate(found), _each(found_at, found)
            np.add.at(self._hits, hits[at >= self._born[hits]], np.uint32(1))

    def _plant(self, pages: NDArray[np.int32], parents: NDArray[Any], born: NDArray[np.uint32] | int) -> None:
        self._parent[pages], self._born[pages], self._hits[pages] = parents, born, 0

    def rows(self, pool: str, most: int) -> tuple[TreeRow, ...]:
        """Returns at most `most` parts of the tree, the largest first. The size of a part includes all parts below it.

        A part is a run of pages without a branch.
        """
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
        # For each page, the first page of its part of the tree. In round n, the loop below replaces each page with the
        # page 2**n pages before it, but never goes back beyond the first page of the part.
        first = up.copy()
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


def _each(clocks: list[int], pages: list[NDArray[np.int32]]) -> NDArray[np.uint32]:
    """Returns the time of each page's entry. `clocks` and `pages` have one item for each entry."""
    return np.repeat(np.array(clocks, np.uint32), [len(some) for some in pages])


def _with_below(heads: NDArray[np.intp], before: NDArray[np.int32], own: NDArray[np.intp]) -> NDArray[np.intp]:
    """Returns, for each part of the prefix tree, how many pages are in the part and in all parts below it.

    The index of a part is its first page. `own` has the number of pages in each part. `heads` has the first page of
    each part, and `before` has the first page of the part above it. The numbers are summed up one level of the tree
    after another, the deepest level first.
    """
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
