"""One data-parallel replica: its pages, its prefix index, and the rows of its running requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.block_table import BlockRows
from kvcache.context import Context
from kvcache.errors import (
    InvalidRequestError,
    NotReservedError,
    PromptTooLongError,
    SequenceTooLongError,
)
from kvcache.hashing import DIGEST_BYTES, PrefixHasher, hasher_of
from kvcache.metrics import KVCacheMetrics
from kvcache.pages import PagePool
from kvcache.params import HashAlgorithm
from kvcache.types import RequestID

Pages = NDArray[np.int32]


@dataclass(eq=False, slots=True)
class PendingImport:
    """Pages that another manager's block table is being copied into. Made by `import_block_table`.

    Attributes:
        request_id: whose pages.
        replica_idx: ours.
        src_replica_idx: the other manager's.
        num_tokens: tokens that the table covers.
        src_pages: int32, page ids to read, of the other manager.
        dst_pages: int32, page ids to write, of ours; as many. They belong to the transfer until the import is closed.
        closed: committed or cancelled.
    """

    request_id: RequestID
    replica_idx: int
    src_replica_idx: int
    num_tokens: int
    src_pages: Pages
    dst_pages: Pages
    closed: bool = False


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a reservation takes: `hits` replace the row's logical pages from `first` on, `new` pages are appended.

    `cached` is the token up to which nothing has to run, or 0 where that is no news to the context.
    """

    first: int
    hits: Pages
    replaced: Pages
    new: int
    cached: int


