"""`EvictionOrder`: the order in which a pool's idle pages are evicted. A pool uses it only through this interface.

    LruOrder      least recently used first; the default
    HintedOrder   another order, biased by the retention hints of requests
    QuotaOrder    another order, in which pages above their tenants' quotas go first

`KVCacheParams.eviction_order` accepts an order of your own. `tests/kvcache/test_eviction_order.py` tests all orders
against one contract: run it on yours.
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
"""The reasons of evictions: the page's turn had come, a hint put it first, or its tenant was above its quota."""


class EvictionOrder(Protocol):
    """The idle pages of one pool, numbered 1 to its `num_pages`, in the order in which they are evicted.

    The pool calls `append` when a page becomes idle, `remove` when an idle page is used again, and `pop` when it needs
    pages. An order only names pages; it neither frees nor holds them. All calls come from one thread, except
    `positions`. Your own order needs `count` and the abstract methods. The other methods have defaults, which ignore
    hints and tenants. `CheckedOrder` checks the results of your order: if `pop` returns a page that is not idle, the
    call fails with an error.

    Attributes:
        count: the number of pages in the order. The pool reads it at each allocation.
        by_age: whether pages go strictly by the time at which they became idle, whatever hints say.
    """

    count: int = 0
    by_age: bool = False

    # ---- every order

    @abstractmethod
    def append(self, pages: Pages | Indices) -> None:
        """Add `pages`, which are idle now and are not in the order. The first of them are worth the least."""

    @abstractmethod
    def remove(self, pages: Pages | Indices) -> None:
        """Remove `pages`, which are in the order and are used again. `append` may add them again later."""

    @abstractmethod
    def pop(self, count: int) -> Pages:
        """Take out the next `count` pages, at most `self.count`, in their order. Their contents are lost.

        Calling `pop(1)` that many times gives the same pages.
        """

    @abstractmethod
    def pages(self) -> Pages:
        """All pages, roughly in eviction order. The next one comes first, unless the order overrides `first`."""

    @abstractmethod
    def mend(self, pages: Indices) -> None:
        """Make the order contain exactly `pages`: an interrupted call may have left it half changed.

        Pages that were in it keep their order as far as it is known, and come before the others.
        """

    # ---- optional for an order

    def first(self) -> int:
        """The page that `pop` would return first, if any. It stays in the order."""
        return int(self.pages()[0])

    def pop_one(self) -> int:
        """`pop(1)` for an order that is not empty."""
        return int(self.pop(1)[0])

    def pop_explained(self, count: int) -> tuple[Pages, Reasons | None]:
        """`pop`, with the reason for each page (such as `BY_HINT`); None: all pages went in their normal turn."""
        return self.pop(count), None

    def forget(self, pages: Pages) -> None:
        """Drop all knowledge about `pages`, which are not in the order: they lost their content without a `pop`."""

    def moved(self, sources: Pages, targets: Pages) -> None:
        """Move the knowledge about `sources` to `targets`, to which their content has moved. None is in the order."""

    def renew(self, pages: Pages) -> None:
        """Announce that `pages`, which are in the order, will be replaced by others that stand for the same content."""

    def hint(self, pages: Pages, hints: PageHints | None) -> None:
        """A request releases `pages`, which are not in the order, with these `hints`; None: without hints."""

    def own(self, pages: Pages, salt: str | None) -> None:
        """Assign `pages`, which are not in the order, to this tenant; None: to no tenant."""

    def trust(self, share: float) -> None:
        """Let this share of the idle pages follow hints from now on, 0.0 to 1.0."""

    # ---- comparison with pages of another order

    def due(self) -> int:
        """The page that must go next, however young it is; 0 if there is none."""
        return 0

    def leads(self, pages: Pages | Indices) -> NDArray[np.float64]:
        """How much later than by age alone each of `pages` is evicted, in pool sizes; negative if it is earlier."""
        return np.zeros(len(pages))

    def first_lead(self) -> float:
        """`leads` of the page that goes next."""
        return 0.0

    def positions(self, pages: Indices) -> Indices:
        """A number for each of `pages`: a larger one roughly means a later eviction. Any number for a page not in it.

        It may be called from another thread than the one that changes the order.
        """
        mine = self.pages()
        places = np.zeros(1 + max(int(mine.max(initial=0)), int(pages.max(initial=0))), np.int64)
        places[mine] = np.arange(len(mine))
        return places[pages]

    def check(self) -> None:
        """Raise `InvariantError` if the counts disagree."""
        pages = self.pages()
        if len(np.unique(pages)) != len(pages) or len(pages) != self.count:
            raise InvariantError(
                f"idle order: holds {len(pages)} entries for {len(np.unique(pages))} pages, but count is {self.count}"
            )
