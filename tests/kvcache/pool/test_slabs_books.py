"""Slabs without cached states and without movable pages. Also the records of slabs after an interrupt or a fault."""

from __future__ import annotations

from operator import attrgetter

import numpy as np
import pytest

from kvcache.errors import InvariantError
from kvcache.eviction_order import Pages
from kvcache.policies.quotas import QuotaOrder, TenantQuotas
from kvcache.pool.pages import PageMoves
from kvcache.pool.slabs import SlabPool, SlabStates


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
    pool.release(pages[[3, 4, 7, 8, 11, 12]])  # Every slab has some held pages and some free pages.
    assert (pool.free_count, pool.can_take_slab(), pool.take_slab()) == (6, False, 0)


class Moved(PageMoves):
    def __init__(self) -> None:
        self.sources: list[int] = []

    def staying(self) -> np.bool_:
        return np.False_

    def move(self, sources: Pages, targets: Pages) -> None:  # noqa: ARG002
        self.sources += sources.tolist()


def test_a_mover_that_is_set_later_is_used_from_then_on() -> None:
    pool = SlabPool(15, 1, 4)
    pages = pool.allocate(15)
    pool.release(pages[[0, 1, 3, 4, 5, 7, 8]])
    assert pool.take_slab() == 0
    pool.moves = moves = Moved()
    assert pool.can_take_slab()
    assert pool.take_slab() == 1
    assert (moves.sources, pool.moved) == ([7], 1)
    pool.release(pages[[2, 12]])
    assert pool.take_slab() == 2
    assert (moves.sources, pool.moved) == ([7, 10, 11], 3)


class Cached:
    """A substitute for cached states: one slab that was last used at time `used`."""

    def __init__(self, pool: SlabPool, used: int) -> None:
        self.pool, self.slab, self.used, self.is_idle = pool, pool.take_slab(), used, True
        pool.cached = self  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def num_idle(self) -> int:
        return int(self.is_idle)

    @property
    def oldest_use(self) -> int:
        return self.used

    def give_up_oldest(self) -> None:
        self.pool.give_back(self.slab)
        self.is_idle = False


@pytest.mark.parametrize("count", [1, 2])
def test_a_cached_slab_is_evicted_once_a_page_with_as_late_a_use_was_evicted(count: int) -> None:
    pool = SlabPool(15, 1, 4)
    pages = pool.allocate(15)
    publish(pool, pages)
    pool.release(pages[9:])
    cached = Cached(pool, pool.uses.clock + 1)
    assert cached.slab == 3
    pool.release(pages[:9])
    # Evicts pages 10 and 11, the only idle pages that were last used before the slab. The remaining idle pages were
    # last used after it.
    pool.allocate(2)
    assert cached.num_idle == 1
    pool.allocate(count)
    assert cached.num_idle == 1, "no evicted page was used later than the slab"
    pool.allocate(count)
    assert cached.num_idle == 0


def test_no_cached_slab_is_evicted_if_fresh_pages_are_just_enough() -> None:
    pool = SlabPool(15, 1, 4)
    cached = Cached(pool, 1)
    pool.uses.last_evicted = 5
    assert len(pool.allocate(11)) == 11
    assert cached.num_idle == 1
    assert pool.allocate(0).size == 0
    assert cached.num_idle == 1
    assert len(pool.allocate(4)) == 4
    assert cached.num_idle == 0


def test_a_page_above_a_quota_was_used_before_everything_else() -> None:
    pool = SlabPool(15, 1, 4)
    pool.follow(QuotaOrder(pool.idle, TenantQuotas(15, 0.2, {})))
    pages = pool.allocate(15)
    publish(pool, pages)
    pool.idle.own(pages[:5], "tenant")
    pool.release(pages)
    used = np.arange(16) + 100
    assert pool.uses.next_of(pool.idle, used) == 100 + 5 - (1 << 62)
    pool.allocate(2)
    assert pool.uses.next_of(pool.idle, used) == 100 + 15, "three pages are its own"


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
    pool.forget()
    assert pool.has_fresh_slab


def test_states_take_no_slab_where_pages_are_held_or_a_copy_is_older() -> None:
    pool = SlabPool(15, 1, 4)
    states = pool.cached
    assert states.make_room(moving=True)
    copy = states.allocate(1)
    states.index.publish(copy, np.array([[7]], np.uint64))
    pool.release(pool.allocate(3))
    states.release(copy)
    released = pool.uses.clock
    pages = pool.allocate(11)
    publish(pool, pages)
    pool.release(pages)
    assert (states.num_idle, states.oldest_use) == (1, released)
    assert released < pool.uses.clock
    assert states.make_room(moving=True)
    assert np.count_nonzero(pool.taken) == 1, "the copy goes first"
    states.give_up_oldest()
    assert states.make_room(moving=True)
    one = states.allocate_one()
    pool.allocate(11)
    assert not states.make_room(moving=False)
    states.check(counts(pool, one)[: states.num_pages + 1], none(states))


