"""The rows of a replica's running requests: their block tables in memory, their progress, and token counts."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.errors import InvalidRequestError
from kvcache.layer_groups import TableGroup
from kvcache.pool.index import NO_PAGE, Pages
from kvcache.replica.context import NEVER
from kvcache.types import RequestID
from kvcache.unmoved import Unmoved
from kvcache.weights import Weights

Ints = NDArray[np.int64]
Rows = Ints | slice
"""Rows of a block table: an array, or a slice if they are consecutive."""
ONE = np.array(1)  # an array, because numpy takes twice as long with a Python int


def as_rows(rows: Rows) -> Ints:
    return np.arange(rows.start, rows.stop, dtype=np.int64) if isinstance(rows, slice) else rows


def rows_at(rows: Rows, at: NDArray[np.intp]) -> Ints:
    """Returns the rows at the positions `at` in `rows`."""
    if isinstance(rows, slice):
        return at + rows.start if rows.start else at
    return rows[at]


class Filled(NamedTuple):
    """Full pages of computed tokens: pages `firsts[i]` to `lasts[i]` (excluded) of `rows[i]`, and their digests."""

    rows: Ints
    firsts: Ints
    lasts: Ints
    digests: NDArray[np.uint64]


class AllRows:
    """Arrays over the rows of all replicas, for steps of a batch.

    The index of a row is its place: `replica * rows + row`.
    """

    def __init__(
        self, replicas: int, rows: int, page_size: int, *, caching: bool = True, weights: Weights | None = None
    ) -> None:
        self.replicas, self.rows, self.page_size, self.caching = replicas, rows, page_size, caching
        self.weights = weights or Weights()  # the version of the weights, which names pages
        # For each place, the number of tokens for which its row has pages. It is -1 while an import is pending, because
        # the row's pages must not be used then. numpy code writes this array. Calls for a single request read it
        # through a memoryview, which is faster. The last entry, at place -1, belongs to no row.
        self.capacity, self.capacity_of = _numbers(replicas * rows, 0)
        # for each row, the number of tokens whose KV was cached at the last `step`
        self.cached: Ints = np.zeros(replicas * rows, np.int64)
        self.cached_of = self.cached.data
        # for each row, the number of computed tokens at which its next page is full; `NEVER` if no page is published
        self.commit_at, self.commit_at_of = _numbers(replicas * rows, page_size if caching else NEVER)
        # For each place, what its request must do because the weights changed (`MUST`). Until it has, its
        # capacity is -1, as for a pending import, so that no quick way passes it by.
        self.stale: NDArray[np.int8] = np.zeros(replicas * rows, np.int8)
        # For each place, the start of its context if the context counts along (`TextContext.count_along`); `NEVER` or
        # more if the context must be read. The last entry, at place -1, belongs to no row.
        self.starts, self.start_of = _numbers(replicas * rows, NEVER)

    def slack(self, places: Rows, ends: Ints) -> int:
        """Returns by how many tokens each request at `places` can grow before any of these requests needs a page."""
        return least(self.capacity[places], ends)

    def due(self, places: Rows, starts: Ints) -> int:
        """Returns how many tokens each request at `places` can compute before any of these requests fills a page."""
        return least(self.commit_at[places], starts)


def _numbers(count: int, number: int) -> tuple[Ints, "memoryview[int]"]:
    """Returns an array of `count` equal numbers, and a memoryview of the same memory with one entry more."""
    numbers = np.full(count + 1, number, np.int64)
    return numbers[:-1], numbers.data


def least(ends: Ints, begins: Ints) -> int:
    """Returns the smallest of the differences of two arrays of equal length; `NEVER` if they are empty."""
    if len(ends) == 1:  # subtracting two items takes a fifth of the time of subtracting two arrays
        return ends.item() - begins.item()
    return int((ends - begins).min()) if len(ends) else NEVER


class BlockRows:
    """One row for each running request: its page ids in each block table, and its progress.

    The tables of all groups are in one tensor. A column is a position in a row of a table, for one page. A column
    without a page holds the null page. Groups of full attention come first. In each row, the first group has pages at
    least as far as any other group.

    A row of 16 tokens a page, after 40 computed tokens and a reservation up to token 64:

        column      0     1     2     3     4
        page       [3]   [7]   [1]   [9]    0      0 is the null page
        tokens    0–15 16–31 32–47 48–63
                  └ published ┘ │     └ reserved: no token is computed yet
                   `committed`  └ tokens 32 to 39 are computed (`cached` is 40)
                     is 2                          `num_pages` is 4, `capacity` is 64 tokens
    """

    def __init__(
        self, every: AllRows, replica_idx: int, max_seq_len: int, groups: Sequence[TableGroup], *, pinned: bool
    ) -> None:
        rows, page_size = every.rows, every.page_size
        own = slice(replica_idx * rows, (replica_idx + 1) * rows)
        self.replica_idx = replica_idx
        self.weights = every.weights
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.groups = groups
        # whether there is only one table, which keeps the pages of all tokens
        self._is_plain = groups[0].group.keeps_all and groups[-1].tables.stop == 1
        shape = (groups[-1].tables.stop, rows, -(-max_seq_len // page_size))
        # The page ids of each row in logical order: `[rows, columns]`, or with several tables `[tables, rows,
        # columns]`.
        self.tensor = torch.zeros(shape if shape[0] > 1 else shape[1:], dtype=torch.int32, pin_memory=pinned)
        self.table: Pages = self.tensor.numpy().reshape(shape)  # a view of `tensor`
        self.unmoved = Unmoved({"block tables": self.tensor})
        self._first_table: Pages = self.table[0]
        # A flat view of `table`, because numpy indexes a flat array in a tenth of the time. `places` returns the
        # indices.
        self.entries: Pages = self.table.reshape(-1)
        # Arrays, because numpy takes twice as long with a Python int.
        self.table_size = np.array(shape[1] * shape[2])  # the number of entries of a table
        self._begins = np.arange(shape[0])[:, None] * self.table_size  # where each table begins in `entries`
        self.width, self.size = np.array(shape[2]), np.array(page_size)
        # For each number of pages, how many tokens they hold, and the number of computed tokens at which one more page
        # is full. Reading the tables takes a fifth of the time of computing the numbers.
        full = np.arange(shape[2] + 2) * page_size
        self._room, self._next_full = np.minimum(full, max_seq_len), full[1:] if every.caching else full[1:] * 0 + NEVER
        self._room_of = self._room.data
        self._first_full = self._next_full.item(0)  # for a row without published pages
        # for each group and row, the first column with a page, and the column after the last page
        self._bounds = np.zeros((2, len(groups), rows), np.int64)
        self.firsts, self.ends = self._bounds
        # For each row, the column after the last page of the first group. No other group has later pages.
        self.num_pages: Ints = self.ends[0]
        self.shortest: Ints = self.ends[-1]
        # a mask of the rows that have changed since they were last uploaded to devices
        self.changed = np.zeros(rows, np.bool_)
        # for each row, the number of published pages, counted from the first page
        self.committed = np.zeros(rows, np.int64)
        # for each row, how many tokens the request had at its first reservation; -1 before that
        self.prompt = np.full(rows, -1, np.int64)
        self.counted = np.zeros(rows, np.int64)  # for each row, how many of its tokens the metrics have counted
        # the rows of this replica, as views of the arrays of all replicas
        self.capacity, self.cached, self.commit_at = every.capacity[own], every.cached[own], every.commit_at[own]
        self.stale = every.stale[own]
        # The same memory, for calls that read or write one row: an item of a memoryview takes a third of the time.
        self.num_pages_of, self.committed_of, self.capacity_of = (
            numbers.data for numbers in (self.num_pages, self.committed, self.capacity)
        )
        self.prompt_of, self.counted_of = self.prompt.data, self.counted.data
        # The rows that had pages at a reset of the cache, and their forks. They neither publish pages nor use cached
        # pages, as if caching were off. `unbind` removes a row.
        self.private: set[int] = set()
        self.request_ids: list[RequestID | None] = [None] * rows
        self.row_of: dict[RequestID, int] = {}
        # a heap that yields the lowest row first, so that a batch is often one run of rows
        self.free = list(range(rows))

    def claim(self, request_id: RequestID, row: int | None = None) -> int:
        """Bind the lowest free row to the request, or the free `row`, and return it."""
        if row is None:
            row = heapq.heappop(self.free)
        else:
            self.free.remove(row)
            heapq.heapify(self.free)
        self.request_ids[row] = request_id
        self.row_of[request_id] = row
        return row

    def pages(self, row: int) -> Pages:
        """Returns the row's pages in the first table."""
        return self._first_table[row, : self.num_pages[row]]

    def grow(self, row: int, end: int) -> None:
        """Record that the row now has pages in all columns before column `end`. There must be a single table."""
        self.num_pages_of[row] = end
        self.changed[row] = True
        self.capacity_of[row] = self._room_of[end]

    def places(self, rows: Ints, columns: Ints, tables: slice = slice(None)) -> Ints:
        """Returns the index in `entries` of column `columns[i]` of `rows[i]`, for each i and each of `tables`.

        The result has the shape `[tables, rows]`.
        """
        return self._begins[tables] + (rows * self.width + columns)

    def append(self, rows: Ints, pages: Pages) -> None:
        """Append one page to each of `rows` in each table. `pages` is `[tables, rows]`. No row occurs twice."""
        counts = self.num_pages[rows]
        where = rows * self.width + counts
        self.entries[where if self._is_plain else self._begins + where] = pages
        counts += ONE
        for ends in self.ends:
            ends[rows] = counts
        self.changed[rows] = True
        self.capacity[rows] = self._room[counts]

    def commit(self, rows: Ints | int, pages: Ints | int) -> None:
        """Record that the first `pages` pages of `rows` are published. A private row has no published page."""
        self.committed[rows] = pages
        self.commit_at[rows] = self._next_full[pages]
        if self.private:
            self._hide()

    def make_private(self) -> None:
        """Make every row with pages private."""
        self.private.update(self.num_pages.nonzero()[0].tolist())
        # A row that has used cached pages, but has not run yet, has computed as much as these pages hold.
        np.maximum(self.cached, self.committed * self.page_size, out=self.cached)
        self._hide()

    def _hide(self) -> None:
        private = [*self.private]
        self.committed[private], self.commit_at[private] = 0, NEVER

    def mark_stale(self, what: int) -> None:
        """Record that every row with pages must do `what`, because the weights have changed (`MUST`)."""
        np.maximum(self.stale, (self.num_pages > 0) * np.int8(what), out=self.stale)
        self.capacity[self.stale > 0] = -1

    def room(self, rows: Rows) -> Ints:
        """Returns how many tokens the pages of `rows` hold, even if the rows are stale."""
        return np.where(self.stale[rows] > 0, self._room[self.shortest[rows]], self.capacity[rows])

    def measure(self, row: int, *, usable: bool = True) -> None:
        self.capacity[row] = self._room[self.shortest[row]] if usable and not self.stale[row] else -1

    def clear(self) -> None:
        """Free every row after an interrupt."""
        self.table[:] = NO_PAGE
        self._bounds[:] = 0
        self.changed[:] = True
        for numbers in (self.cached, self.counted, self.committed, self.capacity, self.stale):
            numbers[:] = 0
        self.commit_at[:] = self._first_full
        self.prompt[:] = -1
        self.private.clear()
        self.row_of.clear()
        self.request_ids[:] = [None] * len(self.request_ids)
        self.free[:] = range(len(self.request_ids))

    def unbind(self, row: int) -> None:
        """Clear a bound row, and free it."""
        count = self.num_pages_of[row]
        if self._is_plain:
            self._first_table[row, :count] = NO_PAGE
            self.num_pages_of[row] = 0
        else:
            self.table[:, row, :count] = NO_PAGE
            self._bounds[:, :, row] = 0
        self.changed[row] = True
        self.cached[row] = self.counted_of[row] = self.committed_of[row] = self.capacity_of[row] = self.stale[row] = 0
        self.commit_at[row] = self._first_full
        self.private.discard(row)
        self.prompt_of[row] = -1
        request_id, self.request_ids[row] = self.request_ids[row], None
        if request_id is not None:
            del self.row_of[request_id]
        heapq.heappush(self.free, row)


