"""`WatchBook`: makes looks of a manager's replicas and the host tier, and remembers when each cell has changed."""

import secrets
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.metrics import KVCacheMetrics
from kvcache.pool.pages import PagePool
from kvcache.replica.replica import Replica
from kvcache.watch.cells import Holding, OwnerNumbers, leased, pool_cells, quarantined, replica_cells
from kvcache.watch.log import EvictionBook, PoolLog, PrefixTree
from kvcache.watched import Beside, Cells, CheckReport, Look, Owners, PageState, PoolLook, TreeRow

_TREE_ROWS = 64
_TREE_SHARE = 0.03  # of the time, for the tree of each pool
_MOST_CHANGED = 0.4  # of a pool's cells; beyond that it is told whole, which is shorter

Frames = list[NDArray[np.uint32]]


class Watched(Protocol):
    """What a watch reads of a manager: its replicas, and the pool of its host tier where it has one."""

    @property
    def replicas(self) -> list[Replica]: ...
    @property
    def host(self) -> PagePool | None: ...
    @property
    def metrics(self) -> KVCacheMetrics: ...


class PoolBook:
    """The cells of one pool as of the last look, and of each the look in which it came to be so."""

    def __init__(self, name: str, pool: PagePool, replica: Replica | None) -> None:
        self.name, self.pool, self.replica = name, pool, replica
        self.numbers = OwnerNumbers(0 if replica is None else len(replica.rows.request_ids))
        self.log, self.tree = PoolLog(pool), PrefixTree(pool)
        self.cells: Cells = np.zeros(pool.num_pages + 1, np.uint32)
        self._changed: Cells = np.zeros(pool.num_pages + 1, np.uint32)
        self._tree_rows: tuple[TreeRow, ...] = ()
        self._tree_at = 0.0

    def read(self) -> Cells:
        """The cells now."""
        return pool_cells(self.pool) if self.replica is None else replica_cells(self.replica, self.numbers)

    def update(self, number: int) -> None:
        cells = self.read()
        self._changed[cells != self.cells] = number
        self.cells = cells

    def since(self, base: int) -> Frames:
        """The pages that have changed after a look, and their cells; all of them where there is none, or many have."""
        if base:
            pages = np.flatnonzero(self._changed > base)
            if len(pages) < _MOST_CHANGED * len(self.cells):
                return [pages.astype(np.uint32), self.cells[pages]]
        return [np.zeros(0, np.uint32), self.cells]

    def take(self, evictions: EvictionBook) -> None:
        """Apply what the loop has written down."""
        self.log.begin()
        for entry in self.log.take():
            evictions.apply(self.name, entry)
            self.tree.apply(entry)

    def plant(self) -> None:
        """The tree begins with what the rows have."""
        if self.replica is not None:
            rows = self.replica.rows
            for row in np.flatnonzero(rows.committed).tolist():
                self.tree.add_row(rows.table[row, : rows.committed[row]].copy())

    def tree_rows(self) -> tuple[TreeRow, ...]:
        """The largest parts of the tree. A large tree is looked at less often."""
        started = time.monotonic()
        if started >= self._tree_at:
            self._tree_rows = self.tree.rows(self.name, _TREE_ROWS)
            self._tree_at = started + (time.monotonic() - started) / _TREE_SHARE
        return self._tree_rows