def test_states_say_whether_there_is_room_for_one_more_and_whether_it_may_cost_pages() -> None:
    pool = SlabPool(15, 1, 4)
    states = pool.cached
    assert (states.num_held, states.has_room, states.room_may_cost) == (0, True, False)
    assert states.make_room(moving=False)
    one = states.allocate_one()
    assert (states.num_held, states.has_room, states.room_may_cost) == (1, True, False)
    pool.allocate(11)
    assert (states.num_held, states.has_room, states.room_may_cost) == (1, False, True)
    states.index.publish(ids(one), np.array([[7]], np.uint64))
    states.release(ids(one))
    assert (states.num_held, states.has_room, states.room_may_cost) == (0, True, True)
    assert states.next_evicted() == 0, "pages and states compete for the same memory, so the answer is not known"


def test_states_move_pages_only_where_they_may() -> None:
    pool = SlabPool(15, 1, 4)
    states = pool.cached
    pages = pool.allocate(15)
    pool.moves = Moved()
    pool.release(pages[[3, 4, 7, 8, 11, 12]])
    assert not states.make_room(moving=False)
    assert states.make_room(moving=True)
    assert pool.moved > 0


@pytest.mark.parametrize("backwards", [False, True])
def test_the_highest_of_several_slabs_released_together_is_handed_out_last(backwards: bool) -> None:
    pool = SlabPool(15, 1, 4)
    states = pool.cached
    both = sorted(states.allocate_one() for _ in range(2) if states.make_room(moving=False))
    states.release(ids(*(both[::-1] if backwards else both)))
    assert set(range(1, 16)) - set(pool.allocate(11).tolist()) == {both[1] * 4 + at for at in range(4)}


def test_after_an_interrupt_slabs_that_are_held_written_or_found_are_taken_and_no_others() -> None:
    pool = SlabPool(39, 1, 4)
    states = pool.cached
    held, written, found, known, lost = (states.allocate_one() for _ in range(5) if states.make_room(moving=False))
    states.index.publish(ids(found, known), np.array([[7], [8]], np.uint64))
    states.add_writer(ids(written))
    states.release(ids(found, known, written))
    pages = pool.allocate(9)
    publish(pool, pages[:8])
    pool.release(pages[3:8])
    pool.taken[[held, lost, 1]] = False, False, True  # Slab 1 has pages of requests. No request holds slab `lost`.
    states.holders[[held, found]], states.writers[:] = (4, 1), 0
    pool.uses.of_slabs[:] = 0
    pool.uses.of_slabs[known] = 2
    pool.uses.used[pages[3:6]] = 0
    pool.uses.ages[:] = 1 << 40
    of_states, writers = none(states), none(states)
    of_states[held] = writers[written] = 1
    states.rebuild(of_states.copy(), writers.copy())
    assert np.flatnonzero(pool.taken).tolist() == sorted([held, written, found, known])
    rows = counts(pool, *pages[[0, 1, 2, 8]].tolist())
    pool.rebuild(rows.copy(), none(pool))
    pool.check(rows.copy(), none(pool))
    states.check(of_states.copy(), writers.copy())
    assert states.oldest_use == 2, "a slab keeps the time of its last use"
    assert pool.take_slab() not in (0, held, written, found, known), "slabs are taken as before"
    assert pool.free_count == 39 - 4 - 4 * 4 + 2 * 4 - 4
    with pytest.raises(InvariantError, match="page .* has 0 holders, but 1 are counted"):
        states.check(np.ones(states.num_pages + 1, np.int64), none(states))


@pytest.mark.parametrize(
    ("column", "at", "value", "message"),
    [
        ("_index", 5, 3, "page 5 is fresh, but the stack has another page at the index 3"),
        ("uses.ages", 2, 9, "slab 2 was last used at 0, before its recorded bound 9"),
    ],
)
def test_check_names_a_broken_column(column: str, at: int, value: int, message: str) -> None:
    pool = SlabPool(15, 1, 4)
    attrgetter(column)(pool)[at] = value
    with pytest.raises(InvariantError, match=message):
        pool.check(none(pool), none(pool))


def test_check_names_a_slab_that_states_kept_without_need() -> None:
    pool = SlabPool(15, 1, 4)
    states = pool.cached
    assert states.make_room(moving=False)
    with pytest.raises(InvariantError, match="1 pages are free, but were not returned to their slabs"):
        states.check(none(states), none(states))
