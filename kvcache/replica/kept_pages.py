"""`KeptPages`: the pages that rows keep in the block tables of one group of layers, and what a reservation changes.

A *column* is a position in a row of a block table: column 0 is for the page of the request's first `page_size` tokens,
column 1 for the page of the next `page_size` tokens.

    columns    0 ... first ... found_end ... end ...
    page ids   0  0  [ found  ][   new    ]  0  0
"""

from typing import NamedTuple

import numpy as np

from kvcache.layer_groups import LayerGroup, TableGroup
from kvcache.pool.index import NO_PAGE
from kvcache.pool.pages_below import Asked
from kvcache.replica.block_table import ImportPart
from kvcache.replica.context import ContextIndices, chunk_end
from kvcache.replica.rows import BlockRows, Ints, Pages


class ColumnSpan(NamedTuple):
    """The columns in which a row has pages in the tables of one group after a reservation.

    Attributes:
        found: the pages that were found: int32 `[tables, pages]`, or `[pages]` for a single table. They take the last
            columns before `found_end`. `NO_PAGE` stands for a page that is restored from the host.
        first: the first column that has a page.
        found_end: the column after the last found page.
        end: the column after the last column that has a page.
    """

    found: Pages
    first: int
    found_end: int
    end: int

    @property
    def columns(self) -> slice:
        """The columns of the found pages."""
        return slice(self.found_end - self.found.shape[-1], self.found_end)

    @property
    def hole(self) -> int:
        """The first column whose page is not found, at most `found_end`."""
        holes = (self.found == NO_PAGE).any(axis=0).nonzero()[0]
        return self.columns.start + int(holes[0]) if holes.size else self.found_end


