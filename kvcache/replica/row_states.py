"""`RowStates`: the recurrent states of a replica's requests, and the rule by which copies of them are kept.

Recurrent layers keep one state for all tokens so far. States are cached only after some pages, so a hit ends at the
last page of the prefix for which a state is cached. With several block tables, all tables must be able to resume after
that page, too: a state is useless without the window before it, and a window is useless without a state.

A copy of a state is worth its memory if another request can resume from it. Copies are kept

- at the end of a prompt's last full page, for the same prompt again,
- at the end of the prefix that a prompt shares with earlier ones, for the next prompt with that prefix,
- after the last full page that a request has reached, for the next turn of its conversation,
- and every `state_every_pages` pages, if that is configured.

Prompts run in chunks that end at these tokens, because a state exists only right after its last token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import NoFreeStatePageError, StatePageError
from kvcache.params import KVCacheParams
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.pages import HeldPages, PagePool
from kvcache.pool.pages_below import Asked, PagesBelow
from kvcache.replica.batch import Gathered
from kvcache.replica.block_table import ImportPart, PendingImport
from kvcache.replica.context import Context, HasherOfRow, SafeContext
from kvcache.replica.hashing import PrefixHasher
from kvcache.replica.resume import Found, FromBelow, Reservation
from kvcache.replica.rows import NEVER, BlockRows, Ints, Rows, rows_at
from kvcache.replica.tables import RowTables
from kvcache.states.state_pages import NO_STATE, StatePages

Step = Callable[[Gathered, Callable[[], None] | None], None]
"""Steps the gathered requests. The second argument is a function to call once their tokens are published."""


class RowStates:
    """The state of each row of one replica: a page from `claim` to `release`.

    Separate memory for states has a page for each row, and pages for copies. If states share memory with token pages
    (`SlabPool`), held token pages may be moved to make room for a new request's state. Pages that a model reads (from
    `fetch` to `step`), or that a lease, an import or a block table names, are never moved.

    Attributes:
        pages: the state pages.
    """

    def __init__(
        self,
        pages: StatePages,
        rows: BlockRows,
        pool: PagePool,
        tables: RowTables,
        hasher_of: HasherOfRow,
        params: KVCacheParams,
    ) -> None:
        self.pages = pages
        self._rows, self._pool, self._tables, self._hasher_of = rows, pool, tables, hasher_of
        self._caching = params.enable_prefix_caching
        self._spacing = params.state_every_pages * rows.page_size or NEVER  # tokens between two copies
        self._stops: list[tuple[int, ...]] = [()] * len(rows.request_ids)  # by row; see `Reservation.stops`

    def _name(self, row: int) -> str:
        return self._rows.request_ids[row] or ""

    # ---- claims

    def check_free(self, request_id: str) -> None:
        """Raise `NoFreeStatePageError` if there is no room for one more request's state."""
        if not self.pages.pool.has_room:
            raise NoFreeStatePageError(f"request {request_id!r}: all {self.pages.num_pages} state pages are held")

    def claim(self, row: int) -> None:
        """Give the row's new request a state."""
        self.pages.allocate(self._name(row))
        self._stops[row] = ()
        self._pool.moves.claimed(row)

    def release(self, request_id: str | None) -> None:
        """Free the state of a released request, unless a transfer still writes it or a lease holds it."""
        if request_id and self.pages.holds(request_id):  # False if the claim of the request was interrupted
            self.pages.release(request_id)

    # ---- lookups

    def shortened(self, run: Found, hasher: PrefixHasher, context: SafeContext, row: int | None) -> Found:
        """The part of a found `run` of pages with which the request can resume from a state.

        A request without a row has yet to be claimed, and then needs a state page of its own. A cached state that would
        be evicted for that page is ignored.
        """
        if not run.num_columns:
            return run
        digests = hasher.digests(context.tokens, run.first, run.end)
        if row is None:
            ends = self.pages.kept_after(digests, but=self.pages.pool.next_evicted())
        else:
            ends = self.ends(digests, row)
        return self._tables.shortened(run, digests, ends)

    def ends(self, digests: Digests, row: int | None = None, *, anywhere: bool = False) -> Asked:
        """See `Replica.ends`. Only pages after which a state is cached count.

        No page counts for a request whose own state is promised to the readers of a lease.
        """
        if row is not None and self.pages.is_promised(self._name(row)):
            return np.zeros(len(digests), np.bool_)
        return self.pages.there(digests) if anywhere else self.pages.kept_after(digests)

    def ends_here(self, digests: Digests) -> Asked:
        """After which of these pages the device keeps the state, as a mask."""
        return self.pages.pool.index.find(digests) != NO_PAGE

    # ---- tiers

    def ask(self, tier: PagesBelow, digests: Digests, first: int) -> tuple[bool, Digests]:
        """Ask for the last state after these pages, and the `tier` for the pages up to it, unless they are known.

        The caller has the `first` pages. Returns whether an answer is on its way, and the pages up to the known end. If
        an object holds only the end of a run of pages, then there is a state after that run.
        """
        tables = self._tables
        found = tables.from_below(digests, tier.has, None, first)
        behind = digests[: found.reach + tier.longest_tail]
        if self.pages.ask(behind):
            return True, digests[: found.pages]
        for end in (found.pages + 1 + np.flatnonzero(self.pages.there(behind[found.pages :])))[::-1].tolist():
            perhaps = tables.from_below(digests[:end], tier.may_have, None, first)
            asking = perhaps.pages == end and tier.ask(perhaps.every, perhaps.lacking)
            if tables.from_below(digests[:end], tier.has, None, first).pages == end:
                return False, digests[:end]
            if asking:
                return True, digests[: found.pages]
        return False, digests[: found.pages]

    def to_host(self, digests: Digests, there: int, *, wait: bool) -> bool:
        """Bring the last state that a lower tier has after one of these pages to the host.

        `there`: the pages of a request that does not wait; the host must keep the last state of these pages. Returns
        whether a state is on its way. `wait`: wait a while for it.
        """
        self.pages.below.touch(digests[max(0, there - 1) : there])
        return self.pages.bring_newest(digests, wait=wait)

    def to_device(self, wanted: FromBelow, digests: Digests) -> bool:
        """Copy the state after the last of the `wanted` pages from the host to the device, which has all these pages.

        Returns whether it is on its way. Brings nothing if state and wanted pages need more than half of the free
        pages.
        """
        if self.pages.below.is_bringing:
            return True
        pool, end = self._pool, wanted.pages
        if not end or pool.free_count // 2 - pool.would_be_taken(wanted.here) < pool.beside:
            return False
        pool.hold(wanted.here)  # making room for the state must not evict the pages that are needed with it
        coming = self.pages.bring_copy(digests[end - 1 : end], end * self._rows.page_size)
        pool.release(wanted.here)
        return coming

    # ---- reservations and steps

    def planned(self, row: int, context: SafeContext, plan: Reservation) -> Reservation:
        """Returns the reservation, with its chunk cut where a state must be kept."""
        if not self._caching:
            return plan
        start, active, of_prompt = plan.start, plan.active, self._stops[row]
        # A chunk of one token was not looked up: it is a first chunk of one token, or a fork that decodes.
        if not of_prompt and (plan.cached or active - start > 1):
            last, size = context.end_idx - 1, self._rows.page_size
            of_prompt = (plan.reached * size, last - last % size)
        stops = [*of_prompt, start - start % self._spacing + self._spacing]
        active = min((stop for stop in stops if start < stop < active), default=active)
        return plan._replace(active=active, state=self.digest_at(row, context, plan.cached), stops=of_prompt)

    def reserve(self, row: int, plan: Reservation) -> None:
        """Record that the row runs as planned. If a state was found, copy it into the row's state page.

        Called before the pages are taken, because taking pages may evict the found state.
        """
        if len(plan.state):
            self.pages.resume(self._name(row), plan.state, plan.start)
        self._stops[row] = plan.stops

    def stepped(self, rows: Rows, computed: Ints) -> None:
        """Record that a model has run the rows up to these tokens."""
        self._pool.moves.stepped(rows)
        self._keep(rows, computed)

    def _keep(self, stepped: Rows, computed: Ints) -> None:
        """Keep copies of the states of the rows whose `computed` tokens now end a page."""
        if not self._caching:
            return
        rows = self._rows
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
        stops, spaced = self._stops, (tokens % self._spacing == 0).tolist()
        stay = [fits or count in stops[row] for fits, row, count in zip(spaced, of_rows, counts, strict=True)]
        digests = self._pool.index.digests_of(pages)
        if not any(stay) and self.pages.keep_passing(names, digests, tokens):
            return
        for place, (name, count) in enumerate(zip(names, counts, strict=True)):
            self.pages.keep(name, digests[place : place + 1], count, passing=not stay[place])

    def digest_at(self, row: int, context: SafeContext, tokens: int) -> Digests:
        """Returns the digest of the page that ends the request's first `tokens` tokens, `[1, words]`.

        Empty if `tokens` is 0.
        """
        if not tokens:
            return NO_STATE
        last = tokens // self._rows.page_size
        return self._hasher_of(row, context).digests(context.tokens, last - 1, last)

    def check_fork(self, parent: int) -> None:
        """Raise `StatePageError` unless the parent's state covers exactly its computed tokens."""
        request_id, cached = self._name(parent), self._rows.cached.item(parent)
        self.pages.drafts.check_booked(request_id)
        tokens = self.pages.tokens_of(request_id)
        if tokens != cached:
            raise StatePageError(
                f"request {request_id!r}: {cached} tokens are computed, but its state covers {tokens}: "
                "fork it after step"
            )

    def fork(self, parent: int, row: int) -> None:
        self.pages.fork(self._name(parent), self._name(row))

    # ---- leases, block tables and imports

    def held(self, row: int) -> HeldPages:
        """The row's state page, for a lease.

        Raises `StatePageError` if drafted tokens ran and no `step` has said which of them stay.
        """
        self.pages.drafts.check_booked(self._name(row))
        return self.pages.held(self._name(row))

    def named(self, row: int, num_tokens: int, *, full_pages: bool) -> tuple[int]:
        """The row's state page, as a group of a block table. The state does not change while it is leased.

        Raises `StatePageError` if drafted tokens ran without a `step` after them, or if the state includes other
        tokens. With `full_pages` the state is not reported to readers yet, and may include other tokens.
        """
        request_id, pages = self._name(row), self.pages
        if not full_pages:
            pages.drafts.check_booked(request_id)
            tokens = pages.tokens_of(request_id)
            if tokens != num_tokens:
                raise StatePageError(
                    f"request {request_id!r}: its pages hold {num_tokens} tokens, but its state covers {tokens}"
                )
            pages.tell(request_id)
        self._pool.moves.told(row)
        return (pages.page_of(request_id),)

    def begin_import(self, row: int, context: SafeContext, pending: PendingImport) -> None:
        """Also import the state that the last group of a block table names."""
        request_id = context.request_id
        page = self.pages.begin_import(request_id, self.digest_at(row, context, context.start_idx))
        pending.parts.append(ImportPart(0, np.array([page], np.int32), is_state=True))
        pending.on_free = functools.partial(self._cancel_import, request_id, page)

    def _cancel_import(self, request_id: str, page: int) -> None:
        """End a cancelled import when nothing writes any more to the state page that its request had."""
        self.pages.cancel_import(page)
        if self.pages.holds(request_id) and self.pages.page_of(request_id) == page:
            # When the request computes its prompt itself, more of it may be cached than now, so its chunks are planned
            # anew.
            self._stops[self._rows.row_of[request_id]] = ()

    def commit_import(self, row: int, tokens: int) -> None:
        """Record that the row's state has arrived, and covers `tokens` tokens."""
        self.pages.commit_import(self._name(row), tokens)
        self._keep(np.array([row]), np.array([tokens]))  # a request may exist only for its import

    # ---- after an interrupt

    def mend(self, written: Sequence[int], leased: NDArray[np.int64]) -> None:
        """Rebuild the holders of the state pages. See `StatePages.mend`."""
        below = self.pages.below
        below.mend(())  # running copies hold pages, so they are ended first
        self.pages.mend(self._rows.row_of, written, leased)
        below.mend(())  # copies that wait are looked up in the repaired pages

    def goes_on(self, row: int, start: int) -> bool:
        """Whether the row's state covers exactly `start` tokens. False if drafted tokens wait for `step`."""
        name, pages = self._name(row), self.pages
        return name not in pages.drafts.page_of and pages.tokens_of(name) == start


