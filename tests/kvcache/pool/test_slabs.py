from __future__ import annotations

import numpy as np
import pytest

from kvcache.errors import InvariantError
from kvcache.eviction_order import BY_QUOTA, BY_TURN
from kvcache.policies.hinted_order import HintedOrder
from kvcache.policies.quotas import QuotaOrder, TenantQuotas
from kvcache.pool.journal import PageReader
from kvcache.pool.slabs import SlabPool, num_slabs
from kvcache.retention import NEUTRAL, PageHints


class Told(PageReader):
    """Records the calls that a pool makes to its readers."""

    def __init__(self) -> None:
        self.saved: list[list[int]] = []
        self.gone_for: list[tuple[object, list[int]]] = []

    def going(self, pages: np.ndarray) -> None:
        self.saved.append(pages.tolist())

    def gone(self, pages: np.ndarray, why: object) -> None:
        self.gone_for.append((why, pages.tolist()))


class Kept:
    """Idle slabs with cached content. The number of a slab stands for its content."""

    def __init__(self, pool: SlabPool) -> None:
        self.pool, self.slabs = pool, list[tuple[int, int]]()

    @property
    def num_idle(self) -> int:
        return len(self.slabs)

    @property
    def oldest_use(self) -> int:
        return self.slabs[0][1]

    def give_up_oldest(self) -> None:
        self.pool.give_back(self.slabs.pop(0)[0])

    def keep(self) -> int:
        slab = self.pool.take_slab(moving=False)
        if slab:
            self.slabs.append((slab, self.pool.uses.clock))
        return slab


class Elsewhere:
    """A mover that moves each page to the page that a list gives. Pages in `stays` cannot be moved."""

    def __init__(self, pool: SlabPool) -> None:
        self.pool, self.stays, self.moved = pool, set[int](), list[tuple[list[int], list[int]]]()

    def staying(self) -> np.ndarray:
        held = np.zeros(self.pool.num_pages + 1, np.bool_)
        held[np.flatnonzero(np.repeat(self.pool.taken, self.pool.slab_pages))] = True
        held[list(self.stays)] = True
        return held

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self.moved.append((sources.tolist(), targets.tolist()))


def made(num_pages: int = 15, slab_pages: int = 4) -> tuple[SlabPool, Kept, Elsewhere]:
    pool = SlabPool(num_pages, 1, slab_pages)
    pool.cached, pool.moves = Kept(pool), Elsewhere(pool)  # pyright: ignore[reportAttributeAccessIssue]
    return pool, pool.cached, pool.moves  # pyright: ignore[reportReturnType]


def publish(pool: SlabPool, pages: np.ndarray) -> None:
    pool.index.publish(pages, pages.astype(np.uint64).reshape(-1, 1))


def recount(pool: SlabPool, *held: np.ndarray) -> None:
    pages = np.concatenate(held) if held else np.zeros(0, np.int64)
    pool.check(np.bincount(pages, minlength=pool.num_pages + 1), np.zeros(pool.num_pages + 1, np.int64))


def test_slabs_are_the_last_pages_first_and_pages_again_when_given_back() -> None:
    pool, _, _ = made()
    assert pool.num_slabs == 3
    assert [pool.take_slab(), pool.take_slab()] == [3, 2]
    assert pool.free_count == 15 - 8
    recount(pool)
    pool.give_back(3)
    recount(pool)
    assert sorted(pool.allocate(11).tolist()) == [1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]
    assert not pool.can_take_slab()
    assert pool.take_slab() == 0


def test_a_slab_that_comes_back_is_the_last_to_be_handed_out_page_by_page() -> None:
    pool, _, _ = made(31)
    assert [pool.take_slab() for _ in range(4)] == [7, 6, 5, 4]
    pool.give_back(5)
    pages = pool.allocate(10)
    assert pages.tolist() == list(range(1, 11))
    recount(pool, pages)
    assert [pool.take_slab(), pool.take_slab()] == [5, 3]
    recount(pool, pages)


