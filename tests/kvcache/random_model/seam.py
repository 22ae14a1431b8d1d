"""The model's access to a manager's internals. If they change, only this file of the model needs to change."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvcache import PagedKVCacheManager, PageLease, TextContext
from kvcache.copies import Copy, PageMover
from kvcache.replica.hashing import DIGEST_BYTES
from kvcache.tiers.tiers import Tiers
from tests.kvcache.policies.hinted_idle import hinted_order, trust

Digest = bytes


def _found(index: Any) -> dict[Digest, int]:
    """Returns the page of each digest in an index."""
    pages = np.flatnonzero(index.published).astype(np.int32)
    digests = index.digests_of(pages)
    assert len(pages) == 0 or (index.find(digests) == pages).all(), "a published page is not found"
    return {digest.tobytes(): page for digest, page in zip(digests, pages.tolist(), strict=True)}


def rows(manager: PagedKVCacheManager, request_id: str) -> list[dict[int, int]]:
    """Returns the request's pages by block number, for each block table."""
    replica, _, row = manager._claims.locate(request_id, "rows")
    tables = replica.rows.table[:, row]
    return [{int(column): int(table[column]) for column in table.nonzero()[0]} for table in tables]


def published(manager: PagedKVCacheManager, request_id: str) -> int:
    """Returns the number of the request's published pages."""
    replica, _, row = manager._claims.locate(request_id, "published")
    return int(replica.rows.committed[row])


def cached(manager: PagedKVCacheManager, request_id: str) -> int:
    """Returns how many tokens of the request were computed at its last step."""
    replica, _, row = manager._claims.locate(request_id, "cached")
    return int(replica.rows.cached[row])


def digests(manager: PagedKVCacheManager, context: TextContext) -> list[list[Digest]]:
    """Returns the digests of a prompt's full pages in each table. A page that ends with the last token is left out."""
    replica = manager._replicas.each[0]
    every = replica.tables.every(_of_tokens(manager, context))
    return [[one.tobytes() for one in table] for table in every]


def token_digests(manager: PagedKVCacheManager, context: TextContext) -> list[Digest]:
    """Returns the digests of the tokens in a prompt's full pages, which also name its states. As above."""
    return [one.tobytes() for one in _of_tokens(manager, context)]