def step_drafted(each: Sequence[RowStates], gathered: Gathered, step: Step) -> None:
    """Do a `step` for requests some of which ran drafted tokens.

    `each`: the states of each replica. If drafted tokens of a request were removed, its `start_idx` is set back to the
    tokens that its state covers. Raises `StatePageError` if a `start_idx` is before or after all tokens that ran, and
    the errors of `step`. In these cases nothing has changed.
    """
    drafted: list[tuple[Context, str, StatePages, int, int]] = []
    owners: list[int] = gathered.replicas.tolist()
    for context, replica_idx in zip(gathered.contexts, owners, strict=True):
        name, states, start = context.request_id, each[replica_idx].pages, context.start_idx
        if name in states.drafts.page_of:
            goes_on = states.drafts.goes_on_from(name, states.tokens_of(name), start)
            drafted.append((context, name, states, start, goes_on))

    def settle() -> None:
        for _, name, states, _, goes_on in drafted:
            states.settle(name, goes_on)

    try:
        for context, _, _, _, goes_on in drafted:
            context.set_token_indices(start_idx=goes_on)
        gathered.gather(starts_only=True)
        step(gathered, settle)
    except BaseException:
        for context, _, _, start, _ in drafted:
            context.set_token_indices(start_idx=start)
        raise
