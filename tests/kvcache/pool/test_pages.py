from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcache.errors import InvariantError
from kvcache.eviction_order import BY_TURN, Pages
from kvcache.policies.hinted_order import HintedOrder
from kvcache.policies.quotas import QuotaOrder, TenantQuotas
from kvcache.pool.journal import BY_RESET, PageReader
from kvcache.pool.lru_order import LruOrder
from kvcache.pool.pages import PagePool
from kvcache.retention import NEUTRAL, PageHints

SIZE = 12


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def digests(numbers: list[int]) -> np.ndarray:
    return np.array([[number, ~number & 0xFFFF] for number in numbers], np.uint64)


class Reader(PageReader):
    """Records which pages were removed from the index, and why."""

    def __init__(self, news: list[tuple[int, list[int]]]) -> None:
        self.news = news

    def gone(self, pages: np.ndarray, why: np.ndarray | int) -> None:
        assert isinstance(why, int), "plain LRU has one reason"
        self.news.append((why, pages.tolist()))


class Saver(PageReader):
    """Records which pages are about to be overwritten."""

    def __init__(self, saved: list[int]) -> None:
        self.saved = saved

    def going(self, pages: np.ndarray) -> None:
        self.saved += pages.tolist()


class Books:
    """A model of a pool in lists: a stack of fresh pages, idle pages by age, and the numbers of holders and writers."""

    def __init__(self) -> None:
        self.pool = PagePool(SIZE, 2)
        self.fresh = [*range(SIZE, 0, -1)]
        self.idle: list[int] = []
        self.holders, self.writers = (dict.fromkeys(range(SIZE + 1), 0) for _ in range(2))
        self.published: dict[int, int] = {}
        self.next_digest = 1
        self.evictions = 0
        self.news: list[tuple[int, list[int]]] = []  # The reasons and pages that the pool should report to its readers.
        self.guarded: list[int] = []
        self.expected: list[tuple[int, list[int]]] = []
        self.evicted: list[int] = []

    def watch(self, told: bool, guard: bool) -> None:
        journal = self.pool.journal
        for reader in journal.readers:
            journal.end(reader)
        if told:
            journal.read(Reader(self.news))
        if guard:
            journal.read(Saver(self.guarded), saves=True)

    def used(self) -> list[int]:
        return [page for page in range(1, SIZE + 1) if self.holders[page]]

    def allocate(self, count: int) -> None:
        taken = [self.fresh.pop() for _ in range(min(count, len(self.fresh)))]
        evicted, self.idle = self.idle[: count - len(taken)], self.idle[count - len(taken) :]
        if evicted:
            self.evictions += len(evicted)
            if self.pool.journal.gone:
                self.expected.append((BY_TURN, evicted))
            if self.pool.journal.going:
                self.evicted += evicted
        for page in evicted:
            del self.published[page]
        for page in [*taken, *evicted]:
            self.holders[page] = 1
        got = [self.pool.allocate_one()] if count == 1 and random.random() < 0.5 else self.pool.allocate(count).tolist()
        assert got == sorted([*taken, *evicted])

    def publish(self, some: list[int]) -> None:
        some = [page for page in some if page not in self.published]
        numbers = [*range(self.next_digest, self.next_digest + len(some))]
        self.next_digest += len(some)
        self.published |= dict(zip(some, numbers, strict=True))
        if some:
            self.pool.index.publish(pages(*some), digests(numbers))

    def hold(self, some: list[int]) -> None:
        assert self.pool.would_be_taken(pages(*some)) == len([page for page in some if page in self.idle])
        for page in some:
            self.holders[page] += 1
            if page in self.idle:
                self.idle.remove(page)
        self.pool.hold(pages(*some))

    def release(self, some: list[int]) -> None:
        alone = [page for page in some if self.holders[page] == 1 and not self.writers[page]]
        assert self.pool.would_be_freed(pages(*some)) == len(alone)
        for page in some:
            self.holders[page] -= 1
        self.free(some)
        self.pool.release(pages(*some))

    def release_each(self, some: list[int]) -> None:
        for page in reversed(some):  # The pages are released in reverse order, as if each page were released alone.
            self.holders[page] -= 1
            self.free([page])
        self.pool.release_each(pages(*some))

    def free(self, some: list[int]) -> None:
        """Frees pages in this order. The last page is evicted first."""
        over = [page for page in reversed(some) if not self.holders[page] and not self.writers[page]]
        self.idle += [page for page in over if page in self.published]
        self.fresh += [page for page in over if page not in self.published]

    def add_writer(self, some: list[int]) -> None:
        for page in some:
            self.writers[page] += 1
        self.pool.add_writer(pages(*some))

    def drop_writer(self, some: list[int]) -> None:
        for page in some:
            self.writers[page] -= 1
        self.free(some)
        self.pool.drop_writer(pages(*some))

    def forget(self) -> None:
        if self.pool.journal.gone:
            self.expected.append((BY_RESET, [*self.idle]))
        self.fresh += reversed(self.idle)
        self.idle = []
        self.published.clear()
        self.pool.forget()

    def compare(self) -> None:
        pool = self.pool
        assert pool._fresh[: pool._fresh_count].tolist() == self.fresh
        assert pool.idle.pages().tolist() == self.idle
        free = len(self.fresh) + len(self.idle)
        assert (pool.free_count, pool.num_held) == (free, SIZE - free)
        # No other pool lends this pool pages, and requests take pages only for their tokens.
        assert pool.has_room == pool.make_room(moving=True) == (free > 0)
        assert (pool.room_may_cost, pool.beside, pool.width) == (False, 0, 1.0)
        assert pool.evictions == self.evictions
        assert (self.news, self.guarded) == (self.expected, self.evicted)
        there = [self.published.get(page) for page in range(SIZE + 1)]
        assert pool.index.published.tolist() == [number is not None for number in there]
        if self.published:
            found = pool.index.find(digests([*self.published.values()]))
            assert found.tolist() == [*self.published]
        pool.check(*(np.array([*each.values()], np.int64) for each in (self.holders, self.writers)))


