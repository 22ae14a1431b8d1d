"""`ReplicaStates`: the recurrent states of one replica, as the calls of a manager meet them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
import torch

from kvcache.arguments import shown
from kvcache.errors import BlockTableMismatchError, InvariantError, NoFreeStatePageError, StatePageError
from kvcache.layout import PageLayout
from kvcache.params import KVCacheParams
from kvcache.pool.slabs import SlabPool
from kvcache.replica.block_table import BlockTable, PendingImport
from kvcache.replica.context import Context
from kvcache.replica.devices import PlacedReplica
from kvcache.replica.hashing import DIGEST_BYTES
from kvcache.replica.imports import own_import
from kvcache.replica.leases import PageLease
from kvcache.replica.page_moves import ReplicaPageMoves
from kvcache.replica.pages_below import PagesBelow
from kvcache.replica.rows import Ints, Rows
from kvcache.states.kept_states import KeptStates
from kvcache.states.state_hints import StateHints
from kvcache.states.state_layout import state_layouts
from kvcache.states.state_pages import StatePages
from kvcache.states.state_slabs import StateSlabs, pages_of_slab
from kvcache.states.state_tiers import Divided, StateTiers, make_state_tiers


def slab_pages_of(params: KVCacheParams, layouts: Sequence[PageLayout]) -> int:
    """Pages that a request takes for its state, which lies among them; 0: none. `layouts`: of a page on each shard."""
    if params.states is None or not params.has_states_in_pages:
        return 0
    return pages_of_slab(state_layouts(params.states, len(layouts)), layouts)


def state_tiers_of(
    params: KVCacheParams, divided: Divided, layouts: Sequence[PageLayout], states: Sequence[ReplicaStates]
) -> StateTiers | None:
    """The tiers below the states of these replicas, wired to them; None where the params ask for none."""
    tiers = (
        make_state_tiers(params, divided, layouts, states[0].pages.layouts, [one.pages.places for one in states])
        if states
        else None
    )
    if tiers is not None:
        for one, tier in zip(states, tiers.each, strict=True):
            one.pages.below = tier
    return tiers


class ReplicaStates:
    """The states of a replica's requests: each has a page from `claim` to `release`.

    In memory of their own there is one for each of `requests`, and copies. In that of the token pages (`SlabPool`)
    these may be moved for a state that is claimed or forked; but none that a model reads (from `fetch` to `step`), or
    that a lease, an import or a block table names.

    Raises `InvalidParamsError` for shards that cannot share the heads, `PoolTooSmallError` where there is no room.
    """

    def __init__(
        self, placed: PlacedReplica, params: KVCacheParams, requests: int, devices: Sequence[torch.device]
    ) -> None:
        if params.states is None:
            raise InvariantError("a manager without recurrent layers has no states")
        self._replica = replica = placed.replica
        words, pool = DIGEST_BYTES[params.hash_algorithm] // 8, replica.pool
        self._moves: ReplicaPageMoves | None = None
        if isinstance(pool, SlabPool):
            self._moves = pool.moves = ReplicaPageMoves(
                replica, lambda sources, targets: placed.copy_pages_of(placed, sources, targets)
            )
            slabs = StateSlabs(state_layouts(params.states, len(devices)), pool, placed.rows)
            self.pages = StatePages(params.states, pool.num_slabs, devices, words, slabs, replica.mark)
        else:
            self.pages = StatePages(params.states, params.states_apart(requests), devices, words, None, replica.mark)
        self.kept = KeptStates(self.pages, replica, params.state_every_pages)
        if params.enable_prefix_caching:
            replica.states = self.kept
            replica.hints.follow_states(StateHints(self.pages, params, pool.beside))

    @property
    def has_room(self) -> bool:
        """Whether one more request could have a state."""
        return self.pages.num_free > 0

    def claim(self, request_id: str) -> None:
        """The state of a new request, before its first token. `NoFreeStatePageError`: there is no page for it."""
        self.pages.allocate(request_id)
        if self._moves is not None:
            self._moves.claimed(self._replica.rows.row_of[request_id])

    def release(self, request_id: str) -> None:
        """The request is released: its page is free, unless a transfer still writes it or a lease holds it."""
        self.kept.leave(request_id)
        self.pages.release(request_id)

    def fetched(self, rows: Rows | list[int]) -> None:
        """A model reads the pages of these rows, until their `step`: they stay where they are."""
        if self._moves is not None:
            self._moves.fetched(rows)

    def stepped(self, rows: Rows, computed: Ints) -> None:
        """It has run, up to these tokens: of those at the end of a page copies are kept, where they pay."""
        if self._moves is not None:
            self._moves.stepped(rows)
        if self._replica.states is not None:
            self.kept.computed(rows, computed)

    def refuse_fork(self, parent_id: str, child_id: str) -> None:
        """Raise where the parent has a run that is not booked, or no state page is left (`NoFreeStatePageError`)."""
        self.pages.drafts.check_booked(parent_id)
        rows, tokens = self._replica.rows, self.pages.tokens_of(parent_id)
        cached = rows.cached.item(rows.row_of[parent_id])
        if tokens != cached:
            raise StatePageError(
                f"request {parent_id!r}: {cached} tokens are computed as of its last step, "
                f"its state has taken up {tokens}: fork it after step"
            )
        if not self.has_room:
            raise NoFreeStatePageError(f"request {child_id!r}: no state page is free for this fork")

    def fork(self, parent_id: str, child: Context, indices: tuple[int, int]) -> None:
        """The child, which has its pages, has the parent's state in a page of its own.

        `NoFreeStatePageError`: its pages lie where there was room; its start and active index are `indices` then.
        """
        try:
            self.claim(child.request_id)
        except BaseException:
            child.set_token_indices(start_idx=indices[0], active_idx=indices[1])
            raise
        self.pages.fork(parent_id, child.request_id)

    def name_state(self, table: BlockTable, *, full_pages: bool) -> BlockTable:
        """The table with the request's state page as a further group, which stays with these tokens while leased.

        Raises `StatePageError` where a run was not booked, or the state is of other tokens; with `full_pages` it is not
        told of yet, and may be.
        """
        request_id = table.request_id
        if not full_pages:
            self.pages.drafts.check_booked(request_id)
            tokens = self.pages.tokens_of(request_id)
            if tokens != table.num_tokens:
                raise StatePageError(
                    f"request {request_id!r}: its pages hold {table.num_tokens} tokens, its state has taken up {tokens}"
                )
            self.pages.tell(request_id)
        if self._moves is not None:
            self._moves.told(self._replica.rows.row_of[request_id])
        return msgspec.structs.replace(table, groups=(*table.groups, (self.pages.page_of(request_id),)))

    def begin_import(self, context: Context, pending: PendingImport, table: BlockTable) -> None:
        """The import takes the state that the table names too, last, once all tokens ran."""
        ((source,),) = table.groups[-1:]
        had = context.start_idx
        digest = self.kept.digest_at(context, had) if had else None
        page = self.pages.begin_import(context.request_id, digest)
        pending.wholes = ((source, page),)
        pending.on_free = functools.partial(self.pages.cancel_import, page)

    def refuse_other(self, context: Context, pending: PendingImport, table: BlockTable) -> None:
        """Raise `BlockTableMismatchError` where the table names another state page than before."""
        own_import([self._replica], pending, "extend_import")
        ((source,),) = table.groups[-1:]
        ((before, _),) = pending.wholes
        if source != before:
            raise BlockTableMismatchError(
                f"request {context.request_id!r}: the block table names state page {source}, {before} before"
            )

    def lease(self, request_id: str, lease: PageLease) -> None:
        """The lease holds the state too: once a table has named it, the request cannot run on."""
        self.pages.lease(request_id, lease)

    def mend(self) -> None:
        """After an interrupt: rows, leases and imports are mended; what holds states follows."""
        self.kept.mend()
        below = self.pages.below or PagesBelow()
        below.mend(())  # what is on its way holds pages
        self.pages.mend(self._replica.rows.row_of, self._replica.leases, self._written)
        below.mend(())  # what waits to be copied down is found in pages

    @property
    def _written(self) -> list[int]:
        return [page for pending in self._replica.imports.each for _, page in pending.wholes]

    def goes_on(self, request_id: str, start: int) -> bool:
        """Whether the request's state is that after `start` tokens, and no drafted run waits to be booked."""
        pages = self.pages
        return request_id not in pages.drafts.page_of and pages.tokens_of(request_id) == start

    def check(self) -> None:
        """Recount. Raises `InvariantError` at the first discrepancy."""
        self.kept.check()
        self.pages.check(self._replica.rows.row_of, self._written)


def without_state(context: Context, table: BlockTable, count: int) -> BlockTable:
    """The table without the group of its state, which has one page, behind the `count` groups of its tokens.

    Raises `BlockTableMismatchError` where it has others, or is no block table.
    """
    if not isinstance(table, BlockTable):  # pyright: ignore[reportUnnecessaryIsInstance] - callers need no types
        raise BlockTableMismatchError(f"request {context.request_id!r}: {shown(table)} is no block table")
    if len(table.groups) != count + 1 or len(table.groups[-1]) != 1:
        raise BlockTableMismatchError(
            f"request {context.request_id!r}: the block table has {len(table.groups)} page groups, this manager "
            f"{count + 1}, the last of one state page"
        )
    (source,) = table.groups[-1]
    if not 0 < source < 1 << 31:
        raise BlockTableMismatchError(f"request {context.request_id!r}: the block table names state page {source}")
    return msgspec.structs.replace(table, groups=table.groups[:-1])
