"""Pages that a request misses on its replica, and other replicas of this process have, are copied from there.

Off by default (`Routing.copy_pages`). A copy takes room that another prompt's pages had, and a router that follows
prefixes leaves little to copy: it is for what routing alone cannot give, an owner that is busy, a head that all share.
Rejected: that the other replicas give up what was copied. They have room for more then, but the same page comes and
goes: in a simulation on public traces no more was found, and up to three times as much was copied.
"""

from collections.abc import Sequence

import numpy as np

from kvcache.pool.index import NO_PAGE, Digests
from kvcache.replica.context import Context
from kvcache.replica.devices import PlacedReplica
from kvcache.replica.replica import Replica
from kvcache.replica.resume import Asked, FromBelow


class PeerCopies:
    """Brings published pages of other replicas to one's cache; `copied`: how many so far."""

    def __init__(self, placed: Sequence[PlacedReplica]) -> None:
        self._placed = placed
        self.copied = 0

    def bring(self, replica_idx: int, row: int, context: Context, num_steps: int) -> None:
        """Bring what the row's new request will look up, where other replicas have more of it; nothing is reserved.

        Only where the request then fits: one that is refused is to leave everything as it was.
        """
        mine = self._placed[replica_idx].replica
        last = (context.current_length - 1) // mine.page_size
        if not mine.caching or not last:
            return
        digests = mine.hasher(row, context).digests(context.tokens, 0, last)
        place = self._placed[replica_idx]
        others = [other for other in self._placed if other is not place]

        def found(names: Digests, asked: Asked) -> Asked:
            having = [other.replica.pool.index.find(names[asked]) != NO_PAGE for other in others]
            there = np.zeros_like(asked)
            there[asked] = np.logical_or.reduce(having)
            return there

        wanted = mine.tables.from_below(digests, found)
        names = wanted.digests
        if not len(names) or not _fits(mine, context, num_steps, wanted):
            return
        mine.pool.hold(wanted.here)
        brought = mine.pool.allocate(len(names))
        missing = np.ones(len(brought), np.bool_)
        for other in others:
            pages = other.replica.pool.index.find(names)
            taken = missing & (pages != NO_PAGE)
            if taken.any():
                place.copy_pages_of(other, pages[taken], brought[taken])
                missing &= ~taken
        mine.pool.index.say_tables(brought, wanted.tables)
        mine.pool.index.publish(brought, names)
        mine.pool.release(brought)
        mine.pool.release(wanted.here)
        for tell in mine.pool.journal.came:
            tell(brought, names)
        mine.hints.brought(digests[: wanted.pages, 0])
        self.copied += len(brought)


def _fits(replica: Replica, context: Context, num_steps: int, wanted: FromBelow) -> bool:
    """Whether a request without pages could be reserved if what is `wanted` were on the device."""
    start, pool = wanted.pages * replica.page_size, replica.pool
    needed = replica.tables.least(context, context.current_length + num_steps - 1, start)
    return needed - len(wanted.here) + pool.would_be_taken(wanted.here) <= pool.free_count
