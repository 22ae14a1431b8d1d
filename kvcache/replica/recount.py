"""Compares everything that a replica records with a recount."""

import numpy as np

from kvcache.errors import InvariantError
from kvcache.replica.replica import Replica


def check_replica(replica: Replica) -> None:
    """Raise `InvariantError` at the first discrepancy: rows, then holders, writers and free pages, then the index.

    `Replica.counted` counts holders and writers again, from rows, leases, imports, copies and parked pages. A page
    without holders and writers must be fresh or idle.
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
    if committed > end or not pool.index.published[replica.tables.committed(row)].all():
        raise InvariantError(f"request {request_id!r}: not all of its {committed} committed pages are published")
    # A page after the committed pages may be published for three reasons. A fork may have published pages that it
    # shares with this row. With several tables, a pending import may have found more pages in the first table than in
    # all tables. A row may have published pages after a page from a lower tier.
    alone = pool.holders[pages[committed:]] == 1
    found = not replica.tables.is_plain or replica.tier.keeps
    if not found and (pool.index.published[pages[committed:]] & alone).any():
        raise InvariantError(f"request {request_id!r}: a page after its {committed} committed pages is published")
