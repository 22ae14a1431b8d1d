"""`HybridKVCacheManager`: the paged cache of a model that has recurrent layers too, a state page beside each row."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kvcache import sizing
from kvcache.errors import BlockTableMismatchError, InvalidParamsError
from kvcache.manager import PagedKVCacheManager
from kvcache.replica.imports import own_import
from scheduler_adapters.errors import NoFreeStatePageError, StatePageError
from scheduler_adapters.hf.state_pages import StatePages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache.params import KVCacheParams
    from kvcache.replica.block_table import BlockTable, PageCopy, PendingImport
    from kvcache.replica.context import Context
    from kvcache.replica.copier import ImportProof
    from kvcache.replica.leases import PageLease
    from kvcache.types import RequestID
    from scheduler_adapters.hf.state_layout import StateShape


class HybridKVCacheManager(PagedKVCacheManager):
    """A manager whose every claimed request holds a state page as well, from `external_claim` to `release`.

    A serving loop drives it as it drives the other one. What differs:

    - No prefix caching: a state is of all tokens before it, so no page of keys and values can stand for it.
    - `block_table` has a second group, the state page. `import_block_table` takes such a table, and `state_import` says
      which state page to copy to which, beside the pages of the `PendingImport`; its copier names both, `commit_import`
      and `cancel_import` are for both. So are leases.
    - One replica: its state pages are of one set of devices.

    Args:
        state: the model's recurrent layers.
        params, max_batch_size, max_seq_len, num_layers, devices: as in `PagedKVCacheManager`; `num_layers` counts the
            layers that keep keys and values.
        available_cache_memory: bytes for pages over all devices, state pages included: `max_batch_size` of these.
        kwargs: as there.

    Raises:
        InvalidParamsError: (a ValueError) prefix caching is on, or there are several replicas, or as there.
        PoolTooSmallError: (a RuntimeError) nothing is left beside the state pages, or as there.
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
        self.states = StatePages(state, max_batch_size, devices)
        left = available_cache_memory - sum(tensor.nbytes for tensor in self.states.tensors)
        self._state_imports: dict[PendingImport, tuple[int, int]] = {}
        super().__init__(
            params, max_batch_size, max_seq_len, num_layers, devices, available_cache_memory=left, **kwargs
        )
        layouts = ",".join(repr(layout) for layout in self.states.layouts)
        self.fingerprint = hashlib.sha256(f"{self.fingerprint},{layouts}".encode()).hexdigest()[:16]

    def external_claim(self, request_id: RequestID, replica_idx: int | None = None) -> None:
        """As the base; takes a state page too.

        Raises:
            NoFreeStatePageError: (a NoFreeRowError) none is free: a transfer still writes some of released requests.
        """
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
        """As the base; copies the state too.

        Raises:
            NoFreeStatePageError: (a NoFreeRowError) none is free.
            StatePageError: (a ValueError) a transfer writes the parent's state.
        """
        self.states.tokens_of(parent.request_id)
        if not self.states.num_free:
            raise NoFreeStatePageError(f"request {child.request_id!r}: no state page is free for this fork")
        if not super().fork(parent, child, num_steps):
            return False
        self.states.allocate(child.request_id)
        self.states.fork(parent.request_id, child.request_id)
        return True

    def block_table(self, request_id: RequestID, *, full_pages: bool = False) -> BlockTable:
        """As the base, with the state page as the second group.

        Raises:
            StatePageError: (a ValueError) the state is not of the tokens of the table: a step ran, and was not booked.
        """
        table = super().block_table(request_id, full_pages=full_pages)
        tokens, page = self.states.tokens_of(request_id), self.states.page_of(request_id)
        if tokens != table.num_tokens and not full_pages:
            raise StatePageError(
                f"request {request_id!r}: its pages hold {table.num_tokens} tokens, its state has taken up {tokens}"
            )
        if not full_pages:
            self.states.tell(request_id)
        return msgspec.structs.replace(table, groups=(*table.groups, (page,)))

    def lease(self, request_id: RequestID) -> PageLease:
        """As the base, for the state page too: once a table has named its state, the request cannot run on."""
        lease = super().lease(request_id)
        self.states.lease(request_id, lease)
        return lease

    def end_lease(self, lease: PageLease) -> None:
        """As the base; the state page goes as well."""
        super().end_lease(lease)
        self.states.end_lease(lease)

    def import_block_table(
        self, context: Context, table: BlockTable, num_steps: int = 1, *, partial: bool = False
    ) -> PendingImport | None:
        """As the base, for a table with a state page; `state_import` names the pages to copy, once all tokens ran."""
        of_pages, source = _without_state(context, table)
        pending = super().import_block_table(context, of_pages, num_steps, partial=partial)
        if pending is not None:
            pages = self._state_imports[pending] = (source, self.states.begin_import(context.request_id))
            pending.wholes = (pages,)
            pending.on_free = functools.partial(self._cancel_state, pending)
        return pending

    def extend_import(self, context: Context, pending: PendingImport, table: BlockTable, *, last: bool) -> PageCopy:
        """As the base; the state page stays the same."""
        own_import(self._replicas.each, pending, "extend_import")
        of_pages, source = _without_state(context, table)
        before = self._state_imports.get(pending, (source, 0))[0]
        if source != before:
            raise BlockTableMismatchError(
                f"request {context.request_id!r}: the block table names state page {source}, {before} before"
            )
        return super().extend_import(context, pending, of_pages, last=last)

    def state_import(self, pending: PendingImport) -> tuple[int, int]:
        """The state page to read, of the other manager, and the one to write, of ours, of an import that is open."""
        return self._state_imports[pending]

    def commit_import(self, context: Context, pending: PendingImport, proof: ImportProof | None = None) -> None:
        """As the base; the state page has been copied as well."""
        super().commit_import(context, pending, proof)
        del self._state_imports[pending]
        self.states.commit_import(context.request_id, pending.num_tokens)

    def _cancel_state(self, pending: PendingImport) -> None:
        self.states.cancel_import(self._state_imports.pop(pending)[1])

    def check(self) -> None:
        """As the base, and the state pages too."""
        super().check()
        self.states.check(list(self._claims.places))


def _without_state(context: Context, table: BlockTable) -> tuple[BlockTable, int]:
    """The table without its second group, and the state page that this names.

    Raises:
        BlockTableMismatchError: (a ValueError) there is no such group, or no such page.
    """
    if len(table.groups) != 2 or len(table.groups[1]) != 1:
        raise BlockTableMismatchError(
            f"request {context.request_id!r}: the block table has {len(table.groups)} page groups, this manager 2, "
            "the second of one state page"
        )
    (source,) = table.groups[1]
    if not 0 < source < 1 << 31:
        raise BlockTableMismatchError(f"request {context.request_id!r}: the block table names state page {source}")
    return msgspec.structs.replace(table, groups=table.groups[:1]), source
