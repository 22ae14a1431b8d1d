"""`RowTables`: the block tables of a replica's rows, with their pages, reservations and publication.

In each table, a row has one column for each page of tokens. A table has pages from the first column that the request's
next query sees: column 0 for full attention, otherwise the first column of the window or chunk. Earlier columns hold
the null page. Pages that fall out of a window are freed when the request next asks for pages. Published pages then stay
cached, idle, and are evicted independently of the request. A page is found by the digest of its tokens, mixed with the
index of its table, so no table finds the pages of another table.

A request may resume after a page if each table has the pages that the next query sees (`resume`). Tables of full
attention have pages for all known tokens. Tables with a window have pages up to the end of the chunk that runs, so a
long prompt needs only the pages of a window and a chunk.

If a request is leased, its leases take over the pages that fall out of a window and that readers know.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidRequestError, InvariantError
from kvcache.layer_groups import LayerGroup, LayerTables, TableGroup
from kvcache.pool.index import INDEX, NO_PAGE, Digests
from kvcache.pool.pages import PagePool
from kvcache.pool.pages_below import Asked, Slots, last_end
from kvcache.replica.context import ContextIndices, chunk_end
from kvcache.replica.leases import PageLeases
from kvcache.replica.resume import Below, Found, FromBelow, Host, Reservation, resume
from kvcache.replica.rows import ONE, BlockRows, Ints, Pages, Rows, as_rows

_NO_PAGES: Pages = np.zeros(0, np.int32)
_NONE_FOUND = (_NO_PAGES,)
_FIRST = (0,)
_NOTHING = Found(0, 0, _NONE_FOUND, 0)
_NO_ROWS: Ints = np.zeros(0, np.int64)
_MIX = 0x9E3779B97F4A7C15  # odd, so that its multiples for all tables differ in 64 bits


DigestsTo = Callable[[int], Digests]
"""Returns the digests of a request's pages before a column."""


