"""Pages from elsewhere: export a request's block table, reserve against one, and take up what was copied.

Until `commit_import` the pages are in no index and no batch: bytes that never arrived are never read.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from kvcache.block_table import BlockTable, Ints
from kvcache.context import Context
from kvcache.errors import BlockTableMismatchError, InvalidRequestError
from kvcache.hashing import DIGEST_BYTES, hasher_of
from kvcache.replica import PendingImport, Replica
from kvcache.types import RequestID


def export_table(replica: Replica, replica_idx: int, request_id: RequestID, fingerprint: str) -> BlockTable:
    """The block table of what the request had computed by its last `step`.

    Raises:
        InvalidRequestError: (a ValueError) nothing is computed yet.
    """
    rows, row = replica.rows, replica.rows.row_of[request_id]
    replica.refuse_pending(row, "block_table")
    num_tokens = int(rows.cached[row])
    if not num_tokens:
        raise InvalidRequestError(f"request {request_id!r}: no tokens computed yet; block_table comes after step")
    pages = rows.pages(row)[: -(-num_tokens // replica.page_size)]
    full = pages[: min(int(rows.committed[row]), num_tokens // replica.page_size)]
    return BlockTable(
        request_id=request_id,
        replica_idx=replica_idx,
        num_tokens=num_tokens,
        page_size=replica.page_size,
        groups=(tuple(pages.tolist()),),
        fingerprint=fingerprint,
        hash_algorithm=replica.hash_algorithm if replica.caching else "",
        digests=replica.pool.index.digests_of(full).tobytes() if replica.caching else b"",
    )


def check_table(replica: Replica, context: Context, table: BlockTable, fingerprint: str) -> None:
    """Raise unless the table holds a proper prefix of the context's tokens in pages of our geometry.

    Raises:
        BlockTableMismatchError: (a ValueError) naming the request, both values, or what does not add up.
    """
    refuse = functools.partial(_mismatch, context)

    if table.page_size != replica.page_size:
        raise refuse(f"has pages of {table.page_size} tokens, this manager of {replica.page_size}")
    if table.fingerprint != fingerprint:
        raise refuse(f"has the page layout {table.fingerprint!r}, this manager {fingerprint!r}")
    if not 0 < table.num_tokens < context.end_idx:
        raise refuse(
            f"covers {table.num_tokens} of the request's {context.end_idx} tokens: 1 to {context.end_idx - 1} may be"
        )
    if len(table.groups) != 1:
        raise refuse(f"has {len(table.groups)} page groups, this manager 1")
    pages = table.groups[0]
    wanted = -(-table.num_tokens // table.page_size)
    if len(pages) != wanted:
        raise refuse(f"names {len(pages)} pages, its {table.num_tokens} tokens take {wanted}")
    bad = next((page for page in pages if not 0 < page < 1 << 31), None)
    if bad is not None or len(set(pages)) != len(pages):
        raise refuse(f"names page {bad}" if bad is not None else "names a page twice")
    _check_digests(replica, context, table)


def _mismatch(context: Context, reason: str) -> BlockTableMismatchError:
    return BlockTableMismatchError(f"request {context.request_id!r}: the block table {reason}")


def _check_digests(replica: Replica, context: Context, table: BlockTable) -> None:
    """The digests are those of the context's own tokens: the pages hold this prompt, not another one."""
    if not table.digests or table.hash_algorithm != replica.hash_algorithm:
        return  # nothing to compare by
    count, rest = divmod(len(table.digests), DIGEST_BYTES[replica.hash_algorithm])
    if rest or count > table.num_tokens // table.page_size:
        raise _mismatch(context, f"carries {len(table.digests)} bytes of digests for {table.num_tokens} tokens")
    hasher = hasher_of(context, replica.hash_algorithm, replica.page_size)
    own = hasher.digests(context.tokens, 0, count)
    theirs = np.frombuffer(table.digests, np.uint64).reshape(own.shape)
    differ = np.flatnonzero((own != theirs).any(axis=1))
    if differ.size:
        raise _mismatch(context, f"holds other tokens (or another cache_salt), from page {differ[0]} on")


def begin_import(
    replica: Replica, replica_idx: int, context: Context, table: BlockTable, num_steps: int
) -> PendingImport | None:
    """Reserve the request's pages and hand those that must be copied to the transfer. None: too few pages, no change.

    Raises:
        InvalidRequestError: (a ValueError) the request has pages already.
    """
    rows, row = replica.rows, replica.rows.row_of[context.request_id]
    replica.refuse_pending(row, "import_block_table")
    if rows.num_pages[row]:
        raise InvalidRequestError(
            f"request {context.request_id!r}: has {rows.num_pages[row]} pages already; import comes first"
        )
    if replica.reserve(row, context, num_steps) is None:
        return None
    pages = np.array(table.groups[0], np.int32)
    have = min(int(rows.committed[row]), len(pages))
    pending = PendingImport(
        request_id=context.request_id,
        replica_idx=replica_idx,
        src_replica_idx=table.replica_idx,
        num_tokens=table.num_tokens,
        src_pages=pages[have:],
        dst_pages=rows.pages(row)[have : len(pages)].copy(),
    )
    replica.begin_import(row, pending)
    return pending


def finish_import(replica: Replica, context: Context, pending: PendingImport) -> None:
    """Every byte has arrived: the tokens count as cached, the full pages can be found.

    Raises:
        InvalidRequestError: (a ValueError) the import is closed, or not of this request any more.
    """
    row = replica.rows.row_of[context.request_id]
    if pending.closed or replica.import_of(row) is not pending:
        raise InvalidRequestError(f"request {context.request_id!r}: this import is closed, or another request's")
    cached = max(pending.num_tokens, context.start_idx)
    context.set_token_indices(start_idx=cached, active_idx=context.end_idx)
    replica.close_import(pending)
    replica.counter.ran_elsewhere(row, cached)
    digests_of = functools.partial(_digests, replica, row, context)
    replica.step(np.array([row]), np.array([cached]), digests_of)


def _digests(replica: Replica, row: int, context: Context, _at: Ints, firsts: Ints, lasts: Ints) -> NDArray[np.uint64]:
    return replica.hasher(row, context).digests(context.tokens, int(firsts[0]), int(lasts[0]))
