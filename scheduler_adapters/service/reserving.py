"""Reserves the replica, row and pages of a request whose pages are read from another process."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.errors import NoFreeRowError
from kvcache.replica.block_table import BlockTable, PendingImport
from kvcache.replica.context import TextContext
from scheduler_adapters.base import PulledPages


def recommended(manager: PulledPages, context: TextContext) -> int:
    """Returns the replica on which a request should be claimed if its pages are at another process."""
    # A short chunk is assumed, because with windows the pages of the whole prompt need not fit at once.
    context.set_token_indices(active_idx=min(2, context.end_idx))
    return manager.get_or_recommend_replica(context)


def reserve(
    manager: PulledPages,
    context: TextContext,
    replica: int,
    table: BlockTable,
    *,
    last: bool = True,
    others: Sequence[BlockTable] = (),
) -> PendingImport | None:
    """Takes a row, and pages for the tokens in the source's `table`. Returns None if too few rows or pages are free.

    Raises:
        BlockTableMismatchError, PromptTooLongError, SequenceTooLongError: the request can never be imported.
    """
    try:
        manager.external_claim(context.request_id, replica)
    except NoFreeRowError:
        return None
    pending = None
    try:
        pending = manager.import_block_table(context, table, partial=not last, others=others)
    finally:
        if pending is None:
            manager.release(context.request_id)
    return pending
