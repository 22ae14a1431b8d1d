"""Copies of states for other requests: `KeptStates` decides when one is kept, `StateHints` how long it stays.

A copy is worth its memory if another request can resume from it. Copies are kept

- at the end of a prompt's last full page, for the same prompt again,
- at the end of the prefix that a prompt shares with earlier ones, for the next prompt with that prefix,
- after the last full page that a request has reached, for the next turn of its conversation,
- and every `every` pages, if that is configured.

Prompts run in chunks that end at these tokens, because a state exists only right after its last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.hinted_order import HintedOrder
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.quotas import NoQuotas
from kvcache.replica.context import SafeContext
from kvcache.replica.hints import HintFollower
from kvcache.replica.replica import Replica
from kvcache.replica.resume import NO_STATE, Reservation
from kvcache.replica.rows import NEVER, Ints, Rows, rows_at
from kvcache.retention import LEVEL_OF, NEUTRAL, PageHints
from kvcache.states.state_pages import StatePages


class KeptStates:
    """The rule for one replica, whose cached states are in `pages`.

    `every`: pages of tokens between two copies, or 0.
    """

    def __init__(self, pages: StatePages, replica: Replica, every: int) -> None:
        self._pages, self._replica = pages, replica
        self._spacing = every * replica.page_size or NEVER
        self._stops: list[tuple[int, ...]] = [()] * len(replica.rows.request_ids)  # by row; see `Reservation.stops`

    def begin(self, row: int) -> None:
        """Forget where the chunks of the row's request must end."""
        self._stops[row] = ()

    def planned(self, row: int, context: SafeContext, plan: Reservation) -> Reservation:
        """The reservation, with its chunk cut where a state must be kept."""
        start, active, of_prompt = plan.start, plan.active, self._stops[row]
        # A chunk of one token was not looked up: it is a first chunk of one token, or a fork that decodes.
        if not of_prompt and (plan.cached or active - start > 1):
            last, size = context.end_idx - 1, self._replica.page_size
            of_prompt = (plan.reached * size, last - last % size)
        stops = [*of_prompt, start - start % self._spacing + self._spacing]
        active = min((stop for stop in stops if start < stop < active), default=active)
        return plan._replace(active=active, state=self.digest_at(row, context, plan.cached), stops=of_prompt)

    def reserved(self, row: int, request_id: str, plan: Reservation) -> None:
        """Record that the request runs as planned. If a state was found, copy it into the request's state page."""
        if len(plan.state):
            self._pages.resume(request_id, plan.state, plan.start)
        self._stops[row] = plan.stops

    def computed(self, stepped: Rows, computed: Ints) -> None:
        """After a step: keep the states of the rows whose `computed` tokens now end a page."""
        rows = self._replica.rows
        at = ((computed % rows.size == 0) & (computed > 0)).nonzero()[0]
        if not at.size:
            return
        ended, tokens = rows_at(stepped, at), computed[at]
        pages = rows.entries[rows.places(ended, tokens // rows.size - 1)[0]]
        # Null pages are left out: their window has moved on although nothing was computed.
        if len(there := pages.nonzero()[0]) < len(pages):
            ended, tokens, pages = ended[there], tokens[there], pages[there]
        of_rows: list[int] = ended.tolist()
        counts: list[int] = tokens.tolist()
        names = [rows.request_ids[row] or "" for row in of_rows]
        # Which of these states stay cached when their requests go further.
        stops, spacing = self._stops, self._spacing
        stay = [count in stops[row] or not count % spacing for row, count in zip(of_rows, counts, strict=True)]
        digests = self._replica.pool.index.digests_of(pages)
        if not any(stay) and self._pages.keep_passing(names, digests, tokens):
            return
        for place, (name, count) in enumerate(zip(names, counts, strict=True)):
            self._pages.keep(name, digests[place : place + 1], count, passing=not stay[place])

    def digest_at(self, row: int, context: SafeContext, tokens: int) -> Digests:
        """The digest of the page that ends the request's first `tokens` tokens, `[1, words]`.

        Empty if `tokens` is 0.
        """
        if not tokens:
            return NO_STATE
        last = tokens // self._replica.page_size
        return self._replica.hasher(row, context).digests(context.tokens, last - 1, last)


class StateHints(HintFollower):
    """Retention hints and tenant quotas for the cached states of one replica. `HintFollower` documents the calls.

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

    def __init__(self, pages: StatePages, replica: Replica) -> None:
        self._replica = replica
        self._slab_pages = replica.pool.beside  # the pages of a slab; 0 if states have memory of their own
        self._pool = pages.pool
        self._quotas = NoQuotas()

    def begin(self, quotas: NoQuotas) -> None:
        """See the base class. Gives the cached states an eviction order of the same kind as pages have."""
        pool = self._pool
        if pool.idle.by_age:  # False if they already have such an order
            self._quotas = quotas if self._slab_pages else quotas.of_pool(pool.num_pages)
            pool.follow(self._quotas.over(HintedOrder(pool.num_pages, pool.idle), self._slab_pages))

    def clear(self) -> None:
        self._quotas.clear()

    def leave(self, row: int, digests: Digests, hints: PageHints | None, ends: Sequence[int], share: float) -> None:
        """See the base class.

        Later requests likely resume at the end of a hinted range, of the prompt, or of all tokens.
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