@pytest.mark.parametrize("seed", range(12))
def test_after_random_moves_pages_have_the_state_and_order_of_a_model_of_lists(seed: int) -> None:
    random.seed(seed)
    books = Books()
    for move in range(400):
        if move % 40 == 0:
            books.watch(random.random() < 0.5, random.random() < 0.5)
        used, cached = books.used(), [*books.published]
        some = random.sample(used, random.randint(0, len(used)))
        kind = random.choices(
            ["allocate", "publish", "hold", "release", "release_each", "add_writer", "drop_writer", "forget"],
            [30, 20, 15, 20, 10, 6, 8, 1],
        )[0]
        match kind:
            case "allocate":
                if free := books.pool.free_count:
                    books.allocate(random.choice([1, 1, random.randint(1, free), free]))
            case "hold":
                known = sorted({*used, *cached})
                books.hold(random.sample(known, random.randint(0, len(known))))
            case "release_each":
                several = [page for page in used for _ in range(random.randint(0, books.holders[page]))]
                books.release_each(random.sample(several, len(several)))
            case "drop_writer":
                written = [page for page, count in books.writers.items() if count]
                books.drop_writer(random.sample(written, random.randint(0, len(written))))
            case "add_writer":
                books.add_writer(some[:3])
            case "forget":
                books.forget()
            case _:
                getattr(books, kind)(some)
        books.compare()
    assert books.evictions


def test_allocate_returns_a_copy_and_begins_with_the_lowest_pages() -> None:
    pool = PagePool(8, 2)
    first = pool.allocate(3)
    assert first.tolist() == [1, 2, 3]
    pool.release(first)
    again = pool.allocate(2)
    assert again.tolist() == [1, 2]
    first[:] = again[:] = 0  # The caller may overwrite the array that `allocate` returns.
    assert pool.allocate(6).tolist() == [3, 4, 5, 6, 7, 8]
    assert pool.free_count == 0


def test_a_large_pool_evicts_all_its_pages_with_and_without_a_reader() -> None:
    pool = PagePool(160, 2)
    held = pool.allocate(pool.num_pages)
    pool.index.publish(held, digests([*range(1, len(held) + 1)]))
    pool.release(held)
    assert pool.allocate_one() == held[-1]  # The last page of the prompt is evicted first.
    assert np.array_equal(pool.allocate(len(held) - 1), held[:-1])
    assert pool.evictions == pool.num_pages
    assert not pool.index.published.any()


def held_pool() -> tuple[PagePool, np.ndarray, np.ndarray]:
    """Returns a pool, and the true numbers of holders and writers of each page. Pages 1 to 3 are held. Pages 2 and 3
    are published. Page 3 is being written. Page 4 is idle.
    """
    pool = PagePool(6, 2)
    held = pool.allocate(4)
    pool.index.publish(held[1:], digests([1, 2, 3]))
    pool.add_writer(held[2:3])
    pool.release(held[3:])
    return pool, np.array([0, 1, 1, 1, 0, 0, 0], np.int64), np.array([0, 0, 0, 1, 0, 0, 0], np.int64)


def add(counts: np.ndarray, page: int) -> None:
    counts[page] += 1


def change(pool: Any, count: str, by: int) -> None:
    setattr(pool, count, getattr(pool, count) + by)