class RowTables:
    """The block tables of one replica, for one or several groups of layers, over the arrays of `rows`.

    For a single table of full attention, `OneTable` does the same at less cost.
    """

    is_plain = False

    def __init__(
        self, tables: LayerTables, pool: PagePool, rows: BlockRows, leases: PageLeases, *, caching: bool
    ) -> None:
        self.count = len(tables.tables)
        self.kinds, self.kinds_named = tables.kinds, tables.kinds_named
        self.groups = tables.groups
        # Whether the first table keeps the pages of all tokens. No other table can then have more.
        self.keeps_prefix = self.groups[0].group.keeps_all
        # Whether some tables have pages only for the chunk that runs.
        self.in_chunks = not all(group.keeps_all for group, _ in self.groups)
        self._pool, self._rows, self._leases, self._caching = pool, rows, leases, caching
        self._page_size = rows.page_size
        # By table: what is mixed into a digest, `[tables, 1, words]`.
        self._mixed = np.zeros((self.count, 1, pool.index.digest_words), np.uint64)
        self._mixed[:, 0, 0] = [number * _MIX % (1 << 64) for number in range(self.count)]
        self._no_pages = tuple(np.zeros((group.num_tables, 0), np.int32) for group in self.groups)
        self._numbers = pool.index.tables
        self._own_numbers, self._counts = np.arange(self.count)[:, None], np.array(self.count)

    # ---- lookups

    def run(self, first: int, digests: Digests) -> Found:
        """Returns the columns that `find` has to search: the longest published run of the first table after `first`.

        If no table keeps all pages, these are all columns.
        """
        if not self.keeps_prefix:
            end = first + len(digests)
            return Found(first, end, self._no_pages, end)
        if len(digests) and self._pool.index.may_have(digests):
            pages = self._pool.index.match(digests)
            if pages.size:
                end = first + len(pages)
                return Found(first, end, (pages,), end)
        return self.nothing(first)

    def nothing(self, first: int) -> Found:
        """Returns the result of a lookup that finds no page after the `first` pages that the request has."""
        return Found(first, first, self._no_pages, first)

    def shortened(self, run: Found, digests: Digests, ends: Asked) -> Found:
        """Returns the part of the found `run` that `find` would return. `digests` are those of the run's pages."""
        return self.find(run.first, digests, ends)._replace(reached=run.reached)

    def find(self, first: int, digests: Digests, ends: Asked | None = None) -> Found:
        """Returns the pages of the longest prefix from which all tables can resume.

        `digests` are those of the pages after the `first` ones. For `ends`, see `resume`.
        """
        digests = digests[: self.run(first, digests).num_columns]
        digests = digests if ends is None else digests[: last_end(ends[: len(digests)])]
        end = first + len(digests)
        found = self._seen_pages(first, end, digests)
        if not all(np.count_nonzero(pages) == pages.size for pages in found):
            there = self._find(slice(None), digests) != NO_PAGE
            end = first + resume(there, self.groups, self._page_size, first, ends)
            found = self._seen_pages(first, end, digests)
        return Found(first, end, found, end)

    def every(self, digests: Digests) -> Digests:
        """Returns the digests of the pages of all tables, `[tables, pages, words]`, given those of their tokens."""
        return self._mix(slice(None), digests)

    def pages_of(self, digests: Digests) -> Pages:
        """Returns the published page of each digest in each table: int32 `[tables, len(digests)]`."""
        return self._find(slice(None), digests)

    def from_below(self, digests: Digests, below: Below, ends: Asked | None = None, first: int = 0) -> FromBelow:
        """Returns the longest prefix of these pages from which all tables can resume, given the pages `below`.

        The caller already has the `first` pages. Pages that have fallen out of a window are not requested. For `ends`,
        see `resume`.
        """
        every = self.every(digests)
        pages = self._find_each(every)
        absent = pages == NO_PAGE
        absent[:, :first] = False
        there = ~absent | below(every, absent)
        end = resume(there, self.groups, self._page_size, 0, ends)
        reach = resume(there, [one for one in self.groups if one.group.keeps_all], self._page_size)
        needed, found = np.zeros_like(absent), list[Pages]()
        for group, tables in self.groups:
            begin = min(end, max(first, self._seen(group, end * self._page_size)))
            needed[tables, begin:end] = True
            found.append(pages[tables, begin:end])
        return FromBelow(end, reach, every, needed & absent, tuple(found), pages.T[(needed & ~absent).T])

    def whole(self, digests: Digests, most: int, ends: Asked | None = None) -> tuple[int, list[Pages]]:
        """Returns the longest prefix from which all tables can resume with at most `most` pages.

        The result is the number of its columns, and the pages of each table. It has 0 columns if resuming there needs
        no page and no state, because then there is nothing to lend. For `ends`, see `resume`.
        """
        end = len(digests)
        while end := self.find(0, digests[:end], ends).end:
            found = [pages for of_group in self._seen_pages(0, end, digests[:end]) for pages in of_group]
            surplus = sum(map(len, found)) - most
            if surplus <= 0:
                return (end, found) if ends is not None or any(map(len, found)) else (0, [])
            end -= max(1, min(end, surplus // self.count))
        return 0, []

    # ---- reservations

    def plan(self, row: int | None, indices: ContextIndices, length: int, start: int, found: Found) -> Reservation:
        """Plan the reservation with which a request runs from token `start`. `row` is None if it has no row yet.

        Changes nothing. `indices` are those of the context. `length` is the number of tokens that need pages, and
        `found` the pages found after the row's published columns. A chunk that would end before `start` keeps its
        length.
        """
        firsts: list[int] = []
        for number, (group, _) in enumerate(self.groups):
            before, now = 0 if row is None else self._rows.firsts.item(number, row), self._seen(group, start)
            # Pages that are not published yet stay until `step` publishes them.
            firsts.append(max(before, min(now, found.end) if self._caching else now))
        ends_found = [max(now, found.end) for now in firsts]
        until = [self._to_hold(group, indices, length, start) for group, _ in self.groups]
        plan = self._planned(row, found.pages, ends_found, firsts, until)
        if row is not None and found.first > (own := self._rows.committed.item(row)):
            plan = plan._replace(committed=own)  # the row has computed pages that it has not published
        cached = start if found.num_columns else 0
        active = chunk_end(indices, start)
        return plan._replace(start=start, active=active, cached=cached, slots=found.slots, reached=found.reached)

    def plan_import(
        self,
        row: int,
        indices: ContextIndices,
        length: int,
        num_tokens: int,
        here: Found,
        digests_of: DigestsTo,
        host: Host,
    ) -> Reservation:
        """Plan an import, for a row without pages.

        The tokens before `num_tokens` come from elsewhere, or are cached `here`. Each group looks up which of these
        pages the device or the `host` has. No group takes pages that no query sees.
        """
        cached = here.end * self._page_size  # all tables have these tokens cached, so none of these pages is copied
        start = max(num_tokens, cached)
        digests = digests_of(min(start, indices[2] - 1) // self._page_size if self._caching else 0)
        found, slots, firsts = list[Pages](), list[Slots](), list[int]()
        for group, tables in self.groups:
            firsts.append(self._seen(group, start))
            names = self._mix(tables, digests[firsts[-1] :])
            pages = self._find_each(names)
            below = np.where(pages == NO_PAGE, host(names.reshape(-1, names.shape[2])).reshape(pages.shape), NO_PAGE)
            missing = (pages == below).any(axis=0).nonzero()[0]  # equal only if both are `NO_PAGE`
            end = missing[0] if missing.size else pages.shape[1]
            found.append(pages[:, :end])
            slots.append(below[:, :end][pages[:, :end] == NO_PAGE])
        ends_found = [now + pages.shape[1] for now, pages in zip(firsts, found, strict=True)]
        until = [-(-length // self._page_size)] * len(firsts)
        return self._planned(row, tuple(found), ends_found, firsts, until)._replace(
            start=cached,
            active=chunk_end(indices, cached),
            cached=cached,
            slots=np.concatenate(slots),
            reached=here.reached,
        )

    def _planned(
        self, row: int | None, found: tuple[Pages, ...], ends_found: list[int], firsts: list[int], until: list[int]
    ) -> Reservation:
        had = [0] * len(firsts) if row is None else self._rows.ends[:, row].tolist()
        ends = [*map(max, had, until)]
        new = sum(
            tables.num_tables * max(0, end - max(before, at))
            for tables, end, before, at in zip(self.groups, ends, had, ends_found, strict=True)
        )
        new += sum(int(np.count_nonzero(pages == NO_PAGE)) for pages in found)
        gone = freed = _NO_PAGES
        if row is not None and had[0]:
            leaves = np.zeros((self.count, had[0]), np.bool_)
            mine = self._rows.table[:, row, : had[0]].T
            for (_, tables), pages, at, now in zip(self.groups, found, ends_found, firsts, strict=True):
                leaves[tables, :now] = True
                own = mine.T[tables, at - pages.shape[1] : at]
                come = pages[:, : own.shape[1]]
                # A page from a lower tier is restored into the row's own page, if the row has one there. A found page
                # may be the row's own.
                leaves[tables, at - pages.shape[1] : at] |= (come != NO_PAGE) & (come != own)
                new -= int(np.count_nonzero((come == NO_PAGE) & (own != NO_PAGE)))
            leaves &= mine.T != NO_PAGE
            gone = mine[leaves.T]
            for (_, tables), first, last in self._for_readers(row, found, ends_found, firsts):
                leaves[tables, first:last] = False
            freed = mine[leaves.T]
        taken = sum(self._pool.would_be_taken(pages[pages != NO_PAGE]) for pages in found)
        cost = new + taken - self._pool.would_be_freed(freed)
        committed = min(map(_before_hole, found, ends_found)) if self._caching else 0
        return Reservation(found, tuple(ends_found), tuple(firsts), tuple(ends), gone, new, committed, cost, 0, 0)

    def fits(self, row: int | None, plan: Reservation, free: int) -> bool:  # noqa: ARG002 - `cost` is exact here
        """Whether `free` pages are enough for the plan. This is always so if at least `plan.cost` pages are free."""
        return plan.cost <= free

    def least(self, indices: ContextIndices, length: int, start: int) -> int:
        """Returns how many pages the request takes if it runs from `start` and no cached page is found."""
        return sum(
            tables.num_tables * (self._to_hold(tables.group, indices, length, start) - self._seen(tables.group, start))
            for tables in self.groups
        )

    def most(self, indices: ContextIndices, length: int) -> int:
        """Returns the most pages that a request without pages may take, wherever in its prompt it resumes."""
        size, (start, active, known) = self._page_size, indices
        starts: Ints = np.arange(0, known, size)
        active = np.where(starts < active, active, np.minimum(known, starts + active - start))
        tokens = np.where(active < known, active, length)
        pages = 0
        for group, tables in self.groups:
            columns = -(-(length if group.keeps_all else tokens) // size)
            pages += (tables.stop - tables.start) * int((columns - group.first_seen(starts) // size).max())
        return pages

    def take(self, row: int, plan: Reservation) -> Pages:
        """Carry out a plan for which there is room. Returns the pages that get the content of the plan's `slots`."""
        rows, pool = self._rows, self._pool
        parts = [
            (rows.table[tables, row, at - pages.shape[1] : at], pages)
            for (_, tables), pages, at in zip(self.groups, plan.found, plan.ends_found, strict=True)
        ]
        if (found := np.concatenate([pages[(pages != NO_PAGE) & (pages != mine)] for mine, pages in parts])).size:
            pool.hold(found)
            for tell in pool.journal.found:
                tell(plan.found[0][0][plan.found[0][0] != NO_PAGE])
        for (_, tables), first, last in self._for_readers(row, plan.found, plan.ends_found, plan.firsts):
            self._leave_to_readers(row, tables, first, last)
        had = rows.ends[:, row].tolist()
        for number, ((_, tables), pages, at) in enumerate(zip(self.groups, plan.found, plan.ends_found, strict=True)):
            mine = rows.table[tables, row]
            mine[:, rows.firsts[number, row] : plan.firsts[number]] = NO_PAGE
            mine[:, at - pages.shape[1] : at] = np.where(pages == NO_PAGE, mine[:, at - pages.shape[1] : at], pages)
        rows.firsts[:, row] = plan.firsts
        for tell in pool.journal.left:
            tell(np.full(len(plan.leaving), row), plan.leaving)
        pool.release(plan.leaving)
        new = pool.allocate(plan.new)
        for mine, _ in parts:
            holes = mine == NO_PAGE
            count = np.count_nonzero(holes)
            mine[holes], new = new[:count], new[count:]
        for (_, tables), before, at, end in zip(self.groups, had, plan.ends_found, plan.ends, strict=True):
            part = rows.table[tables, row, max(before, at) : end]
            part[:] = new[: part.size].reshape(part.shape)
            new = new[part.size :]
        rows.ends[:, row] = plan.ends
        rows.commit(row, plan.committed)
        rows.changed[row] = True
        rows.measure(row)
        return np.concatenate([mine[pages == NO_PAGE] for mine, pages in parts])

    def append(self, rows: Ints) -> bool:
        """Append a page to each of `rows` in each table, and free the pages that fall out of windows.

        Returns False, and changes nothing, if there are too few pages or a row is within a chunk.
        """
        state = self._rows
        in_chunk = np.count_nonzero(state.shortest[rows] != state.num_pages[rows])
        if in_chunk or len(rows) * self.count > self._pool.free_count:
            return False
        self._slide(rows)
        state.append(rows, self._pool.allocate(self.count * len(rows)).reshape(self.count, -1))
        return True

    def publish(self, rows: Ints, columns: Ints, digests: Digests, told: Ints | None) -> tuple[Pages, Digests, Ints]:
        """Publish the full pages at `rows`, `columns`. `digests` are those of their tokens, all distinct.

        If the same content is already published, the row shares that page instead. `told` has, by row, how many tokens
        readers may know; None without leases. Returns the pages that are new in the index, their digests, and, for each
        page of the first table that was shared, its row.
        """
        state, index, count = self._rows, self._pool.index, len(rows)
        where = state.places(rows, columns)
        own = state.entries[where]
        at = own.astype(INDEX)
        self._numbers[at] = self._own_numbers
        new = ((own != NO_PAGE) & ~index.published[at]).ravel().nonzero()[0]  # published pages were found by a lookup
        where, own = where.ravel()[new], own.ravel()[new]
        names = _taken(self.every(digests), new)
        kept, shared = index.publish(own, names), _NO_ROWS
        if kept is not own and np.count_nonzero(duplicate := kept != own):
            # Rows get the shared pages before the duplicates are freed, so that no row ever names a free page.
            self._pool.hold(kept[duplicate])
            state.entries[where] = kept
            state.changed[rows] = True
            of_rows, of_columns = (one[new[duplicate] % count] for one in (rows, columns))
            self._pass_to_readers(of_rows, of_columns, own[duplicate], told)
            self._pool.release(own[duplicate])
            shared = of_rows[new[duplicate] < count]
            own, names = own[~duplicate], names[~duplicate]
            new = new[~duplicate]
        for tell in self._pool.journal.followed:
            first = new[new < count]
            before = np.where(columns[first] > 0, state.table[0, rows[first], columns[first] - 1], NO_PAGE)
            tell(own[: len(first)], before)
        return own, names, shared

    def _pass_to_readers(self, rows: Ints, columns: Ints, pages: Pages, told: Ints | None) -> None:
        """Let the leases take over these pages, which leave their leased rows.

        `told` has, by row, how many tokens readers may know.
        """
        if told is not None:
            for row, column, page in zip(rows.tolist(), columns.tolist(), pages[:, None], strict=True):
                self._leases.replace(row, column, page, int(told[row]))

    def fork(self, parent: int, row: int, full: int, end: int) -> list[tuple[int, int]]:
        """Let `row` share the first `full` pages of row `parent`, and get pages up to `end`.

        Returns the pages to copy, each with its target.
        """
        rows, table = self._rows, self._rows.table
        shared = table[:, parent, :full]
        self._pool.hold(shared[shared != NO_PAGE])
        table[:, row, :full] = shared
        table[:, row, full:end] = self._pool.allocate(self.count * (end - full)).reshape(self.count, -1)
        rows.firsts[:, row], rows.ends[:, row] = rows.firsts[:, parent], end
        rows.changed[row] = True
        rows.measure(row)
        return [*zip(table[:, parent, full].tolist(), table[:, row, full].tolist(), strict=True)]

    # ---- the pages of rows

    def lists(self, row: int, tokens: int, *, first: int, windows: bool) -> tuple[tuple[int, ...], ...]:
        """Returns the pages of the row's first `tokens` tokens, by table, from column `first` on.

        In a table with a window only the pages that the next query sees are listed, or none if `windows` is False.
        """
        end, named = -(-tokens // self._page_size), list[tuple[int, ...]]()
        for number, (group, tables) in enumerate(self.groups):
            begin = max(first, int(self._rows.firsts[number, row]), self._seen(group, tokens))
            begin = begin if windows or group.keeps_all else end
            named += [tuple(pages) for pages in self._rows.table[tables, row, begin:end].tolist()]
        return tuple(named)

    def by_table(self, of_groups: Sequence[int]) -> list[int]:
        """Repeat the value of each group for each of its tables."""
        return [one for group, one in zip(self.groups, of_groups, strict=True) for _ in range(group.num_tables)]

    def needed(self, row: int, digests: Digests, ends: Sequence[int]) -> tuple[Ints, Pages]:
        """Returns the pages of the row's published columns, and the pages needed to resume from `ends`.

        `digests` are those of the columns. The result has the column of each cached page, and the page, without
        duplicates.
        """
        wanted = self._rows.table[:, row, : len(digests)] != NO_PAGE
        for group, tables in self.groups:
            for end in ends:
                wanted[tables, self._seen(group, end * self._page_size) : end] = True
        pages = np.where(wanted, self._find(slice(None), digests), NO_PAGE)
        at = pages.nonzero()
        return at[1], pages[at]

    def width(self) -> float:
        """The number of published pages in all tables, divided by that in the first table."""
        published = self._pool.index.published
        every = np.count_nonzero(published)
        first = every - np.count_nonzero(published & (self._numbers != 0))
        return every / first if first else float(self.count)

    def pages(self, row: int, end: int) -> Pages:
        """Returns the row's pages before column `end`.

        The pages of the first table come first, if it keeps all pages. Those of the other tables follow, column by
        column.
        """
        mine, kept = self._rows.table[:, row, :end], int(self.keeps_prefix)
        every = np.concatenate((mine[:kept].ravel(), mine[kept:].T.ravel()))
        return every[every != NO_PAGE]

    def refuse_lost(self, rows: Rows, starts: Ints) -> None:
        """Raise `InvalidRequestError` if one of `rows` would run from a token whose window has been freed."""
        for number, (group, _) in enumerate(self.groups):
            first = self._rows.firsts[number, rows]
            behind = (group.first_seen(starts) // self._page_size < first).nonzero()[0]
            if behind.size:
                at = int(behind[0])
                raise InvalidRequestError(
                    f"request {self._rows.request_ids[as_rows(rows)[at]]!r}: would run from token {starts[at]}, but "
                    f"the layers of kind {group.kind} ({group.window} tokens) have freed their pages before token "
                    f"{first[at] * self._page_size}: release the request and claim it again"
                )

    def sees(self, row: int, start: int) -> bool:
        """Whether the row has the pages that the query at token `start` sees."""
        rows, before = self._rows, -(-start // self._page_size)
        return int(rows.ends[-1, row]) >= before and all(
            int(rows.firsts[number, row]) <= self._seen(group, start) for number, (group, _) in enumerate(self.groups)
        )

    def check(self) -> None:
        """Raise `InvariantError` if a table lacks pages of a row, or has pages that it should not have."""
        rows = self._rows
        columns = np.arange(rows.table.shape[2], dtype=np.int64)
        for number, (group, tables) in enumerate(self.groups):
            with_page = (columns >= rows.firsts[number][:, None]) & (columns < rows.ends[number][:, None])
            for _, row, column in np.argwhere((rows.table[tables] != NO_PAGE) != with_page)[:1]:
                raise InvariantError(
                    f"request {rows.request_ids[row]!r}: column {column} of the layers of kind {group.kind} "
                    f"contradicts the recorded range of pages, {rows.firsts[number, row]} to {rows.ends[number, row]}"
                )
        if (np.diff(rows.ends, axis=0) > 0).any() or (rows.ends[-1] < rows.committed).any():
            raise InvariantError("a row has pages that its first table does not have, or lacks published ones")

    # ---- inside

    def _slide(self, rows: Ints) -> None:
        """Free the pages that the next queries of `rows` do not see, those of the first row first."""
        state, published = self._rows, self._rows.committed[rows]
        of_row, width = self._leases.of_row, state.width
        leased = [at for at, row in enumerate(rows.tolist()) if row in of_row] if of_row else []
        found: list[tuple[Ints, Pages]] = []  # each page's turn to be freed, and the page
        for firsts, (group, tables) in zip(state.firsts, self.groups, strict=True):
            if group.keeps_all:
                continue
            before = firsts[rows]
            now = group.first_seen(state.cached[rows]) // state.size
            now = np.maximum(before, np.minimum(now, published) if self._caching else now)
            for at in leased:
                told, behind = self._told(group, int(rows[at]))
                self._leave_to_readers(int(rows[at]), tables, max(int(before[at]), told), min(int(now[at]), behind))
            counts = now - before
            at = counts.nonzero()[0]
            if not at.size:
                continue
            columns = before[at]
            if np.count_nonzero(counts[at] != ONE):  # in nearly all steps, each of these rows frees one page
                at = np.repeat(np.arange(len(rows)), counts)
                columns = np.arange(len(at)) + np.repeat(before - np.cumsum(counts) + counts, counts)
            where = state.places(rows[at], columns, tables)
            pages = state.entries[where].ravel()
            state.entries[where] = NO_PAGE
            firsts[rows] = now
            # The last row first, and in each row by column, then by table.
            turns = (columns - at * width) * self._counts + self._own_numbers[tables]
            found.append((turns.ravel(), pages))
        if found:
            turns, pages = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
            for tell in self._pool.journal.left:
                tell(rows[-(turns // (width * self.count))], pages)
            self._pool.release_each(pages[turns.argsort()])

    def _for_readers(
        self, row: int, found: Sequence[Pages], ends_found: Sequence[int], firsts: Sequence[int]
    ) -> Iterator[tuple[TableGroup, int, int]]:
        """Returns the ranges of a leased row's columns whose pages pass to its leases, as `(group, first, last)`.

        Each group has two ranges: pages that readers know and that fall out of a window, and computed pages that are
        replaced by cached ones.
        """
        if row not in self._leases.of_row:
            return
        for number, (of, pages, at, now) in enumerate(zip(self.groups, found, ends_found, firsts, strict=True)):
            last = min(int(self._rows.ends[number, row]), self._leases.last_read(row))
            told, behind = self._told(of.group, row)
            yield of, max(int(self._rows.firsts[number, row]), told), min(now, last, behind)
            yield of, max(at - pages.shape[1], told), min(at, last)

    def _told(self, group: LayerGroup, row: int) -> tuple[int, int]:
        """Returns the columns of a leased row's window that readers may know, as the first one and the end."""
        behind = -(-int(self._leases.told[row]) // self._page_size)
        return self._seen(group, int(self._leases.kept[row])), behind

    def _leave_to_readers(self, row: int, tables: slice, first: int, last: int) -> None:
        """Let the row's leases take over its pages in columns `first` to `last`."""
        for pages in self._rows.table[tables, row, first:last]:
            self._leases.replace(row, first, pages, int(self._rows.cached[row]))

    def _seen(self, group: LayerGroup, position: int) -> int:
        """Returns the first column that the query at `position` sees."""
        return group.first_seen(position) // self._page_size

    def _seen_pages(self, first: int, end: int, digests: Digests) -> tuple[Pages, ...]:
        """Returns, by group, the published pages that a query at column `end` sees.

        `digests` begin at column `first`.
        """
        return tuple(
            self._find(tables, digests[max(0, self._seen(group, end * self._page_size) - first) : end - first])
            for group, tables in self.groups
        )

    def _find(self, tables: slice, digests: Digests) -> Pages:
        """Returns the published page of each digest in each of `tables`: int32 `[tables, len(digests)]`."""
        return self._find_each(self._mix(tables, digests))

    def _find_each(self, mixed: Digests) -> Pages:
        """Returns the published page of each of these digests, `[tables, pages, words]`, which `_mix` has made."""
        return self._pool.index.find(mixed.reshape(-1, mixed.shape[2])).reshape(mixed.shape[:2])

    def _mix(self, tables: slice, digests: Digests) -> Digests:
        """Returns the digests of pages of `tables`, given those of their tokens: uint64 `[tables, pages, words]`."""
        return digests ^ self._mixed[tables]

    def _to_hold(self, group: LayerGroup, indices: ContextIndices, length: int, start: int) -> int:
        """Returns the number of columns that need pages if the request runs from `start`.

        With full attention, these columns hold `length` tokens; with a window, the tokens up to the end of the chunk.
        """
        if not group.keeps_all:
            active = chunk_end(indices, start)
            length = active if active < indices[2] else length
        return -(-length // self._page_size)


def _taken(digests: Digests, at: NDArray[np.intp]) -> Digests:
    """Some of the digests `[tables, pages, words]`: uint64 `[len(at), words]`."""
    return digests.reshape(-1, digests.shape[2]).take(at, axis=0)


def _before_hole(pages: Pages, end: int) -> int:
    """Returns the column of the first hole in `pages`, `[tables, pages]`, which end before column `end`.

    Returns `end` if there is no hole.
    """
    holes = (pages == NO_PAGE).any(axis=0).nonzero()[0]
    return end - pages.shape[1] + int(holes[0]) if holes.size else end


class OneTable(RowTables):
    """One table of full attention. It has pages in all columns, so most of the work can be skipped."""

    is_plain = True

    def nothing(self, first: int) -> Found:
        return Found(first, first, _NONE_FOUND, first) if first else _NOTHING

    def find(self, first: int, digests: Digests, ends: Asked | None = None) -> Found:
        run = self.run(first, digests)
        return run if ends is None else self.shortened(run, digests, ends[: run.num_columns])

    def shortened(self, run: Found, digests: Digests, ends: Asked) -> Found:  # noqa: ARG002 - the run has its pages
        pages = run.pages[0][: last_end(ends)]
        return Found(run.first, run.first + len(pages), (pages,), run.reached)

    def whole(self, digests: Digests, most: int, ends: Asked | None = None) -> tuple[int, list[Pages]]:
        (pages,) = self.find(0, digests[: max(0, most)], ends).pages
        return len(pages), [pages]

    def plan(self, row: int | None, indices: ContextIndices, length: int, start: int, found: Found) -> Reservation:
        if found.slots.size:
            return super().plan(row, indices, length, start, found)
        first, end = found.first, found.end
        needed, count = -(-length // self._page_size), end - first
        have, leaving = 0, _NO_PAGES
        if row is not None:
            have = self._rows.num_pages.item(row)
            if count and have > first:
                leaving = self._rows.pages(row)[first:end].copy()
        behind = max(have, end)
        new = needed - behind if needed > behind else 0
        cached, active = start if count else 0, indices[1]
        if start >= active:
            active = chunk_end(indices, start)
        ends, cost = (max(needed, have),), new + count  # an upper bound, because some found pages may have holders
        return Reservation(
            found.pages, (end,), _FIRST, ends, leaving, new, end, cost, start, active, cached, found.reached
        )

    def by_table(self, of_groups: Sequence[int]) -> list[int]:
        return [*of_groups]

    def fits(self, row: int | None, plan: Reservation, free: int) -> bool:
        if plan.slots.size:
            return super().fits(row, plan, free)
        (found,), (end,) = plan.found, plan.ends_found
        if plan.cost <= free:
            return True
        kept = 0 if row is None else max(0, self._leases.last_read(row) - (end - len(found)))
        freed = self._pool.would_be_freed(plan.leaving[kept:])
        return plan.new + self._pool.would_be_taken(found) - freed <= free

    def least(self, indices: ContextIndices, length: int, start: int) -> int:  # noqa: ARG002 - as above
        return -(-length // self._page_size)

    def most(self, indices: ContextIndices, length: int) -> int:
        return self.least(indices, length, 0)

    def take(self, row: int, plan: Reservation) -> Pages:
        if plan.slots.size:
            return super().take(row, plan)
        rows, pool, (found,), end = self._rows, self._pool, plan.found, plan.committed
        if found.size:
            pool.hold(found)
            if plan.leaving.size:
                if self._leases.of_row:
                    self._leases.replace(row, end - len(found), plan.leaving, int(rows.cached[row]))
                pool.release(plan.leaving)
            rows.table[0, row, end - len(found) : end] = found
            for tell in pool.journal.found:
                tell(found)
        new, last = plan.new, plan.ends[0]
        if new == 1:  # costs a third; usual if all pages but the last one were found
            rows.table[0, row, last - 1] = pool.allocate_one()
        elif new:
            rows.table[0, row, last - new : last] = pool.allocate(new)
        rows.grow(row, last)
        if found.size:
            rows.commit(row, end)
        return _NO_PAGES

    def pages(self, row: int, end: int) -> Pages:
        return self._rows.table[0, row, :end]

    def needed(self, row: int, digests: Digests, ends: Sequence[int]) -> tuple[Ints, Pages]:  # noqa: ARG002 - an end is within the row's pages
        return np.arange(len(digests)), self._rows.pages(row)[: len(digests)]

    def width(self) -> float:
        return 1.0

    def append(self, rows: Ints) -> bool:
        if len(rows) > self._pool.free_count:
            return False
        self._rows.append(rows, self._pool.allocate(len(rows)))
        return True

    def publish(self, rows: Ints, columns: Ints, digests: Digests, told: Ints | None) -> tuple[Pages, Digests, Ints]:
        table = self._rows.table[0]
        own = table[rows, columns]
        kept, shared = self._pool.index.publish(own, digests), _NO_ROWS
        if kept is not own and np.count_nonzero(duplicate := kept != own):
            # Rows get the shared pages before the duplicates are freed, so that no row ever names a free page.
            shared = rows[duplicate]
            self._pool.hold(kept[duplicate])
            table[shared, columns[duplicate]] = kept[duplicate]
            self._rows.changed[rows] = True
            self._pass_to_readers(shared, columns[duplicate], own[duplicate], told)
            self._pool.release(own[duplicate])
            own, digests = own[~duplicate], digests[~duplicate]
            rows, columns = rows[~duplicate], columns[~duplicate]
        for tell in self._pool.journal.followed:
            tell(own, np.where(columns > 0, table[rows, columns - 1], NO_PAGE))
        return own, digests, shared
