"""A cell says what one page of a pool is doing.

The endpoint's thread reads all cells in a few numpy operations over the loop's arrays. This is safe in another thread
for three reasons: the arrays are never moved in memory; lists and dicts are copied in one step before they are read;
and the state of a page follows from its own holders, writers and digest. So each cell is correct for some moment during
the snapshot. If the loop does nothing during the snapshot, all cells agree with the counts of `check`. numpy releases
the interpreter lock, so the loop can run meanwhile.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.pages import PagePool
from kvcache.replica.replica import Replica
from kvcache.watch.messages import AGE_SHIFT, MOST_OWNERS, OWNER_SHIFT, SHARED_BIT, STATE_BITS, Cells, PageState

# How the state of a page without a request is shown. A held page is shown as leased, because a lease holds it. A page
# that is written is shown as quarantined, because a cancelled import may still write to it.
_BECOMES = ((PageState.HELD, PageState.LEASED), (PageState.WRITTEN, PageState.QUARANTINED))


class Holding(NamedTuple):
    """Pages that are in no row, because a lease holds them or a cancelled import may still write to them."""

    what: object
    request_id: str
    pages: NDArray[np.int32]


class OwnerNumbers:
    """Gives numbers to leases and imports that hold pages. A holder keeps its number as long as it exists.

    The numbers 1 to `rows` belong to the rows, so these holders get larger numbers.
    """

    def __init__(self, rows: int) -> None:
        self._next = self._first = rows + 1
        # The key is the `id` of the lease or import. The `id` stays unique, because the object is kept alive here.
        self._known: dict[int, tuple[object, int]] = {}

    def of(self, holdings: list[Holding]) -> list[int]:
        """Returns the number of the lease or import of each holding.

        A lease or import that is not in the list loses its number.
        """
        known = self._known
        self._known = {id(one.what): known.get(id(one.what)) or (one.what, self._new()) for one in holdings}
        return [self._known[id(one.what)][1] for one in holdings]

    def _new(self) -> int:
        number = self._next
        self._next = self._first if number >= MOST_OWNERS else number + 1
        return number


def leased(replica: Replica) -> list[Holding]:
    """Returns the pages that leases hold after their requests were released."""
    found = ((lease, np.concatenate(pages)) for lease, pages in replica.leases.held() if pages)
    return [Holding(lease, lease.request_id, pages) for lease, pages in found]


def quarantined(replica: Replica) -> list[Holding]:
    """Returns the pages of cancelled imports to which a transfer may still write."""
    given_up = (pending for pending in list(replica.imports.each) if pending.closed)
    return [Holding(pending, pending.request_id, pending.written) for pending in given_up]


def pool_cells(pool: PagePool) -> Cells:
    """Returns the state and the age of each page, as far as the pool itself knows them: uint32 `[num_pages + 1]`."""
    holders = pool.holders
    cells = (pool.index.published & (holders == 0)).astype(np.uint32)  # PageState.IDLE is 1
    cells[holders > 0] = PageState.HELD
    cells[holders > 1] |= np.uint32(1 << SHARED_BIT)
    cells[pool.writers > 0] = PageState.WRITTEN
    cells[0] = PageState.FREE
    idle = np.flatnonzero(cells == PageState.IDLE)
    if idle.size:
        positions = pool.idle.positions(idle)
        positions -= positions.min()
        cells[idle] |= (positions * 8 // (positions.max() + 1)).astype(np.uint32) << np.uint32(AGE_SHIFT)
    return cells


def replica_cells(replica: Replica, numbers: OwnerNumbers) -> Cells:
    """Does the same as `pool_cells` for the pool of a replica, and adds the owner of each page."""
    cells, rows = pool_cells(replica.pool), replica.rows
    owner = np.zeros(len(cells), np.uint32)
    taken = np.flatnonzero(rows.num_pages)
    if taken.size:
        width = int(rows.num_pages[taken].max())
        numbers_of = np.repeat(taken.astype(np.uint32) + 1, width)
        for table in rows.table[::-1]:
            owner[table[taken, :width].ravel()] = numbers_of
    leases, given_up = leased(replica), quarantined(replica)
    for at, (holding, number) in enumerate(zip(leases + given_up, numbers.of(leases + given_up), strict=True)):
        pages = holding.pages
        pages = pages[owner[pages] == 0] if at < len(leases) else pages
        was, becomes = _BECOMES[at >= len(leases)]
        changed = pages[cells[pages] & STATE_BITS == was]
        cells[changed] = cells[changed] - was + becomes
        owner[pages[owner[pages] == 0]] = number
    held = np.flatnonzero(owner)
    held = held[cells[held] & STATE_BITS >= PageState.HELD]
    cells[held] |= owner[held] << np.uint32(OWNER_SHIFT)
    return cells
