"""`FurtherTables`: block tables beside the first one, of layers that keep other tokens, or do not fit into its pages.

A row has one column a page of tokens in each table. A table of a window has pages from the first token on that the
request's next query sees; the columns before that are the null page's. Their pages go back when the request comes for
more. Published ones are idle then, and age by themselves: they are found by the digest of the first table's page with
the table's number mixed in, so that no table finds another's.

A request may go on from the end of a page if each table has what the query there sees. Where a prompt runs in chunks,
these tables have pages up to the end of the chunk that runs, so that a long prompt takes no more than a window and a
chunk; the first table has them for all known tokens.

Where a request is leased, what its readers were told of a window passes to the leases when it falls out.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcache.errors import InvalidRequestError, InvariantError
from kvcache.layer_groups import LayerGroup, LayerTables
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.pages import PagePool
from kvcache.replica.block_table import FurtherImport
from kvcache.replica.context import Context
from kvcache.replica.leases import PageLeases
from kvcache.replica.pages_below import Asked, Below, FromBelow, last_end
from kvcache.replica.rows import BlockRows, Ints, Pages, Rows, as_rows

_NO_PAGES: Pages = np.zeros(0, np.int32)
_MIX = 0x9E3779B97F4A7C15  # odd: no two tables' multiples are equal in 64 bits


class FurtherPlan(NamedTuple):
    """What a reservation does to the further tables of a row."""

    hits: tuple[Pages, ...] = ()  # by group `[tables, pages]`, pages that were found and that the next query sees
    founds: tuple[int, ...] = ()  # by group the column after these, or from which they would have been
    firsts: tuple[int, ...] = ()  # by group the first column that has a page then
    leaving: Pages = _NO_PAGES  # the pages that leave the row, by column
    end: int = 0  # the column after the last that has a page then
    new: int = 0  # pages to be allocated
    cost: int = 0  # free pages that all this takes: below zero where it gives more back


class FurtherTables:
    """The further tables of one replica: those of `rows`, `[tables, rows, columns]`."""

    def __init__(
        self, tables: LayerTables, pool: PagePool, rows: BlockRows, leases: PageLeases, *, caching: bool
    ) -> None:
        further = tables.tables[1:]
        self.count = len(further)
        self.kinds = tables.kinds[1:]
        self.slid = 0  # pages that requests gave back because no later query sees them
        self._pool, self._rows, self._leases, self._caching = pool, rows, leases, caching
        self._page_size = rows.page_size
        # Each group, and which of these tables are its.
        self._groups: list[tuple[LayerGroup, slice]] = []
        for at, table in enumerate(further):
            if self._groups and self._groups[-1][0] is table.group:
                self._groups[-1] = (table.group, slice(self._groups[-1][1].start, at + 1))
            else:
                self._groups.append((table.group, slice(at, at + 1)))
        self.table = rows.further
        self.firsts = np.zeros((len(self._groups), len(rows.request_ids)), np.int64)  # the first column with a page
        self.ends = np.zeros(len(rows.request_ids), np.int64)  # the column after the last one
        self._numbers = pool.index.tables = np.zeros(len(pool.index.published), np.intp)
        self._mixed = np.array([number * _MIX % (1 << 64) for number in range(1, self.count + 1)], np.uint64)

    def longest(self, first: int, digests: Digests, ends: Asked | None = None) -> int:
        """Of pages that the first table has found, after `first` published ones, how many all tables can go on from.

        `ends`: of each page whether a request may go on after it for the sake of all else; None: after each.
        """
        digests = digests if ends is None else digests[: last_end(ends)]
        size, end = self._page_size, first + len(digests)
        needed = [(tables, max(0, self._seen(group, end * size) - first)) for group, tables in self._groups]
        if all((self._find(tables, digests[least:]) != NO_PAGE).all() for tables, least in needed):
            return len(digests)
        return self._longest(self._find(slice(None), digests) != NO_PAGE, first, ends)

    def every(self, digests: Digests) -> Digests:
        """The digests of the pages of all tables, `[tables, pages, words]`, given those of the first one."""
        return np.concatenate((digests[None], self._mix(slice(None), digests)))

    def from_below(self, digests: Digests, below: Below, ends: Asked | None = None) -> FromBelow:
        """The longest prefix of pages with these digests that all tables can go on from with what `below` has of them.

        What a window has let fall is not asked for. `ends` as in `longest`.
        """
        every = self.every(digests)
        pages = self._find_each(every)
        absent = pages == NO_PAGE
        there = ~absent | below(every, absent)
        run = len(digests) if there[0].all() else int(there[0].argmin())
        longest = self._longest(there[1:, :run], 0, ends)
        needed = np.zeros_like(there)
        needed[0, :longest] = True
        for group, tables in self._groups:
            needed[1:][tables, self._seen(group, longest * self._page_size) : longest] = True
        return FromBelow(longest, every, needed & absent, pages.T[(needed & ~absent).T])

    def whole(self, digests: Digests, most: int) -> list[Pages]:
        """The pages of each table, the first one's before the others', of the longest prefix that all can go on from.

        `most` pages at most in all tables together.
        """
        end = len(self._pool.index.match(digests))
        while end := self.longest(0, digests[:end]):
            seen = [(tables, self._seen(group, end * self._page_size)) for group, tables in self._groups]
            further = [pages for tables, first in seen for pages in self._find(tables, digests[first:end])]
            surplus = end + sum(map(len, further)) - most
            if surplus <= 0:
                return [self._pool.index.find(digests[:end]), *further]
            end -= max(1, min(end, surplus // (1 + self.count)))
        return []

    def plan(
        self,
        row: int | None,
        context: Context,
        num_steps: int,
        start: int,
        first: int,
        digests: Digests,
        *,
        imported: bool = False,
    ) -> FurtherPlan:
        """What it takes that the row, or one to come (None), runs on from token `start`; changes nothing.

        `first`: its pages that are published; `digests`: of those that were found after these. `imported`: what is
        before `start` comes from elsewhere: each group looks for itself which of these pages it has, and none takes
        pages that nobody will see; what comes after has pages for all known tokens.
        """
        size = self._page_size
        had = 0 if row is None else int(self.ends[row])
        tokens = context.current_length + num_steps - 1 if imported else _tokens_to_hold(context, num_steps, start)
        end = max(had, -(-tokens // size))
        hits, founds, firsts, new = list[Pages](), list[int](), list[int](), 0
        leaving = np.zeros((self.count, had), np.bool_)
        for number, (group, tables) in enumerate(self._groups):
            before = 0 if row is None else int(self.firsts[number, row])
            now = self._seen(group, start)
            # What is not published yet is kept for `step`; of what comes from elsewhere nothing is here.
            now = max(before, min(now, first + len(digests)) if self._caching and not imported else now)
            from_hits = max(now, first)
            pages = self._find(tables, digests[from_hits - first :])
            if imported and (missing := (pages == NO_PAGE).any(axis=0).nonzero()[0]).size:
                pages = pages[:, : missing[0]]
            found = from_hits + pages.shape[1]
            hits.append(pages)
            founds.append(found)
            leaving[tables, before:now] = True
            leaving[tables, from_hits:found] = True
            firsts.append(now)
            new += (tables.stop - tables.start) * max(0, end - max(had, found))
        gone = _NO_PAGES if row is None else self.table[:, row, :had].T[leaving.T]
        taken = sum(self._pool.would_be_taken(pages.ravel()) for pages in hits)
        freed = gone
        if row in self._leases.of_row:
            for (_, mine), column, last in self._for_readers(row, hits, founds, firsts):
                leaving[mine, column:last] = False
            freed = self.table[:, row, :had].T[leaving.T]
        cost = new + taken - self._pool.would_be_freed(freed)
        return FurtherPlan(tuple(hits), tuple(founds), tuple(firsts), gone, end, new, cost)

    def least(self, context: Context, num_steps: int, start: int) -> int:
        """Pages that the request takes where nothing is found, and it runs from `start`."""
        pages = -(-_tokens_to_hold(context, num_steps, start) // self._page_size)
        return sum((part.stop - part.start) * (pages - self._seen(group, start)) for group, part in self._groups)

    def most(self, context: Context, num_steps: int) -> int:
        """Pages that a request without pages takes at most, whatever is found: from the worst end it may go on from."""
        size, length, known = self._page_size, context.active_length, context.end_idx
        ends: Ints = np.arange(0, known, size)
        active = np.where(ends < context.active_idx, context.active_idx, np.minimum(known, ends + length))
        columns = -(-np.where(active < known, active, known + num_steps - 1) // size)
        return sum(
            (part.stop - part.start) * int((columns - group.first_seen(ends) // size).max())
            for group, part in self._groups
        )

    def hold(self, row: int, plan: FurtherPlan) -> None:
        """Hold what was found and give back what leaves the row. `take` follows; neither can fail."""
        if plan.hits and (hits := np.concatenate([pages.ravel() for pages in plan.hits])).size:
            self._pool.hold(hits)
        if row in self._leases.of_row:
            for (_, tables), first, last in self._for_readers(row, plan.hits, plan.founds, plan.firsts):
                self._leave_to_readers(row, tables, first, last)
        for number, ((_, tables), pages, found) in enumerate(zip(self._groups, plan.hits, plan.founds, strict=True)):
            self.table[tables, row, self.firsts[number, row] : plan.firsts[number]] = NO_PAGE
            self.table[tables, row, found - pages.shape[1] : found] = pages
        self.firsts[:, row] = plan.firsts
        self.slid += len(plan.leaving)
        for tell in self._pool.journal.left:
            tell(np.full(len(plan.leaving), row), plan.leaving)
        self._pool.release(plan.leaving)

    def take(self, row: int, plan: FurtherPlan) -> None:
        """Allocate what is missing."""
        pages, had = self._pool.allocate(plan.new), int(self.ends[row])
        for (_, tables), found in zip(self._groups, plan.founds, strict=True):
            part = self.table[tables, row, max(had, found) : plan.end]
            part[:] = pages[: part.size].reshape(part.shape)
            pages = pages[part.size :]
        self.ends[row] = plan.end
        rows = self._rows
        rows.commit(row, min(int(rows.committed[row]), *plan.founds))
        rows.changed[row] = True
        rows.measure(row)
        rows.capacity[row] = min(int(rows.capacity[row]), plan.end * self._page_size)

    def append(self, rows: Ints) -> bool:
        """One more page for each of `rows` in each table; what fell out of their windows goes.

        False: too few pages for these and the first table's, or a row is in a chunk; nothing has changed.
        """
        ends = self.ends[rows]
        if (ends != self._rows.num_pages[rows]).any() or len(rows) * (self.count + 1) > self._pool.free_count:
            return False
        self._slide(rows)
        pages = self._pool.allocate(self.count * len(rows))
        self.table[:, rows, ends] = pages.reshape(self.count, len(rows))
        self.ends[rows] = ends + 1
        return True

    def publish(self, rows: Ints, columns: Ints, digests: Digests, told: Ints | None = None) -> None:
        """The pages at `rows`, `columns` are full, as those of the first table are that have these `digests`.

        `told`: by row, tokens of which readers were told, where there are any.
        """
        at = self.table[:, rows, columns]
        there = at != NO_PAGE
        own, mixed = at[there], self._mix(slice(None), digests)[there]
        self._numbers[self._rows.table[rows, columns]] = 0
        self._numbers[own] = there.nonzero()[0] + 1
        kept = self._pool.index.publish(own, mixed)
        shared = kept != own
        if shared.any():
            self._pool.hold(kept[shared])
            at[there] = kept
            self.table[:, rows, columns] = at
            self._rows.changed[rows] = True
            if told is not None:
                places = there.nonzero()[1]
                for one in shared.nonzero()[0].tolist():
                    row, column = int(rows[places[one]]), int(columns[places[one]])
                    self._leases.replace(row, column, own[one : one + 1], int(told[row]))
            self._pool.release(own[shared])
            own, mixed = own[~shared], mixed[~shared]
        for tell in self._pool.journal.came:
            tell(own, mixed)

    def fork(self, parent: int, row: int, full: int, end: int) -> list[tuple[int, int]]:
        """Let `row` share the first `full` pages, and have pages up to `end`; each page after these, and its twin."""
        shared = self.table[:, parent, :full]
        self._pool.hold(shared[shared != NO_PAGE])
        self.table[:, row, :full] = shared
        self.table[:, row, full:end] = self._pool.allocate(self.count * (end - full)).reshape(self.count, -1)
        self.firsts[:, row], self.ends[row] = self.firsts[:, parent], end
        return [(int(one[parent, full]), int(one[row, full])) for one in self.table]

    def lists(self, row: int, tokens: int, *, windows: bool) -> tuple[tuple[int, ...], ...]:
        """The row's pages of its first `tokens` tokens, of each table; of a window those that the next query sees.

        Without `windows` none of these.
        """
        end, named = -(-tokens // self._page_size), list[tuple[int, ...]]()
        for number, (group, tables) in enumerate(self._groups):
            first = max(int(self.firsts[number, row]), self._seen(group, tokens))
            first = first if windows or group.kind == "full" else end
            named += [tuple(pages) for pages in self.table[tables, row, first:end].tolist()]
        return tuple(named)

    def imports(self, row: int, plan: FurtherPlan, end: int) -> list[FurtherImport]:
        """What is copied from elsewhere into each table of a row, whose import was planned so, before column `end`."""
        kinds = zip(self.kinds, self.by_table(plan.founds), self.table[:, row], strict=True)
        return [
            FurtherImport(found * self._page_size, pages[found:end].copy(), at_end=kind != "full")
            for kind, found, pages in kinds
        ]

    def by_table(self, of_groups: tuple[int, ...]) -> list[int]:
        """What is of each group, of each of its tables."""
        return [
            one for (_, tables), one in zip(self._groups, of_groups, strict=True) for _ in range(self.count)[tables]
        ]

    def needed(self, row: int, digests: Digests, ends: Sequence[int]) -> tuple[Ints, Pages]:
        """The pages of the row's published columns, of these `digests`, and of what going on from columns `ends` needs.

        As far as they are there: the column of each, and the pages, none of them twice.
        """
        wanted = self.table[:, row, : len(digests)] != NO_PAGE
        for group, tables in self._groups:
            for end in ends:
                wanted[tables, self._seen(group, end * self._page_size) : end] = True
        pages = np.where(wanted, self._find(slice(None), digests), NO_PAGE)
        at = pages.nonzero()
        return at[1], pages[at]

    def width(self) -> float:
        """How many published pages there are for each of the first table."""
        published = self._pool.index.published
        every = np.count_nonzero(published)
        first = every - np.count_nonzero(published & (self._numbers != 0))
        return every / first if first else 1.0 + self.count

    def computed(self, row: int, end: int) -> Pages:
        """The row's pages before column `end`, by column: int32 `[pages]`."""
        part = self.table[:, row, :end].T
        return part[part != NO_PAGE]

    def release(self, row: int) -> None:
        """The row gives its pages back."""
        pages = self.computed(row, int(self.ends[row]))
        self.table[:, row, : self.ends[row]] = NO_PAGE
        self.firsts[:, row] = self.ends[row] = 0
        self._pool.release(pages)

    def refuse_lost(self, rows: Rows, starts: Ints) -> None:
        """Raise `InvalidRequestError` where one of `rows` would run from a token whose window it has given back."""
        for number, (group, _) in enumerate(self._groups):
            first = self.firsts[number, rows]
            behind = (group.first_seen(starts) // self._page_size < first).nonzero()[0]
            if behind.size:
                at = int(behind[0])
                raise InvalidRequestError(
                    f"request {self._rows.request_ids[as_rows(rows)[at]]!r}: runs from token {starts[at]}, its layers "
                    f"of kind {group.kind} and {group.window} tokens have given back what is before token "
                    f"{first[at] * self._page_size}: release it and claim it anew"
                )

    def holders(self) -> Ints:
        """How many rows hold each page: int64 `[num_pages + 1]`."""
        counts = np.bincount(self.table.ravel(), minlength=self._pool.num_pages + 1)
        counts[NO_PAGE] = 0
        return counts

    def mend(self) -> None:
        """The rows of the first table are mended: where they end these end too, and begin behind the last hole."""
        columns = np.arange(self.table.shape[2], dtype=np.int64)
        self.ends[:] = np.minimum(self.ends, self._rows.num_pages)
        inside = columns < self.ends[:, None]
        for number, (_, tables) in enumerate(self._groups):
            whole = (self.table[tables] != NO_PAGE).all(axis=0) & inside
            firsts = np.where(~whole & inside, columns + 1, 0).max(axis=1)
            self.firsts[number] = np.where(self.ends > 0, firsts, 0)
            self.table[tables] *= inside & (columns >= firsts[:, None])

    def sees(self, row: int, start: int) -> bool:
        """Whether the row has what the query at token `start` sees."""
        before = -(-start // self._page_size)
        return int(self.ends[row]) >= before and all(
            int(self.firsts[number, row]) <= self._seen(group, start) for number, (group, _) in enumerate(self._groups)
        )

    def first_unpublished(self) -> Ints:
        """Of each row the column of the first page, of any of these tables, that is not published."""
        columns = np.arange(self.table.shape[2], dtype=np.int64)
        named = (self.table != NO_PAGE) & ~self._pool.index.published[self.table]
        return np.where(named.any(axis=0), columns, len(columns)).min(axis=1)

    def check(self) -> None:
        """Raise `InvariantError` where a table has not the pages that the first table's rows stand for."""
        rows = self._rows
        columns = np.arange(-(-rows.max_seq_len // rows.page_size))
        for number, (group, tables) in enumerate(self._groups):
            with_page = (columns >= self.firsts[number][:, None]) & (columns < self.ends[:, None])
            for _, row, column in np.argwhere((self.table[tables] != NO_PAGE) != with_page)[:1]:
                raise InvariantError(
                    f"request {rows.request_ids[row]!r}: of the layers of kind {group.kind} column {column} has a page "
                    f"or not, and its pages are from {self.firsts[number, row]} to {self.ends[row]}"
                )
            full = with_page & (columns < rows.committed[:, None])
            for _, row, column in np.argwhere(full & ~self._pool.index.published[self.table[tables]])[:1]:
                raise InvariantError(
                    f"request {rows.request_ids[row]!r}: of the layers of kind {group.kind} column {column} "
                    f"is not published, and its first {rows.committed[row]} pages are"
                )
        if (self.ends > rows.num_pages).any() or (self.ends < rows.committed).any():
            raise InvariantError("a row has further pages beyond those of its first table, or not all published ones")

    def _slide(self, rows: Ints) -> None:
        """Give back what the next queries of `rows` do not see, as if row by row: the first row's pages age first."""
        size, published = self._page_size, self._rows.committed[rows]
        of_row = self._leases.of_row
        leased = [at for at, row in enumerate(rows.tolist()) if row in of_row] if of_row else []
        found: list[tuple[Ints, Ints, Ints, Pages]] = []
        for number, (group, tables) in enumerate(self._groups):
            before = self.firsts[number, rows]
            now = group.first_seen(self._rows.cached[rows]) // size
            now = np.maximum(before, np.minimum(now, published) if self._caching else now)
            for at in leased:
                told, behind = self._told(group, int(rows[at]))
                self._leave_to_readers(int(rows[at]), tables, max(int(before[at]), told), min(int(now[at]), behind))
            counts = now - before
            at = np.repeat(np.arange(len(rows)), counts)
            if not at.size:
                continue
            columns = np.arange(len(at)) + np.repeat(before - np.cumsum(counts) + counts, counts)
            mine = self.table[tables]
            pages = mine[:, rows[at], columns]
            mine[:, rows[at], columns] = NO_PAGE
            self.firsts[number, rows] = now
            of_table: Ints = np.repeat(np.arange(int(tables.start), int(tables.stop)), len(at))
            found.append((np.tile(-at, len(pages)), np.tile(columns, len(pages)), of_table, pages.ravel()))
        if found:
            at, columns, of_table, pages = (np.concatenate(part) for part in zip(*found, strict=True))
            self.slid += len(pages)
            for tell in self._pool.journal.left:
                tell(rows[-at], pages)
            self._pool.release_each(pages[np.lexsort((of_table, columns, at))])

    def _for_readers(
        self, row: int, hits: Sequence[Pages], founds: Sequence[int], firsts: Sequence[int]
    ) -> Iterator[tuple[tuple[LayerGroup, slice], int, int]]:
        """What leaves a leased row and passes to its leases: of each group from a column to one, twice.

        What falls out of a window, of which readers were told; and what is computed, and found whole instead.
        """
        last = min(int(self.ends[row]), self._leases.last_read(row))
        for number, (of, pages, found, now) in enumerate(zip(self._groups, hits, founds, firsts, strict=True)):
            told, behind = self._told(of[0], row)
            yield of, max(int(self.firsts[number, row]), told), min(now, last, behind)
            yield of, max(found - pages.shape[1], told), min(found, last)

    def _told(self, group: LayerGroup, row: int) -> tuple[int, int]:
        """The first column of a leased row that readers were told of, and the one after the last."""
        behind = -(-int(self._leases.told[row]) // self._page_size)
        return self._seen(group, int(self._leases.kept[row])), behind

    def _leave_to_readers(self, row: int, tables: slice, first: int, last: int) -> None:
        """The row's leases hold what it has from column `first` to `last`."""
        for pages in self.table[tables, row, first:last]:
            self._leases.replace(row, first, pages, int(self._rows.cached[row]))

    def _seen(self, group: LayerGroup, position: int) -> int:
        """The first column that the query at `position` sees."""
        return int(group.first_seen(np.array(position))) // self._page_size

    def _longest(self, there: Asked, first: int, ends: Asked | None = None) -> int:
        """Of pages after `first` ones, all of them in the first table, how many all tables can go on from.

        `there`: which of them each further table has, `[tables, pages]`; `ends` as in `longest`.
        """
        columns: Ints = np.arange(first, first + int(there.shape[1]))
        size = self._page_size
        # Of each page whether a request may go on after it.
        fits = np.ones(len(columns), np.bool_) if ends is None else ends[: len(columns)].copy()
        for group, tables in self._groups:
            last_missing = np.maximum.accumulate(np.where(there[tables].all(axis=0), -1, columns))
            fits &= last_missing < group.first_seen((columns + 1) * size) // size
        return last_end(fits)

    def _find(self, tables: slice, digests: Digests) -> Pages:
        """The published page of each digest in each of `tables`: int32 `[tables, len(digests)]`."""
        return self._find_each(self._mix(tables, digests))

    def _find_each(self, mixed: Digests) -> Pages:
        """The published page of each of these, `[tables, pages, words]`."""
        return self._pool.index.find(mixed.reshape(-1, mixed.shape[2])).reshape(mixed.shape[:2])

    def _mix(self, tables: slice, digests: Digests) -> Digests:
        """The digests of the pages of `tables`, given those of the first table: uint64 `[tables, pages, words]`."""
        mixed = np.repeat(digests[None], len(self._mixed[tables]), axis=0)
        mixed[:, :, 0] ^= self._mixed[tables, None]
        return mixed


def _tokens_to_hold(context: Context, num_steps: int, start: int) -> int:
    """Tokens that need pages where the request runs from `start`: its chunk's, else all known ones and the steps."""
    active = context.active_idx
    if start >= active:  # all of the chunk was found: the next one is as long
        active = min(context.end_idx, start + context.active_length)
    return active if active < context.end_idx else context.current_length + num_steps - 1
