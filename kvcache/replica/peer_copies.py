"""Pages that a request misses on its replica, and other replicas of this process have, are copied from there.

Off by default (`Routing.copy_pages`). A copy takes room that another prompt's pages had, and a router that follows
prefixes leaves little to copy: it is for what routing alone cannot give, an owner that is busy, a head that all share.
Rejected: that the other replicas give up what was copied. They have room for more then, but the same page comes and
goes: in a simulation on public traces no more was found, and up to three times as much was copied.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.index import NO_PAGE, Digests
from kvcache.replica.context import Context
from kvcache.replica.devices import PlacedReplica
from kvcache.replica.further_tables import FurtherTables
from kvcache.replica.lifts import fits
from kvcache.replica.pages_below import Asked
from kvcache.replica.rows import Pages


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
        hasher = mine.hasher(row, context)
        digests = hasher.digests(context.tokens, 0, last)
        if mine.further is not None:
            self._bring_tables(replica_idx, mine.further, context, num_steps, digests)
            return
        runs = self._runs(digests)
        digests = digests[: sum(len(pages) for _, pages in runs)]
        wanted = mine.pool.index.find(digests)  # pages behind a gap may be here already
        absent = wanted == NO_PAGE
        if not absent.any():
            return
        present, names = wanted[~absent], digests[absent]
        new = mine.pages_needed(context, num_steps, 0) - len(present)
        if new + mine.pool.would_be_taken(present) > mine.pool.free_count:
            return
        mine.pool.hold(present)
        wanted[absent] = brought = mine.pool.allocate(len(names))
        self._copy(replica_idx, runs, absent, brought)
        mine.pool.index.publish(brought, names)
        mine.pool.release(wanted)
        for tell in mine.pool.journal.came:
            tell(brought, names)
        mine.hints.brought(digests[:, 0])
        self.copied += len(brought)

    def _bring_tables(
        self, replica_idx: int, further: FurtherTables, context: Context, num_steps: int, digests: Digests
    ) -> None:
        """`bring` where there are several block tables: what the longest prefix that all can go on from needs."""
        place = self._placed[replica_idx]
        mine, others = place.replica, [other for other in self._placed if other is not place]

        def found(names: Digests, asked: Asked) -> Asked:
            having = [other.replica.pool.index.find(names[asked]) != NO_PAGE for other in others]
            there = np.zeros_like(asked)
            there[asked] = np.logical_or.reduce(having)
            return there

        wanted = further.from_below(digests, found)
        names = wanted.digests
        if not len(names) or not fits(mine, context, num_steps, wanted):
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

    def _runs(self, digests: NDArray[np.uint64]) -> list[tuple[int, Pages]]:
        """Who has which pages of the longest run of digests, from the first on, that is cached anywhere.

        In their order, each replica with as many as it has in a row from there: few replicas take part.
        """
        runs, at = list[tuple[int, Pages]](), 0
        while at < len(digests):
            indexes = [place.replica.pool.index for place in self._placed]
            having = [owner for owner, index in enumerate(indexes) if index.may_have(digests[at])]
            found = [(owner, indexes[owner].match(digests[at:])) for owner in having]
            longest = max(found, key=lambda run: len(run[1]), default=None)
            if longest is None or not len(longest[1]):
                break
            runs.append(longest)
            at += len(longest[1])
        return runs

    def _copy(self, replica_idx: int, runs: list[tuple[int, Pages]], absent: NDArray[np.bool_], brought: Pages) -> None:
        """Copy the pages of the runs that are `absent` here into those `brought`, in their order."""
        at = copied = 0
        for owner, pages in runs:
            wanted, at = pages[absent[at : at + len(pages)]], at + len(pages)
            if len(wanted):
                target, copied = brought[copied : copied + len(wanted)], copied + len(wanted)
                self._placed[replica_idx].copy_pages_of(self._placed[owner], wanted, target)
