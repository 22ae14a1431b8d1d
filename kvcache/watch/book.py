"""`WatchBook`: makes snapshots (`Look`) of pools, and remembers in which snapshot each page's cell last changed."""

import secrets
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvcache.types import KVCacheMetrics
from kvcache.watch.log import EvictionBook, PoolLog, PrefixTree
from kvcache.watch.messages import Beside, Cells, CheckReport, Look, Owners, PageState, PoolLook, TreeRow
from kvcache.watch.names import WatchNames
from kvcache.watch.pools import WatchedPool

_TREE_ROWS = 64
_TREE_SHARE = 0.03  # the share of the time that may be spent on the prefix tree of each pool
# how many log entries are applied at a time, which takes about a millisecond; after that the loop can take the
# interpreter lock
_AT_ONCE = 512
_PAUSE_S = 1e-4
_MOST_CHANGED = 0.4  # if more than this share of a pool's cells have changed, a snapshot includes all cells

Frames = list[NDArray[np.uint32]]


class PoolBook:
    """The cells of one pool as of the last snapshot. Also records for each cell in which snapshot it last changed."""

    def __init__(self, watched: WatchedPool) -> None:
        self.watched, self.name, self.pool = watched, watched.name, watched.pool
        self.log, self.tree = PoolLog(self.pool), PrefixTree(self.pool)
        self.cells: Cells = np.zeros(self.pool.num_pages + 1, np.uint32)
        self._changed: Cells = np.zeros(self.pool.num_pages + 1, np.uint32)
        self._tree_rows: tuple[TreeRow, ...] = ()
        self._tree_at = 0.0

    def update(self, number: int) -> None:
        cells = self.watched.cells()
        self._changed[cells != self.cells] = number
        self.cells = cells

    def since(self, base: int) -> Frames:
        """Returns the pages that have changed since the snapshot with the number `base`, and the cells of these pages.

        If `base` is 0, or if many pages have changed, returns an empty array of pages and all cells.
        """
        if base:
            pages = np.flatnonzero(self._changed > base)
            if len(pages) < _MOST_CHANGED * len(self.cells):
                return [pages.astype(np.uint32), self.cells[pages]]
        return [np.zeros(0, np.uint32), self.cells]

    def take(self, evictions: EvictionBook) -> None:
        """Apply the entries that the loop has recorded since the last call."""
        for _ in range(0, len(self.log), _AT_ONCE):
            entries = self.log.take(_AT_ONCE)
            evictions.apply(self.name, entries)
            self.tree.apply(entries)
            time.sleep(_PAUSE_S)

    def tree_rows(self) -> tuple[TreeRow, ...]:
        """Returns the largest parts of the prefix tree.

        The result is reused for a while. The larger the tree is, the longer the result is reused.
        """
        started = time.monotonic()
        if started >= self._tree_at:
            self._tree_rows = self.tree.rows(self.name, _TREE_ROWS)
            self._tree_at = started + (time.monotonic() - started) / _TREE_SHARE
        return self._tree_rows


class WatchBook:
    """Makes snapshots of some pools, for as long as watchers ask for them.

    `sizes` has the number of tokens and the number of bytes of a page. `beside` returns data of other components to
    show. `names` decides under which names requests are shown. Only the endpoint's thread uses this object.
    """

    def __init__(
        self,
        name: str,
        pools: Sequence[WatchedPool],
        sizes: tuple[int, int],
        beside: Callable[[], Beside],
        names: WatchNames,
    ) -> None:
        self.incarnation = secrets.token_hex(8)
        self.number = 0
        self.cost_s = 0.0  # in seconds: the processor time that the last snapshot took
        # In seconds: the part of `cost_s` in which numpy reads whole pools. numpy releases the interpreter lock for
        # most of this time.
        self.beside_s = 0.0
        self.check: tuple[float, CheckReport] | None = None  # the time of the last recount (`check`), and its result
        self._name, self._sizes, self._beside = name, sizes, beside
        self._names = names
        self._evictions = EvictionBook()
        self._pools = [PoolBook(pool) for pool in pools]
        for pool in self._pools:
            pool.log.begin()
            for pages in pool.watched.prefixes():
                pool.tree.add_row(pages)

    @property
    def is_outdated(self) -> bool:
        """Whether a pool is no longer the object that this book follows."""
        return any(one.pool is not one.watched.pool for one in self._pools)

    def forget(self) -> None:
        """Stop recording, because no watcher is left."""
        for pool in self._pools:
            pool.log.end()

    def update(self) -> None:
        """Make a new snapshot: read all cells, and apply the logs."""
        self.number += 1
        self.beside_s = 0.0
        for pool in self._pools:
            started = time.thread_time()
            pool.update(self.number)
            self.beside_s += time.thread_time() - started
            pool.take(self._evictions)

    def look(self, known: int, metrics: KVCacheMetrics) -> tuple[Look, Frames]:
        """Returns the changes since the snapshot with the number `known`. If `known` is 0, returns the whole state."""
        beside = self._beside()
        owners = self._owners(beside)
        beside = self._names.beside(beside)
        base = known if 0 < known <= self.number else 0
        evictions, check = self._evictions, None
        if self.check is not None:
            at, report = self.check
            error = self._names.error(report.error, owners.request_ids)
            check = CheckReport(age_s=time.monotonic() - at, seconds=report.seconds, error=error, counts=report.counts)
        header = Look(
            name=self._name,
            incarnation=self.incarnation,
            number=self.number,
            base=base,
            at=time.time(),
            cost_s=self.cost_s,
            page_size=self._sizes[0],
            page_bytes=self._sizes[1],
            pools=tuple(
                PoolLook(
                    name=one.name,
                    num_pages=one.pool.num_pages,
                    counts=counted(one.cells),
                    older=one.pool.versions.num_older(one.pool.index.published),
                )
                for one in self._pools
            ),
            owners=self._named(owners),
            leases=beside.leases,
            pulls=beside.pulls,
            tree=tuple(row for pool in self._pools for row in pool.tree_rows()),
            evictions=evictions.rows(),
            evicted={reason: (pages, evictions.again[reason]) for reason, pages in evictions.pages.items()},
            figures={**_totals(metrics), **beside.figures},
            check=check,
        )
        return header, [frame for pool in self._pools for frame in pool.since(base)]

    def _owners(self, beside: Beside) -> Owners:
        rows = [row for pool in self._pools for row in pool.watched.owners(beside.phases)]
        known = {request_id for _, request_id, *_ in rows}
        rows += [(0, name, "", phase, "", 0, 0, 0) for name, phase in beside.phases.items() if name not in known]
        columns = zip(*rows, strict=True)  # no columns if there are no rows
        return Owners(**dict(zip(Owners.__struct_fields__, columns, strict=False)))  # pyright: ignore[reportArgumentType]

    def _named(self, owners: Owners) -> Owners:
        names = self._names
        requests, tenants = tuple(names.requests(owners.request_ids)), tuple(names.tenants(owners.tenants))
        return msgspec.structs.replace(owners, request_ids=requests, tenants=tenants)


def counted(cells: Cells) -> tuple[int, ...]:
    """Returns the number of pages in each state. The null page is not counted."""
    counts = np.bincount((cells[1:] & 7).astype(np.uint8), minlength=len(PageState))
    return tuple(counts.tolist())


def _totals(metrics: KVCacheMetrics) -> dict[str, float]:
    return {name: float(getattr(metrics, name)) for name in metrics.__struct_fields__}
