"""Pages from elsewhere: export a request's block table, reserve against one, and take up what was copied.

Until `commit_import` the pages are in no index and no batch: bytes that never arrived are never read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import BlockTableMismatchError, InvalidRequestError
from kvcache.params import HashAlgorithm
from kvcache.replica.block_table import BlockTable, Ints, odd_field
from kvcache.replica.context import Context
from kvcache.replica.copier import ImportProof
from kvcache.replica.hashing import DIGEST_BYTES, PrefixHasher, hasher_of, new_hasher
from kvcache.replica.pending import PageCopy, PendingImport
from kvcache.replica.replica import Replica
from kvcache.types import RequestID


def export_table(
    replica: Replica, replica_idx: int, request_id: RequestID, fingerprint: str, *, full_pages: bool
) -> BlockTable:
    """The block table of what the request had computed by its last `step`, or of its full pages only.

    Raises:
        InvalidRequestError: (a ValueError) nothing is computed yet.
    """
    rows, row, size = replica.rows, replica.rows.row_of[request_id], replica.page_size
    replica.refuse_pending(row, "block_table")
    num_tokens = int(rows.cached[row])
    if not num_tokens:
        raise InvalidRequestError(f"request {request_id!r}: no tokens computed yet; block_table comes after step")
    if full_pages:
        num_tokens -= num_tokens % size
    replica.leases.tell(row, num_tokens)
    pages = rows.pages(row)[: -(-num_tokens // size)]
    full = pages[: min(int(rows.committed[row]), num_tokens // size)]
    return BlockTable(
        request_id=request_id,
        replica_idx=replica_idx,
        num_tokens=num_tokens,
        page_size=size,
        groups=(tuple(pages.tolist()),),
        fingerprint=fingerprint,
        hash_algorithm=replica.hash_algorithm if replica.caching else "",
        digests=replica.pool.index.digests_of(full).tobytes() if replica.caching else b"",
    )


def check_table(
    replica: Replica, context: Context, table: BlockTable, hasher: PrefixHasher | None = None
) -> PrefixHasher | None:
    """Raise unless the table holds a proper prefix of the context's tokens. Its geometry is the transfer's to judge.

    Args:
        replica: ours.
        context: the request.
        table: of another manager, of any page size.
        hasher: what an earlier call returned for this request, if any.

    Returns:
        The hasher of the context's tokens in the page size and algorithm of the table; None where it has no digests.

    Raises:
        BlockTableMismatchError: (a ValueError) naming the request, both values, or what does not add up.
    """
    refuse = functools.partial(_mismatch, context)
    odd = odd_field(table)
    if odd is not None:
        raise refuse(odd)
    if not 0 < table.page_size < 1 << 31:
        raise refuse(f"has pages of {table.page_size} tokens")
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
    return _check_digests(replica, context, table, hasher)


def _mismatch(context: Context, reason: str) -> BlockTableMismatchError:
    return BlockTableMismatchError(f"request {context.request_id!r}: the block table {reason}")


def _check_digests(
    replica: Replica, context: Context, table: BlockTable, hasher: PrefixHasher | None
) -> PrefixHasher | None:
    """The digests are those of the context's own tokens: the pages hold this prompt, not another one.

    Digests of another page size or algorithm are compared too, at the price of hashing the tokens once more: without
    that, nothing would show that the pages are of this prompt and this salt before they are published here.
    """
    if not table.hash_algorithm:
        return None  # made without prefix caching: no page of it was ever shared
    algorithm: HashAlgorithm | None = next((known for known in DIGEST_BYTES if known == table.hash_algorithm), None)
    if algorithm is None:
        raise _mismatch(context, f"has digests by {table.hash_algorithm!r}, known are {', '.join(DIGEST_BYTES)}")
    count = table.num_tokens // table.page_size
    if len(table.digests) != count * DIGEST_BYTES[algorithm]:
        raise _mismatch(
            context,
            f"carries {len(table.digests)} bytes of digests for {table.num_tokens} tokens in {count} full pages",
        )
    if (algorithm, table.page_size) == (replica.hash_algorithm, replica.page_size):
        hasher = hasher_of(context, algorithm, replica.page_size)
    elif hasher is None or (hasher.algorithm, hasher.page_size) != (algorithm, table.page_size):
        hasher = new_hasher(context, algorithm, table.page_size)
    own = hasher.digests(context.tokens, 0, count)
    theirs = np.frombuffer(table.digests, np.uint64).reshape(own.shape)
    differ = np.flatnonzero((own != theirs).any(axis=1))
    if differ.size:
        raise _mismatch(context, f"holds other tokens (or another cache_salt), from page {differ[0]} on")
    return hasher


def begin_import(
    replica: Replica, replica_idx: int, context: Context, table: BlockTable, num_steps: int, *, partial: bool
) -> PendingImport | None:
    """Reserve the request's pages and hand those that must be copied to the transfer. None: too few pages, no change.

    Raises:
        BlockTableMismatchError: (a ValueError) the table is not of this request, or does not add up.
        InvalidRequestError: (a ValueError) the request has pages already.
    """
    hasher = check_table(replica, context, table)
    _check_part(context, table, last=not partial)
    rows, row = replica.rows, replica.rows.row_of[context.request_id]
    replica.refuse_pending(row, "import_block_table")
    if rows.num_pages[row]:
        raise InvalidRequestError(
            f"request {context.request_id!r}: has {rows.num_pages[row]} pages already; import comes first"
        )
    if replica.reserve(row, context, num_steps) is None:
        return None
    size = replica.page_size
    end = -(-(context.end_idx if partial else table.num_tokens) // size)
    have = min(replica.pages_here(row), end)
    pending = PendingImport(
        request_id=context.request_id,
        owner=replica,
        page_size=size,
        src_page_size=table.page_size,
        replica_idx=replica_idx,
        src_replica_idx=table.replica_idx,
        num_tokens=0,
        tokens=(have * size, have * size),
        src_pages=np.zeros(0, np.int32),
        dst_pages=rows.pages(row)[have:end].copy(),
        hasher=hasher,
    )
    _take_up(pending, table)
    replica.imports.begin(row, pending)
    return pending


def extend_import(
    replica: Replica, context: Context, pending: PendingImport, table: BlockTable, *, last: bool
) -> PageCopy:
    """Take up a table that covers more tokens than the one before; what is to be copied beyond that.

    Raises:
        BlockTableMismatchError: (a ValueError) it covers less, names other pages for what it covered, or as before.
        InvalidRequestError: (a ValueError) the import is closed, or not of this request any more.
    """
    _check_open(replica, context, pending, "extend_import")
    hasher = check_table(replica, context, table, pending.hasher)
    _check_part(context, table, last=last)
    if table.page_size != pending.src_page_size:
        raise _mismatch(context, f"has pages of {table.page_size} tokens, {pending.src_page_size} before")
    room = pending.tokens[0] // replica.page_size + len(pending.dst_pages)
    if not pending.num_tokens <= table.num_tokens <= room * replica.page_size:
        raise _mismatch(
            context, f"covers {table.num_tokens} tokens, {pending.num_tokens} to {room * replica.page_size} may be"
        )
    before, known = pending.tokens, pending.src_pages
    now = np.array(table.groups[0], np.int32)[before[0] // table.page_size :]
    if pending.src_replica_idx != table.replica_idx or not np.array_equal(now[: len(known)], known):
        raise _mismatch(context, "names other pages than before")
    pending.hasher = hasher
    _take_up(pending, table)
    return pending.copy_from(before[1])


def _check_part(context: Context, table: BlockTable, *, last: bool) -> None:
    """Of a prompt that is not whole yet only full pages count: a page that is filled further may still be replaced."""
    if not last and table.num_tokens % table.page_size:
        raise _mismatch(
            context, f"covers {table.num_tokens} tokens, not yet all: full pages of {table.page_size} may be"
        )


def _take_up(pending: PendingImport, table: BlockTable) -> None:
    first = pending.tokens[0]
    pending.num_tokens = table.num_tokens
    pending.tokens = (first, max(first, table.num_tokens))
    pending.src_pages = np.array(table.groups[0], np.int32)[first // table.page_size :]


def own_import(replicas: Sequence[Replica], pending: PendingImport, call: str) -> Replica:
    """The replica whose import it is, open or closed.

    Raises:
        InvalidRequestError: (a ValueError) no import, or one of another manager.
    """
    if not isinstance(pending, PendingImport):  # pyright: ignore[reportUnnecessaryIsInstance] - callers need no types
        raise InvalidRequestError(f"{call}: {type(pending).__name__} is no import: one of import_block_table is needed")
    for replica in replicas:
        if pending.owner is replica:
            return replica
    raise InvalidRequestError(f"request {pending.request_id!r}: {call} of another manager's import")


def open_import(replicas: Sequence[Replica], pending: PendingImport, call: str) -> Replica:
    """The replica whose open import it is.

    Raises:
        InvalidRequestError: (a ValueError) as `own_import`, or it is closed.
    """
    replica = own_import(replicas, pending, call)
    if pending.closed:
        raise InvalidRequestError(f"request {pending.request_id!r}: {call}: this import is closed")
    return replica


def _check_open(replica: Replica, context: Context, pending: PendingImport, call: str) -> int:
    row = replica.rows.row_of[context.request_id]
    open_import([replica], pending, call)
    if replica.imports.of_row.get(row) is not pending:
        raise InvalidRequestError(f"request {context.request_id!r}: {call}: this import is another request's")
    replica.refuse_renamed(row, context)
    return row


def _check_proof(replica: Replica, pending: PendingImport, proof: ImportProof | None) -> None:
    """The bytes are there, and are what the table says: nobody knows but whoever copied them."""
    start = f"request {pending.request_id!r}: commit_import"
    copier = replica.imports.copier_of(pending)
    if proof is None:
        if pending.needs_copy:
            raise InvalidRequestError(
                f"{start} without a proof that its pages were copied: its copier gives one, or the pull that passed"
            )
    elif copier is None or copier.proof is not proof:
        raise InvalidRequestError(f"{start} with a proof that is not this import's")
    elif proof.num_tokens < pending.tokens[1]:
        raise InvalidRequestError(
            f"{start} with a proof of {proof.num_tokens} tokens, its table covers {pending.tokens[1]} by now"
        )


def finish_import(replica: Replica, context: Context, pending: PendingImport, proof: ImportProof | None) -> None:
    """Every byte has arrived: the tokens count as cached, the full pages can be found.

    Raises:
        InvalidRequestError: (a ValueError) the import is closed, or not of this request any more, or not proven.
    """
    row = _check_open(replica, context, pending, "commit_import")
    _check_proof(replica, pending, proof)
    cached = max(pending.num_tokens, context.start_idx)
    context.set_token_indices(start_idx=cached, active_idx=context.end_idx)
    replica.imports.commit(pending)
    replica.counter.ran_elsewhere(row, cached)
    digests_of = functools.partial(_digests, replica, row, context)
    replica.step(np.array([row]), np.array([cached]), digests_of)


def _digests(replica: Replica, row: int, context: Context, _at: Ints, firsts: Ints, lasts: Ints) -> NDArray[np.uint64]:
    return replica.hasher(row, context).digests(context.tokens, int(firsts[0]), int(lasts[0]))
