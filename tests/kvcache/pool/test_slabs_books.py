"""Slabs whose pool nobody caches or moves anything in; the books of slabs after an interrupt, and broken ones."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.errors import InvariantError
from kvcache.eviction_order import Pages
from kvcache.pool.slabs import PageMoves, SlabPool, SlabStates


def ids(*pages: int) -> Pages:
    return np.array(pages, np.int32)


def publish(pool: SlabPool, pages: Pages) -> None:
    pool.index.publish(pages, pages.astype(np.uint64).reshape(-1, 1))


def counts(pool: SlabPool, *held: int) -> np.ndarray:
    return np.bincount(held, minlength=pool.num_pages + 1)


def none(pool: SlabPool | SlabStates) -> np.ndarray:
    return np.zeros(pool.num_pages + 1, np.int64)


def test_in_a_pool_where_nothing_moves_and_no_slab_is_cached_held_pages_keep_their_slabs() -> None:
    pool = SlabPool(15, 1, 4)
    assert pool.free_count == 15
    pages = pool.allocate(15)
    publish(pool, pages)
    assert pool.width == 1.0
    pool.release(pages[[3, 4, 7, 8, 11, 12]])  # every slab has pages that are held, and pages that are not
    assert (pool.free_count, pool.can_take_slab(), pool.take_slab()) == (6, False, 0)
    assert pool.cached.oldest_use > pool.clock


class Moved(PageMoves):
    def __init__(self) -> None:
        self.sources: list[int] = []

    def staying(self) -> np.bool_:
        return np.False_

    def move(self, sources: Pages, targets: Pages) -> None:  # noqa: ARG002
        self.sources += sources.tolist()


def test_whoever_moves_pages_is_asked_from_then_on() -> None:
    pool = SlabPool(15, 1, 4)
    pages = pool.allocate(15)
    pool.release(pages[[0, 1, 3, 4, 5]])
    assert pool.take_slab() == 0
    pool.move_by(moves := Moved())
    assert pool.can_take_slab()
    assert pool.take_slab() == 1
    assert moves.sources == [7]
    assert pool.moved == 1


def test_a_slab_is_fresh_while_none_of_its_pages_is_held_or_cached() -> None:
    pool = SlabPool(11, 1, 4)
    assert pool.has_fresh_slab
    pages = pool.allocate(8)
    publish(pool, pages)
    assert not pool.has_fresh_slab
    assert not pool.can_take_slab()
    pool.release(pages[3:])
    assert not pool.has_fresh_slab, "its pages are cached"
    assert pool.can_take_slab()
    pool.forget_idle()
    assert pool.has_fresh_slab


def test_states_take_no_slab_where_pages_are_held_or_a_copy_is_older() -> None:
    pool = SlabPool(15, 1, 4)
    states = SlabStates(pool)
    assert states.take(moving=True)
    copy = states.allocate(1)
    states.index.publish(copy, np.array([[7]], np.uint64))
    states.release(copy)
    pages = pool.allocate(11)
    publish(pool, pages)
    pool.release(pages)
    assert (states.num_idle, states.oldest_use < pool.clock) == (1, True)
    assert not states.take(moving=True), "the copy goes first"
    states.give_up_oldest()
    assert states.take(moving=True)
    one = states.allocate_one()
    pool.allocate(11)
    assert not states.take(moving=False)
    states.check(counts(pool, one)[: states.num_pages + 1], none(states))


def test_after_an_interrupt_slabs_that_are_held_or_found_are_taken_and_no_others() -> None:
    pool = SlabPool(31, 1, 4)
    states = SlabStates(pool)
    held, found, lost = (states.allocate_one() for _ in range(3) if states.take(moving=False))
    states.index.publish(ids(found), np.array([[7]], np.uint64))
    states.release(ids(found))
    pages = pool.allocate(9)
    publish(pool, pages[:6])
    pool.release(pages[3:8])
    pool.taken[[lost, 1]] = False, True  # slab 1 has pages of requests, and nobody holds what `lost` has
    states._used[:] = 0  # pyright: ignore[reportPrivateUsage]
    pool._used[pages[3:6]] = 0  # pyright: ignore[reportPrivateUsage]
    pool._ages[:] = 1 << 40  # pyright: ignore[reportPrivateUsage]
    of_states = np.zeros(states.num_pages + 1, np.int64)
    of_states[held] = 1
    states.mend(of_states.copy(), none(states))
    assert np.flatnonzero(pool.taken).tolist() == sorted([held, found])
    rows = counts(pool, *pages[[0, 1, 2, 8]].tolist())
    pool.mend(rows.copy(), none(pool))
    pool.check(rows.copy(), none(pool))
    states.check(of_states.copy(), none(states))
    assert states.oldest_use > 0
    assert pool.take_slab() not in (0, held, found), "slabs are taken as before"
    assert pool.free_count == 31 - 4 - 2 * 4 + 4 - 4
    with pytest.raises(InvariantError, match="page .* has 0 holders, but 1 are counted"):
        states.check(np.ones(states.num_pages + 1, np.int64), none(states))


@pytest.mark.parametrize(
    ("column", "at", "value", "message"),
    [
        ("_place", 5, 3, "page 5 is fresh, but the stack does not have it at its place 3"),
        ("_ages", 2, 9, "slab 2 was last used at 0, but its recorded time is later"),
    ],
)
def test_check_names_a_broken_column(column: str, at: int, value: int, message: str) -> None:
    pool = SlabPool(15, 1, 4)
    getattr(pool, column)[at] = value
    with pytest.raises(InvariantError, match=message):
        pool.check(none(pool), none(pool))


def test_check_names_a_slab_that_states_kept_without_need() -> None:
    pool = SlabPool(15, 1, 4)
    states = SlabStates(pool)
    assert states.take(moving=False)
    with pytest.raises(InvariantError, match="1 pages are free, but were not returned to their slabs"):
        states.check(none(states), none(states))
