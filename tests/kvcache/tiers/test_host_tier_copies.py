"""Copies between a device and the host that end some time after their begin, as the copies of a GPU do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.pool.index import Digests
from kvcache.pool.pages import PagePool
from kvcache.replica.rows import Pages
from kvcache.tiers.host_tier import HostTier, ReplicaTier


def ids(*pages: int) -> Pages:
    return np.array(pages, np.int32)


def names(*pages: int) -> Digests:
    return np.array([[page, ~page & 0xFF] for page in pages], np.uint64)


class Copy:
    """A copy that has begun. It ends when the test says so, or when the tier waits for it."""

    def __init__(self) -> None:
        self.begun, self.ended, self.ordered = True, False, False

    def begin(self) -> None: ...

    def over(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.ended = True

    def order(self) -> None:
        self.ordered = True


class Mover:
    """A substitute for `PageMover` that records copies instead of making them."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, list[int], list[int]]] = []
        self.copies: list[Copy] = []

    def store(self, pages: Pages, slots: Pages) -> Copy:
        return self._begin("store", pages, slots)

    def load(self, slots: Pages, pages: Pages) -> Copy:
        return self._begin("load", pages, slots)

    def _begin(self, what: str, pages: Pages, slots: Pages) -> Copy:
        self.begun.append((what, pages.tolist(), slots.tolist()))
        self.copies.append(Copy())
        return self.copies[-1]


class Beside:
    """One replica with eight pages, over a host tier with `slots` slots."""

    def __init__(self, slots: int = 4) -> None:
        self.mover = Mover()
        self.host = HostTier([8], slots, 2, pinned=False)
        self.pool = PagePool(8, 2)
        mover: Any = self.mover
        self.tier = ReplicaTier(self.host, self.pool, mover)

    def publish(self, *pages: int) -> Pages:
        """Publishes new pages, as if a request had computed them. The request still holds them."""
        taken = self.pool.allocate(len(pages))
        self.pool.index.publish(taken, names(*pages))
        self.tier.came(taken, names(*pages))
        return taken

    def found(self, *pages: int) -> list[bool]:
        return (self.host.pool.index.find(names(*pages)) != 0).tolist()


def test_a_page_is_found_in_the_host_once_its_copy_has_ended() -> None:
    it = Beside()
    it.publish(11, 12)
    assert it.tier.store(8) == 2
    assert it.mover.begun == [("store", [1, 2], [1, 2])]
    assert (it.found(11, 12), it.tier.storing.nonzero()[0].tolist()) == ([False, False], [1, 2])
    it.mover.copies[0].ended = True
    it.tier.poll()
    assert (it.found(11, 12), it.tier.storing.any(), it.tier.stored) == ([True, True], False, 2)


def test_pages_without_a_free_host_slot_are_not_copied() -> None:
    it = Beside(slots=2)
    it.pool.index.tables = np.arange(9)
    pages = it.publish(11, 12, 13)
    assert it.tier.store(8) == 3
    assert it.mover.begun == [("store", [1, 2], [1, 2])]
    assert it.host.pool.index.tables.tolist() == [0, 1, 2]
    assert it.tier.storing.nonzero()[0].tolist() == [1, 2]
    # This call simulates a fork that publishes the third page again while no slot is free for the page.
    it.tier.came(pages[2:], names(13))
    it.mover.copies[0].ended = True
    it.tier.poll()
    assert it.tier.storing.nonzero()[0].tolist() == [3], "the page waits to be copied"


def test_a_page_is_not_overwritten_before_its_copy_has_ended() -> None:
    it = Beside()
    pages = it.publish(11, 12)
    it.tier.store(1)
    it.tier.going(pages[:1])
    assert it.mover.copies[0].ended, "the copy was waited for"
    assert (it.found(11, 12), len(it.mover.begun)) == ([True, False], 1)
    it.tier.going(pages[1:])
    assert it.found(11, 12) == [True, True]


def test_a_use_of_a_page_that_is_being_copied_counts_after_the_copy() -> None:
    it = Beside()
    it.publish(11, 12)
    it.tier.store(8)
    it.mover.copies[0].ended = True
    it.tier.poll()
    assert it.host.pool.idle.pages().tolist() == [2, 1]
    it.publish(13)
    it.tier.store(8)
    it.tier.used(names(12))
    assert it.host.pool.idle.pages().tolist() == [2, 1], "a copy is still running"
    it.tier.store_all()
    assert it.host.pool.idle.pages().tolist() == [1, 3, 2]
    assert not it.tier.waiting


