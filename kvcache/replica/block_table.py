"""The block tables of the running requests, and `BlockTable`, what one looks like outside this process."""

from __future__ import annotations

import heapq
from typing import cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.arguments import integer, shown
from kvcache.errors import NoFreeRowError
from kvcache.pool.index import NO_PAGE
from kvcache.types import RequestID

Pages = NDArray[np.int32]
Ints = NDArray[np.int64]
Rows = Ints | slice
"""Rows of a block table: an array, or a slice where they are one run."""


def as_rows(rows: Rows) -> Ints:
    """The rows as an array."""
    return np.arange(rows.start, rows.stop, dtype=np.int64) if isinstance(rows, slice) else rows


class BlockTable(msgspec.Struct, frozen=True, tag="block_table/1", omit_defaults=True):
    """Where the KV of one request lies: the contract between a manager, a transfer, and another manager.

    The page ids mean something only to the manager that made the table, and only while it holds them for the request.

    Attributes:
        request_id: the request, as the maker of the table calls it.
        replica_idx: the maker's replica that holds the pages.
        num_tokens: tokens whose KV the pages hold; the last page may be partly filled.
        page_size: tokens of a page.
        groups: per group of layers the page ids in logical order.
        fingerprint: names the geometry of the pages on all shards (`kvcache.layout.replica_fingerprint`): where two
            agree, pages may be copied as they are. A transfer that plans from the layouts does not need it.
        hash_algorithm: of `digests`; empty where prefix caching is off.
        digests: one after another, the digests of all full pages; none where prefix caching is off.
    """

    request_id: str
    replica_idx: int
    num_tokens: int
    page_size: int
    groups: tuple[tuple[int, ...], ...]
    fingerprint: str
    hash_algorithm: str = ""
    digests: bytes = b""


def odd_field(table: object) -> str | None:
    """What is not even of the right type in `table`; None: nothing. What a peer sent was decoded, and is never odd."""
    if not isinstance(table, BlockTable):
        return f"is {shown(table)}: no block table"
    for name in ("replica_idx", "num_tokens", "page_size"):
        if integer(getattr(table, name)) is None:
            return f"has {name} {shown(getattr(table, name))}: an integer is needed"
    if not isinstance(cast("object", table.digests), bytes) or not isinstance(
        cast("object", table.hash_algorithm), str
    ):
        return f"has digests {shown(table.digests)} by {shown(table.hash_algorithm)}: bytes and a name are needed"
    groups = cast("tuple[object, ...]", table.groups)
    if not isinstance(cast("object", groups), tuple) or not all(isinstance(pages, tuple) for pages in groups):
        return f"has groups {shown(groups)}: tuples of page ids are needed"
    for pages in table.groups:
        if not {*map(type, pages)} <= {int}:
            return f"names page {shown(next(page for page in pages if type(page) is not int))}"
    return None


