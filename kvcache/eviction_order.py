"""`EvictionOrder`: the order in which a pool's idle pages are evicted. A pool uses it only through this interface.

    LruOrder      least recently used first; the default
    HintedOrder   another order, biased by the retention hints of requests
    QuotaOrder    another order, in which pages above their tenants' quotas are evicted first

`KVCacheParams.eviction_order` accepts your own order. `tests/kvcache/test_eviction_order.py` tests all orders against
one contract; run it on yours.
"""

from abc import abstractmethod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.retention import PageHints

Pages = NDArray[np.int32]
Indices = NDArray[np.intp]
Reasons = NDArray[np.uint8]

BY_TURN, BY_HINT, BY_QUOTA = 0, 1, 2
"""Why a page was evicted: it was the next in order, a hint put it first, or its tenant was above its quota."""


class EvictionOrder(Protocol):
    """Keeps the idle pages of one pool in the order in which they are to be evicted.

    Pages are numbered 1 to `num_pages`.

    The pool calls `append` when a page becomes idle, `remove` when an idle page is used again, and `pop` when it needs
    pages. An order only sorts page ids; it neither frees nor holds pages. All calls come from one thread, except
    `positions`. Your own order must provide `count` and the abstract methods. The other methods have defaults, which
    ignore hints and tenants. `CheckedOrder` checks the results of your order: if `pop` returns a page that is not idle,
    the call fails with an error.

    Attributes:
        count: the number of pages in the order. The pool reads it at each allocation.
        by_age: whether pages are evicted strictly in the order in which they became idle, regardless of hints.
    """

    count: int = 0
    by_age: bool = False

    # ---- every order

    @abstractmethod
    def append(self, pages: Pages | Indices) -> None:
        """Add `pages`, which have become idle and are not in the order.

        `pages` are sorted: the page to evict first comes first.
        """

    @abstractmethod
    def remove(self, pages: Pages | Indices) -> None:
        """Remove `pages` from the order, because requests use them again. `pages` may be appended again later."""

    @abstractmethod
    def pop(self, count: int) -> Pages:
        """Remove and return the next `count` pages (at most `self.count`), in their order. Their contents are lost.

        The result is the same as that of `count` calls of `pop(1)`.
        """

    @abstractmethod
    def pages(self) -> Pages:
        """Returns all pages, roughly in the order of their eviction.

        The first one must be the page that `pop` would return next, unless the class overrides `first`.
        """

    @abstractmethod
    def clear(self) -> None:
        """Remove all pages. Records about pages, such as hints, stay.

        Called after an interrupted call, which may have left the order half changed. The pool then appends the idle
        pages again.
        """

    # ---- optional for an order

    def append_old(self, pages: Pages | Indices) -> None:
        """Add `pages`, sorted as for `append`, that are to be evicted before all others: they are of other weights.

        If an order does not override it, they are evicted like any page that becomes idle.
        """
        self.append(pages)

    def first(self) -> int:
        """Returns the page that `pop` would return first, without removing it. Undefined if the order is empty."""
        return int(self.pages()[0])

    def pop_one(self) -> int:
        """Do the same as `pop(1)`. The order must not be empty."""
        return int(self.pop(1)[0])

    def pop_explained(self, count: int) -> tuple[Pages, Reasons | None]:
        """Do the same as `pop`, and also return for each page why it was evicted (such as `BY_HINT`).

        The second result is None if each page was evicted because it was the next in order.
        """
        return self.pop(count), None

    def forget(self, pages: Pages) -> None:
        """Forget everything about `pages`, because they lost their content without a `pop`.

        They are not in the order.
        """

    def moved(self, sources: Pages, targets: Pages) -> None:
        """Record that the content of each page of `sources` was moved to the page at the same index of `targets`.

        The order applies its records about a source, such as hints and tenant, to the target. No page of `sources` or
        `targets` is in the order.
        """

    def renew(self, pages: Pages) -> None:
        """Record that each of `pages`, which are in the order, is about to be replaced by a newer page."""

    def hint(self, pages: Pages, hints: PageHints | None) -> None:
        """Record a request's hints for `pages`, which the request is about to release.

        `hints` is None if the request has no hints. The pages are not in the order.
        """

    def own(self, pages: Pages, salt: str | None) -> None:
        """Assign `pages`, which are not in the order, to the tenant of `salt`. None means no tenant."""

    def trust(self, share: float) -> None:
        """Set the share of the idle pages that are evicted according to hints, from 0.0 to 1.0.

        The other idle pages are evicted as if there were no hints.
        """

    # ---- to compare pages with those of another order

    def due(self) -> int:
        """Returns a page that must be evicted next even if it was used recently. Returns 0 if there is no such page."""
        return 0

    def leads(self, pages: Pages | Indices) -> NDArray[np.float64]:
        """Returns how long the hint of each page delays its eviction. Negative numbers mean an earlier eviction.

        The unit is the pool's size. For example, 1.0 delays the eviction of a page until the pool has released as many
        more pages as it has.
        """
        return np.zeros(len(pages))

    def first_lead(self) -> float:
        """Returns the lead of the page that is evicted next, as `leads` defines it. An expired hint has no lead."""
        return 0.0

    def positions(self, pages: Indices) -> Indices:
        """Returns a number for each of `pages`. Larger numbers mean later evictions, approximately.

        Undefined for pages that are not in the order. Unlike the other methods, it may be called from any thread.
        """
        mine = self.pages()
        positions = np.zeros(1 + max(int(mine.max(initial=0)), int(pages.max(initial=0))), np.int64)
        positions[mine] = np.arange(len(mine))
        return positions[pages]

    def check(self) -> None:
        """Raise `InvariantError` unless `count` is the number of pages in the order."""
        pages = self.pages()
        if len(np.unique(pages)) != len(pages) or len(pages) != self.count:
            raise InvariantError(
                f"idle order: holds {len(pages)} entries for {len(np.unique(pages))} pages, but count is {self.count}"
            )
