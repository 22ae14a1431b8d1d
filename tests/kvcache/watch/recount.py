"""Finds the state of each page of a manager from its rows, leases, imports and eviction order.

Tests compare these states with the states that `kvcache.watch` reports to `pagewire top`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvcache import PagedKVCacheManager
from kvcache.endpoints.follower import Followed
from kvcache.replica.replica import Replica
from kvcache.watch.messages import PageState, owners_of, states_of


def recounted(replica: Replica) -> list[PageState]:
    """Returns the state of each page, beginning with the null page. The caller has called `check`, so each page is in
    exactly one state.
    """
    states = [PageState.FREE] * (replica.pool.num_pages + 1)
    for page in replica.pool.idle.pages().tolist():
        states[page] = PageState.IDLE
    for _, held in replica.leases.held():
        for page in np.concatenate([*held, np.zeros(0, np.int32)]).tolist():
            states[page] = PageState.LEASED
    for row in replica.rows.row_of.values():
        for page in replica.rows.pages(row).tolist():
            states[page] = PageState.HELD
    for page in (page for pages in replica.tier.coming() for page in pages.tolist()):
        states[page] = PageState.WRITTEN
    for pending in replica.imports.each:
        for page in pending.parts[0].dst_pages.tolist():
            states[page] = PageState.QUARANTINED if pending.closed else PageState.WRITTEN
    return states


def owners(replica: Replica) -> dict[int, set[str]]:
    """Returns the owners' names of each page with an owner."""
    found: dict[int, set[str]] = {}
    for request_id, row in replica.rows.row_of.items():
        for page in replica.rows.pages(row).tolist():
            found.setdefault(page, set()).add(request_id)
    for lease, held in replica.leases.held():
        for page in (page for pages in held for page in pages.tolist()):
            found.setdefault(page, set()).add(lease.request_id)
    for pending in replica.imports.each:
        for page in pending.parts[0].dst_pages.tolist():
            found.setdefault(page, set()).add(pending.request_id)
    return found


def assert_same(followed: Followed, manager: PagedKVCacheManager) -> Counter[PageState]:
    """Asserts that a snapshot agrees with the manager, page by page. Returns the number of pages in each state."""
    manager.check()
    look, seen = followed.look, Counter[PageState]()
    assert look is not None
    by_pool = dict(zip(zip(look.owners.pools, look.owners.numbers, strict=True), look.owners.request_ids, strict=True))
    for at, replica in enumerate(manager._replicas.each):
        cells = followed.cells[str(at)]
        wanted = recounted(replica)
        assert states_of(cells).tolist() == wanted
        pool = next(pool for pool in look.pools if pool.name == str(at))
        assert pool.counts == tuple(wanted[1:].count(state) for state in PageState)
        seen.update(wanted[1:])
        own = owners(replica)
        for page, number in enumerate(owners_of(cells).tolist()):
            if page in own:
                assert by_pool[str(at), number] in own[page], page
            else:
                assert number == 0, page
        shared = np.flatnonzero(cells >> np.uint32(6) & np.uint32(1))
        assert shared.tolist() == np.flatnonzero(replica.pool.holders > 1).tolist()
    return seen
