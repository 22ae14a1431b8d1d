"""`HybridReplica`: a replica of a model with recurrent layers. Each request has a state in addition to its pages.

Recurrent layers keep one state for all tokens so far. States are cached only after some pages. So a hit ends at the
last page of the prefix after which a state is cached. With several block tables, all tables must be able to resume
after that page, too: a state is useless without the window before it, and a window is useless without a state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from kvcache.errors import NoFreeStatePageError, StatePageError
from kvcache.layer_groups import LayerTables
from kvcache.params import KVCacheParams
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.pages import PagePool
from kvcache.pool.slabs import PageMoves
from kvcache.replica.batch import Gathered
from kvcache.replica.block_table import ImportPart, PendingImport
from kvcache.replica.context import Context, ContextIndices, SafeContext
from kvcache.replica.hashing import PrefixHasher
from kvcache.replica.leases import HeldPages, PageLease
from kvcache.replica.replica import Replica
from kvcache.replica.resume import Asked, Found, FromBelow, Reservation
from kvcache.replica.rows import BlockRows, Ints, Pages, Rows
from kvcache.states.kept_states import KeptStates, StateHints
from kvcache.states.state_pages import StatePages
from kvcache.types import StateCopy
from kvcache.under_way import UnderWay

Step = Callable[[Gathered, Callable[[], None] | None], None]
"""Steps the gathered requests. The second argument is called once their tokens are published."""


class HybridReplica(Replica):
    """A replica whose requests each have a state page from `claim` to `release`.

    If states have separate memory, it has a page for each row, and pages for copies. If states share the memory of
    token pages (`SlabPool`), held token pages may be moved to make room for a new request's state. Pages that a model
    reads (from `fetch` to `step`), or that a lease, an import or a block table names, are never moved.

    Attributes:
        moves: moves held pages to make room for slabs, and records which ones must stay. The caller sets it if there
            are slabs.
    """

    state_groups = 1

    def __init__(
        self,
        params: KVCacheParams,
        states: StatePages,
        tables: LayerTables,
        rows: BlockRows,
        pool: PagePool,
        mark: UnderWay,
    ) -> None:
        super().__init__(params, tables, rows, pool, mark)
        self._run = self.tables.run  # `find` looks up the pages of the other tables
        self.moves = PageMoves()
        self.states = states
        self._kept = KeptStates(states, self, params.state_every_pages)
        self.hints.lead(StateHints(states, self))

    def _name(self, row: int) -> str:
        return self.rows.request_ids[row] or ""

    # ---- claims

    @property
    def has_room(self) -> bool:
        return super().has_room and self.has_state_room

    @property
    def has_state_room(self) -> bool:
        return self.states.pool.has_room

    def check_free(self, request_id: str) -> None:
        """See the base class. Raises `NoFreeStatePageError` if there is no room for a state."""
        super().check_free(request_id)
        if not self.has_state_room:
            raise NoFreeStatePageError(f"request {request_id!r}: all {self.states.num_pages} state pages are held")

    def claim(self, request_id: str) -> int:
        row = super().claim(request_id)
        self.states.allocate(request_id)
        self._kept.begin(row)
        self.moves.claimed(row)
        return row

    def release(self, row: int, context: SafeContext | None) -> None:
        """See the base class. The state is freed, unless a transfer still writes it or a lease holds it."""
        request_id = self._name(row)
        super().release(row, context)
        if self.states.holds(request_id):  # False if the claim of the request was interrupted
            self.states.release(request_id)

    def forget_idle(self) -> None:
        super().forget_idle()
        self.states.forget_copies()

    # ---- lookups

    @property
    def lends_any_part(self) -> bool:
        return super().lends_any_part and not self.caching

    @property
    def hit_may_change(self) -> bool:
        """See the base class.

        With slabs, making room for the state of a new request may also evict pages that it would find.
        """
        return super().hit_may_change or (self.caching and self.states.pool.room_may_cost)

    @property
    def generation(self) -> int:
        return super().generation + self.states.generation

    def find(self, context: SafeContext, row: int | None = None, hasher: PrefixHasher | None = None) -> Found:
        """See the base class.

        If claiming a request would evict a cached state to make room for the request's own state, the cached one is
        ignored.
        """
        run = super().find(context, row, hasher)
        if not run.num_columns:
            return run
        digests = (hasher or self.hasher(row, context)).digests(context.tokens, run.first, run.end)
        if row is not None:
            return self.tables.shortened(run, digests, self.ends(digests, self._name(row)))
        goes = self.states.pool.next_evicted()
        return self.tables.shortened(run, digests, self.states.kept_after(digests, but=goes))

    def ends(self, digests: Digests, request_id: str | None = None, *, anywhere: bool = False) -> Asked:
        """See the base class. Only pages after which a state is cached count.

        No page counts for a request whose own state is promised to the readers of a lease.
        """
        if request_id is not None and self.states.is_promised(request_id):
            return np.zeros(len(digests), np.bool_)
        return self.states.there(digests) if anywhere else self.states.kept_after(digests)

    # ---- tiers

    @property
    def fetches(self) -> bool:
        return super().fetches or self.states.below.fetches

    def _ask(self, digests: Digests, first: int, *, wait: bool) -> tuple[bool, Digests | None]:
        coming, _ = super()._ask(digests, first, wait=wait)
        if coming and self.caching and not wait:
            return True, None
        asking, known = self._ask_for_state(digests, first)
        # An answer may show a later state, and bringing an earlier one would be costly.
        return coming or asking, None if asking and not wait else known

    def _ask_for_state(self, digests: Digests, first: int) -> tuple[bool, Digests]:
        """Ask for the last state after these pages, and for the pages up to it, unless they are known.

        The caller has the `first` pages. Returns whether an answer is on its way, and the pages up to the known end. If
        an object holds only the end of a run of pages, there is a state after that run.
        """
        tables, tier = self.tables, self.tier
        found = tables.from_below(digests, tier.has, None, first)
        behind = digests[: found.reach + tier.longest_tail]
        if self.states.ask(behind):
            return True, digests[: found.pages]
        for end in (found.pages + 1 + np.flatnonzero(self.states.there(behind[found.pages :])))[::-1].tolist():
            perhaps = tables.from_below(digests[:end], tier.may_have, None, first)
            asking = perhaps.pages == end and tier.ask(perhaps.every, perhaps.lacking)
            if tables.from_below(digests[:end], tier.has, None, first).pages == end:
                return False, digests[:end]
            if asking:
                return True, digests[: found.pages]
        return False, digests[: found.pages]

    def _bring_state(self, digests: Digests, there: int, *, wait: bool) -> bool:
        self.states.below.touch(digests[max(0, there - 1) : there])
        return self.states.bring_newest(digests, wait=wait)

    # ---- copies for other requests, replicas and readers

    def copies(self, digests: Digests) -> Asked:
        return self.states.pool.index.find(digests) != NO_PAGE

    def held_copy(self, digest: Digests) -> list[HeldPages]:
        return [self.states.held_copy(digest)]

    def bring_copy(self, wanted: FromBelow, digests: Digests) -> bool:
        """See the base class. Brings nothing if state and wanted pages need more than half of the free pages."""
        if self.states.below.is_bringing:
            return True
        pool, end = self.pool, wanted.pages
        if not end or pool.free_count // 2 - pool.would_be_taken(wanted.here) < pool.beside:
            return False
        pool.hold(wanted.here)  # making room for the state must not evict the pages that are needed with it
        coming = self.states.bring_copy(digests[end - 1 : end], end * self.page_size)
        pool.release(wanted.here)
        return coming

    def copy_of(self, digest: Digests) -> StateCopy | None:
        return self.states.copy_of(digest)

    def take_copy(self, copy: StateCopy, digest: Digests) -> HeldPages | None:
        return self.states.take_copy(copy, digest)

    # ---- reservations and steps

    def act(self, row: int, context: SafeContext, indices: ContextIndices, plan: Reservation) -> int | None:
        """See the base class. A chunk ends where a state must be kept."""
        if self.caching:
            plan = self._kept.planned(row, context, plan)
        return super().act(row, context, indices, plan)

    def take(self, row: int, plan: Reservation) -> Pages:
        """See the base class.

        The state from which the request resumes is copied first, because taking pages may evict it.
        """
        self._kept.reserved(row, self._name(row), plan)
        return super().take(row, plan)

    def fetched(self, rows: Rows) -> None:
        """Record that a model reads the pages of these rows until their `step`, so that they are not moved."""
        self.moves.fetched(rows)

    def stepped(self, rows: Rows, computed: Ints) -> None:
        """Record that the rows have run up to these tokens.

        `KeptStates` decides which states at the end of a page are copied.
        """
        self.moves.stepped(rows)
        if self.caching:
            self._kept.computed(rows, computed)

    def plan_fork(self, parent: int, child: SafeContext, num_steps: int) -> int | None:
        """See the base class. Raises `StatePageError` unless the parent's state covers exactly its computed tokens."""
        self.refuse_pending(parent, "fork")
        request_id, cached = self._name(parent), self.rows.cached.item(parent)
        self.states.drafts.check_booked(request_id)
        tokens = self.states.tokens_of(request_id)
        if tokens != cached:
            raise StatePageError(
                f"request {request_id!r}: {cached} tokens are computed, but its state covers {tokens}: "
                "fork it after step"
            )
        return super().plan_fork(parent, child, num_steps)

    def fork(self, parent: int, row: int, end: int) -> list[tuple[int, int]]:
        copies = super().fork(parent, row, end)
        self.states.fork(self._name(parent), self._name(row))
        return copies

    # ---- leases, block tables and imports

    def grant(self, lease: PageLease, row: int) -> None:
        """See the base class.

        Raises `StatePageError` if drafted tokens ran and no `step` has said which of them stay.
        """
        self.refuse_pending(row, "lease")
        self.states.drafts.check_booked(self._name(row))
        self.leases.grant(lease, row, [self.states.held(self._name(row))])

    def page_groups(self, row: int, num_tokens: int, *, first: int, full_pages: bool) -> tuple[tuple[int, ...], ...]:
        """See the base class. The state is one more group, and does not change while it is leased.

        Raises `StatePageError` if drafted tokens ran without a `step` after them, or if the state covers other tokens.
        With `full_pages` the state is not yet reported to readers, and may cover other tokens.
        """
        request_id, states = self._name(row), self.states
        if not full_pages:
            states.drafts.check_booked(request_id)
            tokens = states.tokens_of(request_id)
            if tokens != num_tokens:
                raise StatePageError(
                    f"request {request_id!r}: its pages hold {num_tokens} tokens, but its state covers {tokens}"
                )
            states.tell(request_id)
        self.moves.told(row)
        groups = super().page_groups(row, num_tokens, first=first, full_pages=full_pages)
        return *groups, (states.page_of(request_id),)

    def begin_state_import(self, context: SafeContext, pending: PendingImport) -> None:
        row = self.rows.row_of[context.request_id]
        page = self.states.begin_import(context.request_id, self._kept.digest_at(row, context, context.start_idx))
        pending.parts.append(ImportPart(0, np.array([page], np.int32), is_state=True))
        pending.on_free = functools.partial(self._cancel_state_import, context.request_id, page)

    def _cancel_state_import(self, request_id: str, page: int) -> None:
        """End a cancelled import, once nothing writes to the state page that the request had when the import began."""
        self.states.cancel_import(page)
        if self.states.holds(request_id) and self.states.page_of(request_id) == page:
            # When the request computes its prompt itself, more of it may be cached than now, so its chunks are planned
            # anew.
            self._kept.begin(self.rows.row_of[request_id])

    def commit_state_import(self, request_id: str, tokens: int) -> None:
        self.states.commit_import(request_id, tokens)
        if self.caching:  # a request may exist only for its import
            self._kept.computed(np.array([self.rows.row_of[request_id]]), np.array([tokens]))

    # ---- after an interrupt

    def mend(self, over: object) -> list[str]:
        """See the base class. A request whose import was ended by the interrupt cannot continue."""
        ended = super().mend(over)
        below = self.states.below
        below.mend(())  # running copies hold pages, so they are ended first
        self.states.mend(self.rows.row_of, self._written, self.leases.holders(self.states.pool))
        below.mend(())  # copies that wait are looked up in the repaired pages
        return ended

    @property
    def _written(self) -> list[int]:
        """The state pages that transfers write."""
        parts = [part for pending in self.imports.each for part in pending.parts if part.is_state]
        return [int(part.dst_pages[0]) for part in parts]

    def goes_on(self, row: int, start: int) -> bool:
        """See the base class. The state must also cover exactly these tokens.

        False if drafted tokens wait for `step`.
        """
        name, states = self._name(row), self.states
        return super().goes_on(row, start) and name not in states.drafts.page_of and states.tokens_of(name) == start

    def check(self) -> None:
        super().check()
        self.states.check(self.rows.row_of, self._written, self.leases.holders(self.states.pool))


def step_drafted(each: Sequence[HybridReplica], gathered: Gathered, step: Step) -> None:
    """Do a `step` for requests of which some ran drafted tokens.

    If drafted tokens of a request were removed, its `start_idx` is set back to the tokens that its state covers. Raises
    `StatePageError` if a `start_idx` is before or after all tokens that ran, and the errors of `step`. In these cases
    nothing has changed.
    """
    drafted: list[tuple[Context, str, StatePages, int, int]] = []
    owners: list[int] = gathered.replicas.tolist()
    for context, replica_idx in zip(gathered.contexts, owners, strict=True):
        name, states, start = context.request_id, each[replica_idx].states, context.start_idx
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
