"""Block tables from other managers: exports a table, reserves pages for a table from elsewhere, publishes copied pages.

Until `commit_import`, an import's pages are neither in the prefix index nor in the inputs of a batch, so nothing reads
bytes that have not arrived.

With several block tables (`params.groups`), each table reuses the pages that it finds in the local cache. A table of
full attention reuses pages from the first token on. A table with a window reuses pages of the last window. Only the
other pages are copied. For example, if the local cache has a prefix without the pages of its window, only the window's
pages are copied.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvcache.arguments import of_kind, shown, whole
from kvcache.errors import BlockTableMismatchError, InvalidRequestError
from kvcache.params import HashAlgorithm, usable_hashes
from kvcache.replica.block_table import BlockTable, ImportPart, PageCopy, PendingImport
from kvcache.replica.context import SafeContext, hasher_of
from kvcache.replica.copier import BEFORE_LAST, ImportProof
from kvcache.replica.hashing import DIGEST_BYTES, PrefixHasher, token_bytes
from kvcache.replica.replica import Replica
from kvcache.replica.resume import Reservation
from kvcache.replica.rows import Filled, Pages
from kvcache.weights import last_name, named_version

_NO_PAGES: Pages = np.zeros(0, np.int32)


def export_table(
    replica: Replica, row: int, context: SafeContext | None, fingerprint: str, *, full_pages: bool, first_page: int
) -> BlockTable:
    """Returns the block table of the tokens that the request had computed at its last `step`, with its seals.

    With `full_pages`, the table covers only the full pages of these tokens. If the model has one block table, of full
    attention, the exported table begins with page `first_page`. Otherwise `first_page` is ignored, and the exported
    table begins with the first page.
    """
    rows, size = replica.rows, replica.page_size
    request_id = rows.request_ids[row] or ""
    replica.refuse_pending(row, "block_table")
    num_tokens = int(rows.cached[row])
    if not num_tokens:
        raise InvalidRequestError(
            f"request {request_id!r}: none of its tokens are computed yet; call block_table after step"
        )
    if full_pages:
        num_tokens -= num_tokens % size
    first = min(whole("first_page", first_page, 0, error=InvalidRequestError), num_tokens // size)
    first = first if replica.tables.is_plain else 0
    if row in rows.private:
        last = num_tokens // size
        digests = replica.own_digests(row, context, first, last)
    else:
        last = min(int(rows.committed[row]), num_tokens // size)
        digests = replica.published_digests(row, context, first, last)
    if replica.caching and len(digests) < last - first:
        raise InvalidRequestError(f"request {request_id!r}: its context has fewer than {num_tokens} tokens")
    groups = replica.tables.lists(row, num_tokens, first=first, windows=not full_pages)
    groups += replica.kept.named(row, num_tokens, full_pages=full_pages)
    replica.tables.tell(row, num_tokens, windows=not full_pages)
    table = BlockTable(
        request_id=request_id,
        replica_idx=rows.replica_idx,
        num_tokens=num_tokens,
        page_size=size,
        groups=groups,
        kinds=replica.tables.kinds_named,
        fingerprint=fingerprint,
        hash_algorithm=replica.hash_algorithm if replica.caching else "",
        digests=digests.tobytes() if replica.caching else b"",
        first_page=first,
        weights=last_name(replica.lineage(row).segments, max(0, num_tokens - 1) // size),
    )
    return replica.leases.sealed(row, table)


def check_table(
    replica: Replica, context: SafeContext, table: BlockTable, hasher: PrefixHasher | None = None, *, last: bool
) -> PrefixHasher | None:
    """Raise `BlockTableMismatchError` unless `table` holds the KV of a proper prefix of the context's tokens.

    The transfer checks the geometry of the pages. `last` is False while the prompt still runs at the source. The table
    may then have only full pages, because the source may still replace a partly filled page. Returns the hasher of the
    context's tokens with the page size and the hash algorithm of the table, or None if the table has no digests.
    `hasher` is the result of an earlier call, and is reused if it has this page size and algorithm.
    """
    name = f"request {context.request_id!r}: the block table"
    of_kind(name, table, BlockTable, "a BlockTable", BlockTableMismatchError)
    # A table from a peer was decoded with the right types. A table that was made in this process may have any types.
    try:
        if not _has_types(table):
            table = msgspec.convert(msgspec.to_builtins(table), BlockTable)
    except (TypeError, ValueError, OverflowError) as error:
        raise _mismatch(context, f"has a field of the wrong type: {error}") from error
    if not 0 < table.page_size < 1 << 31:
        raise _mismatch(context, f"has pages of {shown(table.page_size)} tokens; 1 to 2**31 - 1 are allowed")
    if not 0 < table.num_tokens < context.end_idx:
        raise _mismatch(
            context,
            f"covers {shown(table.num_tokens)} of the request's {context.end_idx} tokens; 1 to {context.end_idx - 1} "
            "are allowed",
        )
    pages = -(-table.num_tokens // table.page_size)
    if not 0 <= table.first_page < pages:
        raise _mismatch(
            context,
            f"begins with page {shown(table.first_page)}, but its {table.num_tokens} tokens are in pages 0 to "
            f"{pages - 1}",
        )
    _check_pages(replica, context, table, last=last)
    # A request of the import's version, or of the current one if the import begins now, must own the last tokens. A
    # table of full pages, which was lent by their digests, need not name the version.
    segments = replica.lineage(None).segments if hasher is None else hasher.segments
    told = table.weights or table.num_tokens % table.page_size or not table.hash_algorithm
    if told and table.weights != last_name(segments):
        raise _mismatch(
            context,
            f"has tokens of the weights {named_version(table.weights)}, but this request runs under "
            f"{named_version(segments[-1].version)}",
        )
    hasher = _check_digests(replica, context, table, hasher)
    if not last and table.num_tokens % table.page_size:
        raise _mismatch(
            context,
            f"covers {table.num_tokens} tokens, and its prompt still runs: until it is done, only full pages of "
            f"{table.page_size} tokens are allowed",
        )
    return hasher


def check_tables(
    replica: Replica, context: SafeContext, table: BlockTable, others: Sequence[BlockTable], *, partial: bool
) -> PrefixHasher | None:
    """Do `check_table` for `table` and for the tables `others`.

    Also raises `BlockTableMismatchError` if the pages of `others` have another size than the pages of `table`.
    """
    found = check_table(replica, context, table, last=not partial)
    needed = "a sequence of BlockTables"
    of_kind(f"request {context.request_id!r}: others", others, Sequence, needed, BlockTableMismatchError)
    hasher: PrefixHasher | None = None
    for other in others:
        hasher = check_table(replica, context, other, hasher, last=True)
        if partial or other.page_size != table.page_size:
            reason = "does not cover the whole prompt yet" if partial else f"has pages of {table.page_size}"
            raise _mismatch(context, f"in `others` has pages of {other.page_size} tokens, but the first table {reason}")
    return found


def _has_types(table: BlockTable) -> bool:
    """Whether every field of `table` has the right type.

    For a table with thousands of pages, this test is faster than `msgspec.convert`.
    """
    every: list[Any] = [table.groups, table.kinds, table.digests, table.weights]
    of_each = [type(value) for value in every] == [tuple, tuple, bytes, bytes]
    names = (table.request_id, table.fingerprint, table.hash_algorithm, *(table.kinds if of_each else ()))
    numbers = (table.replica_idx, table.num_tokens, table.page_size, table.first_page)
    if not of_each or {*map(type, names)} != {str} or {*map(type, numbers)} != {int}:
        return False
    return all(type(pages) is tuple and {*map(type, pages)} <= {int} for pages in table.groups)


def _check_pages(replica: Replica, context: SafeContext, table: BlockTable, *, last: bool) -> None:
    """Raise `BlockTableMismatchError` unless the table names the pages that each of our groups of layers needs.

    A group with full attention needs the pages of all tokens of the table. A group with a window needs the pages of the
    window at the end of the table. The table must also name everything else that rows keep (`Kept.refusal`).
    """
    kinds, named, kept = replica.tables.kinds, replica.tables.kinds_named, replica.kept
    lists, beside = len(kinds) + kept.num_lists, table.groups[len(kinds) :]
    if len(table.groups) != lists:
        raise _mismatch(context, f"has {len(table.groups)} page groups; this manager has {lists}{kept.told}")
    if reason := kept.refusal(beside, table.num_tokens, last=last):
        raise _mismatch(context, reason)
    if table.kinds != named:
        theirs = [*["full"] * (len(kinds) - len(table.kinds)), *table.kinds]
        raise _mismatch(context, f"has the layer kinds {', '.join(theirs)}; this manager has {', '.join(kinds)}")
    if table.first_page and named:
        raise _mismatch(
            context, f"begins with page {table.first_page}; with the layer kinds {', '.join(kinds)} it begins with 0"
        )
    wanted = -(-table.num_tokens // table.page_size) - table.first_page
    for of in replica.tables.groups:
        for pages in table.groups[of.tables]:
            wrong = len(pages) != wanted or not pages
            if wrong and (of.group.keeps_all or len(pages) > wanted):
                first = f" from page {table.first_page} on" if table.first_page else ""
                raise _mismatch(
                    context, f"names {len(pages)} pages; its {table.num_tokens} tokens take {wanted}{first}"
                )
    groups = [pages for pages in table.groups[: len(kinds)] if pages]
    out = any(min(pages) <= 0 or max(pages) >= 1 << 31 for pages in groups)
    every = [*chain.from_iterable(groups)]
    bad = next(page for page in every if not 0 < page < 1 << 31) if out else None
    if bad is not None or len(set(every)) != len(every):
        raise _mismatch(context, f"names page {shown(bad)}" if bad is not None else "names a page twice")


def _mismatch(context: SafeContext, reason: str) -> BlockTableMismatchError:
    return BlockTableMismatchError(f"request {context.request_id!r}: the block table {reason}")


def _check_digests(
    replica: Replica, context: SafeContext, table: BlockTable, hasher: PrefixHasher | None
) -> PrefixHasher | None:
    """Raise unless the table has the digests of the context's tokens, and therefore holds the KV of these tokens.

    Digests of another page size or algorithm are compared, too. For this comparison, the tokens are hashed once more.
    Without this check, pages of another prompt or salt could be published here under this prompt's digests.
    """
    if not table.hash_algorithm:
        # The source has no prefix caching, so its requests share no pages, and the pages cannot hold another prompt.
        return None
    algorithm: HashAlgorithm | None = next((known for known in usable_hashes() if known == table.hash_algorithm), None)
    if algorithm is None:
        raise _mismatch(
            context, f"has digests by {table.hash_algorithm!r}; this process knows {', '.join(usable_hashes())}"
        )
    first, last = table.first_page, table.num_tokens // table.page_size
    if len(table.digests) != (last - first) * DIGEST_BYTES[algorithm]:
        raise _mismatch(
            context,
            f"carries {len(table.digests)} bytes of digests, which do not fit its {last - first} full pages "
            f"({table.num_tokens} tokens)",
        )
    # the weights of an import that has begun, even if the weights have changed since then
    segments = replica.lineage(None).segments if hasher is None else hasher.segments
    if (algorithm, table.page_size) == (replica.hash_algorithm, replica.page_size):
        hasher = hasher_of(context, algorithm, replica.page_size, segments)
    elif hasher is None or (hasher.algorithm, hasher.page_size) != (algorithm, table.page_size):
        hasher = PrefixHasher(algorithm, table.page_size, *context.named, segments)
    own = hasher.digests(context.tokens, first, last)
    if own.tobytes() == table.digests:
        return hasher
    theirs = np.frombuffer(table.digests, np.uint64).reshape(own.shape)
    differ = np.flatnonzero((own != theirs).any(axis=1))
    if differ.size:
        raise _mismatch(
            context,
            f"holds other tokens (or another cache_salt or version of the weights), from page {first + differ[0]} on",
        )
    return hasher


def _new_import(
    replica: Replica, context: SafeContext, table: BlockTable, others: Sequence[BlockTable], hasher: PrefixHasher | None
) -> PendingImport:
    """Returns an import without parts."""
    return PendingImport(
        request_id=context.request_id,
        owner=replica,
        page_size=replica.page_size,
        src_page_size=table.page_size,
        replica_idx=replica.rows.replica_idx,
        src_replica_idx=table.replica_idx,
        parts=[],
        hasher=hasher,
        others=tuple(others),
    )


def begin_import(
    replica: Replica,
    row: int,
    context: SafeContext,
    table: BlockTable,
    num_steps: int,
    *,
    partial: bool,
    others: Sequence[BlockTable] = (),
) -> PendingImport | None:
    """Reserve pages for the request, and find which of them have to be copied.

    Returns None if there are too few free pages.
    """
    hasher = check_tables(replica, context, table, others, partial=partial)
    replica.refuse_pending(row, "import_block_table")
    if replica.rows.num_pages[row]:
        raise InvalidRequestError(
            f"request {context.request_id!r}: already holds {replica.rows.num_pages[row]} pages; import its block "
            "table before it reserves any"
        )
    size, begins = replica.page_size, table.first_page * table.page_size
    if begins and (here := replica.find(context, row).end * size) < begins:
        raise _mismatch(context, f"begins at token {begins}, but only {here} tokens before it are cached here")
    end = -(-(context.end_idx if partial else table.num_tokens) // size)
    plan = _plan(replica, row, context, table, num_steps, partial=partial)
    if replica.act(row, context, context.indices, plan) is None:
        return None
    pending = _new_import(replica, context, table, others, hasher)
    for kept, span in zip(replica.tables.groups, plan.spans, strict=True):
        pending.parts += kept.parts(row, span, end)
    replica.kept.begin_import(row, context, pending)
    pending.take_up(table, _named(context, pending, table, last=not partial), last=not partial)
    replica.imports.begin(pending, row)
    return pending


def _plan(
    replica: Replica, row: int, context: SafeContext, table: BlockTable, num_steps: int, *, partial: bool
) -> Reservation:
    """Plan the reservation of an import.

    Each block table shares the pages that it finds in the local cache, and needs new pages for the tokens after them.
    """
    tables, size = replica.tables, replica.page_size
    # The last table may leave out the last known token. The query at that token may see an earlier page of a window.
    num_tokens = context.end_idx - 1 if partial else table.num_tokens
    length = replica.length_of(context, num_steps, num_tokens)
    here = replica.look_up(row, context, 0)
    if tables.is_plain:
        # Cached pages after the state from which the request resumes are not shared. If the import is cancelled, the
        # request has to compute the tokens of these pages itself, and would overwrite shared pages.
        return tables.plan(row, context.indices, length, here.end * size, here)
    start = max(num_tokens, here.end * size)
    last = (context.end_idx - 1) // size if replica.caching else 0
    digests = replica.hasher(row, context).digests(context.tokens, 0, last)
    plan = tables.plan_import(context.indices, length, start, here, digests, replica.tier)
    if not partial:
        _check_reach(replica, context, table, [span.found_end * size for span in plan.spans])
    return plan


def _check_reach(replica: Replica, context: SafeContext, table: BlockTable, firsts: Sequence[int]) -> None:
    """Raise `BlockTableMismatchError` unless the table names all window pages that this manager lacks.

    `firsts` has the first token of these pages for each group of layers.
    """
    for kept, first in zip(replica.tables.groups, firsts, strict=True):
        for pages in table.groups[kept.tables]:
            if reason := kept.refusal(len(pages), table, first):
                raise _mismatch(context, reason)


def extend_import(
    replica: Replica, row: int, context: SafeContext, pending: PendingImport, table: BlockTable, *, last: bool
) -> PageCopy:
    """Accept a table that covers at least as many tokens as the import's last table.

    Returns the pages of the first block table that can now be copied in addition.
    """
    _check_open(replica, row, context, pending, "extend_import")
    if pending.hasher is None and replica.lineage(row).segments[-1].mark:
        raise _mismatch(
            context, "has no digests, which would tell its weights, and the weights changed after this import began"
        )
    hasher = check_table(replica, context, table, pending.hasher, last=last)
    if table.page_size != pending.src_page_size:
        raise _mismatch(
            context, f"has pages of {table.page_size} tokens; the earlier table had {pending.src_page_size}"
        )
    tables, parts = replica.tables, pending.parts[: replica.tables.count]
    room = parts[0].first // replica.page_size + len(parts[0].dst_pages)
    if not pending.num_tokens <= table.num_tokens <= room * replica.page_size:
        raise _mismatch(
            context,
            f"covers {table.num_tokens} tokens; {pending.num_tokens} to {room * replica.page_size} are allowed",
        )
    before, start = pending.tokens[1], max(table.num_tokens, context.start_idx)
    seen = _seen_parts(replica, pending, start) if last and tables.in_chunks else pending.parts
    if last:
        _check_reach(replica, context, table, [seen[one.tables][0].first for one in tables.groups])
    named = _named(context, dataclasses.replace(pending, parts=seen), table, last=last)
    if last and max(table.num_tokens, pending.tokens[0]) < context.start_idx:
        raise _mismatch(
            context,
            f"is the last and covers {table.num_tokens} tokens, but the request starts at token {context.start_idx}",
        )
    if last and not tables.is_plain and (lost := tables.lost(np.array([row]), np.array([start]))) is not None:
        raise _mismatch(
            context,
            f"is the last and covers {table.num_tokens} tokens, but this import, which was begun for up to "
            f"{context.end_idx - 1}, has no {lost[1]}: cancel it and import this table anew",
        )
    if seen is not pending.parts:
        _give_back_unseen(replica, row, pending, seen, start)
    pending.hasher = hasher
    pending.take_up(table, named, last=last)
    return seen[0].copy_from(max(before, seen[0].first), pending.page_size, pending.src_page_size)


def _seen_parts(replica: Replica, pending: PendingImport, start: int) -> list[ImportPart]:
    """Returns the parts of the import without the pages that a query at token `start` does not see.

    When the import began, it was not known whether its last table would have the last token of the prompt. So its
    windows may have earlier pages, which that table does not name.
    """
    parts = pending.parts[:]
    for kept in replica.tables.groups:
        for number, part in enumerate(parts[kept.tables], kept.tables.start):
            if not len(part.src_pages):
                parts[number] = kept.unseen(part, start)
    return parts


def _give_back_unseen(replica: Replica, row: int, pending: PendingImport, seen: list[ImportPart], start: int) -> None:
    """Limit the import to its parts `seen`. The row gives back the pages that a query at token `start` does not see."""
    rows, pool, left = replica.rows, replica.pool, list[Pages]()
    replica.tier.arrive(np.array([row]))
    every, pending.parts = pending.parts, seen
    for kept in replica.tables.groups:
        at: int = kept.tables.start
        if seen[at] is not every[at]:
            left.append(kept.give_back(row, kept.seen(start)))
    given = [np.setdiff1d(one.written, kept.written) for one, kept in zip(every, seen, strict=True)]
    pages = np.concatenate([_NO_PAGES, *left])
    rows.changed[row] = True
    for tell in pool.journal.left:
        tell(np.full(len(pages), row), pages)
    pool.release(pages)
    pool.drop_writer(np.concatenate(given))


def takes_any_part(replica: Replica) -> bool:
    """Whether this replica can cache a page of a prompt without having the earlier pages of the prompt."""
    return replica.caching and replica.lends_any_part


def check_pages(
    replica: Replica, context: SafeContext, table: BlockTable, others: Sequence[BlockTable]
) -> PendingImport:
    """Create an import of full pages that no request waits for. `begin_pages` gives the import its pages.

    The pages may begin anywhere in a prompt. Raises `BlockTableMismatchError` unless all tables hold full pages of the
    context's tokens, with this manager's page size and hash algorithm.
    """
    if not takes_any_part(replica):
        raise _mismatch(
            context, "was given to import_pages, which needs prefix caching and a single table of full attention"
        )
    hasher = check_tables(replica, context, table, others, partial=False)
    size, algorithm = replica.page_size, replica.hash_algorithm
    if (table.page_size, table.hash_algorithm) != (size, algorithm) or table.num_tokens % size:
        raise _mismatch(
            context,
            f"covers {table.num_tokens} tokens in pages of {table.page_size} by {table.hash_algorithm!r}; "
            f"full pages of {size} by {algorithm!r} are needed",
        )
    pending = _new_import(replica, context, table, others, hasher)
    pending.parts.append(ImportPart(table.first_page * size, _NO_PAGES))
    pending.prompt = context.tokens[: table.num_tokens].copy()
    return pending


def begin_pages(replica: Replica, pending: PendingImport, table: BlockTable) -> bool:
    """Give a new import its pages. Returns False, and takes no pages, if it needs more than half of the free pages."""
    pool, pages = replica.pool, table.groups[0]
    if len(pages) > pool.free_count // 2:
        return False
    pending.parts[0].dst_pages = allocated = pool.allocate(len(pages))
    pending.take_up(table, [np.array(pages, np.int32)], last=True)
    replica.imports.begin(pending)
    pool.release(allocated)
    return True


def finish_pages(replica: Replica, pending: PendingImport, proof: ImportProof | None) -> None:
    """End an import of pages that no request waits for, after all bytes have arrived.

    The pages are then published, and no request holds them.
    """
    hasher, prompt, pool, size = pending.hasher, pending.prompt, replica.pool, replica.page_size
    if hasher is None or prompt is None:
        raise InvalidRequestError(
            f"request {pending.request_id!r}: commit_pages: a request waits for this import, so call commit_import"
        )
    _check_proof(replica, pending, proof, "commit_pages")
    if pending.private:
        replica.imports.commit(pending)
        return
    first, stop = (token // size for token in pending.tokens)
    names = hasher.digests(prompt, first, stop)
    _describe(replica, hasher, prompt, first, stop)
    written = pending.written[: stop - first]
    is_new = pool.index.publish(written, names) == written
    pages, names = written[is_new], names[is_new]
    # the weights may have changed since this import began
    pool.versions.name(pages, replica.weights.numbers[hasher.segments[0].version])
    pool.hold(pages)
    replica.hints.brought(pages, hasher.salt, names[:, 0])
    replica.imports.commit(pending)
    pool.release(pages)
    for tell in pool.journal.came:
        tell(pages, names)
    replica.log.end_call()


def _named(context: SafeContext, pending: PendingImport, table: BlockTable, *, last: bool) -> list[Pages]:
    """Returns the other manager's pages that can be copied now.

    Raises if `table` contradicts earlier tables of the import.
    """
    named = pending.named(table, last=last)
    if isinstance(named, str):
        raise _mismatch(context, named)
    return named


def own_import(replicas: Sequence[Replica], pending: PendingImport, call: str, *, is_open: bool = False) -> Replica:
    """Returns the replica that owns the import. Raises `InvalidRequestError` if none of `replicas` owns it.

    With `is_open`, also raises if the import is closed.
    """
    needed = "what import_block_table returned"
    of_kind(f"{call}: the import", pending, PendingImport, needed, InvalidRequestError)
    owner = next((replica for replica in replicas if pending.owner is replica), None)
    if owner is None:
        raise InvalidRequestError(f"request {pending.request_id!r}: {call}: another manager made this import")
    if is_open and pending.closed:
        raise InvalidRequestError(
            f"request {pending.request_id!r}: {call}: this import was already finished or cancelled"
        )
    return owner


def _check_open(replica: Replica, row: int, context: SafeContext, pending: PendingImport, call: str) -> None:
    own_import([replica], pending, call, is_open=True)
    if replica.imports.of_row.get(row) is not pending:
        raise InvalidRequestError(f"request {context.request_id!r}: {call}: this import belongs to another request")
    replica.refuse_renamed(row, context)


def _check_proof(replica: Replica, pending: PendingImport, proof: ImportProof | None, call: str) -> None:
    """Raise unless `proof` comes from the import's copier, and covers all tokens of its table.

    No proof is needed if nothing had to be copied.
    """
    start = f"request {pending.request_id!r}: {call}"
    copier = replica.imports.copiers.get(pending)
    if proof is None:
        if pending.needs_copy:
            raise InvalidRequestError(
                f"{start} without a proof that its pages were copied: pass the proof from its copier or its finished "
                "pull"
            )
    elif copier is None or copier.proof is not proof:
        raise InvalidRequestError(f"{start} with the proof of another import")
    elif proof.num_tokens < pending.tokens[1]:
        raise InvalidRequestError(
            f"{start} with a proof for {proof.num_tokens} tokens, but its table now covers {pending.tokens[1]}"
        )


def finish_import(
    replica: Replica, row: int, context: SafeContext, pending: PendingImport, proof: ImportProof | None
) -> None:
    """End an import after all bytes have arrived.

    Its tokens then count as computed, and its full pages are published.
    """
    _check_open(replica, row, context, pending, "commit_import")
    if pending.lacks_end:
        raise InvalidRequestError(f"request {context.request_id!r}: commit_import {BEFORE_LAST}")
    _check_proof(replica, pending, proof, "commit_import")
    # the request's own prefix hit may cover more tokens than the table
    there = max(pending.num_tokens, replica.rows.counted.item(row))
    if context.start_idx > there:
        raise replica.counter.ahead(row, context.start_idx, there)
    cached = max(pending.num_tokens, context.start_idx)
    context.run_from(cached, context.end_idx)
    replica.imports.commit(pending)
    replica.counter.ran_elsewhere(row, cached)
    if replica.caching and cached >= replica.rows.commit_at.item(row):
        first, last = replica.rows.committed.item(row), cached // replica.page_size
        hasher = replica.hasher(row, context)
        digests = hasher.digests(context.tokens, first, last)
        _describe(replica, hasher, context.tokens, first, last)
        replica.publish(Filled(np.array([row]), np.array([first]), np.array([last]), digests))
    replica.rows.cached[row] = cached
    replica.log.end_call()
    replica.kept.commit_import(row, context, pending.num_tokens)


def _describe(replica: Replica, hasher: PrefixHasher, tokens: NDArray[np.integer[Any]], first: int, last: int) -> None:
    """Record for KV events which tokens the pages `first` to `last` (excluded) hold.

    The caller publishes these pages next.
    """
    if replica.log.is_read:
        run = token_bytes(tokens[first * replica.page_size : last * replica.page_size])
        replica.log.describe(([hasher], np.array([first]), np.array([last]), [run]))
