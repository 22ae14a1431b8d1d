"""`Journal`: reports to readers what happens to the pages of one pool.

Readers are called in the order in which they were added, before the call that caused the change returns. A reader that
saves pages before they are overwritten comes first. No reader knows the others. If a report has no readers, it costs
only a test of an empty tuple:

    for tell in pool.journal.found:
        tell(pages)
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.eviction_order import Pages, Reasons

Digests = NDArray[np.uint64]
Indices = NDArray[np.intp]

BY_RESET = 3
"""The reason for evictions by a reset of the cache. The other reasons are `BY_TURN`, `BY_HINT` and `BY_QUOTA`."""


class PageReader:
    """Reads a journal. A reader overrides the methods for the reports that it wants.

    It does not get the other reports.

    Examples:
        >>> class Evicted(PageReader):
        ...     def gone(self, pages, why):
        ...         print("evicted", pages.tolist())
        >>> from kvcache.pool.pages import PagePool
        >>> pool = PagePool(2, digest_words=1)
        >>> pool.journal.read(Evicted())
        >>> pages = pool.allocate(2)
        >>> _ = pool.index.publish(pages, np.array([[7], [8]], np.uint64))
        >>> pool.release(pages)
        >>> _ = pool.allocate(1)  # the page that is evicted first is the last one of its prompt
        evicted [2]
    """

    def going(self, pages: Pages) -> None:
        """`pages` are about to be overwritten, so this is the last moment to copy their content."""

    def gone(self, pages: Pages, why: Reasons | int) -> None:
        """`pages` were evicted. `why` is one reason, or one for each page. The index still has their digests."""

    def came(self, pages: Pages, digests: Digests) -> None:
        """`pages` were just published. Not called for pages that come from a lower tier."""

    def followed(self, pages: Pages, parents: Pages) -> None:
        """`pages` were just published. In its prompt, `pages[i]` follows `parents[i]`, for each i.

        A parent of 0 means that the page begins the prompt.
        """

    def found(self, pages: Pages) -> None:
        """A request reuses the published `pages`."""

    def left(self, rows: NDArray[np.int64], pages: Pages) -> None:
        """`pages` are about to be removed from the block tables of `rows`, because no later query sees these pages."""

    def changed(self, pages: Indices | int, come: bool, digests: Digests | int) -> None:
        """`pages` were published if `come` is True, and withdrawn if it is False.

        If `pages` is one withdrawn page, `digests` is only the last word of its digest.
        """


class Journal:
    """The readers of one pool's journal. For each kind of report, it has the methods to call."""

    def __init__(self) -> None:
        self.readers: tuple[PageReader, ...] = ()
        self._sort()

    def read(self, reader: PageReader, *, saves: bool = False) -> None:
        """Add `reader`. With `saves`, `reader` is called before all other readers.

        Any thread may call `read` and `end`.
        """
        self.readers = (reader, *self.readers) if saves else (*self.readers, reader)
        self._sort()

    def end(self, reader: PageReader) -> None:
        """Remove `reader`."""
        self.readers = tuple(one for one in self.readers if one is not reader)
        self._sort()

    def _sort(self) -> None:
        self.going: tuple[Callable[[Pages], None], ...] = self._who("going")
        self.gone: tuple[Callable[[Pages, Reasons | int], None], ...] = self._who("gone")
        self.came: tuple[Callable[[Pages, Digests], None], ...] = self._who("came")
        self.followed: tuple[Callable[[Pages, Pages], None], ...] = self._who("followed")
        self.found: tuple[Callable[[Pages], None], ...] = self._who("found")
        self.left: tuple[Callable[[NDArray[np.int64], Pages], None], ...] = self._who("left")
        self.changed: tuple[Callable[[Indices | int, bool, Digests | int], None], ...] = self._who("changed")

    def _who(self, news: str) -> tuple[Any, ...]:
        reads = getattr(PageReader, news)
        return tuple(getattr(one, news) for one in self.readers if getattr(type(one), news) is not reads)