def test_a_slab_is_taken_from_among_fresh_pages_wherever_they_lie() -> None:
    pool, _, _ = made(31)
    pages = pool.allocate(31)
    # The pages of slabs 1 and 7 are released first. The pages of slab 2 and of other slabs are released later and are
    # taken first.
    pool.release(pages[np.r_[8:20, 3:8, 27:31]])
    for _ in range(3):
        taken = [pool.take_slab() for _ in range(3)]
        assert sorted(taken) == [3, 4, 7]
        recount(pool, np.setdiff1d(pages, np.r_[4:9, 9:21, 28:32]))
        one = pool.allocate_one()
        for slab in taken:
            pool.give_back(slab)
        pool.release(np.array([one], np.int32))


def test_a_slab_is_as_old_as_its_youngest_page_and_free_once_nobody_holds_one() -> None:
    pool, _, moves = made()
    pages = pool.allocate(15)
    moves.stays = set(pages.tolist())
    publish(pool, pages)
    assert pool.take_slab() == 0
    for page in (4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 7, 15):
        pool.release(np.array([page], np.int32))
        recount(pool, np.flatnonzero(pool.holders))
    assert pool.take_slab() == 2
    assert pool.take_slab() == 1


def test_a_page_that_is_written_keeps_its_slab() -> None:
    pool, _, moves = made()
    pages = pool.allocate(15)
    pool.add_writer(pages[3:])
    pool.release(pages)
    moves.stays = set(range(4, 16))
    assert pool.take_slab() == 0
    pool.drop_writer(pages[3:7])
    assert pool.take_slab() == 1


def test_the_slab_whose_pages_were_used_longest_ago_is_taken_and_they_are_evicted() -> None:
    pool, _, _ = made()
    pages = pool.allocate(15)
    publish(pool, pages)
    pool.release(pages[7:11])  # slab 2
    pool.release(pages[3:7])  # slab 1
    pool.release(pages[11:])  # slab 3
    assert pool.take_slab() == 2
    assert pool.evictions == 4
    assert not pool.index.published[8:12].any()
    recount(pool, pages[:3])


def test_a_page_or_a_kept_slab_is_evicted_whichever_was_used_first() -> None:
    pool, kept, _ = made()
    first = kept.keep()
    pages = pool.allocate(11)
    publish(pool, pages)
    pool.release(pages[3:])
    assert pool.take_slab() == 0, "the pages were used later than the kept slab"
    assert (kept.keep(), first) == (0, 3)
    kept.slabs = [(3, pool.uses.clock + 1)]
    assert pool.take_slab() in (1, 2)
    recount(pool, pages[:3])


def test_nothing_is_evicted_for_a_slab_that_fresh_pages_can_form_not_even_content_above_a_quota() -> None:
    pool, kept, _ = made()
    quotas = TenantQuotas(15, 0.1, {})
    pool.follow(QuotaOrder(pool.idle, quotas))
    assert kept.keep() == 3
    kept.slabs = [(3, -5)]  # A copy has this rank if its tenant is above its quota.
    pages = pool.allocate(4)
    publish(pool, pages)
    quotas.own(pages, "tenant")
    pool.release(pages)
    assert pool.take_slab() == 2
    assert (pool.evictions, kept.num_idle) == (0, 1)
    assert pool.take_slab() == 1, "content above its quota is evicted before the kept slab"
    assert (pool.evictions, kept.num_idle) == (3, 1)


def test_pages_evicted_for_a_slab_are_reported_stored_in_lower_tiers_and_not_found_any_more() -> None:
    pool, _, _ = made()
    told = Told()
    pages = pool.allocate(15)
    publish(pool, pages)
    pool.release(pages)
    pool.journal.read(told)
    assert pool.take_slab() == 3
    assert told.gone_for == [(BY_TURN, [12, 13, 14, 15])]
    assert told.saved == [[12, 13, 14, 15]]
    assert pool.evictions == 4
    recount(pool)
    assert pool.index.published.nonzero()[0].tolist() == [*range(1, 12)]


