"""`ReplicaStates`: the recurrent states of one replica, as a manager's calls use them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import torch

from kvcache.errors import InvariantError, NoFreeStatePageError, StatePageError
from kvcache.layout import PageLayout
from kvcache.params import KVCacheParams
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.quotas import TenantQuotas
from kvcache.pool.slabs import SlabPool
from kvcache.replica.batch import Gathered
from kvcache.replica.block_table import BlockTable, ImportPart, PendingImport
from kvcache.replica.context import Context
from kvcache.replica.devices import PlacedReplica
from kvcache.replica.hashing import DIGEST_BYTES, PrefixHasher
from kvcache.replica.leases import HeldPages
from kvcache.replica.page_moves import ReplicaPageMoves
from kvcache.replica.request_states import RequestStates, StateCopy
from kvcache.replica.reservation import Reservation, StatePlan
from kvcache.replica.resume import Asked, Found, FromBelow
from kvcache.replica.rows import Ints, Rows
from kvcache.replica.tables import RowTables
from kvcache.retention import PageHints
from kvcache.states.kept_states import KeptStates
from kvcache.states.state_hints import StateHints
from kvcache.states.state_layout import state_layouts
from kvcache.states.state_pages import StatePages
from kvcache.states.state_room import StateSlabs, pages_of_slab

Step = Callable[[Gathered, Callable[[], None] | None], None]
"""Steps the gathered requests. The second argument is called once their tokens are published."""


def slab_pages_of(params: KVCacheParams, layouts: Sequence[PageLayout]) -> int:
    """The pages that a request's state takes among the token pages; 0: none. `layouts`: of a page on each shard."""
    if params.states is None or not params.has_states_in_pages:
        return 0
    return pages_of_slab(state_layouts(params.states, len(layouts)), layouts)