class Replica:
    """State and rules of one replica; knows nothing of tensors or devices.

    Args:
        num_pages: budgeted pages; ids are 1 to `num_pages`.
        page_size: tokens of a page.
        rows: requests that may be claimed at a time.
        max_seq_len: most tokens that one request's row has columns for.
        caching: keep and find pages by content.
        hash_algorithm: of the index.
        pinned: keep the block table in pinned memory.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        rows: int,
        max_seq_len: int,
        caching: bool,
        hash_algorithm: HashAlgorithm,
        pinned: bool,
    ) -> None:
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.caching = caching
        self.hash_algorithm: HashAlgorithm = hash_algorithm
        self.pool = PagePool(num_pages, DIGEST_BYTES[hash_algorithm] // 8)
        self.rows = BlockRows(rows, -(-max_seq_len // page_size), pinned=pinned)
        self.imports: list[PendingImport] = []
        self._importing: dict[int, PendingImport] = {}
        self._hashers: dict[int, PrefixHasher] = {}  # by row, of the contexts that cannot carry their own
        self._input_tokens = 0
        self._cache_tokens = 0

    @property
    def metrics(self) -> KVCacheMetrics:
        """Counters since the replica was made."""
        return KVCacheMetrics(self._input_tokens, self._cache_tokens, evictions=self.pool.evictions)

    def reserve(self, row: int, context: Context, num_steps: int) -> int | None:
        """Give the row the pages for all known tokens and `num_steps` steps, published ones where they match.

        Returns the pages taken anew, or None if there are too few: then nothing has changed.

        Raises:
            SequenceTooLongError: past `max_seq_len`.
            PromptTooLongError: more pages than the pool has.
            NotReservedError: an import of the row is pending.
        """
        self.refuse_pending(row, "maybe_reserve")
        needed = self.pages_needed(context, num_steps)
        plan = self._plan(row, context, needed)
        taken = self.pool.would_be_taken(plan.hits) + plan.new
        if taken > self.pool.free_count + self.pool.would_be_freed(plan.replaced):
            return None
        if plan.cached:
            # First, as a context of the caller's own may refuse: then no page has moved yet.
            self._advance(row, context, plan.cached)
        rows = self.rows
        if rows.prompt[row] < 0:
            rows.prompt[row] = context.end_idx
        if plan.hits.size:
            self.pool.hold(plan.hits)
            self.pool.release(plan.replaced)
            rows.write(row, plan.first, plan.hits)
            rows.committed[row] = plan.first + len(plan.hits)
        if plan.new:
            rows.write(row, int(rows.num_pages[row]), self.pool.allocate(plan.new))
        return plan.new

    def pages_needed(self, context: Context, num_steps: int) -> int:
        """Pages for all known tokens and `num_steps` steps, the last of which stores no KV of its own token.

        Raises:
            SequenceTooLongError: past `max_seq_len`.
            PromptTooLongError: more pages than the pool has.
        """
        length = context.current_length + num_steps - 1
        if length > self.max_seq_len:
            raise SequenceTooLongError(
                f"request {context.request_id!r}: {length} tokens (with {num_steps} steps), "
                f"max_seq_len is {self.max_seq_len}"
            )
        needed = -(-length // self.page_size)
        if needed > self.pool.num_pages:
            raise PromptTooLongError(
                f"request {context.request_id!r}: {length} tokens need {needed} pages, "
                f"the pool has {self.pool.num_pages} of {self.page_size} tokens"
            )
        return needed

    def match(self, context: Context, row: int | None = None) -> tuple[int, Pages]:
        """First logical page that is not committed yet, and the published pages that continue from there.

        The last known token is never covered: it has to run, to give the next one.
        """
        first = 0 if row is None else int(self.rows.committed[row])
        last = (context.current_length - 1) // self.page_size
        if not self.caching or last <= first:
            return first, np.zeros(0, np.int32)
        digests = self._hasher(row, context).digests(context.tokens, first, last)
        # Most lookups of a new prompt end within its first pages.
        head = self.pool.index.match(digests[:4])
        if len(head) < 4:
            return first, head
        return first, self.pool.index.match(digests)

    def check_step(self, row: int, context: Context) -> None:
        """Raise unless `step` may commit what the context says was computed.

        Raises:
            NotReservedError: more tokens computed than the row has pages for, or an import pending.
        """
        self.refuse_pending(row, "step")
        room = int(self.rows.num_pages[row]) * self.page_size
        if context.start_idx > room:
            raise NotReservedError(
                f"request {context.request_id!r}: {context.start_idx} tokens computed, "
                f"its reserved pages hold {room}: call maybe_reserve before the model runs"
            )

    def step(self, row: int, context: Context) -> None:
        """Publish the row's full pages of computed tokens; content published before is shared instead."""
        rows, computed = self.rows, context.start_idx
        rows.cached[row] = computed
        self._count(row, computed)
        first, last = int(rows.committed[row]), computed // self.page_size
        if not self.caching or last <= first:
            return
        digests = self._hasher(row, context).digests(context.tokens, first, last)
        own = rows.table[row, first:last].copy()
        kept = self.pool.index.publish(own, digests)
        duplicate = kept != own
        if duplicate.any():
            # The row names the pages to keep before the duplicates are freed: it never names a free page.
            self.pool.hold(kept[duplicate])
            rows.write(row, first, kept)
            self.pool.release(own[duplicate])
        rows.committed[row] = last

    def release(self, row: int) -> None:
        """Give back the row and its pages; those of a pending import stay with the transfer until it is closed."""
        self._importing.pop(row, None)
        self._hashers.pop(row, None)
        pages = self.rows.pages(row).copy()
        self.rows.unbind(row)
        self.pool.release(pages)

    def begin_import(self, row: int, pending: PendingImport) -> None:
        """The destination pages belong to a transfer from now on."""
        self.pool.add_writer(pending.dst_pages)
        self._importing[row] = pending
        self.imports.append(pending)

    def close_import(self, pending: PendingImport) -> None:
        """The transfer is over: its pages have no writer any more."""
        pending.closed = True
        self.imports.remove(pending)
        row = self.rows.row_of.get(pending.request_id)
        if row is not None and self._importing.get(row) is pending:
            del self._importing[row]
        self.pool.drop_writer(pending.dst_pages)

    def import_of(self, row: int) -> PendingImport | None:
        """The row's import that is not closed yet."""
        return self._importing.get(row)

    def refuse_pending(self, row: int, call: str) -> None:
        """Raise `NotReservedError` while an import of the row is pending."""
        if row in self._importing:
            raise NotReservedError(
                f"request {self.rows.request_ids[row]!r}: {call} while its import is pending: "
                "commit_import or cancel_import first"
            )

    def refuse_short(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Raise unless each of `rows` may run with pages for `lengths` tokens.

        Raises:
            SequenceTooLongError: past `max_seq_len`.
            NotReservedError: too few pages, or an import pending.
        """
        for row in rows.tolist() if self._importing else ():
            self.refuse_pending(row, "fetch")
        room = self.rows.num_pages[rows] * self.page_size
        for at in np.flatnonzero(lengths > room)[:1]:
            text = f"request {self.rows.request_ids[rows[at]]!r}: {lengths[at]} tokens"
            if lengths[at] > self.max_seq_len:
                raise SequenceTooLongError(f"{text}, max_seq_len is {self.max_seq_len}")
            raise NotReservedError(f"{text}, its reserved pages hold {room[at]}: call maybe_reserve first")

    def count_fetch(self, rows: NDArray[np.int64], ends: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Tokens from `starts` to `ends` of `rows` are about to run: count those of the prompt not counted before."""
        state = self.rows
        seen = np.maximum(state.counted[rows], starts)
        self._input_tokens += int(np.maximum(np.minimum(ends, state.prompt[rows]) - seen, 0).sum())
        state.counted[rows] = np.maximum(seen, ends)

    def _plan(self, row: int, context: Context, needed: int) -> _Plan:
        none, rows = np.zeros(0, np.int32), self.rows
        have = int(rows.num_pages[row])
        # One active token after all others were computed is a decode step: there is nothing to look up.
        first, hits = self.match(context, row) if context.active_length > 1 else (0, none)
        cached = (first + len(hits)) * self.page_size
        if cached <= context.start_idx:
            cached, hits = 0, none  # no token fewer to run: `step` finds the duplicates
        replaced = rows.table[row, first : min(have, first + len(hits))].copy() if hits.size else none
        return _Plan(first, hits, replaced, max(0, needed - max(have, first + len(hits))), cached)

    def _advance(self, row: int, context: Context, cached: int) -> None:
        """Move the context's start to `cached`; a chunk that ended before keeps its length."""
        before, active = context.start_idx, context.active_idx
        if cached >= active:
            active = min(context.end_idx, cached + context.active_length)
        context.set_token_indices(start_idx=cached, active_idx=active)
        if context.start_idx != cached:
            raise InvalidRequestError(
                f"request {context.request_id!r}: set_token_indices({cached}) left start_idx at {context.start_idx}"
            )
        self._cache_tokens += max(0, cached - max(before, int(self.rows.counted[row])))
        self.rows.counted[row] = max(cached, int(self.rows.counted[row]))

    def _count(self, row: int, computed: int) -> None:
        rows = self.rows
        seen = int(rows.counted[row])
        if computed > seen:
            self._input_tokens += max(0, min(computed, int(rows.prompt[row])) - seen)
            rows.counted[row] = computed

    def _hasher(self, row: int | None, context: Context) -> PrefixHasher:
        kept = None if row is None else self._hashers.get(row)
        if kept is not None:
            return kept
        hasher = hasher_of(context, self.hash_algorithm, self.page_size)
        if row is not None and getattr(context, "prefix_hasher", None) is not hasher:
            self._hashers[row] = hasher
        return hasher
