"""`StateHints`: retention hints and tenant quotas for copies of recurrent states.

A prefix is found only up to a copy of its state, so a hint that keeps its pages must keep a copy, too. A copy has the
hint of the last page of its tokens. A hint to stay longer applies only to copies from which a likely next request would
resume. These are the newest copies before the end of each hinted range, of all tokens of the request (the next turn of
its conversation), and of its prompt (the same prompt again, or a next turn without the model's reasoning). A copy is as
large as the pages of thousands of tokens, and no request resumes from older copies. A hint to go first applies to all
copies, as no request will come for any of them.

The copies have an eviction order of their own, of the same kind as pages. If both share one memory, `SlabPool` decides
whether a copy or a page goes next. With memory of their own, a tenant's quota is a share of the state pages. In one
memory its pages and its copies, each as large as a slab, count together. The baselines know no copies: pages show what
hints are worth.
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
from kvcache.replica.hints import HintFollower
from kvcache.replica.replica import Replica
from kvcache.retention import LEVEL_OF, NEUTRAL, PageHints
from kvcache.states.state_pages import StatePages


class StateHints(HintFollower):
    """The rule for the copies of one replica's states; `HintFollower` documents its calls."""

    def __init__(self, pages: StatePages, replica: Replica, params: KVCacheParams) -> None:
        self._replica = replica
        self._slab_pages = replica.pool.beside  # pages of a slab; 0 if states have memory of their own
        self._pool = pages.pool
        self._params = params
        self._quotas: TenantQuotas | SlabQuotas | None = None

    def begin(self, quotas: TenantQuotas | None) -> None:
        """As the base: give the copies such an eviction order."""
        pool, params = self._pool, self._params
        if not pool.idle.by_age:  # they have one
            return
        order: EvictionOrder = HintedOrder(pool.num_pages, pool.idle)
        if quotas is not None:
            apart = (pool.num_pages, params.tenant_quota, params.tenant_quotas)
            self._quotas = SlabQuotas(quotas, self._slab_pages) if self._slab_pages else TenantQuotas(*apart)
            order = QuotaOrder(order, self._quotas)
        pool.follow(order)

    def clear(self) -> None:
        if self._quotas is not None:
            self._quotas.clear()

    def leave(self, row: int, digests: Digests, hints: PageHints | None, ends: Sequence[int], share: float) -> None:
        """As the base. Later requests likely resume at the end of a hinted range, of the prompt, or of all tokens."""
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
        at = np.flatnonzero(touched)[::-1]  # `release` takes the last one first, so the oldest copy goes first
        self._pool.hold(copies[at])
        order.own(copies[owned], salt)
        if hints is not None:
            order.hint(copies[said], hints.of(columns[said]))
        self._pool.release(copies[at])

    def _owned(self, salt: str | None, copies: NDArray[np.int32]) -> NDArray[np.bool_]:
        """A mask of the copies that have no owner yet, if the tenant is to own them."""
        if self._quotas is None or salt is None:
            return np.zeros(len(copies), np.bool_)
        return ~self._quotas.owned(copies)


def _said_of(hints: PageHints | None, columns: NDArray[np.intp], ends: Sequence[int]) -> NDArray[np.bool_]:
    """A mask of the copies, after the pages of `columns`, that `hints` apply to. `ends`: where requests may resume."""
    if hints is None:
        return np.zeros(len(columns), np.bool_)
    said = LEVEL_OF[hints.codes[columns]] < NEUTRAL
    newest = np.searchsorted(columns, ends) - 1
    said[newest[newest >= 0]] = True
    return said