class WatchBook:
    """Looks at a manager, as long as somebody asks for them.

    `beside` tells what others know. Only the thread that looks uses it.
    """

    def __init__(self, name: str, watched: Watched, sizes: tuple[int, int], beside: Callable[[], Beside]) -> None:
        self.incarnation = secrets.token_hex(8)
        self.number = 0
        self.cost_s = 0.0  # processor time of the last look
        self.check: tuple[float, CheckReport] | None = None  # when it was made
        self._name, self._sizes, self._beside = name, sizes, beside
        self._metrics = lambda: watched.metrics
        self._evictions = EvictionBook()
        self._pools = [PoolBook(str(at), replica.pool, replica) for at, replica in enumerate(watched.replicas)]
        if watched.host is not None:
            self._pools.append(PoolBook("host", watched.host, None))
        for pool in self._pools:
            pool.log.begin()
            pool.plant()

    def forget(self) -> None:
        """Nobody looks any more: nothing is written down from now on."""
        for pool in self._pools:
            pool.log.end()

    def update(self) -> None:
        """Look."""
        self.number += 1
        for pool in self._pools:
            pool.update(self.number)
            pool.take(self._evictions)

    def look(self, known: int) -> tuple[Look, Frames]:
        """What has changed since a look that somebody knows; 0: all."""
        beside = self._beside()
        base = known if 0 < known <= self.number else 0
        evictions, check = self._evictions, None
        if self.check is not None:
            at, report = self.check
            check = CheckReport(
                age_s=time.monotonic() - at, seconds=report.seconds, error=report.error, counts=report.counts
            )
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
                PoolLook(name=one.name, num_pages=one.pool.num_pages, counts=counted(one.cells)) for one in self._pools
            ),
            owners=self._owners(beside),
            leases=beside.leases,
            pulls=beside.pulls,
            tree=tuple(row for pool in self._pools for row in pool.tree_rows()),
            evictions=evictions.rows(),
            evicted={reason: (pages, evictions.again[reason]) for reason, pages in evictions.pages.items()},
            figures={**_totals(self._metrics()), **beside.figures},
            check=check,
        )
        return header, [frame for pool in self._pools for frame in pool.since(base)]

    def _owners(self, beside: Beside) -> Owners:
        columns: list[list[object]] = [[] for _ in Owners.__struct_fields__]
        for pool in self._pools:
            if pool.replica is not None:
                for column, values in zip(columns, _rows_of(pool, beside.phases), strict=True):
                    column.extend(values)
        known = set(columns[1])
        for request_id, phase in beside.phases.items():
            if request_id not in known:
                for column, value in zip(columns, (0, request_id, "", phase, "", 0, 0, 0), strict=True):
                    column.append(value)
        return Owners(**dict(zip(Owners.__struct_fields__, map(tuple, columns), strict=True)))  # pyright: ignore[reportArgumentType]


def counted(cells: Cells) -> tuple[int, ...]:
    """Pages by state; the null page is not counted."""
    counts = np.bincount((cells[1:] & 7).astype(np.uint8), minlength=len(PageState))
    return tuple(counts.tolist())


def _totals(metrics: KVCacheMetrics) -> dict[str, float]:
    return {name: float(getattr(metrics, name)) for name in metrics.__struct_fields__}


def _rows_of(pool: PoolBook, phases: dict[str, str]) -> tuple[list[object], ...]:
    """The columns of `Owners`, of the requests of a replica, then of what leases and imports hold of released ones."""
    replica = pool.replica
    if replica is None:
        return ()
    rows = replica.rows
    pairs = list(rows.row_of.items())
    at = np.array([row for _, row in pairs], np.int64)
    names = [request_id for request_id, _ in pairs]
    salts = [replica.salt(row) for _, row in pairs]
    pages, tokens, prompts = rows.num_pages[at], rows.cached[at], np.maximum(rows.prompt[at], 0)
    own = np.where(pages == 0, "waiting", np.where(tokens < prompts, "prompt", "decoding")).tolist()
    pending = {one.request_id for one in list(replica.imports.of_row.values())}
    told = [
        phases.get(name) or ("importing" if name in pending else phase) for name, phase in zip(names, own, strict=True)
    ]
    kept: list[tuple[str, Holding]] = [(phases.get(one.request_id, "leased"), one) for one in leased(replica)]
    kept += [("quarantined", one) for one in quarantined(replica)]
    holdings = [one for _, one in kept]
    extra = len(kept)
    return (
        [*(at + 1).tolist(), *pool.numbers.of(holdings)],
        [*names, *(one.request_id for one in holdings)],
        [*salts, *[""] * extra],
        [*told, *(phase for phase, _ in kept)],
        [pool.name] * (len(names) + extra),
        [*pages.tolist(), *(len(one.pages) for one in holdings)],
        [*tokens.tolist(), *[0] * extra],
        [*prompts.tolist(), *[0] * extra],
    )
