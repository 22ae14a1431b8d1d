"""`StateHints`: applies retention hints and tenant quotas to the cached recurrent states of a replica."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.hinted_order import HintedOrder
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.quotas import NoQuotas
from kvcache.replica.rows import BlockRows
from kvcache.retention import LEVEL_OF, NEUTRAL, PageHints
from kvcache.states.state_pages import StatePages


class StateHints:
    """Retention hints and tenant quotas for the cached states of one replica.

    A prefix is found only up to a cached state, so a hint that keeps its pages must keep a state, too. A cached state
    has the hint of the last page of its tokens.

    A hint to stay longer applies only to states from which a likely next request would resume. These are the newest
    states before the end of each hinted range, before the end of all tokens of the request (for the next turn of its
    conversation), and before the end of its prompt (for the same prompt again, or for a next turn without the model's
    reasoning). No request resumes from older states, and each is as large as the pages of thousands of tokens. A hint
    to be evicted first applies to all states, because no request will need any of them.

    The cached states have an eviction order of their own, of the same kind as pages. If both share one memory,
    `SlabPool` decides whether a state or a page is evicted next. If states have memory of their own, a tenant's quota
    is a share of the state pages. In shared memory the tenant's pages and states count together, a state as a slab. The
    baselines do not simulate states, because pages suffice to show how well hints work.
    """

    def __init__(
        self, pages: StatePages, rows: BlockRows, salt_of: Callable[[int], str | None], slab_pages: int
    ) -> None:
        self._rows, self._salt_of = rows, salt_of
        self._slab_pages = slab_pages  # the pages of a slab; 0 if states have memory of their own
        self._pool = pages.pool
        self._quotas = NoQuotas()

    def begin(self, quotas: NoQuotas) -> None:
        """From now on, apply hints and `quotas`: cached states get an eviction order of the kind that pages have."""
        pool = self._pool
        if pool.idle.by_age:  # False if they already have such an order
            self._quotas = quotas if self._slab_pages else quotas.of_pool(pool.num_pages)
            pool.follow(self._quotas.over(HintedOrder(pool.num_pages, pool.idle), self._slab_pages))

    def clear(self) -> None:
        """After an interrupt: forget which states of each tenant are idle. The pool reports all of them again."""
        self._quotas.clear()

    def leave(self, row: int, digests: Digests, hints: PageHints | None, ends: Sequence[int], share: float) -> None:
        """Called before the row's request is released. `hints`: those of its published columns, or None.

        `digests`: the digests of these columns. `ends`: the end columns of hinted ranges. `share`: the share of cached
        pages that follows hints. Later requests likely resume at the end of a hinted range, of the prompt, or of all
        tokens.
        """
        order, size, salt = self._pool.idle, self._rows.page_size, self._salt_of(row)
        order.trust(share)
        copies = self._pool.index.find(digests)
        columns = np.flatnonzero(copies != NO_PAGE)
        copies = copies[columns]
        prompt = (self._rows.prompt.item(row) - 1) // size
        columns_before = [*ends, prompt, len(digests)]
        said, owned = _said_of(hints, columns, columns_before), self._owned(salt, copies)
        if not np.count_nonzero(touched := said | owned):
            return
        # Reversed, because `release` evicts the last one first; so the oldest state is evicted first.
        at = np.flatnonzero(touched)[::-1]
        self._pool.hold(copies[at])
        order.own(copies[owned], salt)
        if hints is not None:
            order.hint(copies[said], hints.of(columns[said]))
        self._pool.release(copies[at])

    def _owned(self, salt: str | None, copies: NDArray[np.int32]) -> NDArray[np.bool_]:
        """A mask of the states that have no owner yet, if this tenant has a quota and must own them."""
        if salt is None:
            return np.zeros(len(copies), np.bool_)
        return self._quotas.ownerless(copies * max(1, self._slab_pages))


def _said_of(hints: PageHints | None, columns: NDArray[np.intp], ends: Sequence[int]) -> NDArray[np.bool_]:
    """A mask: to which of the states after the pages of `columns` the hints apply.

    `ends`: where requests may resume.
    """
    if hints is None:
        return np.zeros(len(columns), np.bool_)
    said = LEVEL_OF[hints.codes[columns]] < NEUTRAL
    newest = np.searchsorted(columns, ends) - 1
    said[newest[newest >= 0]] = True
    return said