class ReplicaStates(RequestStates):
    """The states of a replica's requests. Each request has a state page from `claim` to `release`.

    With memory of their own, states have a page for each of `requests`, and pages for copies. In the memory of token
    pages (`SlabPool`), held token pages may be moved to make room for a state that is claimed or forked. Pages that a
    model reads (from `fetch` to `step`), or that a lease, an import or a block table names, are never moved.

    Raises `InvalidParamsError` if the shards cannot share the heads, `PoolTooSmallError` if there is no room.
    """

    groups = 1

    def __init__(
        self, placed: PlacedReplica, params: KVCacheParams, requests: int, devices: Sequence[torch.device]
    ) -> None:
        if params.states is None:
            raise InvariantError("a manager without recurrent layers has no states")
        self._replica = replica = placed.replica
        words, pool = DIGEST_BYTES[params.hash_algorithm] // 8, replica.pool
        self._moves = ReplicaPageMoves(replica, functools.partial(placed.copy_pages_of, placed))
        if isinstance(pool, SlabPool):
            pool.move_by(self._moves)
            slabs = StateSlabs(state_layouts(params.states, len(devices)), pool, placed.rows)
            self.pages = StatePages(params.states, pool.num_slabs, devices, words, slabs, replica.mark)
        else:
            self.pages = StatePages(params.states, params.states_apart(requests), devices, words, None, replica.mark)
        self.keeps = params.enable_prefix_caching
        self._kept = KeptStates(self.pages, replica, params.state_every_pages)
        self._hints = StateHints(self.pages, replica, params)
        replica.keep(self)

    def _name(self, row: int) -> str:
        return self._replica.rows.request_ids[row] or ""

    # ---- claims

    def check_free(self, request_id: str) -> None:
        if not self.has_room:
            raise NoFreeStatePageError(f"request {request_id!r}: all {self.pages.num_pages} state pages are held")

    @property
    def has_room(self) -> bool:
        return self.pages.num_free > 0

    @property
    def may_lose_pages(self) -> bool:
        return self.keeps and self.pages.may_lose_pages

    def claim(self, request_id: str, row: int) -> None:
        self.pages.allocate(request_id)
        self._moves.claimed(row)

    def release(self, request_id: str) -> None:
        self._kept.leave(request_id)
        if self.pages.holds(request_id):  # False if its claim was interrupted
            self.pages.release(request_id)

    # ---- cached states

    @property
    def generation(self) -> int:
        return self.pages.generation

    @property
    def fetches(self) -> bool:
        return self.pages.below.fetches

    def there(self, digests: Digests) -> Asked:
        return self.pages.there(digests)

    def ask(self, digests: Digests, first: int) -> tuple[bool, Digests]:
        """As the base. If an object holds only the end of a run of pages, there is a state after that run."""
        tables, tier = self._replica.tables, self._replica.tier
        found = tables.from_below(digests, tier.has, None, first)
        behind = digests[: found.reach + tier.longest_tail]
        if self.pages.ask(behind):
            return True, digests[: found.pages]
        for end in (found.pages + 1 + np.flatnonzero(self.there(behind[found.pages :])))[::-1].tolist():
            perhaps = tables.from_below(digests[:end], tier.may_have, None, first)
            asking = perhaps.pages == end and tier.ask(perhaps.every, perhaps.lacking)
            if tables.from_below(digests[:end], tier.has, None, first).pages == end:
                return False, digests[:end]
            if asking:
                return True, digests[: found.pages]
        return False, digests[: found.pages]

    def touch(self, digests: Digests) -> None:
        self.pages.below.touch(digests)

    def bring_newest(self, digests: Digests, *, wait: bool) -> bool:
        return self.pages.bring_newest(digests, wait=wait)

    def ends(self, request_id: str | None, digests: Digests) -> Asked:
        """As the base: where there is a copy. Nowhere for a request whose own state is promised to readers."""
        if request_id is not None and self.pages.is_promised(request_id):
            return np.zeros(len(digests), np.bool_)
        return self.pages.kept_after(digests)

    def run(self, tables: RowTables, first: int, digests: Digests) -> Found:
        return tables.run(first, digests)

    def up_to_state(self, found: Found, row: int | None, context: Context, hasher: PrefixHasher | None = None) -> Found:
        """As the base. Claiming a request evicts a copy to make room for its state; that copy does not count."""
        if not found.num_columns:
            return found
        replica, pages = self._replica, self.pages
        digests = (hasher or replica.hasher(row, context)).digests(context.tokens, found.first, found.end)
        ends = pages.kept_after(digests, but=pages.goes_next) if row is None else self.ends(self._name(row), digests)
        return replica.tables.shortened(found, digests, ends)

    def copies(self, digests: Digests) -> Asked:
        return self.pages.index.find(digests) != NO_PAGE

    def bring_copy(self, wanted: FromBelow, digests: Digests) -> bool:
        """As the base, if half of the free pages suffice for it and the wanted pages."""
        if self.pages.below.is_bringing:
            return True
        pool, end = self._replica.pool, wanted.pages
        if not end or pool.free_count // 2 - pool.would_be_taken(wanted.here) < pool.beside:
            return False
        pool.hold(wanted.here)  # making room for the state must not evict the pages needed with it
        coming = self.pages.bring_copy(digests[end - 1 : end], end * self._replica.page_size)
        pool.release(wanted.here)
        return coming

    def copy_of(self, digest: Digests) -> StateCopy | None:
        return self.pages.copy_of(digest)

    def take_copy(self, copy: StateCopy, digest: Digests) -> HeldPages | None:
        return self.pages.take_copy(copy, digest)

    def forget(self) -> None:
        self.pages.forget_copies()

    # ---- reservations and steps

    def planned(self, row: int, context: Context, plan: Reservation, reached: int) -> Reservation:
        return self._kept.planned(self._name(row), context, plan, reached) if self.keeps else plan

    def reserved(self, row: int, plan: StatePlan, start: int) -> None:
        self._kept.reserved(self._name(row), plan, start)

    def fetched(self, rows: Rows) -> None:
        """A model reads the pages of these rows until their `step`, so they are not moved."""
        self._moves.fetched(rows)

    def stepped(self, rows: Rows, computed: Ints) -> None:
        """The rows have run up to these tokens. States at the end of a page are copied as `KeptStates` decides."""
        self._moves.stepped(rows)
        if self.keeps:
            self._kept.computed(rows, computed)

    def refuse_fork(self, parent: int) -> None:
        self.refuse_unbooked(request_id := self._name(parent))
        tokens, cached = self.pages.tokens_of(request_id), self._replica.rows.cached.item(parent)
        if tokens != cached:
            raise StatePageError(
                f"request {request_id!r}: {cached} tokens are computed as of its last step, "
                f"its state has taken up {tokens}: fork it after step"
            )

    def fork(self, parent: int, row: int) -> None:
        self.pages.fork(self._name(parent), self._name(row))

    # ---- leases, block tables and imports

    def refuse_unbooked(self, request_id: str) -> None:
        self.pages.drafts.check_booked(request_id)

    def held(self, row: int) -> list[HeldPages]:
        return [self.pages.held(self._name(row))]

    def held_copy(self, digest: Digests) -> list[HeldPages]:
        return [self.pages.held_copy(digest)]

    def name(self, table: BlockTable, *, full_pages: bool) -> BlockTable:
        """As the base. The state stays as it is while it is leased.

        Raises `StatePageError` if a run was not booked, or if the state is of other tokens. With `full_pages` the state
        is not yet reported to readers, and may be of other tokens.
        """
        request_id = table.request_id
        if not full_pages:
            self.refuse_unbooked(request_id)
            tokens = self.pages.tokens_of(request_id)
            if tokens != table.num_tokens:
                raise StatePageError(
                    f"request {request_id!r}: its pages hold {table.num_tokens} tokens, its state has taken up {tokens}"
                )
            self.pages.tell(request_id)
        self._moves.told(self._replica.rows.row_of[request_id])
        return _with_state(table, self.pages.page_of(request_id))

    def begin_import(self, context: Context, pending: PendingImport) -> None:
        had = context.start_idx
        digest = self._kept.digest_at(context, had) if had else None
        page = self.pages.begin_import(context.request_id, digest)
        pending.parts.append(ImportPart(0, np.array([page], np.int32), is_state=True))
        pending.on_free = functools.partial(self._cancel_import, context.request_id, page)

    def _cancel_import(self, request_id: str, page: int) -> None:
        """End a cancelled import, once nothing writes to the page that the request had when it began."""
        self.pages.cancel_import(page)
        if self.pages.holds(request_id) and self.pages.page_of(request_id) == page:
            # By the time that it computes its prompt itself, more of it may be cached: other chunks may be right.
            self._kept.leave(request_id)

    def commit_import(self, request_id: str, tokens: int) -> None:
        self.pages.commit_import(request_id, tokens)
        if self.keeps:  # the import may be all that the request is for
            self._kept.computed(np.array([self._replica.rows.row_of[request_id]]), np.array([tokens]))

    # ---- hints and quotas

    def follow_hints(self, quotas: TenantQuotas | None) -> None:
        self._hints.begin(quotas)

    def clear_quotas(self) -> None:
        self._hints.clear()

    def leave_hinted(
        self, row: int, digests: Digests, hints: PageHints | None, ends: Sequence[int], share: float
    ) -> None:
        self._hints.leave(row, digests, hints, ends, share)

    # ---- after an interrupt

    def mend(self, ended: Iterable[str]) -> Iterable[str]:
        self._kept.mend()
        below = self.pages.below
        below.mend(())  # copies on their way hold pages, so they are ended first
        self.pages.mend(self._replica.rows.row_of, self._written, self._leased)
        below.mend(())  # copies that wait are looked up in the mended pages
        return ended

    @property
    def _leased(self) -> Ints:
        return self._replica.leases.holders(self.pages.pool)

    @property
    def _written(self) -> list[int]:
        parts = [part for pending in self._replica.imports.each for part in pending.parts if part.is_state]
        return [int(part.dst_pages[0]) for part in parts]

    def goes_on(self, request_id: str, start: int) -> bool:
        """As the base. Also False if a drafted run is not booked."""
        pages = self.pages
        return request_id not in pages.drafts.page_of and pages.tokens_of(request_id) == start

    def check(self) -> None:
        self._kept.check()
        self.pages.check(self._replica.rows.row_of, self._written, self._leased)


