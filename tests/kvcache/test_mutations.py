"""Breaks the code at one rule at a time. Either the model or `check()` must notice each break, because otherwise no
test would cover the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcache.replica.batch
from kvcache.copies import Copy, PageMover
from kvcache.pool.index import PrefixIndex
from kvcache.pool.lru_order import LruOrder
from kvcache.pool.pages import PagePool
from kvcache.replica.batch import Batch
from kvcache.replica.hashing import PrefixHasher
from kvcache.replica.leases import PageLease, PageLeases
from kvcache.replica.replica import Replica
from kvcache.replica.resume import Found
from kvcache.replica.rows import BlockRows
from kvcache.tiers.host_tier import HostTier, ReplicaTier
from tests.kvcache.random_model.run import Model

# These tests check the model and not the manager.
pytestmark = pytest.mark.ci

LOOK_UP = Replica.look_up


def without_tail_first(pool: PagePool, pages: np.ndarray) -> None:
    pool.holders[pages] -= 1
    pool._free(pages[pool._unused(pages)])


def without_hold(pool: PagePool, pages: np.ndarray) -> None:
    idle = pages[pool._unused(pages)]
    if idle.size:
        pool.idle.remove(idle)
    pool.holders[idle] += 1


def idle_before_fresh(pool: PagePool, count: int) -> np.ndarray:
    evicted = pool.idle.pop(min(count, pool.idle.count))
    pool.index.withdraw(evicted)
    pool.evictions += len(evicted)
    pool._push_fresh(evicted)
    return ALLOCATE(pool, count)


def full_hits(replica: Replica, context: Any, row: int | None = None, hasher: Any = None) -> Found:
    first = 0 if row is None else int(replica.rows.committed[row])
    last = context.end_idx // replica.page_size
    if not replica.caching or last <= first:
        return replica.tables.nothing(first)
    hasher = hasher or replica.hasher(row, context)
    return replica.tables.run(first, hasher.digests(context.tokens, first, last))


def forgets_duplicates(replica: Replica, rows: Any, columns: Any, digests: np.ndarray) -> None:
    replica.pool.index.publish(replica.rows.table[0, rows, columns], digests)


def keeps_duplicates(replica: Replica, rows: Any, columns: Any, digests: np.ndarray) -> None:
    own = replica.rows.table[0, rows, columns]
    kept = replica.pool.index.publish(own, digests)
    replica.pool.hold(kept[kept != own])
    replica.rows.table[0, rows, columns] = kept


def leaves_entries(rows: BlockRows, row: int) -> None:
    kept = rows.table[:, row].copy()
    UNBIND(rows, row)
    rows.table[:, row] = kept


def most_recent_first(order: LruOrder, count: int) -> np.ndarray:
    taken = order.pages()[len(order.pages()) - count :][::-1].copy()
    order.remove(taken)
    return taken


def stays_published(index: PrefixIndex, _pages: np.ndarray) -> None:
    index.generation += 1


def forgets_a_generation(index: PrefixIndex, pages: np.ndarray) -> None:
    before = index.generation
    WITHDRAW(index, pages)
    index.generation = before


def no_room_check(replica: Replica, rows: Any, lengths: Any) -> bool:
    RESERVE_DECODING(replica, rows, lengths)
    return True


def drops_a_token(batch: Batch, place: int, end: int) -> None:
    CATCH_UP(batch, place, end)
    if batch.contexts[place]._end - end > 3:
        batch.contexts[place]._buffer[batch.contexts[place]._end - 2] ^= 3


def hits_free_pages_twice(_pool: PagePool, _pages: np.ndarray) -> int:
    return 0


def arrives_without_a_copy(tier: ReplicaTier, rows: Any) -> None:
    for load in tier.open_loads:
        load.copy.begun = True
    ARRIVE(tier, rows)


def evicts_without_a_copy(tier: ReplicaTier, pages: np.ndarray) -> None:
    if tier.storing[pages].any():
        tier.waiting.clear()
        tier.storing[:] = False


def copies_another_page(mover: PageMover, pages: np.ndarray, slots: np.ndarray) -> Copy:
    return STORE(mover, pages[::-1], slots)


def holds_no_slot(_tier: ReplicaTier, _slots: np.ndarray) -> None:
    pass


def found_before_it_arrived(tier: ReplicaTier, row: int, pages: np.ndarray, slots: np.ndarray) -> None:
    RESTORE(tier, row, pages, slots)
    tier.pool.index.publish(pages, tier.host.pool.index.digests_of(slots))


def head_of_a_prompt_first(tier: HostTier, slots: np.ndarray) -> None:
    tier.pool.hold(slots)
    tier.pool.release(slots[::-1])


def restores_the_last_token(self: Replica, row: int, context: Any, start: int) -> Any:
    found = LOOK_UP(self, row, context, start)
    last, below = context.end_idx // self.page_size, None
    if self.tier.keeps and found.end < last and not self.rows.num_pages[row]:
        below = self._with_below(row, context, found.first, last)
    return below or found


def forgets_keys_to_come(hashers: Any, firsts: Any, rows: Any, slow: Any) -> np.ndarray:
    for hasher in hashers:
        hasher.keys_left = []
    return NEXT_DIGESTS(hashers, firsts, rows, slow)


def takes_changed_keys(_replica: Replica, _row: int, _context: Any) -> None:
    pass


def fits_by_salt_alone(hasher: PrefixHasher, algorithm: Any, page_size: int, named: Any, _segments: Any) -> bool:
    return (hasher.algorithm, hasher.page_size, hasher.salt) == (algorithm, page_size, named[0])


NEXT_DIGESTS = kvcache.replica.batch.next_digests


def leaves_nothing_to_leases(leases: PageLeases, row: int, pages_of: Callable[[int, int], np.ndarray]) -> None:
    LEAVE(leases, row, lambda row, _end: pages_of(row, 0))


def leaves_what_is_not_computed(leases: PageLeases, row: int, pages_of: Callable[[int, int], np.ndarray]) -> None:
    LEAVE(leases, row, lambda row, _end: pages_of(row, int(leases._rows.num_pages[row])))


def keeps_nothing_that_was_told(_leases: PageLeases, *_: Any) -> None:
    pass


def ends_by_forgetting(leases: PageLeases, lease: PageLease) -> None:
    if lease in leases:
        leases._held[lease].clear()
    END(leases, lease)


LEAVE, END = PageLeases.leave, PageLeases.end
ALLOCATE, UNBIND, WITHDRAW = PagePool.allocate, BlockRows.unbind, PrefixIndex.withdraw
RESERVE_DECODING, CATCH_UP = Replica.reserve_decoding, Batch.catch_up
ARRIVE, RESTORE, STORE = ReplicaTier.arrive, ReplicaTier.restore, PageMover.store

MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a key that lies on the page to come is forgotten": (kvcache.replica.batch, "next_digests", forgets_keys_to_come),
    "keys may change under pages": (Replica, "refuse_renamed", takes_changed_keys),
    "changed keys keep the digests of the old ones": (PrefixHasher, "fits", fits_by_salt_alone),
    "pages are freed head first": (PagePool, "release", without_tail_first),
    "a hit adds no holder to a page in use": (PagePool, "hold", without_hold),
    "useful pages go before fresh ones": (PagePool, "allocate", idle_before_fresh),
    "the last token may be hit": (Replica, "find", full_hits),
    "a duplicate is not shared": (Replica, "_publish", forgets_duplicates),
    "a duplicate is shared but never freed": (Replica, "_publish", keeps_duplicates),
    "a released row keeps its entries": (BlockRows, "unbind", leaves_entries),
    "the most recent page goes first": (LruOrder, "pop", most_recent_first),
    "an evicted page stays published": (PrefixIndex, "withdraw", stays_published),
    "an eviction leaves remembered matches": (PrefixIndex, "withdraw", forgets_a_generation),
    "a batch is told that it has pages": (Replica, "reserve_decoding", no_room_check),
    "a batch hands over a wrong token": (Batch, "catch_up", drops_a_token),
    "free pages of a hit count as free": (PagePool, "would_be_taken", hits_free_pages_twice),
    "a restored page is read before it is there": (ReplicaTier, "arrive", arrives_without_a_copy),
    "an evicted page is not copied first": (ReplicaTier, "going", evicts_without_a_copy),
    "another page is copied to the host": (PageMover, "store", copies_another_page),
    "a slot that is to be restored may be evicted": (ReplicaTier, "hold", holds_no_slot),
    "a page is found before it has arrived": (ReplicaTier, "restore", found_before_it_arrived),
    "host slots age head first": (HostTier, "touch", head_of_a_prompt_first),
    "a released request leaves its leases nothing": (PageLeases, "leave", leaves_nothing_to_leases),
    "a released request leaves its leases too much": (PageLeases, "leave", leaves_what_is_not_computed),
    "a page that was told is freed": (PageLeases, "replace", keeps_nothing_that_was_told),
    "an ended lease holds on": (PageLeases, "end", ends_by_forgetting),
    "the last token may be restored": (Replica, "look_up", restores_the_last_token),
}


# All managers have the features whose moves exercise the rule. Half of the managers have host memory. If the rule
# belongs to the tiers, all managers have it. Pages that readers know seldom leave a row, except from a window.
COMMON = ("forks", "preemption", "batches", "renames", "stale", "resets", "leases")
BELOW = (ReplicaTier, HostTier, PageMover)
OF_TIERS = {name for name, (owner, *_) in MUTATIONS.items() if owner in BELOW} | {"the last token may be restored"}


def many_moves(name: str) -> None:
    for number in range(300):
        windows = ["window"] * (MUTATIONS[name][:2] == (PageLeases, "replace"))
        moves = Model.of(number, (*COMMON, *windows, *["host"] * (name in OF_TIERS or number % 2)))
        for _ in range(100):
            moves.move()
        moves.finish()
        moves.close()


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, mutant = MUTATIONS[name]
    monkeypatch.setattr(owner, method, mutant)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever notices first: the model, the check, numpy
        many_moves(name)
    # A mutant with one of these errors cannot run, so it shows nothing about the rule.
    assert not isinstance(caught.value, (TypeError, AttributeError, NameError)), repr(caught.value)