class BlockRows:
    """One row per running request: its page ids, and how far it has come. Unused entries name the null page.

    `room` is a list that the rows of all replicas share: `capacity` once more, at `first_place + row`, for calls of one
    request, which a list answers in a quarter of the time.

    Attributes:
        table: int32 `[rows, columns]`, page ids in logical order.
        tensor: the same memory as a torch tensor, pinned where the pages are on a GPU.
        changed: bool `[rows]`, set where a row changed; who copies rows elsewhere clears it.
        num_pages: pages of each row.
        committed: pages of each row, from the first on, that are published.
        cached: tokens of each row with KV, as of its last `step`.
        prompt: tokens that each row's request had when it was first reserved, -1 before.
        counted: tokens of each row that the metrics have seen.
        capacity: tokens that the pages of each row hold; -1 while they may not be used (an import is pending).
        commit_at: computed tokens at which the next page of each row is full.
    """

    __slots__ = (
        "_first_place",
        "_free",
        "_max_seq_len",
        "_page_size",
        "_room",
        "cached",
        "capacity",
        "changed",
        "commit_at",
        "committed",
        "counted",
        "num_pages",
        "prompt",
        "request_ids",
        "row_of",
        "table",
        "tensor",
    )

    def __init__(
        self, rows: int, max_seq_len: int, page_size: int, *, pinned: bool, room: list[int], first_place: int
    ) -> None:
        self._page_size = page_size
        self._max_seq_len = max_seq_len
        columns = -(-max_seq_len // page_size)
        self.tensor = torch.zeros((rows, columns), dtype=torch.int32, pin_memory=pinned)
        self.table: Pages = self.tensor.numpy()
        self.changed = np.zeros(rows, np.bool_)
        self.num_pages = np.zeros(rows, np.int64)
        self.committed = np.zeros(rows, np.int64)
        self.cached = np.zeros(rows, np.int64)
        self.prompt = np.full(rows, -1, np.int64)
        self.counted = np.zeros(rows, np.int64)
        self.capacity = np.zeros(rows, np.int64)
        self._room = room
        self._first_place = first_place
        self.commit_at = np.full(rows, page_size, np.int64)
        self.request_ids: list[RequestID | None] = [None] * rows
        self.row_of: dict[RequestID, int] = {}
        self._free = list(range(rows))  # a heap: the lowest row first, so that a batch is often one run of rows

    def claim(self, request_id: RequestID) -> int:
        """Bind a free row to the request.

        Raises:
            NoFreeRowError: (a ValueError) every row is bound.
        """
        if not self._free:
            raise NoFreeRowError(f"request {request_id!r}: all {len(self.request_ids)} rows of the replica are claimed")
        row = heapq.heappop(self._free)
        self.request_ids[row] = request_id
        self.row_of[request_id] = row
        return row

    def pages(self, row: int) -> Pages:
        """The page ids of a row, a view."""
        return self.table[row, : self.num_pages[row]]

    def write(self, row: int, first: int, pages: Pages) -> None:
        """Put `pages` at the logical pages from `first` on; a row only grows."""
        end = first + len(pages)
        self.table[row, first:end] = pages
        if end > self.num_pages[row]:
            self.num_pages[row] = end
            self.measure(row)
        self.changed[row] = True

    def append(self, rows: Ints, pages: Pages) -> None:
        """Put one more page at the end of each of `rows`, distinct."""
        self.table[rows, self.num_pages[rows]] = pages
        self.num_pages[rows] += 1
        self.changed[rows] = True
        capacity = np.minimum(self.num_pages[rows] * self._page_size, self._max_seq_len)
        self.capacity[rows] = capacity
        room = self._room
        for place, tokens in zip((rows + self._first_place).tolist(), capacity.tolist(), strict=True):
            room[place] = tokens

    def append_one(self, row: int, page: int) -> None:
        """`append` for one row."""
        self.table[row, self.num_pages[row]] = page
        self.num_pages[row] += 1
        self.changed[row] = True
        self.measure(row)

    def commit(self, rows: Ints | int, pages: Ints | int) -> None:
        """The first `pages` pages of `rows` are published."""
        self.committed[rows] = pages
        self.commit_at[rows] = (pages + 1) * self._page_size

    def measure(self, row: int, *, usable: bool = True) -> None:
        """Bring the row's `capacity` up to date."""
        tokens = min(int(self.num_pages[row]) * self._page_size, self._max_seq_len) if usable else -1
        self.capacity[row] = self._room[self._first_place + row] = tokens

    def unbind(self, row: int) -> None:
        """Clear the row and give it back."""
        request_id = self.request_ids[row]
        assert request_id is not None  # noqa: S101 - our own callers look the row up by its request
        self.table[row, : self.num_pages[row]] = NO_PAGE
        self.changed[row] = True
        for counts in (self.num_pages, self.cached, self.counted):
            counts[row] = 0
        self.prompt[row] = -1
        self.commit(row, 0)
        self.measure(row)
        self.request_ids[row] = None
        del self.row_of[request_id]
        heapq.heappush(self._free, row)
