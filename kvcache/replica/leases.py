"""`PageLease`: keeps pages for readers after the request that computed them has been released.

While a request is claimed, its row holds its pages. When the request is released, for whatever reason, its open leases
take over the pages. The pages are freed when the last of these leases ends. So a caller need not keep a request only
because others still read its pages.

A page may also leave the row earlier, because it falls out of a window, or because the row shares another page with the
same content instead. At that moment, the leases take over the page if a block table has named it. No reader knows any
other page, so it is freed. A table of a prompt that still runs (`full_pages`) names no page of a window.
"""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from kvcache.arguments import of_kind
from kvcache.errors import InvalidRequestError, InvariantError
from kvcache.pool.pages import HeldPages, PagePool
from kvcache.replica.block_table import BlockTable
from kvcache.replica.rows import BlockRows, Ints, Pages, Rows, as_rows
from kvcache.types import RequestID
from kvcache.uncopied import Uncopied

# returns the pages of a row before a column
PagesOf = Callable[[int, int], Pages]
Columns = tuple[int, int]  # a range of columns of a block table: the first, and the one after the last

# makes the bytes by which readers recognise that a lease holds the pages of a block table
Seal = Callable[[BlockTable], bytes]


class PageLease(Uncopied):
    """Keeps the pages of one request for readers. Made by `PagedKVCacheManager.lease`, ended by `end_lease`.

    A lease covers every page that the request's block tables name between these two calls. When the request is
    released, the lease also covers all other pages with computed tokens that the request has then.

        claim ─► step ─► lease ─► release ───────────────────► end_lease
        └─── the row holds the pages ───┘└─ the lease holds them ──┘ then they are idle or fresh

    Examples:
        >>> from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
        >>> import torch
        >>> params = KVCacheParams(torch.float16, n_kv_heads=2, head_dim=64, page_size=16)
        >>> manager = PagedKVCacheManager(params, 4, 256, 1, ["cpu"], available_cache_memory=1 << 20)
        >>> prompt = TextContext(range(40), 256, "r")
        >>> manager.external_claim("r")
        >>> _ = manager.maybe_reserve(prompt), manager.fetch([prompt]), prompt.update(7), manager.step([prompt])
        >>> lease = manager.lease("r")
        >>> manager.release("r")
        >>> manager.num_held_blocks, lease
        (3, PageLease('r', replica_idx=0, is_over=False))
        >>> manager.end_lease(lease)
        >>> manager.num_held_blocks, lease.is_over
        (0, True)
    """

    __slots__ = ("owner", "replica_idx", "request_id", "seal")

    def __init__(self, owner: "PageLeases", request_id: RequestID, replica_idx: int, seal: Seal | None = None) -> None:
        needed = "a manager, whose lease makes one,"
        self.owner = of_kind("owner", owner, PageLeases, needed, InvalidRequestError)
        self.seal = seal
        # the request's id when the lease was made; another request may have this id by now
        self.request_id = request_id
        self.replica_idx = replica_idx

    @property
    def is_over(self) -> bool:
        """Whether the lease has ended, or was not made by a manager."""
        return self not in self.owner

    def __repr__(self) -> str:
        return f"PageLease({self.request_id!r}, replica_idx={self.replica_idx}, is_over={self.is_over})"


