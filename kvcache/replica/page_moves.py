"""`ReplicaPageMoves`: moves held pages to make room for a slab, and replaces their ids wherever they are recorded."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.pages import PageMoves
from kvcache.replica.replica import Replica
from kvcache.replica.rows import Pages, Rows


class ReplicaPageMoves(PageMoves):
    """Moves pages of one replica, in all its block tables. `copy` copies pages to other pages on all shards.

    A page is not moved while a running model, or a reader of a block table, knows its id.
    """

    def __init__(self, replica: Replica, copy: Callable[[Pages, Pages], None]) -> None:
        self._replica = replica
        self._copy = copy
        count = len(replica.rows.request_ids)
        self._runs, self._told = np.zeros(count, np.bool_), np.zeros(count, np.bool_)

    def claimed(self, row: int) -> None:
        self._runs[row] = self._told[row] = False

    def fetched(self, rows: Rows | list[int]) -> None:
        self._runs[rows] = True

    def stepped(self, rows: Rows) -> None:
        self._runs[rows] = False

    def told(self, row: int) -> None:
        self._told[row] = True

    def staying(self) -> NDArray[np.bool_]:
        """A mask of the pages that cannot be moved.

        These are pages that something besides rows holds or writes, and pages of a row that a model runs, or that has a
        lease, an import or an exported block table.
        """
        pool = self._replica.pool
        by_rows = np.bincount(np.concatenate(self._pages_of_rows()), minlength=pool.num_pages + 1)
        stays = (pool.holders != by_rows) | (pool.writers > 0)
        known = np.flatnonzero(self._runs | self._told).tolist()
        for row in (*self._replica.leases.of_row, *self._replica.imports.of_row, *known):
            stays[self._pages_of(row)] = True
        stays &= (pool.holders > 0) | (pool.writers > 0)
        return stays

    def move(self, sources: Pages, targets: Pages) -> None:
        """Copy the pages `sources` to the pages `targets`.

        Then replace the ids of `sources` in the rows and in the prefix index.
        """
        self._copy(sources, targets)
        rows, index = self._replica.rows, self._replica.pool.index
        renamed = np.arange(self._replica.pool.num_pages + 1, dtype=np.int32)
        renamed[sources] = targets
        moves = np.zeros(len(renamed), np.bool_)
        moves[sources] = True
        claimed = np.array([-1, *rows.row_of.values()], np.int64)
        of_rows = self._pages_of_rows()
        ends = np.cumsum([*map(len, of_rows)])
        # One test for the pages of all rows takes half the time of one test for each row.
        found = np.flatnonzero(moves[np.concatenate(of_rows)])
        moved: list[int] = claimed[np.unique(np.searchsorted(ends, found, "right"))].tolist()
        for row in moved:
            own = rows.table[:, row, : rows.num_pages[row]]
            own[:] = renamed[own]
        rows.changed[moved] = True
        index.tables[targets] = index.tables[sources]
        published = index.published[sources]
        index.rename(sources[published], targets[published])

    def _pages_of_rows(self) -> list[Pages]:
        """Returns the pages of each claimed row. An empty array comes first, because numpy joins at least one array."""
        return [np.zeros(0, np.int32), *map(self._pages_of, self._replica.rows.row_of.values())]

    def _pages_of(self, row: int) -> Pages:
        """The pages of a row in all tables."""
        return self._replica.tables.pages(row, self._replica.rows.num_pages.item(row))