def say_fresh(pool: PagePool, page: int, *, on_top: bool) -> None:
    """Makes the pool record this page as its next fresh page. With `on_top`, the page is recorded a second time, on top
    of the stack.
    """
    pool._fresh_count += on_top
    pool._fresh[pool._fresh_count - 1] = page


DAMAGE: dict[str, tuple[Callable[[PagePool], object], str]] = {
    "one holder more": (lambda pool: add(pool.holders, 2), "page 2 has 2 holders, but 1 are counted"),
    "one writer more": (lambda pool: add(pool.writers, 5), "page 5 has 1 writers, but 0 are counted"),
    "their sum": (lambda pool: change(pool, "_writing", 1), "pages have 1 writers, but 2 are counted"),
    "a fresh page is lost": (
        lambda pool: change(pool, "_fresh_count", -1),
        "page 5 is in 0 of the states fresh, idle and used: exactly one is needed",
    ),
    "a fresh page is idle, too": (
        lambda pool: pool.idle.append(pages(6)),
        "page 6 is in 2 of the states fresh, idle and used: exactly one is needed",
    ),
    "an idle page is lost": (
        lambda pool: pool.idle.pop_one(),
        "page 4 is in 0 of the states fresh, idle and used: exactly one is needed",
    ),
    "a held page is fresh": (
        lambda pool: say_fresh(pool, 2, on_top=False),
        "page 2 is in 2 of the states fresh, idle and used: exactly one is needed",
    ),
    "an idle page is not published": (
        lambda pool: pool.index.withdraw(pages(4)),
        "page 4 is idle, but not published",
    ),
    "a fresh page is published": (
        lambda pool: pool.index.publish(pages(6), digests([9])),
        "page 6 is fresh, but published",
    ),
    "the null page is fresh": (lambda pool: say_fresh(pool, 0, on_top=True), "the null page is in use"),
    "the null page is published": (lambda pool: add(pool.index.published, 0), "the null page is in use"),
    "the idle order": (lambda pool: change(pool.idle, "count", 1), "idle order: "),
    "the index": (
        lambda pool: pool.index.withdraw_one(2) or add(pool.index.published, 2),
        "page 2 is published, but its digest",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_check_names_the_first_inconsistent_page(how: str) -> None:
    pool, holders, writers = held_pool()
    pool.check(holders, writers)
    breaks, message = DAMAGE[how]
    breaks(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check(holders, writers)


def test_would_be_freed_predicts_what_a_release_frees() -> None:
    pool = PagePool(20, 2)
    held = pool.allocate(8)
    pool.index.publish(held[::2], np.arange(1, 9, dtype=np.uint64).reshape(4, 2))
    pool.hold(held[4:])
    pool.add_writer(held[2:6])
    assert pool.would_be_freed(held) == 2
    assert pool.would_be_freed(held[4:]) == 0
    assert pool.would_be_freed(pages()) == 0
    before = pool.free_count
    pool.release(held)
    assert pool.free_count == before + 2
    assert pool.would_be_taken(held) == 2
    # Four pages have only one holder. Two of the four pages are being written, so only two pages would become free.
    assert pool.would_be_freed(held[4:]) == 2
    pool.drop_writer(held[2:6])
    assert pool.would_be_freed(held) == 4
    assert pool.would_be_taken(held) == 4


def test_a_page_without_holders_that_a_transfer_writes_is_not_idle_and_can_be_held() -> None:
    pool = PagePool(8, 2)
    held = pool.allocate(3)
    pool.index.publish(held, np.arange(1, 7, dtype=np.uint64).reshape(3, 2))
    pool.add_writer(held[1:2])
    pool.release(held)
    assert sorted(pool.idle.pages().tolist()) == [held[0], held[2]]
    pool.hold(held)
    assert pool.idle.count == 0
    pool.release(held)
    pool.drop_writer(held[1:2])
    pool.check(np.zeros(9, np.int64), np.zeros(9, np.int64))
    assert pool.idle.count == 3


def test_a_page_whose_transfer_ends_while_a_step_is_in_flight_waits_for_the_step() -> None:
    pool = PagePool(SIZE, 2)
    held = pool.allocate(3)
    pool.add_writer(held[:2])
    pool.release(held[:1])
    pool.begin_step()
    pool.drop_writer(held[:1])  # The page now has no holder and no writer.
    pool.drop_writer(held[1:2])  # The request still holds this page.
    assert pool.free_count == SIZE - 3
    assert [one.tolist() for one in pool.parked[0]] == [held[:1].tolist()]
    pool.end_step(0)
    assert pool.free_count == SIZE - 2
    pool.release(held[1:])
    assert pool.free_count == SIZE


def test_a_page_whose_content_is_replaced_loses_the_hint_and_the_tenant_of_the_old_content() -> None:
    pool = PagePool(SIZE, 2)
    quotas = TenantQuotas(SIZE, 0.5, {})
    hinted = HintedOrder(SIZE, pool.idle)
    pool.follow(QuotaOrder(hinted, quotas))
    held = pool.allocate(2)
    pool.index.publish(held, digests([1, 2]))
    pool.idle.own(held, "tenant")
    pool.idle.hint(held, PageHints(np.full(2, NEUTRAL - 1, np.uint8), np.full(2, np.inf)))
    pool.release(held)
    found: list[tuple[list[int], list[int]]] = []

    def write(written: np.ndarray) -> None:
        found.append((written.tolist(), pool.index.find(digests([1])).tolist()))

    pool.rewrite(held[:1], digests([3]), write)
    assert found == [(held[:1].tolist(), [0])], "no lookup finds the page while it is written"
    assert pool.index.find(digests([3, 2])).tolist() == held.tolist()
    assert hinted.codes[held].tolist() == [NEUTRAL, NEUTRAL - 1]
    assert quotas.ownerless(held).tolist() == [True, False]


def test_the_page_that_goes_next_is_named_while_no_page_is_fresh() -> None:
    pool = PagePool(3, 2)
    held = pool.allocate(2)
    pool.index.publish(held, digests([1, 2]))
    pool.release(held)
    assert pool.next_evicted() == 0, "one page is fresh"
    last = pool.allocate_one()
    for _ in range(2):
        named = pool.next_evicted()
        assert named
        assert pool.allocate_one() == named
    assert pool.next_evicted() == 0, "no page is idle"
    pool.release(pages(last))
    assert pool.next_evicted() == 0, "one page is fresh again"


@pytest.mark.parametrize("wrong", ["as they were", "holders", "writers", "idle", "fresh", "index"])
def test_after_an_interrupt_the_pool_agrees_with_a_recount(wrong: str) -> None:
    """Idle pages keep their age, fresh pages are used first, and published pages can be found."""
    pool = PagePool(SIZE, 2)
    held = pool.allocate(9)
    pool.index.publish(held[:6], digests([*range(1, 7)]))
    pool.release(held[[3, 2]])
    pool.release(held[[0, 1]])
    pool.add_writer(held[7:8])
    pool.release(held[7:9])
    free = pool.idle.count + len(held) - 5
    holders, writers = (np.zeros(SIZE + 1, np.int64) for _ in range(2))
    holders[held[4:6]], holders[held[6]], writers[held[7]] = 1, 2, 1
    match wrong:  # pyright: ignore[reportMatchNotExhaustive]
        case "holders":
            pool.holders[held[2]] = 3
        case "writers":
            pool.writers[held[2]] = 1
        case "idle":
            pool.idle.remove(held[[2]])
        case "fresh":
            pool.allocate(3)
        case "index":
            pool.index._links[:] = 0
    pool.rebuild(holders, writers)
    pool.check(holders, writers)
    assert pool.free_count == free
    assert pool.index.find(digests([*range(1, 7)])).tolist() == held[:6].tolist()
    pool.drop_writer(held[7:8])  # The page has no holder and is not in the index, so it is fresh.
    fresh = {*range(1, SIZE + 1)} - {*held[:7].tolist()}
    assert {*pool.allocate(len(fresh)).tolist()} == fresh
    assert pool.evictions == 0
    # A page that the pool did not count as idle is now the youngest page.
    expected = [3, 1, 0, 2] if wrong in ("holders", "writers") else [2, 3, 1, 0]
    found = [pool.allocate_one() for _ in range(4)]
    assert found == held[expected].tolist() or (wrong == "idle" and {*found} == {*held[:4].tolist()})
    assert pool.evictions == 4
    assert (pool.index.find(digests([*range(1, 7)])) == 0).tolist() == [True] * 4 + [False] * 2


def test_forget_drops_what_the_order_knows_about_pages_in_use() -> None:
    class Noting(LruOrder):
        def forget(self, pages: Pages) -> None:
            noted.extend(pages.tolist())

    noted: list[int] = []
    pool = PagePool(SIZE, 1, Noting(SIZE))
    taken = pool.allocate(3)
    pool.index.publish(taken, digests([1, 2, 3]))
    pool.release(taken[:1])
    pool.forget()
    assert sorted(noted) == sorted(taken[1:].tolist())  # the idle page left the order by a `pop`
    assert pool.index.find(digests([1, 2, 3])).tolist() == [0, 0, 0]
    pool.release(taken[1:])
    assert pool.free_count == SIZE
    pool.check(*np.zeros((2, SIZE + 1), np.int64))