def _with_state(table: BlockTable, page: int) -> BlockTable:
    return msgspec.structs.replace(table, groups=(*table.groups, (page,)))


def step_drafted(each: Sequence[ReplicaStates], gathered: Gathered, step: Step) -> None:
    """`step` of requests of which some ran drafted tokens.

    A request that had drafted tokens removed gets its `start_idx` set back to where its state is. Raises
    `StatePageError` if a `start_idx` is before or after all tokens that ran, and what `step` raises. Nothing has
    changed then.
    """
    drafted: list[tuple[Context, StatePages]] = []
    owners: list[int] = gathered.replicas.tolist()
    for context, replica_idx in zip(gathered.contexts, owners, strict=True):
        pages = each[replica_idx].pages
        if context.request_id in pages.drafts.page_of:
            drafted.append((context, pages))
    starts = [context.start_idx for context, _ in drafted]
    names = [context.request_id for context, _ in drafted]
    goes_on = [
        pages.drafts.goes_on_from(name, pages.tokens_of(name), start)
        for name, (_, pages), start in zip(names, drafted, starts, strict=True)
    ]

    def settle() -> None:
        for name, (_, pages), at in zip(names, drafted, goes_on, strict=True):
            pages.settle(name, at)

    try:
        for (context, _), at in zip(drafted, goes_on, strict=True):
            context.set_token_indices(start_idx=at)
        gathered.gather(starts_only=True)
        step(gathered, settle)
    except BaseException:
        for (context, _), start in zip(drafted, starts, strict=True):
            context.set_token_indices(start_idx=start)
        raise