class KeptPages:
    """A view of the tables of one group in the arrays of `rows`: what each row keeps there.

    Attributes:
        group: the layers, and the rule that says which tokens they see.
        tables: the tables of the group, among all tables of the replica.
        table: their page ids, int32 `[tables, rows, columns]`.
        firsts, ends: for each row, the first column that has a page, and the column after the last one.
    """

    def __init__(self, of: TableGroup, number: int, rows: BlockRows) -> None:
        self.group: LayerGroup = of.group
        self.tables: slice = of.tables
        self.num_tables = of.num_tables
        self.table = rows.table[self.tables]
        self.firsts, self.ends = rows.firsts[number], rows.ends[number]
        self._page_size = rows.page_size

    def seen(self, position: int) -> int:
        """Returns the first column that a query at token `position` sees."""
        return self.group.first_seen(position) // self._page_size

    def sees(self, row: int, position: int) -> bool:
        """Whether the row still has the first page that a query at token `position` sees."""
        return self.firsts.item(row) <= self.seen(position)

    def until(self, indices: ContextIndices, length: int, start: int) -> int:
        """Returns the column after the last column that needs a page if the request runs from token `start`.

        With full attention, pages are needed for `length` tokens. With a window, pages are needed up to the end of the
        chunk.
        """
        if not self.group.keeps_all:
            active = chunk_end(indices, start)
            length = active if active < indices[2] else length
        return -(-length // self._page_size)

    # ---- reservations

    def plan(
        self, row: int | None, indices: ContextIndices, length: int, start: int, found: Pages, end: int, *, keeps: bool
    ) -> ColumnSpan:
        """Returns the columns that have pages if the row's request runs from token `start`.

        `row` is None for a request without a row. `found` are the pages that were found before column `end`. With
        `keeps`, pages that are not published yet stay until `step` has published them.
        """
        before, had = (0, 0) if row is None else (self.firsts.item(row), self.ends.item(row))
        now = self.seen(start)
        first = max(before, min(now, end) if keeps else now)
        return ColumnSpan(found, first, max(first, end), max(had, self.until(indices, length, start)))

    def new(self, row: int | None, span: ColumnSpan) -> int:
        """Returns the number of pages to allocate for the span."""
        had = 0 if row is None else self.ends.item(row)
        new = self.num_tables * max(0, span.end - max(had, span.found_end))
        missing = span.found == NO_PAGE
        if row is not None and had:
            # If only a lower tier has a page, its content is restored into the row's own page.
            missing &= self.table[:, row, span.columns] == NO_PAGE
        return new + int(np.count_nonzero(missing))

    def leaving(self, row: int, span: ColumnSpan, num_columns: int) -> Asked:
        """Returns a mask of the pages that leave the row, bool `[tables, num_columns]`."""
        leaves = np.zeros((self.num_tables, num_columns), np.bool_)
        leaves[:, : span.first] = True
        replaced = leaves[:, span.columns]
        own = self.table[:, row, span.columns]
        replaced |= ((span.found != NO_PAGE) & (span.found != own))[:, : replaced.shape[1]]
        return leaves & (self.table[:, row, :num_columns] != NO_PAGE)

    def come(self, row: int, span: ColumnSpan) -> Pages:
        """Returns the found pages that the row does not have yet."""
        return span.found[(span.found != NO_PAGE) & (span.found != self.table[:, row, span.columns])]

    def take(self, row: int, span: ColumnSpan) -> None:
        """Put the found pages into the row, and remove its pages before column `first`."""
        self.table[:, row, self.firsts.item(row) : span.first] = NO_PAGE
        np.copyto(self.table[:, row, span.columns], span.found, where=span.found != NO_PAGE)
        self.firsts[row] = span.first

    def fill(self, row: int, span: ColumnSpan, new: Pages) -> tuple[Pages, Pages]:
        """Put `new` pages into the columns of the span that have none.

        Returns the pages that the caller must restore, and the `new` pages that were not needed.
        """
        mine = self.table[:, row, span.columns]
        holes = mine == NO_PAGE
        count = np.count_nonzero(holes)
        mine[holes], new = new[:count], new[count:]
        after = self.table[:, row, max(self.ends.item(row), span.found_end) : span.end]
        after[:] = new[: after.size].reshape(after.shape)
        self.ends[row] = span.end
        return mine[span.found == NO_PAGE], new[after.size :]

    # ---- block tables, imports and checks

    def parts(self, row: int, span: ColumnSpan, end: int) -> list[ImportPart]:
        """Returns what an import writes before column `end`, one part for each table: the pages that were not found."""
        first = min(span.found_end, end)
        pages = self.table[:, row, first:end].copy()
        return [ImportPart(first * self._page_size, of_table, not self.group.keeps_all) for of_table in pages]

    def give_back(self, row: int, first: int) -> Pages:
        """Remove the row's pages before column `first`, and return them in the order of the columns."""
        before, first = self.firsts.item(row), min(first, self.ends.item(row))
        pages = self.table[:, row, before:first].T.flatten()
        self.table[:, row, before:first] = NO_PAGE
        self.firsts[row] = first
        return pages

    def named(self, row: int, tokens: int, first: int, *, windows: bool) -> list[tuple[int, ...]]:
        """Returns the pages of the row's first `tokens` tokens, one list for each table, from column `first` on.

        Layers that do not see all tokens name only the pages that the next query sees; without `windows`, none.
        """
        end = -(-tokens // self._page_size)
        begin = max(first, self.firsts.item(row), self.seen(tokens))
        begin = begin if windows or self.group.keeps_all else end
        return [tuple(pages) for pages in self.table[:, row, begin:end].tolist()]

    def wrong(self, columns: Ints) -> tuple[int, int] | None:
        """Returns a row and a column whose page contradicts `firsts` and `ends`; None if none does."""
        with_page = (columns >= self.firsts[:, None]) & (columns < self.ends[:, None])
        odd = np.argwhere((self.table != NO_PAGE) != with_page)
        return (int(odd[0, 1]), int(odd[0, 2])) if len(odd) else None
