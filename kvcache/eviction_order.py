"""`EvictionOrder`: which idle page of a pool goes next. A pool has one order, and asks nothing else.

    LruOrder      least recently used first; what a pool has where nobody says more
    HintedOrder   another order, biased by the retention hints of requests
    QuotaOrder    another order, before whose pages those go that tenants have above their quotas

`KVCacheParams.eviction_order` takes one of your own. `tests/kvcache/test_eviction_order.py` holds all of them to one
contract: run it on yours.
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
"""Why a page went: its turn had come, somebody had said that it goes first, or its tenant had more than its quota."""


class EvictionOrder(Protocol):
    """The idle pages of one pool, 1 to its `num_pages`, in the order in which they go.

    The pool calls `append` when a page becomes idle, `remove` when an idle page is used again, and `pop` when it needs
    pages. An order frees nothing and holds nothing: it names pages. Calls come from one thread, but for `positions`.
    An order of your own has `count` and the abstract methods. The others answer for an order to which nothing was said.
    It is not believed: a `pop` that gives a page that is not idle ends the call with an error (`CheckedOrder`).

    Attributes:
        count: the pages in the order. Read at each allocation.
        by_age: whether pages go strictly by when they became idle, whatever is said of them.
    """

    count: int = 0
    by_age: bool = False

    # ---- every order

    @abstractmethod
    def append(self, pages: Pages | Indices) -> None:
        """`pages`, none of them in the order, are idle now; of these the first ones are worth the least."""

    @abstractmethod
    def remove(self, pages: Pages | Indices) -> None:
        """`pages`, all of them in the order, are used again. They leave it, and may come back by `append`."""

    @abstractmethod
    def pop(self, count: int) -> Pages:
        """Take the `count` pages out that go next, the first of them first: what is in them is lost.

        At most `self.count`. As often `pop(1)` gives the same pages.
        """

    @abstractmethod
    def pages(self) -> Pages:
        """All pages in the order, about as they go; the next one first, unless the order has a `first` of its own."""

    @abstractmethod
    def mend(self, pages: Indices) -> None:
        """Just `pages` are in the order, whatever was in it: an interrupted call may have left it half changed.

        Those that were in it keep their order as far as it is known, before the others.
        """

    # ---- what an order need not say

    def first(self) -> int:
        """The page that `pop` gives first, where there is one; it stays."""
        return int(self.pages()[0])

    def pop_one(self) -> int:
        """`pop(1)`, where there is a page."""
        return int(self.pop(1)[0])

    def pop_explained(self, count: int) -> tuple[Pages, Reasons | None]:
        """`pop`, and of each page why it went (`BY_HINT`, say); None: the turn of all of them had come."""
        return self.pop(count), None

    def forget(self, pages: Pages) -> None:
        """`pages`, not in the order, lost their content otherwise than by `pop`: what is known of it is over."""

    def moved(self, sources: Pages, targets: Pages) -> None:
        """The content of `sources` is in `targets` by now; none of these is in the order. What is known goes along."""

    def renew(self, pages: Pages) -> None:
        """`pages`, in the order, are about to leave it for others that stand for the same thing in their place."""

    def hint(self, pages: Pages, hints: PageHints | None) -> None:
        """A request that used `pages`, not in the order, leaves them and says `hints` of them; None: nothing."""

    def own(self, pages: Pages, salt: str | None) -> None:
        """`pages`, not in the order, are this tenant's; None: nobody's."""

    def trust(self, share: float) -> None:
        """So much of the idle pages may follow hints from now on, 0.0 to 1.0."""

    # ---- what is compared with pages of another order

    def due(self) -> int:
        """The page that goes next however young it is; 0: none."""
        return 0

    def leads(self, pages: Pages | Indices) -> NDArray[np.float64]:
        """By how many pools' pages each of `pages` lives longer than its age says; below 0 where it goes earlier."""
        return np.zeros(len(pages))

    def first_lead(self) -> float:
        """`leads` of the page that goes next, as it stands now."""
        return 0.0

    def positions(self, pages: Indices) -> Indices:
        """A number for each of `pages`, about the larger the later it goes; for those not in the order any number.

        Another thread than the one that changes the order may ask.
        """
        mine = self.pages()
        places = np.zeros(1 + max(int(mine.max(initial=0)), int(pages.max(initial=0))), np.int64)
        places[mine] = np.arange(len(mine))
        return places[pages]

    def check(self) -> None:
        """Raise `InvariantError` where the books do not agree."""
        pages = self.pages()
        if len(np.unique(pages)) != len(pages) or len(pages) != self.count:
            raise InvariantError(f"idle order: {len(np.unique(pages))} pages in {len(pages)}, {self.count} counted")
