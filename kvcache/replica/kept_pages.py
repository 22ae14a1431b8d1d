"""`KeptPages`: the pages that rows keep in the block tables of one group of layers, and what a reservation changes.

A *column* is a position in a row of a block table: column 0 is for the page of the request's first `page_size` tokens,
column 1 for the page of the next `page_size` tokens.

    columns    0 ... first ... found_end ... end ...
    page ids   0  0  [ found  ][   new    ]  0  0
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.layer_groups import LayerGroup, Positions, TableGroup
from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.pages_below import Asked
from kvcache.replica.block_table import BlockTable, ImportPart
from kvcache.replica.rows import BlockRows, Ints, Pages, Rows, as_rows

_NO_PAGES: Pages = np.zeros(0, np.int32)
ColumnSet = Rows
"""ColumnSet of a row, in ascending order: an array, or a slice if they are consecutive."""


class ColumnSpan(NamedTuple):
    """The columns in which a row has pages in the tables of one group after a reservation.

    Attributes:
        found: the pages that were found: int32 `[tables, pages]`, or `[pages]` for a single table. `NO_PAGE` stands for
            a page that is restored from the host.
        columns: the columns of the found pages.
        first: the first column that has a page.
        found_end: the column after the last found page.
        end: the column after the last column that has a page.
        fresh: the columns after the found pages that get new pages.
        coming: the found pages that the row does not have yet.
        new: the number of pages to allocate, in all tables of the group.
    """

    found: Pages
    columns: ColumnSet
    first: int
    found_end: int
    end: int
    fresh: ColumnSet
    coming: Pages
    new: int

    @property
    def hole(self) -> int:
        """The first column whose page is not found, at most `found_end`."""
        holes = (self.found == NO_PAGE).any(axis=0).nonzero()[0]
        return int(as_rows(self.columns)[holes[0]]) if holes.size else self.found_end


def counted_from(first: int, columns: ColumnSet) -> ColumnSet:
    """Returns the columns as if column `first` were column 0."""
    return slice(columns.start - first, columns.stop - first) if isinstance(columns, slice) else columns - first


def ranges_of(columns: ColumnSet) -> list[tuple[int, int]]:
    """Returns the columns as ranges: the first column of each, and the column after its last one.

    Examples:
        >>> ranges_of(np.array([0, 1, 5, 6, 7]))
        [(0, 2), (5, 8)]
    """
    if isinstance(columns, slice):
        return [(columns.start, columns.stop)]
    parts = np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1)
    return [(part.item(0), part.item(-1) + 1) for part in parts if part.size]


class KeptPages:
    """A view of the tables of one group in the arrays of `rows`: what each row keeps there.

    This class serves full attention, windows and chunks. The methods below `the rule of a kind` are all that another
    kind of layers may replace.

    Attributes:
        group: the layers, and the rule that says which tokens they see.
        keeps_all: whether a query sees all tokens before it.
        tables: the tables of the group, among all tables of the replica.
        table: their page ids, int32 `[tables, rows, columns]`.
        firsts, ends: for each row, the first column that has a page, and the column after the last one.
        ahead: the name of a page is the digest of the page that comes `ahead` pages later in the prompt.
    """

    ahead = 0

    def __init__(self, of: TableGroup, number: int, rows: BlockRows) -> None:
        self.group: LayerGroup = of.group
        self.tables: slice = of.tables
        self.num_tables = of.num_tables
        self.keeps_all = of.group.keeps_all
        self.table = rows.table[self.tables]
        self.firsts, self.ends = rows.firsts[number], rows.ends[number]
        self._rows, self._page_size = rows, rows.page_size

    # ---- the rule of a kind

    def resumes_beyond(self, row: int, pages: int) -> bool:  # noqa: ARG002 - true after any page
        """Whether the row may resume from a token after its first `pages` pages, with cached pages."""
        return True

    def kept(self, first: int, end: int, start: int = 0) -> ColumnSet:
        """Returns the columns from `start` on in which a row has pages.

        `first` is the first column that the row keeps by the rule of its layers. Its pages end before column `end`.
        """
        return slice(min(end, max(first, start)), end)

    def num_kept(self, first: Positions, end: Positions) -> Positions:
        """Returns the number of columns of `kept`, for one row or for several."""
        return end - first

    def leave_from(self, first: Positions) -> Positions:
        """Returns the first column whose page leaves a row when `firsts` moves from `first` to a later column."""
        return first

    def lacks(self, rows: Rows, positions: Ints) -> NDArray[np.bool_]:
        """Returns a mask, bool `[rows]`: whether a row has freed pages that a query at its position sees."""
        lacking: NDArray[np.bool_] = self.seen(positions) < self.firsts[rows]
        return lacking

    def names(self, digests: Digests) -> Digests:
        """Returns the names of pages whose tokens have these `digests`, before the index of the table is mixed in."""
        return digests

    def named(self, row: int, tokens: int, first: int, *, windows: bool) -> list[tuple[int, ...]]:
        """Returns the pages of the row's first `tokens` tokens, one list for each table, from column `first` on.

        Layers that do not see all tokens name only the pages that the next query sees; without `windows`, none.
        """
        columns = self.named_columns(row, tokens, windows=windows, start=first)
        return [tuple(pages) for pages in self.table[:, row, columns].tolist()]

    def refusal(self, count: int, table: BlockTable, first: int) -> str:
        """Returns why the `count` pages that `table` names for this group do not suffice; empty if they do.

        The pages from token `first` on are needed.
        """
        begins = (-(-table.num_tokens // table.page_size) - count) * table.page_size
        if self.keeps_all or first >= min(begins, table.num_tokens):
            return ""
        return f"names pages of {self.group.name} from token {begins} on; those from token {first} on are needed"

    def parts(self, row: int, span: ColumnSpan, end: int) -> list[ImportPart]:
        """Returns what an import writes before column `end`, one part for each table: the pages that were not found."""
        first = min(span.found_end, end)
        pages = self.table[:, row, first:end].copy()
        return [ImportPart(first * self._page_size, of_table, not self.keeps_all) for of_table in pages]

    def unseen(self, part: ImportPart, position: int) -> ImportPart:
        """Returns an import's part without the pages that a query at token `position` does not see."""
        first = self.seen(position)
        count = first - part.first // self._page_size
        if count <= 0:
            return part
        return dataclasses.replace(part, first=first * self._page_size, dst_pages=part.dst_pages[count:])

    # ---- which columns

    def seen(self, position: Positions) -> Positions:
        """Returns the first column that a query at each position sees."""
        return position * 0 if self.keeps_all else self.group.first_seen(position) // self._page_size

    def seen_columns(self, end: int, start: int = 0) -> ColumnSet:
        """Returns the columns from `start` on that a query at the first token of column `end` sees."""
        return self.kept(min(end, self.seen(end * self._page_size)), end, start)

    def shared(self, computed: int) -> int:
        """Returns how many columns, from the first on, a fork after `computed` tokens shares with its parent.

        Both write to the page of their next token. If the next token decides the KV before it, too, both compute the KV
        of the last token again.
        """
        return (computed - self.ahead) // self._page_size

    def named_columns(self, row: int, tokens: int, *, windows: bool, start: int = 0) -> ColumnSet:
        """Returns the columns from `start` on whose pages `named` returns."""
        end = -(-tokens // self._page_size)
        if not windows and not self.keeps_all:
            return slice(end, end)
        return self.kept(max(self.firsts.item(row), self.seen(tokens)), end, start)

    # ---- reservations

    def plan(
        self,
        row: int | None,
        start: int,
        found: Pages,
        columns: ColumnSet,
        prefix_end: int,
        needed: int,
        *,
        keeps: bool,
    ) -> ColumnSpan:
        """Returns the columns that have pages if the row's request runs from token `start`.

        `row` is None for a request without a row. `found` are the pages in `columns` that were found for a prefix up to
        column `prefix_end`. The request needs pages up to column `needed`. With `keeps`, pages that are not published
        yet stay until `step` has published them.
        """
        before, had = (0, 0) if row is None else (self.firsts.item(row), self.ends.item(row))
        now = self.seen(start)
        first = max(before, min(now, prefix_end) if keeps else now)
        return self.span(row, found, columns, first, max(first, prefix_end), max(had, needed))

    def span(
        self, row: int | None, found: Pages, columns: ColumnSet, first: int, found_end: int, end: int
    ) -> ColumnSpan:
        """Returns the span from column `first` to `end` with the `found` pages, and what it takes."""
        had = 0 if row is None else self.ends.item(row)
        fresh = self.kept(first, end, max(had, found_end))
        coming, new = _NO_PAGES, self.table[:, 0, fresh].size
        if found.size:
            lacks = found == NO_PAGE
            comes = ~lacks
            if had:
                own = self.table[:, row, columns]
                comes &= found != own
                # If only a lower tier has a page, its content is restored into the row's own page.
                lacks &= own == NO_PAGE
            coming, new = found[comes], new + int(np.count_nonzero(lacks))
        return ColumnSpan(found, columns, first, found_end, end, fresh, coming, new)

    def leaving(self, row: int, span: ColumnSpan, num_columns: int) -> Asked:
        """Returns a mask of the pages that leave the row, bool `[tables, num_columns]`."""
        leaves = np.zeros((self.num_tables, num_columns), np.bool_)
        leaves[:, self.leave_from(0) : span.first] = True
        columns = as_rows(span.columns)
        columns = columns[columns < num_columns]
        found, own = span.found[:, : len(columns)], self.table[:, row, columns]
        leaves[:, columns] |= (found != NO_PAGE) & (found != own)
        return leaves & (self.table[:, row, :num_columns] != NO_PAGE)

    def take(self, row: int, span: ColumnSpan) -> None:
        """Put the found pages into the row, and remove its pages before column `first`."""
        if self.ends.item(row):
            self.table[:, row, self.leave_from(self.firsts.item(row)) : span.first] = NO_PAGE
        if span.found.size:
            own = self.table[:, row, span.columns]
            self.table[:, row, span.columns] = np.where(span.found != NO_PAGE, span.found, own)
        self.firsts[row] = span.first

    def fill(self, row: int, span: ColumnSpan, new: Pages) -> tuple[Pages, Pages]:
        """Put `new` pages into the columns of the span that have none.

        Returns the pages that the caller must restore, and the `new` pages that were not needed.
        """
        restored = new[:0]
        if span.found.size:
            mine = self.table[:, row, span.columns]
            holes = mine == NO_PAGE
            count = np.count_nonzero(holes)
            mine[holes], new = new[:count], new[count:]
            self.table[:, row, span.columns] = mine
            restored = mine[span.found == NO_PAGE]
        count = self.table[:, row, span.fresh].size
        self.table[:, row, span.fresh] = new[:count].reshape(self.num_tables, -1)
        self.ends[row] = span.end
        return restored, new[count:]

    # ---- imports and checks

    def give_back(self, row: int, first: int) -> Pages:
        """Remove the row's pages before column `first`, and return them in the order of the columns."""
        before, first = self.leave_from(self.firsts.item(row)), min(first, self.ends.item(row))
        pages = self.table[:, row, before:first].T.flatten()
        self.table[:, row, before:first] = NO_PAGE
        self.firsts[row] = first
        return pages

    def wrong(self, columns: Ints) -> tuple[int, int] | None:
        """Returns a row and a column whose page contradicts `firsts` and `ends`; None if none does."""
        before = (columns >= self.leave_from(0)) & (columns < self.firsts[:, None])
        with_page = ~before & (columns < self.ends[:, None])
        odd = np.argwhere((self.table != NO_PAGE) != with_page)
        return (int(odd[0, 1]), int(odd[0, 2])) if len(odd) else None