class PageLeases:
    """The open leases of one replica, and the pages that each of them holds."""

    def __init__(self, pool: PagePool, rows: BlockRows) -> None:
        # For each claimed row, the leases of its request. A row without leases has no entry, and costs nothing.
        self.of_row: dict[int, list[PageLease]] = {}
        # for each row, the number of tokens whose pages readers may know
        self.told = np.zeros(len(rows.request_ids), np.int64)
        # For each row, how many tokens had been computed when its last exported table was made. Then, for each of the
        # row's tables, the columns whose pages exported tables have named and no lease holds itself.
        self.named: dict[int, tuple[int, list[list[Columns]]]] = {}
        self._pool = pool
        self._rows = rows
        # For each lease, the pages that the lease itself holds, in addition to the pages that its row still holds.
        self._held: dict[PageLease, list[HeldPages]] = {}

    def __contains__(self, lease: PageLease) -> bool:
        return lease in self._held

    def grant(self, lease: PageLease, row: int, besides: Sequence[HeldPages] = ()) -> None:
        """Open a lease of the request in this row.

        In addition to token pages, the lease holds the pages in `besides`, such as the page of a recurrent state.
        """
        computed = self._rows.cached.item(row)
        # A reader may have a block table that was made before the lease. It is valid if the request has not run since.
        if row not in self.of_row and self.named.get(row, (computed,))[0] != computed:
            del self.named[row]
        self.of_row.setdefault(row, []).append(lease)
        self._held[lease] = []
        for held in besides:
            self._hold(lease, held)
        self.told[row] = max(computed, self.told.item(row))

    def grant_pages(self, lease: PageLease, pages: Pages, besides: Sequence[HeldPages] = ()) -> None:
        """Open a lease of published pages, no matter which request computed them.

        The lease also holds the pages in `besides`, which are the pages of the recurrent state after the last token
        page.
        """
        self._held[lease] = []
        for held in (HeldPages(self._pool, pages), *besides):
            self._hold(lease, held)

    def tell(self, row: int, tokens: int, columns: Sequence[Sequence[Columns]]) -> None:
        """Record that an exported table of the row's first `tokens` tokens names the pages in `columns` of each table.

        While the row is leased, the content of these pages does not change.
        """
        leased, computed = row in self.of_row, self._rows.cached.item(row)
        before, named = self.named.get(row, (computed, []))
        if not named or not (leased or before == computed):
            named = [list[Columns]() for _ in columns]
        self.named[row] = computed, [_union([*old, *new]) for old, new in zip(named, columns, strict=True)]
        if leased:
            self.told[row] = max(tokens, self.told.item(row))

    def known(self, row: int, table: int) -> Sequence[Columns]:
        """Returns the columns of a table whose pages readers may know and no lease holds itself yet, ascending."""
        if row not in self.of_row or row not in self.named:
            return ()
        return self.named[row][1][table]

    def sealed(self, row: int, table: BlockTable) -> BlockTable:
        """Returns `table` with the seals of the row's leases (`BlockTable.seals`). A lease without `seal` adds none."""
        seals = [lease.seal for lease in self.of_row.get(row, ()) if lease.seal is not None]
        return replace(table, seals=tuple(seal(table) for seal in seals)) if seals else table

    def refuse_rewrite(self, rows: Rows, starts: Ints) -> None:
        """Raise `InvalidRequestError` if one of `rows` would recompute tokens in pages that readers may know."""
        behind = (starts < self.told[rows]).nonzero()[0]
        if behind.size:
            at = int(behind[0])
            raise self.rewrite(int(as_rows(rows)[at]), int(starts[at]))

    def rewrite(self, row: int, start: int) -> InvalidRequestError:
        """Returns the error for a row that would recompute tokens from token `start` on, which readers may know."""
        return InvalidRequestError(
            f"request {self._rows.request_ids[row]!r}: would recompute from token {start}, "
            f"but a lease still covers its first {self.told[row]} tokens: release the request and claim it again"
        )

    def leave(self, row: int, pages_of: PagesOf) -> None:
        """Forget a row that is about to be released. Its leases take over its pages with computed or cached tokens."""
        self.named.pop(row, None)
        if row in self.of_row:
            held = self._left(row, pages_of)
            for lease in self.of_row[row]:
                self._hold(lease, held)
            # This comes last: after an interrupt before this line, `leave_all` repeats the lines above.
            del self.of_row[row]
            self.told[row] = 0

    def _left(self, row: int, pages_of: PagesOf) -> HeldPages:
        """Returns the pages of a leased row that its leases take over when it is released."""
        rows = self._rows
        tokens = max(rows.cached.item(row), self.told.item(row))
        end = max(-(-tokens // rows.page_size), rows.committed.item(row))
        return HeldPages(self._pool, pages_of(row, end).copy())

    def replace(self, row: int, table: int, first: int, pages: Pages) -> None:
        """Let the leases of the row take over `pages`, which are about to leave the row while its request goes on.

        `pages` are those of one table, from column `first` on. Pages that no exported table has named are not taken
        over, because no reader knows them.
        """
        left = list[Columns]()
        for begin, end in (known := self.known(row, table)):
            seen = pages[max(0, begin - first) : max(0, end - first)].copy()
            for lease in self.of_row[row]:
                self._hold(lease, HeldPages(self._pool, seen))
            left += [(begin, min(end, first)), (max(begin, first + len(pages)), end)]
        if known:
            # Another page may come into these columns. It is unknown to readers until a table names it.
            self.named[row][1][table] = [columns for columns in left if columns[0] < columns[1]]

    def end(self, lease: PageLease) -> None:
        """Release the pages that the lease holds. Safe to call twice."""
        for held in self._held.pop(lease, ()):
            held.release()
        row = self._rows.row_of.get(lease.request_id, -1)  # another request may have this id by now
        if lease in (leases := self.of_row.get(row, [])):
            leases.remove(lease)
            if not leases:
                del self.of_row[row]
                self.told[row] = 0

    def held(self) -> list[tuple[PageLease, list[Pages]]]:
        """Returns each open lease, and the token pages that the lease itself holds.

        Pages that the lease's row still holds are left out. Any thread may call this.
        """
        return [
            (lease, [pages for pool, pages in list(held) if pool is self._pool])
            for lease, held in list(self._held.items())
        ]

    @property
    def num_pages(self) -> int:
        """The number of pages that leases hold themselves.

        Each page is counted once, even if several leases hold it.
        """
        return int(np.count_nonzero(self.holders())) if self._held else 0

    def holders(self, pool: PagePool | None = None) -> Ints:
        """Returns the number of leases that hold each page: int64 `[num_pages + 1]`.

        `pool` is the pool whose pages are counted. If it is None, the replica's token pages are counted.
        """
        asked = pool or self._pool
        counts = np.zeros(asked.num_pages + 1, np.int64)
        for held in list(self._held.values()):  # iterates over a copy, because another thread may call this for metrics
            for of_pool, pages in list(held):
                if of_pool is asked:
                    np.add.at(counts, pages, 1)
        return counts

    def leave_all(self, pages_of: PagesOf) -> None:
        """Let the leases take over the pages of every leased row, as `leave` does, after an interrupt.

        The pools must be rebuilt afterwards. If this call is interrupted and repeated, a lease may hold a page twice,
        until it ends.
        """
        for row in [*self.of_row]:
            held = self._left(row, pages_of)
            for lease in self.of_row[row]:
                if lease in self._held:
                    self._held[lease].append(held)
            del self.of_row[row]
        self.told[:] = 0
        self.named.clear()

    def check(self) -> None:
        for row in self.told.nonzero()[0].tolist():
            if row not in self.of_row:
                raise InvariantError(f"row {row} has no lease, but {self.told[row]} of its tokens count as leased")
        for row in self.named:
            if self._rows.request_ids[row] is None:
                raise InvariantError(f"row {row} has no request, but block tables of it are recorded")
        for row, leases in self.of_row.items():
            for lease in leases:
                if lease.is_over or self._rows.request_ids[row] != lease.request_id:
                    raise InvariantError(
                        f"{lease} is recorded with row {row} of request {self._rows.request_ids[row]!r}"
                    )

    def _hold(self, lease: PageLease, held: HeldPages) -> None:
        if held.pages.size:
            held.pool.hold(held.pages)
            self._held[lease].append(held)


def _union(ranges: Sequence[Columns]) -> list[Columns]:
    """Returns the columns in any of `ranges`, as ascending ranges with a gap between any two.

    >>> _union([(0, 2), (6, 7), (2, 4), (9, 9)])
    [(0, 4), (6, 7)]
    """
    found = list[Columns]()
    for columns in sorted(columns for columns in ranges if columns[0] < columns[1]):
        if found and columns[0] <= found[-1][1]:
            found[-1] = (found[-1][0], max(columns[1], found[-1][1]))
        else:
            found.append(columns)
    return found


def granted_by(lease: PageLease, books: Sequence[PageLeases]) -> PageLeases:
    """Returns the one of `books` that made this lease. Raises `InvalidRequestError` if none did."""
    of_kind("end_lease: the lease", lease, PageLease, "what lease returned", InvalidRequestError)
    if lease.owner not in books:
        raise InvalidRequestError(f"request {lease.request_id!r}: end_lease: another manager made this lease")
    return lease.owner
