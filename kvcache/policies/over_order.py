"""`OverOrder`: an eviction order that wraps another one. `CheckedOrder`: checks an order that a caller supplies."""

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidParamsError, InvariantError
from kvcache.eviction_order import EvictionOrder, Indices, Pages, Reasons
from kvcache.retention import PageHints


class OverOrder(EvictionOrder):
    """Base class of orders that wrap another order. Methods that a subclass does not override call `order`."""

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order
        self.count = order.count

    def forget(self, pages: Pages) -> None:
        self._order.forget(pages)

    def moved(self, sources: Pages, targets: Pages) -> None:
        self._order.moved(sources, targets)

    def renew(self, pages: Pages) -> None:
        self._order.renew(pages)

    def hint(self, pages: Pages, hints: PageHints | None) -> None:
        self._order.hint(pages, hints)

    def own(self, pages: Pages, salt: str | None) -> None:
        self._order.own(pages, salt)

    def trust(self, share: float) -> None:
        self._order.trust(share)

    def leads(self, pages: Pages | Indices) -> NDArray[np.float64]:
        return self._order.leads(pages)

    def first_lead(self) -> float:
        return self._order.first_lead()

    def positions(self, pages: Indices) -> Indices:
        return self._order.positions(pages)

    def pages(self) -> Pages:
        return self._order.pages()


class CheckedOrder(OverOrder):
    """Checks a caller's own order: only idle pages may leave it.

    If an order returned a page that a request holds, that page would be overwritten. Each wrong result raises
    `InvariantError`, which says what was wrong. The error interrupts the call that needed pages, and `recover` can then
    build the state anew.

    Raises `InvalidParamsError` if `order` is not an empty `EvictionOrder`.
    """

    def __init__(self, num_pages: int, order: EvictionOrder) -> None:
        if EvictionOrder not in type(order).__mro__:
            raise InvalidParamsError(f"eviction_order({num_pages}) returned {order!r:.100}: an EvictionOrder is needed")
        super().__init__(order)
        self._name = f"eviction order {type(order).__name__}"
        if self.count != 0:
            raise InvalidParamsError(f"{self._name} starts with {self.count!r:.100} pages: it must start empty")
        # For each page, whether it is idle. The first entry (the null page) and the last entry are always False. The
        # last entry stands for all page numbers that are too large.
        self._idle = np.zeros(num_pages + 2, np.bool_)

    def append(self, pages: Pages | Indices) -> None:
        self._idle[pages] = True
        self.count += len(pages)
        self._order.append(pages.copy())

    def append_old(self, pages: Pages | Indices) -> None:
        self._idle[pages] = True
        self.count += len(pages)
        self._order.append_old(pages.copy())

    def remove(self, pages: Pages | Indices) -> None:
        self._idle[pages] = False
        self.count -= len(pages)
        self._order.remove(pages.copy())

    def pop(self, count: int) -> Pages:
        return self._leave(self._order.pop(count), count)

    def pop_explained(self, count: int) -> tuple[Pages, Reasons | None]:
        pages, reasons = self._order.pop_explained(count)
        if reasons is not None and (type(reasons) is not np.ndarray or reasons.shape != (count,)):
            raise InvariantError(
                f"{self._name}: pop_explained({count}) returned the reasons {reasons!r:.100}: one EvictionReason for "
                "each page is needed"
            )
        return self._leave(pages, count), reasons

    def first(self) -> int:
        return int(self._idle_ones(np.array([self._order.first()]), 1, "first()")[0])

    def due(self) -> int:
        page = self._order.due()
        return page and int(self._idle_ones(np.array([page]), 1, "due()")[0])

    def clear(self) -> None:
        self._idle[:] = False
        self.count = 0
        self._order.clear()

    def check(self) -> None:
        idle = int(np.count_nonzero(self._idle))
        if not self._order.count == self.count == idle:
            raise InvariantError(f"{self._name}: count is {self._order.count}, but {idle} pages are idle")
        self._idle_ones(self._order.pages(), idle, "pages()")
        self._order.check()

    def _leave(self, pages: Pages, count: int) -> Pages:
        pages = self._idle_ones(pages, count, f"pop({count})")
        self._idle[pages] = False
        self.count -= count
        return pages

    def _idle_ones(self, pages: object, count: int, call: str) -> Pages:
        """Returns a copy of `pages`, which the caller's order cannot change later.

        Raises `InvariantError` unless they are `count` distinct idle pages.
        """
        if type(pages) is not np.ndarray or pages.dtype.kind not in "iu" or pages.shape != (count,):
            raise InvariantError(f"{self._name}: {call} returned {pages!r:.100}: {count} page numbers are needed")
        wide = pages.astype(np.int64)
        strangers = wide[~self._idle.take(wide, mode="clip")]
        if strangers.size or len(np.unique(wide)) != count:
            what = f"page {strangers[0]}, which is not idle" if strangers.size else "a page twice"
            raise InvariantError(f"{self._name}: {call} returned {what}")
        return wide.astype(np.int32)