def test_pages_of_a_tenant_above_its_quota_make_room_for_a_slab() -> None:
    """Pages 8 to 15, in two slabs, belong to no tenant. A tenant above its quota has pages in a lower slab, which were
    used later.
    """
    pool, _, _ = made()
    quotas = TenantQuotas(15, 0.1, {})
    pool.follow(QuotaOrder(pool.idle, quotas))
    pages = pool.allocate(15)
    publish(pool, pages)
    quotas.own(pages[3:7], "tenant")
    pool.release(pages[7:])
    pool.release(pages[3:7])
    pool.journal.read(told := Told())
    assert pool.take_slab() == 3, "one page of the tenant stays, and its slab counts as used when that page was used"
    assert told.saved[:3] == [[7], [6], [5]]
    assert told.gone_for[:3] == [(BY_QUOTA, [7]), (BY_QUOTA, [6]), (BY_QUOTA, [5])]
    assert not pool.index.published[5:8].any()
    assert pool.evictions == 3 + 4
    recount(pool, pages[:3])
    assert sorted(pool.allocate(3).tolist()) == [5, 6, 7]
    recount(pool, pages[:3], np.array([5, 6, 7]))


def test_a_kept_slab_is_evicted_for_pages_if_it_is_older_or_pages_are_too_few() -> None:
    pool, kept, _ = made()
    kept.keep()
    pages = pool.allocate(11)
    publish(pool, pages)
    pool.release(pages)
    assert pool.free_count == 15
    one = pool.allocate_one()  # This is the first eviction, so the age of evicted content is not known yet.
    assert kept.num_idle == 1
    two = pool.allocate_one()
    assert kept.num_idle == 0
    assert two > 11
    recount(pool, np.array([one, two]))
    young, kept, _ = made()
    kept.keep()
    kept.slabs = [(3, 1 << 40)]
    young.allocate(11)
    assert kept.num_idle == 1
    assert len(young.allocate(2)) == 2
    assert kept.num_idle == 0


def test_held_pages_are_moved_out_of_the_slab_that_has_the_fewest_of_them() -> None:
    pool, _, moves = made()
    pages = pool.allocate(15)
    publish(pool, pages)
    held = np.array([1, 5, 9, 10, 13, 14])
    pool.release(np.setdiff1d(pages, held).astype(np.int32))
    pool.hold(np.array([5, 13], np.int32))
    moves.stays = {5}
    assert pool.take_slab(moving=False) == 0
    pool.journal.read(told := Told())
    assert pool.take_slab() == 3
    ((sources, targets),) = moves.moved
    assert sources == [13, 14]
    assert told.saved[:2] == [[12, 15], sources]  # These pages are evicted to make room for other pages.
    assert not set(targets) & {12, 13, 14, 15}
    pool.index.withdraw(np.array(sources, np.int32))
    recount(pool, np.array([1, 5, 5, 9, 10, *targets, targets[0]]))
    assert pool.moved == 2


def test_the_hint_and_the_tenant_of_a_page_move_with_it_and_end_with_it() -> None:
    pool, _, _ = made()
    quotas = TenantQuotas(15, 0.1, {})
    order = HintedOrder(15, pool.idle)
    pool.follow(QuotaOrder(order, quotas))
    pages = pool.allocate(15)
    publish(pool, pages)
    quotas.own(pages, "tenant")
    order.hint(pages, PageHints(np.full(15, 3, np.uint8), np.full(15, 60.0)))
    pool.release(np.setdiff1d(pages, [1, 2, 3, 4, 5, 6, 7, 13]).astype(np.int32))
    assert pool.take_slab() == 2, "none of its pages is held"
    assert (order.codes[8:12] == NEUTRAL).all()
    assert not quotas._owner[8:12].any()
    pool.give_back(2)
    assert pool.take_slab() == 2, "fresh pages are taken before idle ones"
    pool.release(np.array([1, 2, 3, 4], np.int32))
    assert pool.take_slab() == 3
    ((sources, (target,)),) = pool.moves.moved  # type: ignore[union-attr]
    assert sources == [13]
    assert (order.codes[target], quotas._owner[target]) == (3, quotas._ids["tenant"])
    assert order._expires[target] == order._expires[5]
    assert (order.codes[13], quotas._owner[13]) == (NEUTRAL, 0)


