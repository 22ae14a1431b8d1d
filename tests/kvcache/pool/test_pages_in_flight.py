"""Tests pages that are released while steps are in flight. Also tests the pool's calls of its order and readers, and
its counts.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import LruOrder
from kvcache.eviction_order import BY_HINT, BY_TURN, Indices, Pages, Reasons
from kvcache.policies.hinted_order import HintedOrder
from kvcache.pool.index import Digests
from kvcache.pool.journal import PageReader
from kvcache.pool.pages import PagePool
from kvcache.retention import PageHints

SIZE = 12


def ids(*pages: int) -> Pages:
    return np.array(pages, np.int32)


def digests(*names: int) -> Digests:
    return np.array([[name, ~name & 0xFFFF] for name in names], np.uint64)


def published(pool: PagePool, count: int) -> Pages:
    pages = pool.allocate(count)
    pool.index.publish(pages, digests(*range(1, count + 1)))
    return pages


def recount(pool: PagePool, held: dict[int, int], written: dict[int, int]) -> None:
    holders, writers = np.zeros(SIZE + 1, np.int64), np.zeros(SIZE + 1, np.int64)
    for page, count in held.items():
        holders[page] = count
    for page, count in written.items():
        writers[page] = count
    pool.check(holders, writers)


@pytest.mark.parametrize("ended", [(2, 1, 0), (2, 0, 0), (1, 1, 0), (1, 0, 0), (0, 1, 0), (0, 0, 0)])
def test_a_released_page_is_free_once_every_step_that_was_in_flight_at_its_release_has_ended(
    ended: tuple[int, ...],
) -> None:
    pool, steps = PagePool(SIZE, 2), [1, 2, 3]
    # The first page is released with one step in flight, the second page with two steps, and the third page with three
    # steps.
    pages = published(pool, 3)
    for page in pages:
        pool.begin_step()
        pool.release(ids(page))
    for at in ended:
        pool.end_step(at)
        del steps[at]
        waits = [page for page in (1, 2, 3) if any(step <= page for step in steps)]
        recount(pool, {}, dict.fromkeys(waits, 1))
        assert sorted(pool.idle.pages().tolist()) == [page for page in (1, 2, 3) if page not in waits]
    assert not pool.parked


def test_pages_released_by_several_holders_during_a_step_are_free_after_it_the_last_one_first() -> None:
    pool = PagePool(SIZE, 2)
    pages = published(pool, 3)
    pool.hold(pages[1:])
    pool.begin_step()
    pool.release_each(pages[[0, 1, 1, 2]])
    recount(pool, {3: 1}, {1: 1, 2: 1})
    pool.release_each(ids(3))
    pool.end_step(0)
    recount(pool, {}, {})
    assert pool.idle.pages().tolist() == [2, 1, 3]


def test_pages_released_together_during_a_step_age_as_without_a_step() -> None:
    pool = PagePool(SIZE, 2)
    pages = published(pool, 3)
    pool.begin_step()
    pool.release(pages)
    pool.end_step(0)
    assert pool.idle.pages().tolist() == [3, 2, 1]


class Noting(LruOrder):
    """Records its calls."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.noted: list[tuple[str, list[int]]] = []

    def renew(self, pages: Pages) -> None:
        self.noted.append(("renew", pages.tolist()))

    def remove(self, pages: Pages | Indices) -> None:
        self.noted.append(("remove", pages.tolist()))
        super().remove(pages)

    def forget(self, pages: Pages) -> None:
        self.noted.append(("forget", pages.tolist()))

    def append(self, pages: Pages | Indices) -> None:
        self.noted.append(("append", pages.tolist()))
        super().append(pages)


def test_an_idle_page_is_renewed_in_the_order_before_its_content_is_replaced() -> None:
    pool = PagePool(SIZE, 2, order := Noting(SIZE))
    pool.release(published(pool, 3))
    order.noted.clear()
    pool.rewrite(ids(2), digests(9), lambda pages: order.noted.append(("write", pages.tolist())))
    assert order.noted == [(call, [2]) for call in ("renew", "remove", "forget", "write", "append")]
    assert pool.index.find(digests(9, 2)).tolist() == [2, 0]


class Reader(PageReader):
    def __init__(self) -> None:
        self.news: list[tuple[list[int], object]] = []

    def gone(self, pages: Pages, why: Reasons | int) -> None:
        self.news.append((pages.tolist(), why if isinstance(why, int) else why.tolist()))


def test_readers_are_told_the_reason_that_the_order_gives_for_each_page() -> None:
    pool = PagePool(SIZE, 2)
    pool.follow(HintedOrder(SIZE, pool.idle, share=1.0))
    pages = published(pool, SIZE)
    pool.idle.hint(pages[5:6], PageHints(np.zeros(1, np.uint8), np.full(1, np.inf)))
    pool.release(pages)
    pool.journal.read(reader := Reader())
    pool.allocate(2)
    pool.allocate_one()
    assert reader.news == [([6, 12], [BY_HINT, BY_TURN]), ([11], [BY_TURN])]


def test_writers_that_an_interrupt_left_uncounted_keep_their_pages() -> None:
    pool = PagePool(SIZE, 2)
    pages = published(pool, 2)
    pool.writers[pages] += 1  # An interrupted `add_writer` may leave these counts.
    holders, writers = np.zeros(SIZE + 1, np.int64), np.zeros(SIZE + 1, np.int64)
    holders[pages] = writers[pages] = 1
    pool.rebuild(holders, writers)
    pool.check(holders, writers)
    pool.release(pages)
    assert pool.free_count == SIZE - 2
    pool.drop_writer(pages)
    assert pool.free_count == SIZE


def test_allocating_no_pages_returns_none_and_evicts_none() -> None:
    pool = PagePool(SIZE, 2)
    assert pool.allocate(0).size == 0
    pool.release(published(pool, SIZE))
    assert pool.allocate(0).size == 0
    assert (pool.free_count, pool.evictions) == (SIZE, 0)
