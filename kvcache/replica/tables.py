"""`RowTables`: the block tables of a replica's rows, with their pages, reservations and publication.

A *column* is a position in a row of a block table: column 0 is for the page of the request's first `page_size` tokens,
column 1 for the page of the next `page_size` tokens. A table has pages from the first column that the request's next
query sees. With full attention, this is column 0. With a window or chunk, this is the first column of the window or
chunk. Earlier columns hold the null page. When the request next asks for pages, pages that have fallen out of a window
are freed. Freed pages that are published stay cached, and are evicted independently of the request. A page is found by
the digest of its tokens, mixed with the index of its table, so a lookup never finds another table's page.

A request may resume after a page if each table has the pages that the next query sees (`resume`). Tables of full
attention have pages for all known tokens. Tables with a window have pages up to the end of the chunk that runs, so a
long prompt needs only the pages of a window and a chunk.

If a request is leased, its leases take over those pages that fall out of a window and that a block table has named.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from kvcache.errors import InvalidRequestError, InvariantError
from kvcache.layer_groups import LayerTables
from kvcache.pool.index import INDEX, NO_PAGE, Digests
from kvcache.pool.pages import PagePool
from kvcache.pool.pages_below import Asked, PagesBelow, Slots, last_end
from kvcache.replica.context import ContextIndices, chunk_end
from kvcache.replica.kept_pages import ColumnSet, ColumnSpan, KeptPages, counted_from, ranges_of
from kvcache.replica.kinds import kept_pages
from kvcache.replica.leases import PageLeases
from kvcache.replica.resume import Found, FromBelow, Reservation, resume
from kvcache.replica.rows import NEVER, ONE, BlockRows, Ints, Pages, Rows, as_rows

_NO_PAGES: Pages = np.zeros(0, np.int32)
_NO_ROWS: Ints = np.zeros(0, np.int64)
_MIX = 0x9E3779B97F4A7C15  # odd, so that its multiples for different tables are different modulo 2**64


class RowTables:
    """The block tables of one replica, for one or several groups of layers. Uses the arrays of `rows`.

    For a single table of full attention, `OneTable` does the same in less time.

    Two tables of one row, 16 tokens a page. The next query is at token 48, and the window has 32 tokens:

        column      0     1     2     3
        full       [1]   [2]   [3]   [4]       pages for all known tokens
        window      0    [8]   [6]   [5]       token 48 sees tokens 17 to 48
                    │     └─ window ──┘──►     slides with the next query
                    └ page 7 has fallen out: it is free, and stays cached until its memory is needed

    Examples:
        >>> from kvcache import KVCacheParams, LayerGroup, PagedKVCacheManager, TextContext
        >>> import torch
        >>> groups = LayerGroup("full", (0,)), LayerGroup("window", (1,), window=16)
        >>> params = KVCacheParams(torch.float16, n_kv_heads=2, head_dim=64, page_size=16, groups=groups)
        >>> manager = PagedKVCacheManager(params, 4, 256, 2, ["cpu"], available_cache_memory=1 << 20)
        >>> prompt = TextContext(range(40), 256, "r")
        >>> manager.external_claim("r")
        >>> manager.maybe_reserve(prompt)
        True
        >>> _ = manager.fetch([prompt])  # a model computes the KV of 40 tokens
        >>> prompt.update(7)
        >>> manager.step([prompt])
        >>> manager.block_table("r").groups  # the next query, token 40, sees tokens 25 to 40
        ((1, 2, 3), (5, 6))
    """

    is_plain = False

    def __init__(
        self, tables: LayerTables, pool: PagePool, rows: BlockRows, leases: PageLeases, *, caching: bool
    ) -> None:
        self.count = len(tables.tables)
        self.kinds, self.kinds_named = tables.kinds, tables.kinds_named
        self.groups = tuple(kept_pages(of, number, rows) for number, of in enumerate(tables.groups))
        # the groups whose pages are named by the digests of later pages
        self.ahead = [kept for kept in self.groups if kept.ahead]
        # Whether the first table keeps the pages of all tokens, under these tokens' digests. If so, no other table has
        # pages that it lacks.
        self.keeps_prefix = self.groups[0].keeps_all and not self.groups[0].ahead
        # Whether some tables have pages only for the chunk that runs.
        self.in_chunks = not all(kept.keeps_all for kept in self.groups)
        self.pool, self.rows, self._leases, self._caching = pool, rows, leases, caching
        self._page_size = rows.page_size
        # For each table, the value that is mixed into a digest, `[tables, 1, words]`.
        self._mixed = np.zeros((self.count, 1, pool.index.digest_words), np.uint64)
        self._mixed[:, 0, 0] = [number * _MIX % (1 << 64) for number in range(self.count)]
        self._no_pages = tuple(np.zeros((kept.num_tables, 0), np.int32) for kept in self.groups)
        self._no_columns = (slice(0, 0),) * len(self.groups)
        if self.is_plain:
            self._no_pages = (_NO_PAGES,)
        self._nothing = Found(0, 0, self._no_pages, self._no_columns, 0)  # the result for most new prompts
        self._numbers = pool.index.tables
        self._own_numbers, self._counts = np.arange(self.count)[:, None], np.array(self.count)

    # ---- lookups

    def resumes_beyond(self, row: int | None, pages: int) -> bool:
        """Whether a lookup may find pages after the row's first `pages` pages. See `KeptPages.resumes_beyond`."""
        return row is None or all(kept.resumes_beyond(row, pages) for kept in self.groups)

    def run(self, first: int, digests: Digests) -> Found:
        """Returns the columns that `find` has to search, from `first` on, and their pages in the first table.

        The columns end before the first page that is not published. If no table keeps the pages of all tokens, the
        result has a column for each of `digests`, and no pages.
        """
        if not self.keeps_prefix:
            end = first + len(digests)
            return Found(first, end, self._no_pages, self._no_columns, end)
        if len(digests) and self.pool.index.may_have(digests):
            pages = self.pool.index.match(digests)
            if pages.size:
                end = first + len(pages)
                return Found(first, end, (pages,), (), end)
        return self.nothing(first)

    def nothing(self, first: int) -> Found:
        """Returns the result of a lookup that finds no page after the `first` pages that the request already has."""
        return Found(first, first, self._no_pages, self._no_columns, first) if first else self._nothing

    def shortened(self, run: Found, digests: Digests, ends: Asked) -> Found:
        """Do the same as `find` for the columns of `run`, whose tokens have these `digests`."""
        return self.find(run.first, digests, ends)._replace(reached=run.reached)

    def find(self, first: int, digests: Digests, ends: Asked | None = None) -> Found:
        """Returns the pages of the longest prefix after which the request can resume in all tables.

        `digests` are the digests of pages `first` and later. The request has the earlier pages. For `ends`, see
        `resume`.
        """
        run = self.run(first, digests)
        count = run.end - first
        digests = self.naming(digests, count)
        end = first + (count if ends is None else last_end(ends[:count]))
        found = self._seen(first, end, digests, run)
        for pages in found.pages:
            if np.count_nonzero(pages) < pages.size:
                there = self.pages_of(digests)[:, :count] != NO_PAGE
                end = first + resume(there, self.groups, self._page_size, first, ends)
                return self._seen(first, end, digests, run)
        return found

    def naming(self, digests: Digests, count: int) -> Digests:
        """Returns those of the pages' `digests` from which the first `count` pages get their names in all tables.

        A draft page is named by the digest of the page after it.
        """
        return digests[: count + len(self.ahead[:1])]

    def every(self, digests: Digests) -> Digests:
        """Returns the name of each page in each table, `[tables, pages, words]`, from the tokens' `digests`."""
        if not self.ahead:
            return digests ^ self._mixed
        return np.concatenate([self._names(kept, digests) for kept in self.groups])

    def pages_of(self, digests: Digests) -> Pages:
        """Returns the published pages of the tokens with these digests in each table: int32 `[tables, pages]`."""
        return self._find_each(self.every(digests))

    def from_below(
        self, digests: Digests, below: Callable[[Digests, Asked], Asked], ends: Asked | None = None, first: int = 0
    ) -> FromBelow:
        """Returns the longest prefix after which all tables can resume if they also get pages from a lower tier.

        `below` takes the digests of pages, `[tables, pages, words]`, and a mask of the pages to look for. It returns a
        mask of the pages that the lower tier has. The caller already has the `first` pages. Pages that have fallen out
        of a window at the end of the prefix are not needed. For `ends`, see `resume`.
        """
        every = self.every(digests)
        pages = self._find_each(every)
        absent = pages == NO_PAGE
        absent[:, :first] = False
        there = ~absent | below(every, absent)
        end = resume(there, self.groups, self._page_size, 0, ends)
        reach = resume(there, [kept for kept in self.groups if kept.keeps_all], self._page_size)
        needed, columns = np.zeros_like(absent), tuple(kept.seen_columns(end, first) for kept in self.groups)
        each = list(zip(self.groups, columns, strict=True))
        for kept, seen in each:
            needed[kept.tables, seen] = True
        found = tuple(pages[kept.tables, seen] for kept, seen in each)
        return FromBelow(end, reach, every, needed & absent, found, columns, pages.T[(needed & ~absent).T])

    def whole(self, digests: Digests, most: int, ends: Asked | None = None) -> tuple[int, list[Pages]]:
        """Returns the longest prefix after which all tables can resume with at most `most` pages in all.

        The result is the number of columns of the prefix, and the pages that each table needs. The number is 0 if
        neither a page nor a state can be lent. For `ends`, see `resume`.
        """
        end = len(digests)
        while end := self.find(0, digests[:end], ends).end:
            found = [pages for of_group in self._seen(0, end, digests).pages for pages in of_group]
            surplus = sum(map(len, found)) - most
            if surplus <= 0:
                return (end, found) if ends is not None or any(map(len, found)) else (0, [])
            end -= max(1, min(end, surplus // self.count))
        return 0, []

    # ---- reservations

    def plan(self, row: int | None, indices: ContextIndices, length: int, start: int, found: Found) -> Reservation:
        """Plan the reservation of a request that runs from token `start`. `row` is None if the request has no row yet.

        Changes nothing. `indices` are the context's. `length` is the number of tokens that need pages. `found` has the
        cached pages to use after the row's published columns. If the context's chunk ends before `start`, a chunk of
        the same length begins at `start`.
        """
        # Full pages of a row are published, so they must stay in the row until then, unless the row is private.
        keeps, active = self._caching and row not in self.rows.private, chunk_end(indices, start)
        every, chunk = self._needed(length, active, indices[2])
        spans = [
            kept.plan(row, start, pages, columns, found.end, every if kept.keeps_all else chunk, keeps=keeps)
            for kept, pages, columns in zip(self.groups, found.pages, found.columns, strict=True)
        ]
        return self._planned(row, start, active, found, spans, keeps=keeps)

    def _needed(self, length: int, active: int, known: int) -> tuple[int, int]:
        """Returns the column after the last one that needs a page: with full attention, and with a window.

        With full attention, pages are needed for `length` tokens. With a window, they are needed up to the end of the
        chunk, token `active`.
        """
        every = -(-length // self._page_size)
        return every, -(-active // self._page_size) if active < known else every

    def plan_import(
        self, indices: ContextIndices, length: int, start: int, here: Found, digests: Digests, tier: PagesBelow
    ) -> Reservation:
        """Plan the reservation of an import for a row without pages, which can run from token `start` afterwards.

        `here` has the longest prefix that all tables have in the local cache. In addition, each group of tables looks
        up the pages that later queries see: on the device, and in the host memory of `tier`. `digests` are the digests
        of all full pages before the last known token; empty without prefix caching.
        """
        slots, spans = list[Slots](), list[ColumnSpan]()
        last, needed = min(len(digests), start // self._page_size), -(-length // self._page_size)
        for kept in self.groups:
            first = kept.seen(start)
            every = as_rows(kept.kept(first, needed))
            columns = every[every < last]
            names = self._names(kept, digests, columns)
            pages = self._find_each(names)
            below = np.where(
                pages == NO_PAGE, tier.slots(names.reshape(-1, names.shape[2])).reshape(pages.shape), NO_PAGE
            )
            missing = (pages == below).any(axis=0).nonzero()[0]  # two items are equal only if both are `NO_PAGE`
            count = missing.item(0) if missing.size else len(columns)
            end = every.item(count) if count < len(every) else max(first, last)
            slots.append(below[:, :count][pages[:, :count] == NO_PAGE])
            spans.append(kept.span(None, pages[:, :count], columns[:count], first, end, needed))
        # No page of the tokens before column `here.end` is copied, because all tables have them cached.
        here = here._replace(slots=np.concatenate(slots))
        start = here.end * self._page_size
        return self._planned(None, start, chunk_end(indices, start), here, spans, keeps=self._caching)

    def _planned(
        self, row: int | None, start: int, active: int, here: Found, spans: Sequence[ColumnSpan], *, keeps: bool
    ) -> Reservation:
        """Plan the reservation of a request that runs tokens `start` to `active`, with the pages in `spans`.

        `keeps` says whether the row's full pages are published.
        """
        new, published, each = 0, NEVER, list[Pages]()
        for span in spans:
            new += span.new
            each.append(span.coming)
            published = min(published, span.hole if here.slots.size else span.found_end)
        coming, cost, gone = np.concatenate(each), new, _NO_PAGES
        if coming.size:
            cost += self.pool.would_be_taken(coming)
        if row is not None and (had := self.rows.num_pages_of[row]):
            parts = [kept.leaving(row, span, had) for kept, span in zip(self.groups, spans, strict=True)]
            leaves, mine = np.concatenate(parts), self.rows.table[:, row, :had].T
            gone = mine[leaves.T]
            for table, first, last in self._for_readers(row, spans):
                leaves[table, first:last] = False
            cost -= self.pool.would_be_freed(mine[leaves.T])
        committed = published if keeps else 0
        if row is not None and here.first > (own := self.rows.committed_of[row]):
            committed = own  # the row has computed pages that are not published yet
        cached = start if here.end > here.first else 0
        return Reservation(
            tuple(spans), coming, gone, new, committed, cost, start, active, cached, here.reached, here.slots
        )

    def least(self, indices: ContextIndices, length: int, start: int) -> int:
        """Returns the number of pages that the request takes if it runs from token `start` and finds no cached page."""
        every, chunk = self._needed(length, chunk_end(indices, start), indices[2])
        return sum(
            kept.num_tables * kept.num_kept(kept.seen(start), every if kept.keeps_all else chunk)
            for kept in self.groups
        )

    def most(self, indices: ContextIndices, length: int) -> int:
        """Returns the largest number of pages that a request without pages can take, wherever it resumes."""
        size, (start, active, known) = self._page_size, indices
        starts: Ints = np.arange(0, known, size)
        active = np.where(starts < active, active, np.minimum(known, starts + active - start))
        tokens = np.where(active < known, active, length)
        pages = 0
        for kept in self.groups:
            columns = -(-(tokens * 0 + length if kept.keeps_all else tokens) // size)
            pages += kept.num_tables * int(kept.num_kept(kept.seen(starts), columns).max())
        return pages

    def take(self, row: int, plan: Reservation) -> Pages:
        """Give the row the pages of `plan`, for which enough pages must be free.

        Returns the pages into which the caller must copy the host slots `plan.slots`.
        """
        rows, pool = self.rows, self.pool
        each = list(zip(self.groups, plan.spans, strict=True))
        if plan.coming.size:
            pool.hold(plan.coming)
            of_first = plan.spans[0].found[0]
            for tell in pool.journal.found:
                tell(of_first[of_first != NO_PAGE])
        for table, first, last in self._for_readers(row, plan.spans):
            self._leases.replace(row, table, first, rows.table[table, row, first:last])
        for kept, span in each:
            kept.take(row, span)
        if plan.leaving.size:
            for tell in pool.journal.left:
                tell(np.full(len(plan.leaving), row), plan.leaving)
            pool.release(plan.leaving)
        new, restored = pool.allocate(plan.new), list[Pages]()
        for kept, span in each:
            pages, new = kept.fill(row, span, new)
            restored.append(pages)
        rows.commit(row, plan.committed)
        rows.changed[row] = True
        rows.measure(row)
        return np.concatenate(restored)

    def append(self, rows: Ints) -> bool:
        """Append a page to each of `rows` in each table, and free the pages that fall out of windows.

        Returns False, and changes nothing, if there are too few free pages, or if a row still runs a chunk of its
        prompt.
        """
        block_rows, needed = self.rows, len(rows) * self.count
        if needed > self.pool.free_count:
            return False
        if self.in_chunks:
            if np.count_nonzero(block_rows.shortest[rows] != block_rows.num_pages[rows]):
                return False
            self._slide(rows)
        block_rows.append(rows, self.pool.allocate(needed).reshape(self.count, -1))
        return True

    def publish(self, rows: Ints, columns: Ints, digests: Digests) -> tuple[Pages, Digests, Ints]:
        """Publish the full pages in `columns` of `rows`, whose tokens have the distinct `digests`.

        If a page with the same content is already published, the row shares that page instead. Returns the newly
        published pages, and their digests. Also returns a row for each page of the first table that was replaced by a
        shared page.
        """
        block_rows = self.rows
        where, own, names = self._unpublished(rows, columns, digests)
        kept, shared = self.pool.index.publish(own, names), _NO_ROWS
        if kept is not own and np.count_nonzero(duplicate := kept != own):
            # First the leases take over the duplicates, then the rows get the shared pages, then the duplicates are
            # freed. So wherever this is interrupted, a row or a lease names each page that readers know.
            replaced = where[duplicate]
            of_rows, of_columns = np.divmod(replaced % block_rows.table_size, block_rows.width)
            if self._leases.of_row:
                tables = replaced // block_rows.table_size
                places = zip(of_rows.tolist(), tables.tolist(), of_columns.tolist(), strict=True)
                for place, pages in zip(places, own[duplicate][:, None], strict=True):
                    self._leases.replace(*place, pages)
            self.pool.hold(kept[duplicate])
            block_rows.entries[where] = kept
            block_rows.changed[rows] = True
            self.pool.release(own[duplicate])
            shared = of_rows[replaced < block_rows.table_size]
            where, own, names = where[~duplicate], own[~duplicate], names[~duplicate]
        for tell in self.pool.journal.followed:
            first = where[where < block_rows.table_size]
            before = np.where(first % block_rows.width > 0, block_rows.entries[first - 1], NO_PAGE)
            tell(own[: len(first)], before)
        return own, names, shared

    def new_of_fork(self, computed: int, end: int) -> int:
        """Returns the number of pages to allocate for a fork after `computed` tokens with `end` columns."""
        return sum(kept.num_tables * (end - kept.shared(computed)) for kept in self.groups)

    def fork(self, parent: int, row: int, computed: int, end: int) -> list[tuple[int, int]]:
        """Let `row` share the pages of row `parent` that neither writes again, and allocate its other columns to `end`.

        `computed` is the number of the parent's computed tokens. Returns a pair for each page that is not shared: the
        parent's page, and the page of `row`. The caller must copy the parent's page to the page of `row`.
        """
        rows, pool, copies = self.rows, self.pool, list[tuple[int, int]]()
        shared = [kept.table[:, parent, : kept.shared(computed)] for kept in self.groups]
        pool.hold(np.concatenate([pages[pages != NO_PAGE] for pages in shared]))
        new = pool.allocate(self.new_of_fork(computed, end))
        for kept, pages in zip(self.groups, shared, strict=True):
            first = pages.shape[1]
            count = kept.num_tables * (end - first)
            kept.table[:, row, :first] = pages
            kept.table[:, row, first:end], new = new[:count].reshape(kept.num_tables, -1), new[count:]
            if first * self._page_size < computed:
                copies += zip(kept.table[:, parent, first].tolist(), kept.table[:, row, first].tolist(), strict=True)
        rows.firsts[:, row], rows.ends[:, row] = rows.firsts[:, parent], end
        rows.changed[row] = True
        rows.measure(row)
        return copies

    # ---- the pages of rows

    def lists(self, row: int, tokens: int, *, first: int, windows: bool) -> tuple[tuple[int, ...], ...]:
        """Returns the pages of the row's first `tokens` tokens, one list for each table, from column `first` on.

        The list of a table with a window has only the pages that the next query sees. Without `windows`, this list is
        empty.
        """
        return tuple(chain.from_iterable(kept.named(row, tokens, first, windows=windows) for kept in self.groups))

    def tell(self, row: int, tokens: int, *, windows: bool) -> None:
        """Record that readers will know the pages of `lists`, so that leases keep them when they leave the row."""
        named = [
            ranges_of(kept.named_columns(row, tokens, windows=windows))
            for kept in self.groups
            for _ in range(kept.num_tables)
        ]
        self._leases.tell(row, tokens, named)

    def needed(self, row: int, digests: Digests, ends: Sequence[int]) -> tuple[Ints, Pages]:
        """Returns the row's pages in published columns, and the cached pages needed to resume at the columns `ends`.

        `digests` are the digests of the published columns. The result is two arrays: the column of each page, and the
        page. The result has only cached pages, and each page once.
        """
        wanted = self.rows.table[:, row, : len(digests)] != NO_PAGE
        for kept in self.groups:
            for end in ends:
                columns = as_rows(kept.seen_columns(end))
                wanted[kept.tables, columns[columns < len(digests)]] = True
        pages = np.where(wanted, self.pages_of(digests), NO_PAGE)
        at = pages.nonzero()
        return at[1], pages[at]

    def width(self) -> float:
        """The number of published pages in all tables, divided by the number in the first table."""
        published = self.pool.index.published
        every = np.count_nonzero(published)
        first = every - np.count_nonzero(published & (self._numbers != 0))
        return every / first if first else float(self.count)

    def pages(self, row: int, end: int) -> Pages:
        """Returns the row's pages before column `end`.

        If the first table keeps the pages of all tokens, its pages come first. The pages of the other tables follow,
        column by column.
        """
        mine, kept = self.rows.table[:, row, :end], int(self.keeps_prefix)
        every = np.concatenate((mine[:kept].ravel(), mine[kept:].T.ravel()))
        return every[every != NO_PAGE]

    def committed(self, row: int) -> Pages:
        """Returns the row's pages in its committed columns, all of which are published.

        Pages that are named by later pages are left out, because they are published later, or not at all.
        """
        end = self.rows.committed_of[row]
        named = [kept.table[:, row, :end].ravel() for kept in self.groups if not kept.ahead]
        mine = np.concatenate([_NO_PAGES, *named])
        return mine[mine != NO_PAGE]

    def lost(self, rows: Rows, starts: Ints) -> tuple[int, str] | None:
        """Returns the index of the first of `rows` that lacks pages which a query at its start sees, and which pages.

        None if no row lacks any.
        """
        for kept in self.groups:
            lacking = kept.lacks(rows, starts).nonzero()[0]
            if lacking.size:
                at = int(lacking[0])
                begin, group = kept.firsts[rows][at] * self._page_size, kept.group
                return at, f"pages of the layers of kind {group.kind} ({group.window} tokens) before token {begin}"
        return None

    def refuse_lost(self, rows: Rows, starts: Ints) -> None:
        """Raise `InvalidRequestError` if a row would run from a token that sees pages which the row has freed."""
        if (lost := self.lost(rows, starts)) is not None:
            at, pages = lost
            raise InvalidRequestError(
                f"request {self.rows.request_ids[as_rows(rows)[at]]!r}: would run from token {starts[at]}, but has "
                f"freed the {pages}: release the request and claim it again"
            )

    def refuse_fork(self, row: int, computed: int) -> None:
        """Raise `InvalidRequestError` if the row has freed pages that a fork after `computed` tokens sees."""
        for kept in self.groups:
            if kept.lacks(np.array([row]), np.array([computed])).any():
                raise InvalidRequestError(
                    f"request {self.rows.request_ids[row]!r}: fork after {computed} computed tokens, but the layers of "
                    f"kind {kept.group.kind} ({kept.group.window} tokens) have freed their pages before token "
                    f"{kept.firsts[row] * self._page_size} for a later step: call step first"
                )

    def check(self) -> None:
        """Raise `InvariantError` if a row lacks a page that it needs, or has a page that it must not have."""
        rows = self.rows
        columns = np.arange(rows.table.shape[2], dtype=np.int64)
        for kept in self.groups:
            if (wrong := kept.wrong(columns)) is not None:
                row, column = wrong
                raise InvariantError(
                    f"request {rows.request_ids[row]!r}: column {column} of the layers of kind {kept.group.kind} "
                    f"contradicts the recorded range of pages, {kept.firsts[row]} to {kept.ends[row]}"
                )
        if (np.diff(rows.ends, axis=0) > 0).any() or (rows.ends[-1] < rows.committed).any():
            raise InvariantError("a row has pages that its first table does not have, or lacks published pages")

    # ---- inside

    def _unpublished(self, rows: Ints, columns: Ints, digests: Digests) -> tuple[Ints, Pages, Digests]:
        """Returns the pages for `publish` to publish, one table after another, and their digests.

        The first array has the place of each page in `BlockRows.entries`.
        """
        where = self.rows.places(rows, columns)
        own = self.rows.entries[where]
        for kept in self.ahead:  # these digests name the pages before
            where[kept.tables] -= kept.ahead
            own[kept.tables] = np.where(columns < kept.ahead, NO_PAGE, self.rows.entries[where[kept.tables]])
        at = own.astype(INDEX)
        self._numbers[at] = self._own_numbers
        # Pages that are published already came from a lookup.
        new: Ints = ((own != NO_PAGE) & ~self.pool.index.published[at]).ravel().nonzero()[0]
        if self.ahead:  # forks may share a page that none of them has published yet, and fill different next pages
            new = np.sort(new[np.unique(own.ravel()[new], return_index=True)[1]])
        names: Digests = (digests ^ self._mixed).reshape(-1, digests.shape[1]).take(new, axis=0)
        return where.ravel()[new], own.ravel()[new], names

    def _slide(self, rows: Ints) -> None:
        """Free the pages that the next queries of `rows` do not see. The pages of the first row are freed first."""
        block_rows, published = self.rows, self.rows.committed[rows]
        if block_rows.private:
            published[[row in block_rows.private for row in rows.tolist()]] = NEVER
        of_row, width = self._leases.of_row, block_rows.width
        leased = [at for at, row in enumerate(rows.tolist()) if row in of_row] if of_row else []
        found: list[tuple[Ints, Pages]] = []  # the pages to free, and the position of each page in the order of freeing
        for kept in self.groups:
            if kept.keeps_all:
                continue
            before = kept.firsts[rows]
            now = kept.seen(block_rows.cached[rows])
            now = np.maximum(before, np.minimum(now, published) if self._caching else now)
            for at in leased:
                row, first, last = int(rows[at]), int(kept.leave_from(before[at])), int(now[at])
                for table in range(kept.tables.start, kept.tables.stop) if first < last else ():
                    self._leases.replace(row, table, first, block_rows.table[table, row, first:last])
            begins = kept.leave_from(before)
            at = (now > begins).nonzero()[0]
            kept.firsts[rows] = now
            if not at.size:
                continue
            columns, counts = begins[at], (now - begins)[at]
            # In nearly all steps, each of these rows frees exactly one page, and this block is skipped.
            if np.count_nonzero(counts != ONE):
                at = np.repeat(at, counts)
                columns = np.arange(len(at)) + np.repeat(columns - np.cumsum(counts) + counts, counts)
            where = block_rows.places(rows[at], columns, kept.tables)
            pages = block_rows.entries[where].ravel()
            block_rows.entries[where] = NO_PAGE
            # `release_each` frees its last page first. So pages are sorted by row, the last row first, then by column,
            # then by table.
            turns = (columns - at * width) * self._counts + self._own_numbers[kept.tables]
            found.append((turns.ravel(), pages))
        if found:
            turns, pages = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
            for tell in self.pool.journal.left:
                tell(rows[-(turns // (width * self.count))], pages)
            self.pool.release_each(pages[turns.argsort()])

    def _for_readers(self, row: int, spans: Sequence[ColumnSpan]) -> Iterator[tuple[int, int, int]]:
        """Returns ranges of columns, `(table, first, last)`, whose pages the leases of the row take over.

        Exported tables have named these pages. They leave the row because they fall out of a window, or because cached
        pages replace them.
        """
        for kept, span in zip(self.groups, spans, strict=True) if row in self._leases.of_row else ():
            for table in range(kept.tables.start, kept.tables.stop):
                for first, end in self._leases.known(row, table):
                    yield table, kept.leave_from(max(kept.firsts.item(row), first)), min(span.first, end)
                    for begin, last in ranges_of(span.columns):
                        yield table, max(begin, first), min(last, end)

    def _seen(self, first: int, end: int, digests: Digests, run: Found | None = None) -> Found:
        """Returns the published pages that a query at the first token of column `end` sees.

        `digests` are the digests of the pages from column `first` on. `run`, if given, is the result of `run` for them.
        """
        found, columns = list[Pages](), list[ColumnSet]()
        for kept in self.groups:
            if run is not None and not found and self.keeps_prefix and kept.num_tables == 1:
                columns.append(slice(first, end))
                found.append(run.pages[0].reshape(1, -1)[:, : end - first])
            else:
                columns.append(seen := kept.seen_columns(end, first))
                found.append(self._find_each(self._names(kept, digests, counted_from(first, seen))))
        return Found(first, end, tuple(found), tuple(columns), end)

    def _names(self, kept: KeptPages, digests: Digests, at: ColumnSet = slice(None)) -> Digests:
        """Returns the names of the pages `at` in each table of a group, `[tables, pages, words]`."""
        names: Digests = kept.names(digests)[at] ^ self._mixed[kept.tables]
        return names

    def _find_each(self, mixed: Digests) -> Pages:
        return self.pool.index.find(mixed.reshape(-1, mixed.shape[2])).reshape(mixed.shape[:2])
