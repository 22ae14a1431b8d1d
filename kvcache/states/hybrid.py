"""`HybridKVCacheManager`: the paged cache of a model that has recurrent layers too, a state page beside each row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import torch

from kvcache import sizing
from kvcache.arguments import flag, whole
from kvcache.errors import (
    BlockTableMismatchError,
    InvalidParamsError,
    InvariantError,
    NoFreeStatePageError,
    PoolTooSmallError,
    StatePageError,
)
from kvcache.layout import replica_fingerprint, shard_layouts
from kvcache.manager import PagedKVCacheManager
from kvcache.params import KVCacheParams, resolve_page_size
from kvcache.pool.slabs import SlabPool
from kvcache.replica.batch import Gathered
from kvcache.replica.block_table import BlockTable, PageCopy, PendingImport
from kvcache.replica.context import Context
from kvcache.replica.copier import ImportProof
from kvcache.replica.hashing import DIGEST_BYTES
from kvcache.replica.imports import own_import
from kvcache.replica.leases import PageLease
from kvcache.replica.page_moves import ReplicaPageMoves
from kvcache.states.kept_states import KeptStates
from kvcache.states.state_layout import StateShape, state_layouts
from kvcache.states.state_pages import StatePages
from kvcache.states.state_slabs import StateSlabs, pages_of_slab
from kvcache.types import Admission, RaggedKVCacheInputs, RequestID


class HybridKVCacheManager(PagedKVCacheManager):
    """A manager whose every claimed request holds a state page as well, from `external_claim` to `release`.

    A serving loop drives it as it drives the other one, whose arguments it takes after the shape of the recurrent
    layers; `num_layers` counts those that keep keys and values. What differs:

    - A prefix is found as far as its pages are cached and a copy of the state after the last of them is: the newest one
      that is left is copied into the request's state page. Copies are made by `step` where they pay (`KeptStates`), and
      evicted on their own, least recently used first. `maybe_reserve` ends a chunk (`active_idx`) where a copy is to be
      made; a loop that runs it past that makes none there. Hints and quotas are of the pages of tokens alone.
    - `block_table` has a second group, the state page. `import_block_table` takes such a table; the import's copier
      names both, `commit_import` and `cancel_import` are for both. So are leases.
    - One replica: its state pages are of one set of devices.
    - A state cannot go back. A run of drafted tokens, which may be taken away again, has a second state page
      (`states.draft`, out of those that are free or copies), and leaves the state before it as it is. Where some are
      taken away, `step` sets `start_idx` back to that state, and the tokens that stay run again with the next ones
      (`drafted_pages`). Without a second page the request may be released, and goes on from the newest copy.

    `state_every_pages`: pages of tokens between two copies, whatever the prompts; 0: only where `KeptStates` says.

    States lie among the pages of tokens, each in a slab of `slab_pages` neighbours (`kvcache.pool.slabs`), so that no
    memory is set apart. Copies and pages are then evicted by their last use. Pages of requests may be moved when
    another one is claimed or forked, but none that a model reads (from `fetch` to `step`), or that a lease, an import
    or a `block_table` names. `NoFreeStatePageError` also where such pages lie in every slab, or pages are too few.

    `share_memory`: False, or `state_copies` named: `max_batch_size + state_copies` state pages, twice `max_batch_size`
    copies where none are named, come out of `available_cache_memory` once and for all, and pages are never moved.

    Raises `InvalidParamsError` also where `state_copies` is given with `share_memory`, where there are several
    replicas, or with prefix caching a tier below the pages, or reuse of a part of a page; and
    `PoolTooSmallError` where nothing is left beside the state pages.
    """

    def __init__(
        self,
        state: StateShape,
        params: KVCacheParams,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        devices: Sequence[torch.device | str],
        available_cache_memory: int,
        state_copies: int | None = None,
        state_every_pages: int = 0,
        share_memory: bool | None = None,
        **kwargs: Any,
    ) -> None:
        sizing.check_sizes(params, max_batch_size, max_seq_len, num_layers)  # before state pages are allocated
        sizing.check_devices(params, devices, here=True)
        caching = params.enable_prefix_caching
        _check_params(params)
        share_memory = state_copies is None if share_memory is None else flag("share_memory", share_memory)
        if share_memory and state_copies is not None:
            raise InvalidParamsError(
                f"state_copies is {state_copies}: with share_memory there are as many as the memory that is left holds"
            )
        copies = 2 * max_batch_size * caching if state_copies is None else whole("state_copies", state_copies, 0)
        every = whole("state_every_pages", state_every_pages, 0)
        if not caching and (copies or every):
            raise InvalidParamsError(
                f"state_copies is {copies}, state_every_pages {every}: there are none, as enable_prefix_caching is off"
            )
        words, left = DIGEST_BYTES[params.hash_algorithm] // 8, available_cache_memory
        if share_memory:
            size = resolve_page_size(params, kwargs.get("page_size", 128))
            layouts = state_layouts(state, len(devices))
            self.slab_pages = pages_of_slab(layouts, shard_layouts(params, num_layers, size))
        else:
            self.states = StatePages(state, max_batch_size + copies, devices, words)
            left -= _state_bytes(self.states, available_cache_memory)
        # What tells of the pages tells of the states, too, once there are some.
        untold, sizes = dataclasses.replace(params, kv_events=None), (max_batch_size, max_seq_len, num_layers)
        super().__init__(untold, *sizes, devices, available_cache_memory=left, **kwargs)
        self.params = params
        self._moves: ReplicaPageMoves | None = None
        if share_memory:
            self.states = self._states_in_slabs(state, words)
        self.further_groups = (self.states,)
        of_states = chain.from_iterable(kinds.values() for kinds in self.states.layouts)
        self.fingerprint = replica_fingerprint([*self.layouts, *of_states])
        (replica,) = self._replicas.each
        self._kept = KeptStates(self.states, replica, every)
        replica.states = self._kept if caching else None
        if params.kv_events is not None:
            self._replicas.publish_events(params.kv_events, params, self.layer_tables, [self.states.index])
            self.kv_event_endpoints = self._replicas.event_endpoints

    def _states_in_slabs(self, state: StateShape, words: int) -> StatePages:
        """State pages in the memory of the token pages."""
        (placed,) = self._replicas.placed
        pool = placed.replica.pool
        if not isinstance(pool, SlabPool):
            raise InvariantError("a manager with states in slabs has a pool without")
        self._moves = pool.moves = ReplicaPageMoves(
            placed.replica, lambda sources, targets: placed.copy_pages_of(placed, sources, targets)
        )
        (devices,) = self.devices_per_replica
        slabs = StateSlabs(state_layouts(state, len(devices)), pool, placed.rows)
        return StatePages(state, pool.num_slabs, devices, words, slabs)

    def external_claim(self, request_id: RequestID, replica_idx: int | None = None) -> None:
        """As the base; takes a state page too. `NoFreeStatePageError`: transfers still write too many."""
        super().external_claim(request_id, replica_idx)
        try:
            self.states.allocate(request_id)
        except NoFreeStatePageError:
            super().release(request_id)
            raise
        if self._moves is not None:
            self._moves.claimed(self._replicas.each[0].rows.row_of[request_id])

    def release(self, request_id: RequestID) -> None:
        """As the base; gives the state page back too, unless a transfer still writes it or a lease holds it."""
        super().release(request_id)
        self._kept.leave(request_id)
        self.states.release(request_id)

    def admission(self, context: Context, num_steps: int = 1) -> Admission:
        """As the base; a request fits where a state page is left for it, too."""
        found = super().admission(context, num_steps)
        return found if self.states.num_free else found._replace(fits=False)

    def fetch(self, batch: Sequence[Context], num_steps: int = 1) -> list[RaggedKVCacheInputs]:
        """As the base; the pages of these requests stay where they are until their `step`."""
        fetched = super().fetch(batch, num_steps)
        if self._moves is not None:
            self._moves.fetched([self._claims.places[context.request_id] for context in batch])  # rows: of one replica
        return fetched

    def step(self, batch: Sequence[Context]) -> None:
        """As the base; keeps copies of the states of requests that are at the end of a page, where these pay.

        A request that ran drafted tokens, and had some taken away, is set back to where its state is (`start_idx`).
        `StatePageError`: that is before all that ran, or after.
        """
        gathered = self._claims.gather(batch, "step")
        if self.states.drafts.page_of:
            gathered = self._step_drafted(batch, gathered)
        else:
            self._replicas.step(gathered)
        if self._moves is not None:
            self._moves.stepped(gathered.rows)
        if self.enable_prefix_caching:
            self._kept.computed(gathered)

    def _step_drafted(self, batch: Sequence[Context], gathered: Gathered) -> Gathered:
        """`step` where requests may be set back; the batch as it is then."""
        states, of_drafts = self.states, self.states.drafts
        drafted = [context for context in gathered.contexts if context.request_id in of_drafts.page_of]
        starts = [context.start_idx for context in drafted]
        goes_on = [
            of_drafts.goes_on_from(context.request_id, states.tokens_of(context.request_id), start)
            for context, start in zip(drafted, starts, strict=True)
        ]
        try:
            for context, at in zip(drafted, goes_on, strict=True):
                context.set_token_indices(start_idx=at)
            gathered = self._claims.gather(batch, "step")
            self._replicas.step(gathered)
        except BaseException:
            for context, start in zip(drafted, starts, strict=True):
                context.set_token_indices(start_idx=start)
            raise
        for context, at in zip(drafted, goes_on, strict=True):
            states.settle(context.request_id, at)
        return gathered

    def reset_prefix_cache(self) -> None:
        """As the base; forgets the copies of states too."""
        super().reset_prefix_cache()
        self.states.forget_copies()

    def fork(self, parent: Context, child: Context, num_steps: int = 1) -> bool:
        """As the base; copies the state too. `NoFreeStatePageError`: there is no page for it."""
        self.states.drafts.check_booked(parent.request_id)
        if not self.states.num_free:
            raise NoFreeStatePageError(f"request {child.request_id!r}: no state page is free for this fork")
        if not super().fork(parent, child, num_steps):
            return False
        self.states.allocate(child.request_id)
        self.states.fork(parent.request_id, child.request_id)
        if self._moves is not None:
            self._moves.claimed(self._replicas.each[0].rows.row_of[child.request_id])
        return True

    def block_table(self, request_id: RequestID, *, full_pages: bool = False, first_page: int = 0) -> BlockTable:
        """As the base, with the state page as the second group. `StatePageError`: a step ran, and was not booked."""
        table = super().block_table(request_id, full_pages=full_pages, first_page=first_page)
        if not full_pages:
            self.states.drafts.check_booked(request_id)
            tokens = self.states.tokens_of(request_id)
            if tokens != table.num_tokens:
                raise StatePageError(
                    f"request {request_id!r}: its pages hold {table.num_tokens} tokens, its state has taken up {tokens}"
                )
            self.states.tell(request_id)
        if self._moves is not None:
            self._moves.told(self._replicas.each[0].rows.row_of[request_id])
        return msgspec.structs.replace(table, groups=(*table.groups, (self.states.page_of(request_id),)))

    def lease(self, request_id: RequestID) -> PageLease:
        """As the base, for the state page too: once a table has named its state, the request cannot run on."""
        self.states.drafts.check_booked(request_id)
        lease = super().lease(request_id)
        self.states.lease(request_id, lease)
        return lease

    def end_lease(self, lease: PageLease) -> None:
        """As the base, for the state page too."""
        super().end_lease(lease)
        self.states.end_lease(lease)

    def import_block_table(
        self, context: Context, table: BlockTable, num_steps: int = 1, *, partial: bool = False
    ) -> PendingImport | None:
        """As the base, for a table with a state page: what its copier takes last, once all tokens ran."""
        of_pages, source = _without_state(context, table)
        pending = super().import_block_table(context, of_pages, num_steps, partial=partial)
        if pending is not None:
            had = context.start_idx
            digest = self._kept.digest_at(context.request_id, had) if had else None
            page = self.states.begin_import(context.request_id, digest)
            pending.wholes = ((source, page),)
            pending.on_free = functools.partial(self.states.cancel_import, page)
        return pending

    def extend_import(self, context: Context, pending: PendingImport, table: BlockTable, *, last: bool) -> PageCopy:
        """As the base; the state page stays the same."""
        own_import(self._replicas.each, pending, "extend_import")
        of_pages, source = _without_state(context, table)
        ((before, _),) = pending.wholes
        if source != before:
            raise BlockTableMismatchError(
                f"request {context.request_id!r}: the block table names state page {source}, {before} before"
            )
        return super().extend_import(context, pending, of_pages, last=last)

    def commit_import(self, context: Context, pending: PendingImport, proof: ImportProof | None = None) -> None:
        """As the base, for the state page too."""
        super().commit_import(context, pending, proof)
        self.states.commit_import(context.request_id, pending.num_tokens)

    def check(self) -> None:
        """As the base, for the state pages too."""
        super().check()
        self._kept.check()
        imports = self._replicas.each[0].imports.each
        self.states.check(self._claims.places, [page for pending in imports for _, page in pending.wholes])


def _state_bytes(states: StatePages, memory: int) -> int:
    """Bytes of state pages in memory of their own. `PoolTooSmallError`: they leave nothing of `memory` for pages."""
    taken = sum(tensor.nbytes for tensor in chain.from_iterable(states.tensors))
    if taken >= memory:
        raise PoolTooSmallError(
            f"available_cache_memory is {memory} bytes: {states.num_pages} state pages, and one that is nobody's, take "
            f"{taken}"
        )
    return taken


def _check_params(params: KVCacheParams) -> None:
    """Refuse what does not go with state pages: `InvalidParamsError`."""
    if params.data_parallel_degree != 1:
        raise InvalidParamsError(
            f"data_parallel_degree is {params.data_parallel_degree}: a manager with state pages has one replica"
        )
    if params.groups:
        raise InvalidParamsError("groups are given: a manager with state pages has one group of attention layers")
    for name in ("enable_kvcache_swapping_to_host", "partial_reuse_min_tokens"):
        if getattr(params, name):
            raise InvalidParamsError(f"{name} is given: pages of a model with recurrent states are not cached that way")


def _without_state(context: Context, table: BlockTable) -> tuple[BlockTable, int]:
    """The table without its second group, and the state page that this names; else `BlockTableMismatchError`."""
    if len(table.groups) != 2 or len(table.groups[1]) != 1:
        raise BlockTableMismatchError(
            f"request {context.request_id!r}: the block table has {len(table.groups)} page groups, this manager 2, "
            "the second of one state page"
        )
    (source,) = table.groups[1]
    if not 0 < source < 1 << 31:
        raise BlockTableMismatchError(f"request {context.request_id!r}: the block table names state page {source}")
    return msgspec.structs.replace(table, groups=table.groups[:1]), source