@pytest.mark.parametrize("left", [False, True])
def test_pages_are_loaded_while_the_model_runs_and_are_held_until_the_copy_has_ended(left: bool) -> None:
    it = Beside()
    it.publish(11)
    it.tier.store_all()
    own, slots = it.pool.allocate(1), it.tier.slots(names(11))
    it.tier.hold(slots)
    it.tier.restore(3, own, slots)
    assert it.mover.begun[-1] == ("load", [2], [1]), "the copy begins at once"
    assert (it.pool.writers[2], [pages.tolist() for pages in it.tier.coming()]) == (1, [[2]])
    assert not it.tier.is_loading
    if left:
        it.tier.leave(3, ids(), names(), lambda found: np.zeros(len(found), np.bool_))
    else:
        it.tier.arrive(slice(2, 4))
        assert it.mover.copies[-1].ordered, "the kernel that reads the page runs after the copy"
    assert it.tier.is_loading
    assert [pages.tolist() for pages in it.tier.coming()] == [[2]]
    it.pool.release(own)
    assert (it.pool.writers[2], it.host.pool.holders[1], it.pool.free_count) == (1, 1, 6)
    if left:
        it.mover.copies[-1].ended = True
        it.tier.poll()
    else:
        it.tier.load_all()
    assert not it.tier.is_loading
    assert (it.pool.writers[2], it.host.pool.holders[1], it.pool.free_count, it.tier.loaded) == (0, 0, 7, 1)


def test_pages_that_a_copy_frees_while_others_are_allocated_are_not_allocated_twice() -> None:
    """To evict a page, the pool waits for the page's copy to the host. Meanwhile it also handles all other copies that
    have ended, which frees further pages.
    """
    it = Beside()
    it.pool.release(it.publish(11, 12))
    slots = it.host.pool.allocate(3)
    restored = it.pool.allocate(3)
    it.tier.restore(0, restored, slots)
    it.tier.leave(0, ids(), names(), lambda _: np.zeros(0, np.bool_))
    it.pool.release(restored)
    it.mover.copies[0].ended = True
    taken = it.pool.allocate(4)  # The allocation takes the three fresh pages and one idle page.
    assert sorted(taken.tolist()) == [2, 6, 7, 8]
    holders = np.zeros(9, np.int64)
    holders[taken] = 1
    it.pool.check(holders, np.zeros(9, np.int64))
    assert it.pool.allocate(4).tolist() == [1, 3, 4, 5]


def test_pages_loaded_for_no_row_are_published_when_their_copy_has_ended() -> None:
    it = Beside()
    it.publish(11, 12)
    it.tier.store_all()
    it.pool.release(ids(1, 2))
    it.pool.forget()
    pages, slots = it.pool.allocate(2), it.tier.slots(names(11, 12))
    it.tier.hold(slots)
    it.tier.bring(pages, slots, names(11, 12))
    it.pool.release(pages)
    assert it.tier.is_bringing
    assert it.tier.brought_at_once == 1 << 20, "8 MiB of these pages"
    assert it.pool.index.find(names(11, 12)).tolist() == [0, 0]
    assert it.pool.free_count == 6
    it.mover.copies[-1].ended = True
    assert not it.tier.is_bringing
    assert it.pool.index.find(names(11, 12)).tolist() == pages.tolist()
    assert (it.pool.free_count, it.pool.idle.count, it.host.pool.idle.count) == (8, 2, 2)


def test_loading_a_page_for_a_row_does_not_count_as_loading_for_no_row() -> None:
    it = Beside()
    it.publish(11, 12)
    it.tier.store_all()
    slots = it.tier.slots(names(11, 12))
    it.tier.hold(slots)
    for_row, for_none = it.pool.allocate(1), it.pool.allocate(1)
    it.tier.restore(0, for_row, slots[:1])
    it.tier.arrive(np.array([0]))
    assert (it.tier.is_loading, it.tier.is_bringing) == (True, False)
    it.tier.bring(for_none, slots[1:], names(12))
    assert it.tier.is_bringing


def test_a_reset_ends_running_copies_and_begins_no_waiting_one() -> None:
    it = Beside()
    it.publish(11, 12)
    it.tier.store(1)
    it.tier.reset()
    assert it.mover.begun == [("store", [1], [1])]
    assert (it.found(11, 12), [*it.tier.stores], it.tier.storing.any()) == ([True, False], [], False)


def test_after_an_interrupt_each_published_page_is_queued_once_unless_the_host_has_it() -> None:
    it = Beside(slots=8)
    it.publish(11, 12, 13, 14)
    it.tier.store(1)
    it.pool.index.withdraw(ids(2))
    it.tier.storing[:] = [0, 0, 0, 1, 0, 1, 0, 0, 0]  # An interrupt may leave these flags.
    later = it.pool.allocate(1)
    it.pool.index.publish(later, names(15))  # The page was published, but the tier does not know it yet.
    it.tier.used(names(12))
    it.host.pool.rebuild(*np.zeros((2, 9), np.int64))
    it.tier.restart()
    assert it.tier.storing.nonzero()[0].tolist() == [1, 3, 4, 5]
    assert [pages.tolist() for pages, _ in it.tier.waiting] == [[1, 3, 4, 5]]
    it.tier.store_all()
    assert it.found(11, 12, 13, 14, 15) == [True, False, True, True, True]
    assert not it.tier.storing.any()