def hinted(code: int, share: float = 0.5) -> tuple[SlabPool, Kept, HintedOrder]:
    """Returns a pool and its order. The pool has a kept copy in slab 3, and later idle pages with this hint in slabs 1
    and 2. The order's clock returns `now`.
    """
    pool, kept, _ = made()
    order = HintedOrder(15, pool.idle, lambda: 100.0, share)
    pool.follow(order)
    kept.keep()
    pages = pool.allocate(11)
    publish(pool, pages)
    order.hint(pages, PageHints(np.full(11, code, np.uint8), np.full(11, np.inf)))
    pool.release(pages)
    return pool, kept, order


@pytest.mark.parametrize(("code", "share"), [(0, 0.5), (0, 0.0), (4, 0.5)])
def test_a_hint_moves_the_use_of_a_page_by_its_level_and_the_trusted_share(code: int, share: float) -> None:
    pool, _, order = hinted(code, share)
    lead = round((code - 2) * 2 * share * 15)
    assert pool.uses.next_of(order, pool.uses.used) == pool.uses.clock + lead
    assert pool.uses.next_of(order._recent, pool.uses.used) == pool.uses.clock
    assert pool.uses.age_of(1) == max(1, pool.uses.clock + lead)
    recount(pool)
    pool.idle.remove(np.array([1], np.int32))
    pool.index.withdraw(np.array([1], np.int32))
    pool._push_fresh(np.array([1], np.int32))
    assert (pool.uses.used[1], pool.uses.turn[1]) == (0, 0)


def test_pages_of_a_returned_slab_are_fresh_whatever_hints_they_had() -> None:
    pool, kept, _ = made(31)
    order = HintedOrder(31, pool.idle, share=0.5)
    pool.follow(order)
    assert pool.take_slab() == 7
    pages = pool.allocate(27)
    publish(pool, pages)
    order.hint(pages, PageHints(np.full(27, 4, np.uint8), np.full(27, np.inf)))
    pool.release(pages[3:])
    assert pool.take_slab() == 6
    pool.give_back(6)
    recount(pool, pages[:3])
    kept.slabs = [(7, 1)]
    assert pool.take_slab() == 6, "fresh pages are taken before the kept slab, however old it is"


def test_an_expired_hint_makes_a_page_no_younger() -> None:
    pool, _, order = hinted(4 + 5)  # The hint lasts for at most four seconds.
    assert pool.uses.next_of(order, pool.uses.used) > pool.uses.clock
    order._expires[:] = 99.0
    assert pool.uses.next_of(order, pool.uses.used) == pool.uses.clock


def test_with_hints_a_kept_slab_is_compared_with_the_next_eviction_and_not_with_the_last() -> None:
    pool, kept, _ = hinted(4)
    kept.slabs = [(3, pool.uses.clock + 1)]
    pool.allocate(1)
    assert kept.num_idle == 0, "the kept slab was used later than the pages, but their hint says that they stay"
    pool, kept, _ = hinted(0)
    kept.slabs = [(3, 2)]
    pool.uses.last_evicted = pool.uses.clock
    pool.allocate(1)
    assert kept.num_idle == 1


def test_pages_of_slabs_are_pages_that_are_cached_beside_those_published() -> None:
    pool, _, _ = hinted(2)
    assert pool.width == 1 + 4 / 11


