"""`StateHints`: retention hints and tenant quotas, as they hold for copies of recurrent states.

A prefix is found only up to a copy, so a hint that keeps its pages has to keep one. A copy has the hint of the last
page of its tokens. That it stays longer is said of those alone that a request would go on from which comes for what the
hint is for: the newest copy before the end of each range, of all that the request has come to (the next turn of its
conversation), and of its prompt (the same again, or a next turn without what the model thought in between). A copy is
as large as thousands of tokens' pages, and nobody goes on from those before the newest. That it goes first is said of
all of them: nobody will come.

The copies are in an order of their own, such a one as pages have; in one memory with these `SlabPool` says whether a
copy or a page goes next. In memory of their own a tenant's quota is a share of the state pages; in one memory its pages
and its copies, each as large as its slab, count together. The baselines know no copies: whether hints are worth
anything shows in pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.eviction_order import EvictionOrder
from kvcache.params import KVCacheParams
from kvcache.pool.hinted_order import HintedOrder
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.quotas import QuotaOrder, SlabQuotas, TenantQuotas
from kvcache.replica.replica import Replica
from kvcache.retention import LEVEL_OF, NEUTRAL, PageHints
from kvcache.states.state_pages import StatePages


class StateHints:
    """The rule for the copies of one replica's states, as `RequestStates` has it."""

    def __init__(self, pages: StatePages, replica: Replica, params: KVCacheParams) -> None:
        self._replica = replica
        self._slab_pages = replica.pool.beside  # of a slab, 0 for none
        self._pool = pages.pool
        self._params = params
        self._quotas: TenantQuotas | SlabQuotas | None = None

    def begin(self, quotas: TenantQuotas | None) -> None:
        """As `RequestStates.follow_hints`: the copies are in such an order, too, from now on."""
        pool, params = self._pool, self._params
        if not pool.idle.by_age:  # they are
            return
        order: EvictionOrder = HintedOrder(pool.num_pages, pool.idle)
        if quotas is not None:
            apart = (pool.num_pages, params.tenant_quota, params.tenant_quotas)
            self._quotas = SlabQuotas(quotas, self._slab_pages) if self._slab_pages else TenantQuotas(*apart)
            order = QuotaOrder(order, self._quotas)
        pool.follow(order)

    def clear(self) -> None:
        """As `RequestStates.clear_quotas`."""
        if self._quotas is not None:
            self._quotas.clear()

    def leave(self, row: int, digests: Digests, hints: PageHints | None, ends: Sequence[int], share: float) -> None:
        """As `RequestStates.leave_hinted`.

        Others will come for each range that a hint is for, for the prompt, and for all of what the row has come to.
        """
        order, size, salt = self._pool.idle, self._replica.page_size, self._replica.salt(row)
        order.trust(share)
        copies = self._pool.index.find(digests)
        columns = np.flatnonzero(copies != NO_PAGE)
        copies = copies[columns]
        prompt = (self._replica.rows.prompt.item(row) - 1) // size
        columns_before = [*ends, prompt, len(digests)]
        said, owned = _said_of(hints, columns, columns_before), self._owned(salt, copies)
        if not np.count_nonzero(touched := said | owned):
            return
        at = np.flatnonzero(touched)[::-1]  # the newest copy first: what is released last goes first
        self._pool.hold(copies[at])
        order.own(copies[owned], salt)
        if hints is not None:
            order.hint(copies[said], hints.of(columns[said]))
        self._pool.release(copies[at])

    def _owned(self, salt: str | None, copies: NDArray[np.int32]) -> NDArray[np.bool_]:
        """The copies that the tenant shall own and that have no owner yet, as a mask."""
        if self._quotas is None or salt is None:
            return np.zeros(len(copies), np.bool_)
        return ~self._quotas.owned(copies)


def _said_of(hints: PageHints | None, columns: NDArray[np.intp], ends: Sequence[int]) -> NDArray[np.bool_]:
    """Whether `hints` apply to each copy after the pages of `columns`; `ends`: columns that others come up to."""
    if hints is None:
        return np.zeros(len(columns), np.bool_)
    said = LEVEL_OF[hints.codes[columns]] < NEUTRAL
    newest = np.searchsorted(columns, ends) - 1
    said[newest[newest >= 0]] = True
    return said
