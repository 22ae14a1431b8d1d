"""`Candidates`: the pages of earlier weights that a request may use, and the names by which it finds them.

A request with `max_staleness` may begin with cached pages of any version that is recent enough. Behind these pages it
may find others, which a request of a later version has computed with the same pages before them:

    column      0     1     2     3     4     5
    weights   └──── "a" ────┘ └─ "b" ─┘                 two prefixes that other requests have left
    weights   └─ "b" ─┘

    under "c", a request that allows two switches takes the first one: four pages are more than one
    weights   └──── "a" ────┘ └─ "b" ─┘ └── "c"         its own pages follow, in a segment of their own
"""

from collections.abc import Callable, Sequence

from kvcache.params import HashAlgorithm
from kvcache.replica.context import SafeContext
from kvcache.replica.hashing import PrefixHasher
from kvcache.weights import Segment, Segments, Weights, followed_by

Reach = Callable[[SafeContext, PrefixHasher], int]
"""Returns how many pages, from the first one on, a request can use if its pages have the names of this hasher."""


class Candidates:
    """The hashers by which one request may find its first pages, for one call of the manager.

    The context carries the hasher that was chosen last, which knows the others. So a request that waits hashes its
    tokens once for each of them.
    """

    def __init__(self, context: SafeContext, weights: Weights, algorithm: HashAlgorithm, page_size: int) -> None:
        self._context, self._weights = context, weights
        self._algorithm: HashAlgorithm = algorithm
        self._page_size = page_size
        kept = context.prefix_hasher
        self._known = {} if kept is None else {kept.segments: kept, **kept.others}
        self._used: dict[Segments, PrefixHasher] = {}

    def best(self, reach: Reach) -> PrefixHasher:
        """Returns the hasher under whose names the request reaches the longest prefix.

        The prefix has no page of a version that is too old. If two prefixes are equally long, the one whose oldest page
        is newer is chosen. So the result has the current version alone if that reaches as far as any other.
        """
        weights, context = self._weights, self._context
        best = self.of(weights.now.segments)
        most, last = reach(context, best), (context.end_idx - 1) // self._page_size
        newer = [weights.version]
        for version in weights.recent(context.staleness):
            if most == last:
                break
            found, end = self._longest((Segment(0, version),), newer, reach)
            if end > most:
                best, most = found, end
            newer.append(version)
        return best

    def of(self, segments: Segments) -> PrefixHasher:
        """Returns the request's hasher for these segments."""
        found = self._known.get(segments)
        if found is None or not found.fits(self._algorithm, self._page_size, self._context.named, segments):
            found = PrefixHasher(self._algorithm, self._page_size, *self._context.named, segments)
        self._known[segments] = self._used[segments] = found
        return found

    def keep(self, chosen: PrefixHasher) -> None:
        """Let the context carry the `chosen` hasher, and with it the others that were used."""
        for one in self._used.values():
            one.others = {}
        chosen.others = {segments: one for segments, one in self._used.items() if one is not chosen}
        self._context.prefix_hasher = chosen

    def _longest(self, segments: Segments, newer: Sequence[bytes | None], reach: Reach) -> tuple[PrefixHasher, int]:
        """Returns the hasher of the longest prefix that begins with `segments`, and its pages.

        Each further segment is of one of the versions `newer`, which are ordered from the newest on, and is newer than
        the segment before it.
        """
        best = self.of(segments)
        end = reach(self._context, best)
        while end and newer:
            longer = [self.of(followed_by(best.segments, end, version)) for version in newer]
            ends = [reach(self._context, one) for one in longer]
            most = max(ends)
            if most <= end:
                break
            at = ends.index(most)
            best, end, newer = longer[at], most, newer[:at]
        return best, end
