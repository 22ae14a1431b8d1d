"""Attention sinks: layers whose queries see a window and the first tokens of the prompt.

columns     0     1     2     3     4     5
page ids   [4]    0     0    [7]   [2]   [9]
sinks   └ freed ┘  └─── window ──►
"""

import dataclasses
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvcache.arguments import whole
from kvcache.layer_groups import LayerGroup, Positions, TableGroup
from kvcache.pool.index import NO_PAGE
from kvcache.replica.block_table import BlockTable, ImportPart, PageCopy
from kvcache.replica.kept_pages import ColumnSet, ColumnSpan, KeptPages
from kvcache.replica.rows import BlockRows, Ints, Pages, Rows


@dataclass(frozen=True, init=False)
class SinkGroup(LayerGroup):
    """Layers whose queries see the last `window` tokens, and the first `sinks` tokens.

    A row keeps the pages of the first `sinks` tokens, and the pages of the window. Between them, the lookup table of
    `fetch` has the null page, and an attention kernel must mask the tokens. An exported `BlockTable` leaves them out.

    Examples:
        >>> group = SinkGroup(layers=(0, 1), window=32, sinks=4)
        >>> group.name, group.first_seen(100), group.most_pages(tokens=1000, page_size=16)
        ('sinks 4 window 32', 69, 4)
    """

    sinks: int = 0

    def __init__(self, layers: tuple[int, ...], window: int, sinks: int) -> None:
        super().__init__("window", layers, window)  # checks the layers and the window
        object.__setattr__(self, "kind", "sinks")
        object.__setattr__(self, "sinks", whole("sinks", sinks, 1))

    @property
    def name(self) -> str:
        return f"sinks {self.sinks} window {self.window}"

    def good_ends(self, there: NDArray[np.bool_], first: int, page_size: int) -> NDArray[np.bool_]:
        count = max(0, -(-self.sinks // page_size) - first)
        missing = np.flatnonzero((~there[:, :count]).any(axis=0))
        good = super().good_ends(there, first, page_size)
        if missing.size:
            good[missing.item(0) :] = False
        return good

    def most_pages(self, tokens: int, page_size: int, step_tokens: int = 1) -> int:
        pages = super().most_pages(tokens, page_size, step_tokens)
        return min(-(-tokens // page_size), pages + -(-self.sinks // page_size))


class KeptSinks(KeptPages):
    """The pages of a `SinkGroup`: those of the first columns, which never leave, and those of a window."""

    def __init__(self, of: TableGroup, number: int, rows: BlockRows) -> None:
        super().__init__(of, number, rows)
        self._sinks = -(-cast("SinkGroup", of.group).sinks // rows.page_size)  # columns

    def kept(self, first: int, end: int, start: int = 0) -> ColumnSet:
        if first <= self._sinks:
            return slice(min(start, end), end)
        return np.r_[min(start, self._sinks) : self._sinks, min(end, max(first, start)) : end]

    def num_kept(self, first: Positions, end: Positions) -> Positions:
        return cast("Positions", end - first + np.minimum(first, self._sinks))

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
        span = super().plan(row, start, found, columns, prefix_end, needed, keeps=keeps)
        # Pages of sinks that came from a lower tier are before the window, and not published yet.
        if prefix_end < self._sinks:
            return self.span(row, found, columns, span.first, prefix_end, span.end)
        return span

    def leave_from(self, first: Positions) -> Positions:
        return cast("Positions", np.maximum(first, self._sinks))

    def lacks(self, rows: Rows, positions: Ints) -> NDArray[np.bool_]:
        return super().lacks(rows, positions) & (self.firsts[rows] > self._sinks)

    def refusal(self, count: int, table: BlockTable, first: int) -> str:
        if table.page_size != self._page_size:
            return (
                f"has pages of {table.page_size} tokens; layers with attention sinks are imported only in pages of "
                f"{self._page_size}"
            )
        if count < min(self._sinks, every := -(-table.num_tokens // self._page_size)):
            return f"names {count} pages of {self.group.name}, which has {self._sinks} pages of sinks"
        if count == every:
            return ""
        return super().refusal(count - self._sinks, table, max(first, self.seen(table.num_tokens) * self._page_size))

    def parts(self, row: int, span: ColumnSpan, end: int) -> list[ImportPart]:
        plain = super().parts(row, span, end)
        return [SinkImportPart(part.first, part.dst_pages, at_end=True, sinks=self._sinks) for part in plain]

    def unseen(self, part: ImportPart, position: int) -> ImportPart:
        begins, first = part.first // self._page_size, self.seen(position)
        if begins >= self._sinks or first <= self._sinks:
            return super().unseen(part, position) if begins >= self._sinks else part
        pages = part.dst_pages.copy()
        pages[self._sinks - begins : first - begins] = NO_PAGE
        return dataclasses.replace(part, dst_pages=pages)


@dataclass(eq=False, slots=True)
class SinkImportPart(ImportPart):
    """The part of an import for a table with sinks: the pages of both managers, with the null page where none is kept.

    It is copied at once, at the end, from a source whose pages have the same size.
    """

    sinks: int = 0  # the number of columns of sinks

    @property
    def written(self) -> Pages:
        return self.dst_pages[self.dst_pages != NO_PAGE]

    def named(self, pages: tuple[int, ...], num_tokens: int, page_size: int) -> Pages | None:
        missing = -(-num_tokens // page_size) - len(pages)
        every = (*pages[: self.sinks], *[NO_PAGE] * missing, *pages[self.sinks :]) if pages and missing > 0 else pages
        return ImportPart.named(self, every, num_tokens, page_size)

    def copy_from(self, token: int, page_size: int, src_page_size: int) -> PageCopy:
        dst, src, (_, stop) = ImportPart.copy_from(self, token, page_size, src_page_size)
        there = np.asarray(src)
        here = np.asarray(dst)[: len(there)]
        held = here != NO_PAGE
        # Pages that no side keeps are left out, as if their tokens did not exist.
        return PageCopy(here[held], there[held], (0, max(0, stop - token - page_size * int(np.sum(~held)))))

    def copy_of(self, table: BlockTable, pages: tuple[int, ...], pending: object) -> PageCopy:  # noqa: ARG002 - only the first source is read
        return PageCopy((), (), (0, 0))
