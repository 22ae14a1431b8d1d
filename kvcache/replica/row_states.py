"""`RowStates`: the recurrent states of a replica's requests, and the rule by which copies of them are cached.

Recurrent layers have one state for all tokens so far. States are cached only after some pages, so a prefix hit ends
after the last page of the prefix for which a state is cached. With several block tables, all tables must be able to
resume after that page, too. A state is useless without the pages of the windows before it, and these pages are useless
without the state.

A cached copy of a state is worth its memory if another request can resume from it. Copies are cached

- at the end of a prompt's last full page, for the same prompt again,
- at the end of the prefix that a prompt shares with earlier prompts, for the next prompt with that prefix,
- after the last full page that a request has reached, for the next turn of its conversation,
- and every `state_every_pages` pages, if that is configured.

The chunks of a prompt end at these tokens, because a state is available only right after the last token that it covers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvcache.arguments import shown
from kvcache.errors import InvalidRequestError, NoFreeStatePageError, StatePageError
from kvcache.params import KVCacheParams
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.pages import HeldPages, HoldersOf
from kvcache.pool.pages_below import Asked, PagesBelow
from kvcache.replica.batch import Gathered
from kvcache.replica.block_table import NOTHING, BlockTable, ImportPart, PageCopy, PendingImport
from kvcache.replica.context import Context, HasherOfRow, SafeContext
from kvcache.replica.hashing import PrefixHasher
from kvcache.replica.kept import Kept
from kvcache.replica.resume import Found, FromBelow, Reservation
from kvcache.replica.rows import NEVER, ONE, Filled, Ints, Pages
from kvcache.replica.tables import RowTables
from kvcache.states.state_pages import NO_STATE, StatePages
from kvcache.types import KVCacheMetrics

_NO_PAGES: Pages = np.zeros(0, np.int32)


class RowStates(Kept):
    """The recurrent state of each row of one replica. A row has a state page from `claim` to `release`.

    If states have separate memory, that memory has a page for each row, and pages for cached copies. If states share
    memory with token pages (`SlabPool`), token pages that are held may be moved to make room for the state of a new
    request. Pages that a model reads (from `fetch` to `step`), or that a lease, an import or an exported block table
    names, are never moved.

    Attributes:
        pages: the state pages.
    """

    num_lists = 1
    told = ", the last with one state page"

    def __init__(self, pages: StatePages, params: KVCacheParams, tables: RowTables, hasher_of: HasherOfRow) -> None:
        super().__init__(tables, hasher_of)
        self.pages, self.drafted = pages, pages.drafted
        self.resumes_anywhere = not params.enable_prefix_caching
        self.pools = (pages.pool,)
        self._rows, self._pool = tables.rows, tables.pool
        self._caching = params.enable_prefix_caching
        # the number of tokens between two cached copies of a request's state
        self._spacing = params.state_every_pages * tables.rows.page_size or NEVER
        self._stops: list[tuple[int, ...]] = [()] * len(tables.rows.request_ids)  # by row; see `Reservation.stops`

    def _caches(self, row: int) -> bool:
        return self._caching and row not in self._rows.private

    def _name(self, row: int) -> str:
        return self._rows.request_ids[row] or ""

    @property
    def generation(self) -> int:
        return self.pages.generation

    @property
    def metrics(self) -> KVCacheMetrics:
        return KVCacheMetrics(state_hits=self.pages.hits, state_evictions=self.pages.pool.evictions)

    # ---- claims

    @property
    def has_room(self) -> bool:
        return self.pages.pool.has_room

    @property
    def room_may_cost(self) -> bool:
        return self.pages.pool.room_may_cost

    def check_free(self, request_id: str) -> None:
        """Raise `NoFreeStatePageError` if there is no room for the state of one more request."""
        if not self.pages.pool.has_room:
            raise NoFreeStatePageError(f"request {request_id!r}: all {self.pages.num_pages} state pages are held")

    def claim(self, row: int) -> None:
        """Give the row's new request a state."""
        self.pages.allocate(self._name(row))
        self._stops[row] = ()
        self._pool.moves.claimed(row)

    def release(self, request_id: str | None) -> None:
        """Free the state page of a released request as soon as no transfer writes it and no lease holds it."""
        # False if the request's claim was interrupted before the request had a state
        if request_id and self.pages.holds(request_id):
            self.pages.release(request_id)

    # ---- lookups

    def shortened(self, run: Found, hasher: PrefixHasher, context: SafeContext, row: int | None) -> Found:
        """Returns the part of the found `run` of pages after which the request can resume from a cached state.

        A request without a row needs a state page when it is claimed. A cached state that would be evicted to make room
        for this page does not count.
        """
        end = run.end
        if self._tables.ahead:  # a draft page is named by the digest of the page after it
            end = min(end + 1, (context.end_idx - 1) // self._rows.page_size)
        digests = hasher.digests(context.tokens, run.first, end)
        if row is None:
            ends = self.pages.kept_after(digests, but=self.pages.pool.next_evicted())
        else:
            ends = self.ends(digests, row)
        return self._tables.shortened(run, digests, ends)

    def ends(self, digests: Digests, row: int | None = None, *, anywhere: bool = False) -> Asked:
        """Returns a mask, bool `[pages]`, of the pages after which a state is cached.

        If the request's own state is promised to the readers of a lease, no page counts, because the state must not be
        replaced.
        """
        if row is not None and self.pages.is_promised(self._name(row)):
            return np.zeros(len(digests), np.bool_)
        return self.pages.there(digests) if anywhere else self.pages.kept_after(digests)

    def lendable(self, digests: Digests) -> Asked:
        """Returns a mask, bool `[pages]`, of the pages after which the device has a cached state.

        States in lower tiers cannot be leased.
        """
        return self.pages.pool.index.find(digests) != NO_PAGE

    # ---- tiers

    @property
    def fetches(self) -> bool:
        return self.pages.below.fetches

    def ask(
        self, tier: PagesBelow, digests: Digests, first: int, *, coming: bool, wait: bool
    ) -> tuple[bool, Digests | None]:
        if coming and not wait:
            return True, None
        asking, known = self._ask(tier, digests, first)
        # The answer may show a later state. Loading an earlier state in the meantime would be costly.
        if asking and not wait:
            return True, None
        return coming or asking, known

    def _ask(self, tier: PagesBelow, digests: Digests, first: int) -> tuple[bool, Digests]:
        """Ask remote stores for the latest state of the prompt with these digests, and for the pages before it.

        `tier` is asked for the pages. Known answers are not asked for again. The caller already has the first `first`
        pages. Returns whether an answer is on its way, and the digests of the longest prefix that is known to exist. A
        short object at the end of a run of pages shows that a state was stored after this run.
        """
        tables = self._tables
        found = tables.from_below(digests, tier.has, None, first)
        behind, known = digests[: found.reach + tier.longest_tail], tables.naming(digests, found.pages)
        if self.pages.ask(behind):
            return True, known
        for end in (found.pages + 1 + np.flatnonzero(self.pages.there(behind[found.pages :])))[::-1].tolist():
            up_to = tables.naming(digests, end)
            after = np.arange(1, len(up_to) + 1) == end
            perhaps = tables.from_below(up_to, tier.may_have, after, first)
            asking = perhaps.pages == end and tier.ask(perhaps.every, perhaps.lacking)
            if tables.from_below(up_to, tier.has, after, first).pages == end:
                return False, up_to
            if asking:
                return True, known
        return False, known

    def to_host(self, digests: Digests, there: int, *, wait: bool) -> bool:
        """Load a state into host memory: the last state that a lower tier has after a page with one of these digests.

        A request that does not wait resumes after `there` pages, so the state after these pages must stay on the host.
        Returns whether a state is on its way. With `wait`, the call waits a limited time for the state.
        """
        self.pages.below.touch(digests[:there][-1:])
        return self.pages.bring_newest(digests, wait=wait)

    def to_device(self, wanted: FromBelow, digests: Digests) -> bool:
        """Copy the state after the last of the `wanted` pages from the host to the device.

        The device already has the `wanted` pages. Returns whether the state is on its way. Copies nothing if the state
        and the `wanted` pages take more than half of the free pages.
        """
        if self.pages.below.is_bringing:
            return True
        pool, end = self._pool, wanted.pages
        if not end or pool.free_count // 2 - pool.would_be_taken(wanted.here) < pool.beside:
            return False
        # The pages are held, because making room for the state must not evict pages that are needed with the state.
        pool.hold(wanted.here)
        coming = self.pages.bring_copy(digests[end - 1 : end], end * self._rows.page_size)
        pool.release(wanted.here)
        return coming

    def finish_loads(self) -> None:
        """Wait for running copies of states to the device, which may hold state pages of released requests."""
        self.pages.below.load_all()

    # ---- reservations and steps

    def plan(self, row: int, context: SafeContext, plan: Reservation) -> Reservation:
        """Returns `plan`, with a shorter chunk if a state must be kept after a token within the chunk."""
        if not self._caches(row):
            return plan
        start, active, of_prompt = plan.start, plan.active, self._stops[row]
        # No prefix was looked up for a chunk of one token, unless it is the first chunk of a request. In that case,
        # `plan.cached` is set. It is also set if a fork decodes.
        if not of_prompt and (plan.cached or active - start > 1):
            last, size = context.end_idx - 1, self._rows.page_size
            of_prompt = (plan.reached * size, last - last % size)
        stops = [*of_prompt, start - start % self._spacing + self._spacing]
        active = min((stop for stop in stops if start < stop < active), default=active)
        return plan._replace(active=active, state=self.digest_at(row, context, plan.cached), stops=of_prompt)

    def take(self, row: int, plan: Reservation) -> None:
        """Record that the row runs as `plan` says. If a cached state was found, copy it into the row's state page.

        Called before the row gets its pages, because allocating pages may evict the state that was found.
        """
        if len(plan.state):
            self.pages.resume(self._name(row), plan.state, plan.start)
        self._stops[row] = plan.stops

    def refuse_overlap(self, requests: int) -> None:
        raise InvalidRequestError(
            f"fetch_ahead of {requests} requests: a step overwrites the recurrent states of the previous step, so the "
            "steps of this model cannot overlap: call fetch"
        )

    def computed(self, full: Filled) -> None:
        """Cache a copy of the state of each row whose computed tokens end with the last of the row's `full` pages."""
        rows, tokens, digests = full.rows, full.lasts * self._rows.size, full.digests
        if len(digests) > len(rows):
            digests = digests[(full.lasts - full.firsts).cumsum() - ONE]
        ended = self._rows.cached[rows] == tokens
        if np.count_nonzero(ended) < len(rows):
            rows, tokens, digests = rows[ended], tokens[ended], digests[ended]
        if rows.size:
            self._keep(rows, tokens, digests)

    def _keep(self, rows: Ints, tokens: Ints, digests: Digests) -> None:
        """Cache a copy of the state of each of `rows` after `tokens` tokens, whose last pages have these `digests`."""
        of_rows: list[int] = rows.tolist()
        counts: list[int] = tokens.tolist()
        of_row = self._rows.request_ids
        names = [of_row[row] or "" for row in of_rows]
        # True for a copy that the request's next copy replaces. All other copies stay cached.
        stops, spacing = self._stops, self._spacing
        passing = [count % spacing > 0 and count not in stops[row] for row, count in zip(of_rows, counts, strict=True)]
        for at in self.pages.keep_passing(names, digests, tokens, passing):
            self.pages.keep(names[at], digests[at : at + 1], counts[at], passing=passing[at])

    def digest_at(self, row: int, context: SafeContext, tokens: int) -> Digests:
        """Returns the digest, `[1, words]`, of the last full page of the request's first `tokens` tokens.

        Empty if `tokens` is 0.
        """
        if not tokens:
            return NO_STATE
        last = tokens // self._rows.page_size
        return self._hasher_of(row, context).digests(context.tokens, last - 1, last)

    def goes_on_from(self, request_id: str, start: int) -> int:
        return self.pages.goes_on_from(request_id, start)

    def settle(self, request_id: str, start: int) -> None:
        self.pages.settle(request_id, start)

    def check_fork(self, parent: int) -> None:
        """Raise `StatePageError` unless the parent's state covers exactly its computed tokens."""
        request_id, cached = self._name(parent), self._rows.cached.item(parent)
        self.pages.check_booked(request_id)
        tokens = self.pages.tokens_of(request_id)
        if tokens != cached:
            raise StatePageError(
                f"request {request_id!r}: {cached} tokens are computed, but its state covers {tokens}: "
                "fork it after step"
            )

    def fork(self, parent: int, row: int) -> None:
        self.pages.fork(self._name(parent), self._name(row))

    # ---- leases, block tables and imports

    def held(self, row: int) -> Sequence[HeldPages]:
        """Returns the row's state page, for a lease to hold.

        Raises `StatePageError` if drafted tokens ran and no `step` has said which of them stay.
        """
        self.pages.check_booked(self._name(row))
        return (self.pages.held(self._name(row)),)

    def held_copies(self, digest: Digests) -> Sequence[HeldPages]:
        return (self.pages.held_copy(digest),)

    def named(self, row: int, num_tokens: int, *, full_pages: bool) -> tuple[tuple[int, ...], ...]:
        """Returns the row's state page, as the last group of a block table.

        While the page is leased, the state does not change. Raises `StatePageError` if drafted tokens ran without a
        `step` after them, or if the state covers another number of tokens than the table. With `full_pages`, the table
        is for a prompt that still runs. It names no state, because the next chunk overwrites the state.
        """
        if full_pages:
            return ((),)
        request_id, pages = self._name(row), self.pages
        pages.check_booked(request_id)
        tokens = pages.tokens_of(request_id)
        if tokens != num_tokens:
            raise StatePageError(
                f"request {request_id!r}: its pages hold {num_tokens} tokens, but its state covers {tokens}"
            )
        pages.tell(request_id)
        self._pool.moves.told(row)
        return ((pages.page_of(request_id),),)

    def refusal(self, lists: Sequence[tuple[int, ...]], num_tokens: int, *, last: bool) -> str:
        """Returns why a table with this one list cannot be imported.

        Only the last table of a prompt must name a state.
        """
        (pages,) = lists
        if not pages and last:
            return (
                f"names no page of the recurrent state after its {num_tokens} tokens, because it was made with "
                "full_pages: the last table of a prompt is made without full_pages"
            )
        if len(pages) > 1:
            return f"names {len(pages)} state pages; a request has one"
        if pages and not 0 < pages[0] < 1 << 31:
            return f"names state page {shown(pages[0])}; 1 to 2**31 - 1 are allowed"
        return ""

    def begin_import(self, row: int, context: SafeContext, pending: PendingImport) -> None:
        """Add the request's recurrent state to the import `pending`. A block table has the state in its last group."""
        request_id = context.request_id
        page = self.pages.begin_import(request_id, self.digest_at(row, context, context.start_idx))
        pending.parts.append(StateImportPart(0, np.array([page], np.int32)))
        pending.on_free = functools.partial(self._cancel_import, request_id, page)

    def _cancel_import(self, request_id: str, page: int) -> None:
        """End a cancelled import of a state. Called when nothing writes to its state page any more."""
        self.pages.cancel_import(page)
        if self.pages.holds(request_id) and self.pages.page_of(request_id) == page:
            # The request will compute its prompt itself. More of the prompt may be cached by then, so its chunks are
            # planned again.
            self._stops[self._rows.row_of[request_id]] = ()

    def commit_import(self, row: int, context: SafeContext, tokens: int) -> None:
        """Record that the row's state has arrived, and covers `tokens` tokens.

        If the request had resumed from a later cached state, which the transfer has overwritten, that state is
        restored.
        """
        name = self._name(row)
        if tokens < context.start_idx:
            self.pages.cancel_import(self.pages.page_of(name))
            return
        self.pages.commit_import(name, tokens)
        last, beyond = divmod(tokens, self._rows.page_size)
        # The request may have been made only for this import, so its state is cached now. If a window begins right
        # after these tokens, no table has their last page.
        if self._caches(row) and last and not beyond and self._rows.table[0, row, last - 1] != NO_PAGE:
            self._keep(np.array([row]), np.array([tokens]), self.digest_at(row, context, tokens))

    # ---- resets, recovery and checks

    def forget(self) -> None:
        self.pages.forget_copies()

    def rebuild(self, written: Sequence[int], holders_of: HoldersOf) -> None:
        self.pages.rebuild(written, holders_of(self.pages.pool))

    def check(self, requests: Mapping[str, int], written: Sequence[int], holders_of: HoldersOf) -> None:
        self.pages.check(requests, written, holders_of(self.pages.pool))


class StateImportPart(ImportPart):
    """The part of an import for a recurrent state: one page of the pool of states, which covers all tokens.

    Only the last table names it, and it is copied at the end.
    """

    __slots__ = ()

    @property
    def needs_copy(self) -> bool:
        return True

    @property
    def needs_last(self) -> bool:
        return True

    @property
    def written(self) -> Pages:
        return _NO_PAGES

    @property
    def besides(self) -> Pages:
        return self.dst_pages

    def named(self, pages: tuple[int, ...], num_tokens: int, page_size: int) -> Pages | None:  # noqa: ARG002 - a state covers all tokens
        if not pages:
            return self.src_pages
        new = np.array(pages, np.int32)
        return new if not len(self.src_pages) or np.array_equal(new, self.src_pages) else None

    def take_up(self, pages: Pages, num_tokens: int) -> None:  # noqa: ARG002 - as above
        self.src_pages = pages

    def copy_of(self, table: BlockTable, pages: tuple[int, ...], pending: PendingImport) -> PageCopy:
        if self.stop == 0 or table.num_tokens != pending.num_tokens:
            return NOTHING
        return PageCopy(self.dst_pages, np.array(pages, np.int32), (0, self.stop))

    def complete(self, num_tokens: int) -> None:
        self.stop = num_tokens

    def contradiction(self, pages: tuple[int, ...]) -> str:
        return f"names state page {pages[0]}; the earlier table named {self.src_pages.item(0)}"


def step_drafted(
    each: Sequence[Kept], gathered: Gathered, step: Callable[[Gathered, Callable[[], None]], None]
) -> None:
    """Do a `step` for requests, some of which have run drafted tokens.

    `each` has what each replica keeps. `step` calls its second argument once the tokens are published. If some
    drafted tokens of a request were removed, its `start_idx` is set back to the number of tokens that its state can
    cover. Raises `StatePageError` if a `start_idx` is before or after all tokens that ran, and also raises the errors
    of `step`. In these cases nothing has changed.
    """
    drafted: list[tuple[Context, str, Kept, int, int]] = []
    owners: list[int] = gathered.replicas.tolist()
    for context, replica_idx in zip(gathered.contexts, owners, strict=True):
        name, kept, start = context.request_id, each[replica_idx], context.start_idx
        if name in kept.drafted:
            drafted.append((context, name, kept, start, kept.goes_on_from(name, start)))

    def settle() -> None:
        for _, name, kept, _, goes_on in drafted:
            kept.settle(name, goes_on)

    try:
        for context, _, _, _, goes_on in drafted:
            context.set_token_indices(start_idx=goes_on)
        gathered.gather(computed_only=True)
        step(gathered, settle)
    except BaseException:
        for context, _, _, start, _ in drafted:
            context.set_token_indices(start_idx=start)
        raise
