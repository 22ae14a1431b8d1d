"""`OneTable`: the block tables of a replica whose layers all have full attention."""

from collections.abc import Sequence

import numpy as np

from kvcache.pool.index import Digests
from kvcache.pool.pages_below import Asked, last_end
from kvcache.replica.context import ContextIndices, chunk_end
from kvcache.replica.kept_pages import ColumnSpan
from kvcache.replica.resume import Found, Reservation
from kvcache.replica.rows import Ints, Pages
from kvcache.replica.tables import RowTables

_NO_PAGES: Pages = np.zeros(0, np.int32)


class OneTable(RowTables):
    """A single table of full attention. It has pages in all columns, so most of the work can be skipped."""

    is_plain = True

    def resumes_beyond(self, row: int | None, pages: int) -> bool:  # noqa: ARG002 - full attention resumes after any page
        return True

    def find(self, first: int, digests: Digests, ends: Asked | None = None) -> Found:
        run = self.run(first, digests)
        return run if ends is None else self.shortened(run, digests, ends[: run.num_columns])

    def shortened(self, run: Found, digests: Digests, ends: Asked) -> Found:  # noqa: ARG002 - the run has its pages
        pages = run.pages[0][: last_end(ends)]
        return Found(run.first, run.first + len(pages), (pages,), (), run.reached)

    def plan(self, row: int | None, indices: ContextIndices, length: int, start: int, found: Found) -> Reservation:
        if found.slots.size:
            return super().plan(row, indices, length, start, found)
        first, end = found.first, found.end
        needed, count = -(-length // self._page_size), end - first
        have, leaving = 0, _NO_PAGES
        if row is not None:
            have = self.rows.num_pages_of[row]
            if count and have > first:
                leaving = self.rows.pages(row)[first:end].copy()
        behind = max(have, end)
        new = needed - behind if needed > behind else 0
        cached, active = start if count else 0, indices[1]
        if start >= active:
            active = chunk_end(indices, start)
        cost, pool = new + count, self.pool
        # Without found pages this is exact. Otherwise it is an upper bound, because a found page that another request
        # holds takes no free page. Nearly always it is small enough, and the exact number takes longer.
        if count and cost > pool.free_count - pool.beside:
            known = () if row is None else self._leases.known(row, 0)  # a table of full attention has one range at most
            kept = max(0, known[0][1] - first) if known else 0
            cost = new + pool.would_be_taken(found.pages[0]) - pool.would_be_freed(leaving[kept:])
        (pages,) = found.pages
        span = ColumnSpan(pages, slice(first, end), 0, end, max(needed, have), slice(behind, needed), pages, new)
        return Reservation((span,), pages, leaving, new, end, cost, start, active, cached, found.reached)

    def take(self, row: int, plan: Reservation) -> Pages:
        if plan.slots.size:
            return super().take(row, plan)
        rows, pool, (found, _, _, end, last, *_) = self.rows, self.pool, plan.spans[0]
        if found.size:
            pool.hold(found)
            if plan.leaving.size:
                self._leases.replace(row, 0, end - len(found), plan.leaving)
                pool.release(plan.leaving)
            rows.table[0, row, end - len(found) : end] = found
            for tell in pool.journal.found:
                tell(found)
        new = plan.new
        if new == 1:  # a growing conversation; `allocate_one` takes a third of the time of `allocate`
            rows.table[0, row, last - 1] = pool.allocate_one()
        elif new:
            rows.table[0, row, last - new : last] = pool.allocate(new)
        rows.grow(row, last)
        if found.size:
            rows.commit(row, end)
        return _NO_PAGES

    def pages(self, row: int, end: int) -> Pages:
        return self.rows.table[0, row, :end]

    def needed(self, row: int, digests: Digests, ends: Sequence[int]) -> tuple[Ints, Pages]:  # noqa: ARG002 - an end is within the row's pages
        return np.arange(len(digests)), self.rows.pages(row)[: len(digests)]

    def width(self) -> float:
        return 1.0

    def _unpublished(self, rows: Ints, columns: Ints, digests: Digests) -> tuple[Ints, Pages, Digests]:
        where = rows * self.rows.width + columns
        return where, self.rows.entries[where], digests
