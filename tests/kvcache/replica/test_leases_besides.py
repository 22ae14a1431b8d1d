"""Leases that hold cached pages and a state. Pages and states are counted in separate pools. The lease ends for both at
the same time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.errors import InvalidRequestError
from kvcache.layer_groups import layer_tables
from kvcache.pool.pages import HeldPages, PagePool
from kvcache.replica.leases import PageLease, PageLeases
from kvcache.replica.rows import AllRows, BlockRows


class Books:
    """The leases over a pool of pages and a pool of states."""

    def __init__(self) -> None:
        self.pages, self.states = PagePool(8, 1), PagePool(4, 1)
        rows = BlockRows(AllRows(1, 2, 4), 0, 16, layer_tables((), 1).groups, pinned=False)
        self.leases = PageLeases(self.pages, rows)
        row = rows.claim("r")
        self.row = row

    def cached(self, pool: PagePool, count: int) -> HeldPages:
        """Makes idle pages: published pages without a holder."""
        pages = pool.allocate(count)
        pool.index.publish(pages, np.arange(1, count + 1, dtype=np.uint64).reshape(-1, 1))
        pool.release(pages)
        return HeldPages(pool, pages)

    def lease(self) -> PageLease:
        return PageLease(self.leases, "r", 0)

    def held(self) -> list[list[int]]:
        return [pages.tolist() for _, of_lease in self.leases.held() for pages in of_lease]

    def counts(self) -> tuple[int, int, int]:
        """Returns three counts: the running count of leased pages, a recount of the leased pages, and a recount of the
        leased states.
        """
        leases = self.leases
        return leases.num_pages, int(leases.holders().sum()), int(leases.holders(self.states).sum())


@pytest.mark.parametrize("of_row", [True, False])
def test_a_leased_state_counts_in_its_own_pool_and_is_free_when_the_lease_ends(of_row: bool) -> None:
    books = Books()
    pages, state = books.cached(books.pages, 3), books.cached(books.states, 1)
    lease = books.lease()
    assert books.counts() == (0, 0, 0)
    if of_row:
        books.leases.grant(lease, books.row, [state])
    else:
        books.leases.grant_pages(lease, pages.pages, [state])
    leased = 0 if of_row else 3
    assert not lease.is_over
    assert books.held() == ([] if of_row else [[1, 2, 3]])
    assert books.counts() == (leased, leased, 1)
    assert (books.pages.idle.count, books.states.idle.count) == (3 - leased, 0)
    books.leases.end(lease)
    assert lease.is_over
    assert books.counts() == (0, 0, 0)
    assert (books.pages.idle.count, books.states.idle.count) == (3, 1)
    books.leases.check()


def test_pages_that_several_lease_are_counted_once_and_held_by_each() -> None:
    books = Books()
    pages = books.cached(books.pages, 3).pages
    first, second = books.lease(), books.lease()
    books.leases.grant_pages(first, pages)
    books.leases.grant_pages(second, pages[:1])
    assert books.counts() == (3, 4, 0)
    books.leases.end(first)
    assert books.counts() == (1, 1, 0)
    assert sorted(books.pages.idle.pages().tolist()) == [2, 3]


def test_a_lease_has_ended_before_it_is_granted_and_for_other_managers() -> None:
    books = Books()
    lease = books.lease()
    assert lease.is_over, "the lease was not granted yet"
    books.leases.grant_pages(lease, books.cached(books.pages, 1).pages)
    assert not lease.is_over
    lease.owner = Books().leases
    assert lease.is_over, "another manager did not grant it"


@pytest.mark.parametrize("owner", [None, "another", {}])
def test_only_a_manager_makes_a_lease(owner: Any) -> None:
    with pytest.raises(InvalidRequestError, match="owner is"):
        PageLease(owner, "r", 0)
