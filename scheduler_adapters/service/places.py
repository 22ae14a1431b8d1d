"""What a request takes for pages that are elsewhere: a replica, a row, and room for what its source has by now."""

from __future__ import annotations

from kvcache.errors import NoFreeRowError
from kvcache.replica.block_table import BlockTable, PendingImport
from kvcache.replica.context import TextContext
from scheduler_adapters.base import PulledPages


def recommended(manager: PulledPages, context: TextContext) -> int:
    """The replica on which a request is best claimed if its pages are elsewhere."""
    context.set_token_indices(active_idx=min(2, context.end_idx))  # no window holds the whole prompt here
    return manager.get_or_recommend_replica(context)


def reserve(
    manager: PulledPages, context: TextContext, replica: int, table: BlockTable, *, last: bool = True
) -> PendingImport | None:
    """A row and pages for what the source has by now; None, and nothing taken, where one is short.

    Raises:
        BlockTableMismatchError, PromptTooLongError, SequenceTooLongError: it can never be taken over.
    """
    try:
        manager.external_claim(context.request_id, replica)
    except NoFreeRowError:
        return None
    pending = None
    try:
        pending = manager.import_block_table(context, table, partial=not last)
    finally:
        if pending is None:
            manager.release(context.request_id)
    return pending