def test_pages_that_cannot_be_moved_keep_their_slab() -> None:
    pool, _, moves = made()
    pages = pool.allocate(15)
    moves.stays = {4, 9, 14}
    pool.release(np.setdiff1d(pages, [4, 9, 14]).astype(np.int32))
    assert not pool.can_take_slab()
    assert pool.take_slab() == 0
    moves.stays = {4, 9}
    assert pool.can_take_slab()
    full, _, _ = made()
    held = full.allocate(15)
    full.release(held[[4, 8, 12]])
    assert full.take_slab() == 0, "three pages are free, a slab takes four"


def test_check_names_a_page_that_a_slab_and_others_hold() -> None:
    pool, _, _ = made()
    pool.take_slab()
    pool.hold(np.array([12], np.int32))
    with pytest.raises(
        InvariantError, match="page 12 is in slab 3, which a state has taken, but the page is also held"
    ):
        recount(pool, np.array([12]))
    pool, _, _ = made()
    pages = pool.allocate(2)
    publish(pool, pages)
    pool.release(pages)
    pool.uses.used[1] = 0
    with pytest.raises(InvariantError, match="page 1 is idle, but the time of its release is not recorded"):
        recount(pool)
    pool.uses.used[1] = 1
    pool.uses.used[9] = 1
    with pytest.raises(InvariantError, match="page 9 is fresh, but was used at 1"):
        recount(pool)


def test_a_slab_is_given_back_as_soon_as_nobody_holds_or_finds_its_state() -> None:
    pool = SlabPool(31, 1, 4)
    states, digest = pool.cached, np.array([[1]], np.uint64)
    pages = [states.allocate(1) for _ in range(2) if states.make_room(moving=False)]
    assert np.count_nonzero(pool.taken) == 2
    states.index.publish(pages[0], digest)
    for page in pages:
        states.release(page)
    # The pages of the other slab are free for tokens again.
    assert np.flatnonzero(pool.taken).tolist() == pages[0].tolist()
    assert (states.num_idle, pool.free_count) == (1, 31)
    states.check(np.zeros(8, np.int64), np.zeros(8, np.int64))
    pool.release(pool.allocate(31))  # This allocation evicts the copy.
    assert not pool.taken.any()
    assert states.index.find(digest).tolist() == [0]
    states.check(np.zeros(8, np.int64), np.zeros(8, np.int64))


def test_a_pool_smaller_than_a_slab_has_none_and_one_without_content_is_as_wide_as_its_pages() -> None:
    assert [num_slabs(pages, 4) for pages in (0, 2, 6, 7, 11)] == [0, 0, 0, 1, 2]
    assert SlabPool(11, 1, 4).width == 1.0


def test_pages_are_moved_for_a_slab_if_exactly_enough_others_are_free() -> None:
    pool, _, moves = made()
    pool.allocate(15)
    pool.release(np.array([1, 8, 9, 12]))
    assert pool.take_slab() == 2
    assert moves.moved == [([10, 11], [1, 12])]


def test_a_kept_slab_that_was_used_later_stays_if_exactly_enough_pages_are_idle() -> None:
    pool, kept, _ = made()
    pages = pool.allocate(11)
    publish(pool, pages)
    pool.release(pages)
    assert kept.keep() == 3
    kept.slabs = [(3, pool.uses.clock + 1)]
    assert len(pool.allocate(11)) == 11
    assert (kept.num_idle, pool.evictions) == (1, 11)


def test_after_an_interrupt_the_pages_of_lost_slabs_are_fresh_wherever_the_stack_began() -> None:
    pool = SlabPool(11, 1, 4)
    assert [pool.take_slab(), pool.take_slab()] == [2, 1]
    for rebuilt in (pool.cached, pool):
        rebuilt.rebuild(*np.zeros((2, rebuilt.num_pages + 1), np.int64))
    recount(pool)
    assert sorted(pool.allocate(11).tolist()) == [*range(1, 12)]
