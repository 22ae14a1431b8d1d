"""`HybridKVCacheManager`: the paged cache of a model that has recurrent layers too, a state page beside each row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import torch

from kvcache import sizing
from kvcache.errors import BlockTableMismatchError, InvalidParamsError
from kvcache.layout import replica_fingerprint
from kvcache.manager import PagedKVCacheManager
from kvcache.params import KVCacheParams
from kvcache.replica.block_table import BlockTable, PageCopy, PendingImport
from kvcache.replica.context import Context
from kvcache.replica.copier import ImportProof
from kvcache.replica.imports import own_import
from kvcache.replica.leases import PageLease
from kvcache.types import RequestID
from scheduler_adapters.errors import NoFreeStatePageError, StatePageError
from scheduler_adapters.hf.state_layout import StateShape
from scheduler_adapters.hf.state_pages import StatePages


class HybridKVCacheManager(PagedKVCacheManager):
    """A manager whose every claimed request holds a state page as well, from `external_claim` to `release`.

    A serving loop drives it as it drives the other one, whose arguments it takes after the shape of the recurrent
    layers; `num_layers` counts those that keep keys and values. What differs:

    - No prefix caching: a state is of all tokens before it, so no page of keys and values can stand for it.
    - `block_table` has a second group, the state page. `import_block_table` takes such a table; the import's copier
      names both, `commit_import` and `cancel_import` are for both. So are leases.
    - One replica: its state pages are of one set of devices. `max_batch_size` state pages come out of
      `available_cache_memory`.

    Raises `InvalidParamsError` also where prefix caching is on, or there are several replicas, and `PoolTooSmallError`
    where nothing is left beside the state pages.
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
        **kwargs: Any,
    ) -> None:
        sizing.check_sizes(params, max_batch_size, max_seq_len, num_layers)  # before state pages are allocated
        sizing.check_devices(params, devices, here=True)
        if params.enable_prefix_caching:
            raise InvalidParamsError(
                "enable_prefix_caching is set: the state of recurrent layers cannot be had from cached pages"
            )
        if params.data_parallel_degree != 1:
            raise InvalidParamsError(
                f"data_parallel_degree is {params.data_parallel_degree}: a manager with state pages has one replica"
            )
        if params.groups:
            raise InvalidParamsError("groups are given: a manager with state pages has one group of attention layers")
        self.states = StatePages(state, max_batch_size, devices)
        self.further_groups = (self.states,)
        left = available_cache_memory - sum(tensor.nbytes for tensor in chain.from_iterable(self.states.tensors))
        super().__init__(
            params, max_batch_size, max_seq_len, num_layers, devices, available_cache_memory=left, **kwargs
        )
        of_states = chain.from_iterable(kinds.values() for kinds in self.states.layouts)
        self.fingerprint = replica_fingerprint([*self.layouts, *of_states])

    def external_claim(self, request_id: RequestID, replica_idx: int | None = None) -> None:
        """As the base; takes a state page too. `NoFreeStatePageError`: transfers still write too many."""
        super().external_claim(request_id, replica_idx)
        try:
            self.states.allocate(request_id)
        except NoFreeStatePageError:
            super().release(request_id)
            raise

    def release(self, request_id: RequestID) -> None:
        """As the base; gives the state page back too, unless a transfer still writes it or a lease holds it."""
        super().release(request_id)
        self.states.release(request_id)

    def fork(self, parent: Context, child: Context, num_steps: int = 1) -> bool:
        """As the base; copies the state too. `NoFreeStatePageError`: there is no page for it."""
        if not self.states.num_free:
            raise NoFreeStatePageError(f"request {child.request_id!r}: no state page is free for this fork")
        if not super().fork(parent, child, num_steps):
            return False
        self.states.allocate(child.request_id)
        self.states.fork(parent.request_id, child.request_id)
        return True

    def block_table(self, request_id: RequestID, *, full_pages: bool = False) -> BlockTable:
        """As the base, with the state page as the second group. `StatePageError`: a step ran, and was not booked."""
        table = super().block_table(request_id, full_pages=full_pages)
        if not full_pages:
            tokens = self.states.tokens_of(request_id)
            if tokens != table.num_tokens:
                raise StatePageError(
                    f"request {request_id!r}: its pages hold {table.num_tokens} tokens, its state has taken up {tokens}"
                )
            self.states.tell(request_id)
        return msgspec.structs.replace(table, groups=(*table.groups, (self.states.page_of(request_id),)))

    def lease(self, request_id: RequestID) -> PageLease:
        """As the base, for the state page too: once a table has named its state, the request cannot run on."""
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
            page = self.states.begin_import(context.request_id)
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
        imports = self._replicas.each[0].imports.each
        self.states.check(self._claims.places, [page for pending in imports for _, page in pending.wholes])


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