class PromptCounter:
    """Counts each prompt token of a replica once: as `ran` if a model computed it, or as `found` if it was cached."""

    def __init__(self, rows: BlockRows) -> None:
        self._rows = rows
        # the rows whose prompts are not fully counted; a row that decodes is not among them
        self.open: set[int] = set()
        self.ran = 0
        self.found = 0

    def admit(self, row: int, known: int) -> None:
        """Record the first reservation of a row's request. The request's `known` tokens are its prompt."""
        if self._rows.prompt_of[row] < 0:
            self._rows.prompt_of[row] = known
            self.open.add(row)

    def hit(self, row: int, start: int, cached: int) -> None:
        """Count the tokens `start` to `cached` (excluded) of an admitted request as `found`: no model runs them."""
        rows = self._rows
        counted = rows.counted_of[row]
        self.found += max(0, min(cached, rows.prompt_of[row]) - max(start, counted))
        rows.counted_of[row] = max(cached, counted)

    def prompts(self, rows: Rows, starts: Ints, ends: Ints) -> list[tuple[int, int, int]]:
        """Returns what `run` takes for those of `rows` whose prompts are not fully counted: `(row, start, end)`.

        Raises `InvalidRequestError` if a start is beyond the counted tokens of its row.
        """
        found: list[tuple[int, int, int]] = []
        for at, row in enumerate(range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()):
            if row in self.open:
                start = starts.item(at)
                if start > (seen := self._rows.counted_of[row]):
                    raise self.ahead(row, start, seen)
                found.append((row, start, ends.item(at)))
        return found

    def run(self, prompts: Sequence[tuple[int, int, int]]) -> None:
        """Count the tokens `start` to `end` (excluded) of each row in `open` as run. An item is `(row, start, end)`."""
        counted = self._rows.counted_of
        for row, start, end in prompts:
            begin, prompt = max(start, counted[row]), self._rows.prompt_of[row]
            if end > begin:
                self.ran += max(0, min(end, prompt) - begin)
                counted[row] = end
            if end >= prompt:
                self.open.remove(row)

    def refuse_ahead(self, row: int, start: int) -> None:
        """Raise `InvalidRequestError` if the row runs its prompt, and token `start` is beyond its counted tokens."""
        if row in self.open and start > (seen := self._rows.counted_of[row]):
            raise self.ahead(row, start, seen)

    def ahead(self, row: int, start: int, most: int) -> InvalidRequestError:
        """Returns the error for a context whose `start_idx` is beyond the tokens that can be computed."""
        return InvalidRequestError(
            f"request {self._rows.request_ids[row]!r}: its start_idx is {start}, but at most {most} tokens are "
            "computed: set start_idx back, or release the request and claim it again"
        )

    def ran_elsewhere(self, row: int, tokens: int) -> None:
        """Record that the first `tokens` tokens of the request were computed elsewhere.

        They are counted neither as `ran` nor as `found`.
        """
        self._rows.prompt[row] = self._rows.counted[row] = tokens
        self.open.discard(row)