def _of_tokens(manager: PagedKVCacheManager, context: TextContext) -> Any:
    width = DIGEST_BYTES[manager._replicas.each[0].hash_algorithm]
    return np.frombuffer(manager.contents.digests(context).digests, np.uint64).reshape(-1, width // 8)


def most_computed(manager: PagedKVCacheManager, request_id: str) -> tuple[int, bool]:
    """Returns the largest number of tokens that a request can have computed. Also returns whether its whole prompt has
    been computed.
    """
    replica, _, row = manager._claims.locate(request_id, "computed")
    rows = replica.rows
    is_through = bool(rows.counted[row] >= rows.prompt[row])
    return int((rows.capacity if is_through else rows.counted)[row]), is_through


def marked(manager: PagedKVCacheManager) -> bool:
    """Returns whether an interrupted call was changing the manager's state."""
    return manager._mark.call is not None


def begin_segments(manager: PagedKVCacheManager) -> None:
    """Lets every row begin its next segment now, which it would do when it next names a page."""
    for replica in manager._replicas.each:
        for row in replica.rows.row_of.values():
            replica.lineage(row)


def found(manager: PagedKVCacheManager, replica: int) -> dict[Digest, int]:
    """Returns the pages that a prompt finds on a replica's devices, by digest."""
    return _found(manager._replicas.each[replica].pool.index)


def idle(manager: PagedKVCacheManager, replica: int) -> list[int]:
    """Returns those pages of `found` that are idle, in the order of eviction. With hints the order is approximate."""
    return manager._replicas.each[replica].pool.idle.pages().tolist()


def leased(manager: PagedKVCacheManager, replica: int) -> list[tuple[PageLease, list[list[int]]]]:
    """Returns the open leases, and the pages that each lease holds in addition to its request's row."""
    return [(one, [part.tolist() for part in parts]) for one, parts in manager._replicas.each[replica].leases.held()]


def written(manager: PagedKVCacheManager, replica: int) -> set[int]:
    """Returns the pages that an import, a tier or a step in flight may write."""
    one = manager._replicas.each[replica]
    pages = [pending.written for pending in one.imports.each] + one.tier.coming()
    pages += [pages for of_step in one.pool.parked for pages in of_step]
    return {int(page) for part in pages for page in part}


def parked(manager: PagedKVCacheManager, replica: int) -> list[int]:
    """Returns the pages that wait for the end of the oldest step in flight, in the order in which they become free. A
    page that was released, found and released again is listed twice. It becomes free at the later place.
    """
    pages = [int(page) for pages in manager._replicas.each[replica].pool.parked[0] for page in pages]
    return [*dict.fromkeys(reversed(pages))][::-1]


def kept(manager: PagedKVCacheManager, replica: int) -> dict[Digest, int]:
    """Returns the state copies that a prompt finds on a replica.

    The key of a copy is the digest of the last page before it.
    """
    return _found(manager.states[replica].pool.index)


def lent_states(manager: PagedKVCacheManager, replica: int) -> set[int]:
    """Returns the state pages that leases hold."""
    leases = manager._replicas.each[replica].leases
    return {int(page) for page in leases.holders(manager.states[replica].pool).nonzero()[0]}


def moved(manager: PagedKVCacheManager) -> int:
    """Returns the number of pages that were moved to make room for a state."""
    return sum(getattr(replica.pool, "moved", 0) for replica in manager._replicas.each)


def evicted(manager: PagedKVCacheManager, replica: int) -> int:
    return manager._replicas.each[replica].pool.evictions


# ---- tiers


def _tiers(manager: PagedKVCacheManager) -> list[Tiers]:
    return [one for one in (manager._replicas.tiers, manager._replicas.state_tiers) if one is not None]


def hold_copies(manager: PagedKVCacheManager) -> None:
    """Makes the manager copy pages only on request and at evictions. A model cannot predict when copies are made by the
    clock.
    """
    for tiers in _tiers(manager):
        tiers.share = 0.0


class _LateCopy:
    """A copy whose bytes have arrived. As with a GPU, the manager notices its end later."""

    def __init__(self, copy: Copy, is_over: Callable[[], bool]) -> None:
        self._copy, self._is_over, self._ended = copy, is_over, False

    @property
    def begun(self) -> bool:
        return self._copy.begun

    def begin(self) -> None:
        self._copy.begin()

    def over(self) -> bool:
        self._ended = self._ended or self._is_over()
        return self._ended

    def wait(self) -> None:
        self._ended = True

    def order(self) -> None:
        """Does nothing, because the bytes have already arrived."""


def end_copies_late(manager: PagedKVCacheManager, is_over: Callable[[], bool]) -> None:
    """Makes copies to and from the host begin at once. A copy ends when `is_over` returns true or when the manager
    waits for the copy.
    """

    def late(mover: PageMover) -> PageMover:
        def store(pages: Any, slots: Any) -> Any:
            return begun(mover.store(pages, slots))

        def load(slots: Any, pages: Any) -> Any:
            return begun(mover.load(slots, pages))

        def begun(copy: Copy) -> _LateCopy:
            copy.begin()
            return _LateCopy(copy, is_over)

        return types.SimpleNamespace(store=store, load=load)  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    for tiers in _tiers(manager):
        for tier in tiers.replicas:
            tier._mover = late(tier._mover)


def end_copies(manager: PagedKVCacheManager) -> None:
    """Waits for all copies from the host."""
    for tiers in _tiers(manager):
        for tier in tiers.replicas:
            tier.load_all()


def copy_below(manager: PagedKVCacheManager) -> None:
    """Copies published pages to the host."""
    for tiers in _tiers(manager):
        tiers.store_all()


def in_host(manager: PagedKVCacheManager) -> dict[Digest, int]:
    """Returns the pages in host memory, by digest."""
    return {} if (tiers := manager._replicas.tiers) is None else _found(tiers.host.pool.index)


def host_states(manager: PagedKVCacheManager) -> dict[Digest, int]:
    return {} if (tiers := manager._replicas.state_tiers) is None else _found(tiers.host.pool.index)


def host_held(manager: PagedKVCacheManager) -> set[int]:
    """Returns the slots of host memory that are held, for example by a copy that has begun."""
    tiers = manager._replicas.tiers
    return set() if tiers is None else {int(slot) for slot in tiers.host.pool.holders.nonzero()[0]}


def host_memory(manager: PagedKVCacheManager) -> list[torch.Tensor]:
    """Returns the bytes of the host tier's slots for each shard, `[slots + 1, bytes]`. The result is empty if there is
    no host tier.
    """
    return [] if manager._replicas.tiers is None else manager._replicas.tiers.host.memory


# ---- hints and quotas


def say_time(manager: PagedKVCacheManager, clock: Callable[[], float], share: float | None) -> None:
    """Makes the manager's hints use `clock`. If `share` is given, this part of the idle pages follows hints from now
    on.
    """
    for replica in manager._replicas.each:
        replica.hints._follow_hints()  # pyright: ignore[reportAttributeAccessIssue]
        assert (order := hinted_order(replica.pool)) is not None
        order._clock = clock
        if share is not None:
            replica.hints._start()  # pyright: ignore[reportAttributeAccessIssue]
            trust(replica.hints, share)
    for states in manager.states:
        if (of_states := hinted_order(states.pool)) is not None:
            of_states._clock = clock


def hint_share(manager: PagedKVCacheManager, replica: int) -> float:
    """Returns the part of a replica's idle pages that follows hints at present, as the manager has learned it."""
    return manager._replicas.each[replica].hints.share


def tenants(manager: PagedKVCacheManager, replica: int) -> dict[str, int]:
    """Returns the tenants that have had idle pages, with the number of their idle pages. The tenants have the order in
    which their quotas are checked. The result is empty without quotas.
    """
    quotas = manager._replicas.each[replica].hints._quotas  # pyright: ignore[reportAttributeAccessIssue]
    if quotas is None:
        return {}
    in_order = sorted(quotas._ids, key=lambda salt: quotas._ids[salt])
    return {salt: quotas._orders[quotas._ids[salt]].count for salt in in_order}
