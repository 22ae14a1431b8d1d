"""`PeerCopies`: copies the pages that a request lacks from other replicas of this process.

With recurrent states, the copied prefix ends at the last page after which some replica has a cached state, and the
state is copied, too. If host memory has pages after this prefix, the request resumes after these pages, and only the
pages that it needs at that point are copied. If both a replica and the host have a page, it is copied from the replica,
because the link between devices is faster.

Copying is off by default (`Routing.copy_pages`). The copies evict pages of other prompts. If the router sends each
request to the replica with its prefix, little is left to copy. Copying helps where routing cannot: if the replica that
has the pages is busy, or if all prompts begin with the same tokens.

An alternative was rejected: removing the copied pages from the other replica. This would save memory, but pages would
move back and forth. In a simulation on public traces, the number of hits was the same, and up to three times as many
pages were copied.
"""

from collections.abc import Sequence

import numpy as np

from kvcache.pool.index import NO_PAGE, Digests
from kvcache.pool.pages import HeldPages
from kvcache.pool.pages_below import Asked
from kvcache.replica.context import SafeContext
from kvcache.replica.devices import PlacedReplica
from kvcache.replica.replica import Replica
from kvcache.replica.resume import FromBelow
from kvcache.states.state_pages import StatePages


class PeerCopies:
    """Copies published pages and states from other replicas.

    `pages` and `states` count the pages and states that were copied so far.
    """

    def __init__(self, placed: Sequence[PlacedReplica]) -> None:
        self._placed = placed
        self.pages = self.states = 0

    def bring(self, replica_idx: int, row: int, context: SafeContext, num_steps: int) -> None:
        """Copy pages of a row's new request to its replica, if other replicas have more pages of the prompt.

        Reserves nothing. Copies only if the request fits afterwards, because a request that is refused must leave
        everything as it was. If even an empty pool is too small for the request, the call raises the errors of
        `reserve`, although the request might fit with a longer hit.
        """
        place = self._placed[replica_idx]
        mine, others = place.replica, [other for other in self._placed if other is not place]
        last = (context.end_idx - 1) // mine.page_size
        if not mine.caching or not last:
            return
        mine.length_of(context, num_steps, 0)
        hasher = mine.hasher(row, context)
        digests = hasher.digests(context.tokens, 0, last)
        here = mine.ends(digests, row)
        there = [other.replica.ends(digests) for other in others]

        wanted = _wanted(mine, others, digests, np.logical_or.reduce([here, *there]))
        after = digests[max(0, wanted.pages - 1) : wanted.pages]
        for states in mine.states if not here[: wanted.pages][-1:].all() else ():
            fits = states.pages.pool.has_room and _fits(mine, context, num_steps, wanted, mine.pool.beside)
            # The state is copied before the pages, because pages may have to be evicted to make room for it.
            if fits and (taken := _copied_state(states.pages, mine, others, wanted, after)) is not None:
                self.states += 1
                if wanted.lacking.any():
                    self._bring_pages(place, others, wanted, hasher.salt)
                taken.release()
                return
            wanted = _wanted(mine, others, digests, here)
        if wanted.lacking.any() and _fits(mine, context, num_steps, wanted):
            self._bring_pages(place, others, wanted, hasher.salt)

    def _bring_pages(
        self, place: PlacedReplica, others: Sequence[PlacedReplica], wanted: FromBelow, salt: str | None
    ) -> None:
        mine, names = place.replica, wanted.digests
        mine.pool.hold(wanted.here)
        brought = mine.pool.allocate(len(names))
        missing = np.ones(len(brought), np.bool_)
        for other in others:
            pages = other.replica.pool.index.find(names)
            taken = missing & (pages != NO_PAGE)
            if taken.any():
                place.memory.copy_pages_of(other.memory, pages[taken], brought[taken])
                missing &= ~taken
        mine.pool.index.tables[brought] = wanted.tables
        # While pages were evicted to make room, some of these pages may also have arrived from a lower tier. The copies
        # of such pages are not new.
        is_new = mine.pool.index.publish(brought, names) == brought
        mine.hints.brought(brought[is_new], salt, wanted.every[0, : wanted.pages, 0])
        mine.pool.release(brought)
        mine.pool.release(wanted.here)
        for tell in mine.pool.journal.came:
            tell(brought[is_new], names[is_new])
        self.pages += len(brought)


def _copied_state(
    states: StatePages, mine: Replica, others: Sequence[PlacedReplica], wanted: FromBelow, after: Digests
) -> HeldPages | None:
    """Copy the state after the last of the `wanted` pages to `states`. Returns None if there is no room for it.

    Another replica has the state. `after` is the digest of that last page. The caller releases the result.
    """
    mine.pool.hold(wanted.here)
    theirs = [one.pages for other in others for one in other.replica.states]
    taken = states.take_copy(next(copy for one in theirs if (copy := one.copy_of(after)) is not None), after)
    mine.pool.release(wanted.here)
    return taken


def _wanted(mine: Replica, others: Sequence[PlacedReplica], digests: Digests, ends: Asked) -> FromBelow:
    """Returns the longest prefix for which the replicas' devices and host memory together have all pages and the state.

    In the result, `lacking` marks the pages to copy from `others`. Pages that only host memory has are not marked. They
    are restored later, when the request reserves its pages.
    """

    def on_others(names: Digests, asked: Asked) -> Asked:
        having = [other.replica.pool.index.find(names[asked]) != NO_PAGE for other in others]
        there = np.zeros_like(asked)
        there[asked] = np.logical_or.reduce(having)
        return there

    def anywhere(names: Digests, asked: Asked) -> Asked:
        return on_others(names, asked) | mine.tier.host_has(names, asked)

    wanted = mine.tables.from_below(digests, anywhere, ends)
    copied = on_others(wanted.every, wanted.lacking)
    # A copy may evict a page, and the evicted page may take the host slot that was used least recently. The slots from
    # which pages are restored later must stay, so they are marked as just used.
    mine.tier.touch(wanted._replace(lacking=wanted.lacking & ~copied).digests)
    return wanted._replace(lacking=copied)


def _fits(replica: Replica, context: SafeContext, num_steps: int, wanted: FromBelow, beside: int = 0) -> bool:
    """Whether a request without pages could get all its pages if the `wanted` pages were on the device.

    `beside` is the number of additional pages that must be free for a recurrent state.
    """
    start, pool = wanted.pages * replica.page_size, replica.pool
    needed = replica.tables.least(context.indices, context.end_idx + num_steps - 1, start) - len(wanted.here)
    needed = max(needed, len(wanted.digests) + beside)
    return needed + pool.would_be_taken(wanted.here) <= pool.free_count
