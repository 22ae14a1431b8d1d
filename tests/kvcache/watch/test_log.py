"""The entries of a pool's log lead to the same result if they are applied together or one by one."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

import numpy as np
import pytest

from kvcache.pool.pages import PagePool
from kvcache.watch import log
from kvcache.watch.log import REASONS, EvictionBook, PoolEntry, PrefixTree

PAGES, WORDS = 24, 40


def entry(rng: random.Random, at: float) -> PoolEntry:
    """Returns a random entry about some pages of a small pool. There are few different values, so values recur."""
    what = rng.choice(("gone", "gone", "gone", "published", "published", "found"))
    pages = np.array(rng.sample(range(1, PAGES + 1), rng.randrange(5)), np.int32)
    more = np.array(rng.choice((0, 3)))
    if what == "published":
        more = np.array([rng.randrange(PAGES + 1) for _ in pages], np.int32)
    elif what == "gone" and rng.random() < 0.5:
        more = np.array([rng.randrange(rng.choice((1, 3))) for _ in pages], np.uint8)
    return PoolEntry(what, at, pages, more, np.array(rng.sample(range(WORDS), len(pages)), np.uint64))


def batches(rng: random.Random, count: int) -> list[tuple[str, list[PoolEntry]]]:
    """Returns entries of two pools in batches, as they arrive in snapshots."""
    clock, found = 100.0, list[tuple[str, list[PoolEntry]]]()
    for _ in range(count):
        clock += rng.choice((0.0, 0.1, 1.0))
        found.append((rng.choice(("0", "1")), [entry(rng, clock) for _ in range(rng.randrange(8))]))
    return found


class OneByOne:
    """The expected result of the entries, found by applying the entries page by page."""

    def __init__(self) -> None:
        self.pages: Counter[str] = Counter()
        self.again: Counter[str] = Counter()
        # Time, pool, reason, and two counts: the evicted pages, and the evicted pages that were published again.
        self.groups = list[tuple[float, str, str, list[int]]]()
        self.of_word: OrderedDict[int, int] = OrderedDict()

    def apply(self, pool: str, one: PoolEntry) -> None:
        for at, word in enumerate(one.words.tolist()):
            if one.what == "published":
                if word in self.of_word:
                    _, _, reason, counts = self.groups[self.of_word.pop(word)]
                    counts[1] += 1
                    self.again[reason] += 1
            elif one.what != "found":
                reason = REASONS[int(one.more[at] if one.more.ndim else one.more)]
                self.pages[reason] += 1
                group = self.group(pool, reason, one.at)
                self.groups[group][3][0] += 1
                self.of_word[word] = group

    def group(self, pool: str, reason: str, at: float) -> int:
        mine = [number for number, one in enumerate(self.groups) if one[1:3] == (pool, reason)]
        if not mine or at - self.groups[mine[-1]][0] > 0.25:
            self.groups.append((at, pool, reason, [0, 0]))
            return len(self.groups) - 1
        return mine[-1]


@pytest.mark.parametrize("seed", range(30))
def test_applying_entries_together_gives_the_evictions_of_applying_each(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_SHOWN", 10_000)
    book, wanted = EvictionBook(), OneByOne()
    for pool, entries in batches(random.Random(seed), 60):
        book.apply(pool, entries)
        for one in entries:
            wanted.apply(pool, one)
        assert (book.pages, book.again) == (wanted.pages, wanted.again)
        rows = {(row.pool, row.reason, row.pages, row.again) for row in book.rows()}
        assert rows == {(pool, reason, *counts) for _, pool, reason, counts in wanted.groups}
    assert sum(wanted.again.values()) > 20, "the random entries do not lead to enough different states"


def test_the_return_of_pages_is_not_noticed_if_their_eviction_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_EVICTED", 8)
    book = EvictionBook()
    pages, words = np.arange(1, 7, dtype=np.int32), np.arange(18, dtype=np.uint64).reshape(3, 6)[::-1].copy()
    for number in range(3):
        book.apply("0", [PoolEntry("gone", 10.0 * number, pages, np.array(0), words[number])])
    for number, again in enumerate((0, 2, 6)):
        book.apply("0", [PoolEntry("published", 40.0, pages, pages * 0, words[number])])
        assert [row.again for row in reversed(book.rows())][number] == again
    assert book.again == {"LRU": 8}


@pytest.mark.parametrize("seed", range(30))
def test_applying_entries_together_gives_the_tree_of_applying_each(seed: int) -> None:
    pool = PagePool(PAGES, 2)
    whole, single = PrefixTree(pool), PrefixTree(pool)
    parent, order, hits = [0] * (PAGES + 1), [0] * (PAGES + 1), [0] * (PAGES + 1)
    clock = 0
    for _, entries in batches(random.Random(seed), 40):
        whole.apply(entries)
        for one in entries:
            single.apply([one])
            if one.what == "published" and one.more is not None:
                clock += 1
                for page, before in zip(one.pages.tolist(), one.more.tolist(), strict=True):
                    parent[page], order[page], hits[page] = before, clock, 0
            elif one.what == "found":
                for page in one.pages.tolist():
                    hits[page] += 1
    for tree in (whole, single):
        assert tree._parent.tolist() == parent
        assert tree._hits.tolist() == hits
        assert [max(0, born - 1) for born in tree._born.tolist()] == order
    assert any(hits), "the random entries do not lead to enough different states"
