"""`ReplicaPolicy`: what the policy of a replica's eviction order is told about requests."""

import numpy as np
from numpy.typing import NDArray

from kvcache.eviction_order import Pages
from kvcache.replica.context import SafeContext
from kvcache.replica.rows import Ints

Words = NDArray[np.uint64]
"""The first word of each page's digest, in logical order. It nearly always tells two pages apart."""


class ReplicaPolicy:
    """Reads what requests do with a replica's pages, and tells the pool's order.

    This one reads nothing, so the order is the pool's own. `kvcache.policies` has others.

    Attributes:
        has_begun: whether `come` must be called for every request. If not, only for a request with a hint.
    """

    has_begun: bool = False

    @property
    def share(self) -> float:
        """The share of idle pages that are evicted according to hints, 0.0 to 1.0."""
        return 0.0

    def come(self, row: int, context: SafeContext, found: int) -> None:
        """Record that the row's request asks for pages, and that `found` of the pages were already published."""

    def share_pages(self, rows: Ints) -> None:
        """Count one more found page for each of `rows`. The row now shares a page that was published before."""

    def brought(self, pages: Pages, salt: str | None, words: Words) -> None:
        """Record that `pages` were copied from another manager, for a request with this `salt`.

        `words` has the first word of the digest of each page that the request finds in its prompt.
        """

    def leave(self, row: int, context: SafeContext | None) -> None:
        """Record that the row is about to be released.

        `context` is the context of the row's request, or None if the request never got pages.
        """

    def reset(self) -> None:
        """Forget what was cached, because the cache is empty now."""

    def clear(self) -> None:
        """Forget all requests after an interrupt. The pools report all idle pages again next."""
