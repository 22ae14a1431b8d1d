"""Recounts a replica from scratch, and reports the first inconsistency."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcache.errors import InterruptedCallError, InvariantError, KVCacheError
from kvcache.replica.replica import Replica

_CHANGES_SOMETHING = (
    *("external_claim", "release", "maybe_reserve", "reserve_batch", "fork", "fetch", "step", "lease", "end_lease"),
    *("import_block_table", "extend_import", "commit_import", "cancel_import", "reset_prefix_cache"),
    *("fetch_ahead", "end_step"),
)


def check_around_calls(manager: Any) -> None:
    """Make every call of this manager that changes something run `check` before and after it, also after an error."""
    for name in _CHANGES_SOMETHING:
        setattr(manager, name, _checked_around(getattr(manager, name), manager.check))


def _checked_around(method: Callable[..., Any], check: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        check()
        try:
            result = method(*args, **kwargs)
        except KVCacheError as error:  # after another exception, the next call checks the state first
            if not isinstance(error, InterruptedCallError):
                check()
            raise
        check()
        return result

    return run


def check_replica(replica: Replica) -> None:
    """Raise `InvariantError` at the first discrepancy: rows, then holders, writers and free pages, then the index.

    `Replica.counted` recounts holders and writers from rows, leases, imports, copies and parked pages. A page without
    either must be fresh or idle.
    """
    rows = replica.rows
    for request_id, row in rows.row_of.items():
        if rows.request_ids[row] != request_id:
            raise InvariantError(f"request {request_id!r}: its row {row} belongs to {rows.request_ids[row]!r}")
        _check_row(replica, row)
    for row, request_id in enumerate(rows.request_ids):
        if request_id is None and (rows.num_pages[row] or rows.table[:, row].any()):
            raise InvariantError(f"row {row} is free, but holds {rows.num_pages[row]} pages")
    replica.check()


def _check_row(replica: Replica, row: int) -> None:
    pool, rows = replica.pool, replica.rows
    request_id, committed, end = rows.request_ids[row], int(rows.committed[row]), int(rows.num_pages[row])
    pages = replica.tables.pages(row, end)
    if len(np.unique(pages)) != len(pages):
        raise InvariantError(f"request {request_id!r}: names a page twice")
    if pages.size and not (pages.min() >= 1 and pages.max() <= pool.num_pages):
        raise InvariantError(f"request {request_id!r}: names a page that is not within 1 to {pool.num_pages}")
    if rows.table[:, row, end:].any():
        raise InvariantError(f"request {request_id!r}: has page numbers after its last page {end}")
    if committed > end or not pool.index.published[replica.tables.pages(row, committed)].all():
        raise InvariantError(f"request {request_id!r}: not all of its {committed} committed pages are published")
    # A fork may have published the pages that it shares with this row. With several tables, a pending import may have
    # found more pages in the first table than in all of them. A row may also have published pages after one from a
    # lower tier.
    alone = pool.holders[pages[committed:]] == 1
    found = not replica.tables.is_plain or replica.tier.keeps
    if not found and (pool.index.published[pages[committed:]] & alone).any():
        raise InvariantError(f"request {request_id!r}: a page past its {committed} committed ones is published")
