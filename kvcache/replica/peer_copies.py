"""Pages that a request misses on its replica, and another replica of this process has, are copied from there.

Off by default (`Routing.copy_pages`): a copy takes room that another prompt's pages had, and a router that follows
prefixes leaves little to copy. It is for what routing alone cannot give: an owner that is busy, a head that all share.
"""

from collections.abc import Sequence

from kvcache.pool.index import NO_PAGE
from kvcache.replica.context import Context
from kvcache.replica.devices import PlacedReplica


class PeerCopies:
    """Brings published pages of one replica to another's cache; `copied`: how many so far."""

    def __init__(self, placed: Sequence[PlacedReplica]) -> None:
        self._placed = placed
        self.copied = 0

    def bring(self, replica_idx: int, row: int, context: Context, num_steps: int) -> None:
        """Bring what the row's new request will look up, where another replica has more of it; nothing is reserved.

        Only where the request then fits: one that is refused is to leave everything as it was.
        """
        mine = self._placed[replica_idx].replica
        if not mine.caching or context.active_length == 1:
            return
        hasher = mine.hasher(row, context)
        here = mine.match(context, row, hasher)[1]
        others = [at for at in range(len(self._placed)) if at != replica_idx]
        held = {at: self._placed[at].replica.match(context, hasher=hasher)[1] for at in others}
        owner = max(others, key=lambda at: len(held[at]))
        pages = held[owner]
        if len(pages) <= len(here):
            return
        digests = hasher.digests(context.tokens, 0, len(pages))
        wanted = mine.pool.index.find(digests)  # pages behind a gap may be here already
        absent = wanted == NO_PAGE
        present, names = wanted[~absent], digests[absent]
        new = mine.pages_needed(context, num_steps) - len(present)
        if new + mine.pool.would_be_taken(present) > mine.pool.free_count:
            return
        mine.pool.hold(present)
        wanted[absent] = brought = mine.pool.allocate(len(names))
        self._placed[replica_idx].copy_pages_of(self._placed[owner], pages[absent], brought)
        mine.pool.index.publish(brought, names)
        mine.pool.release(wanted)
        mine.tier.published(brought, names)
        mine.hints.brought(digests[:, 0])
        self.copied += len(brought)
