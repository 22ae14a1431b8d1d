"""`Journal`: what happens to the pages of one pool, told to its readers as it happens.

A reader is told before the call that has caused it returns, in the order in which readers came; who must save a page
before it is written over comes first. Readers know nothing of each other. News that nobody reads costs one look at an
empty tuple:

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
"""Why pages went, beside `BY_TURN`, `BY_HINT` and `BY_QUOTA`: everything was forgotten."""


class PageReader:
    """A reader of a journal. It has the methods of the news that it reads, and is told of nothing else."""

    def going(self, pages: Pages) -> None:
        """The content of `pages` is in them for the last time: they are about to be written over."""

    def gone(self, pages: Pages, why: Reasons | int) -> None:
        """`pages` are evicted, each for its reason, or all for one. The index knows their digests for now."""

    def came(self, pages: Pages, digests: Digests) -> None:
        """`pages` were published just now, and hold what no tier below has brought."""

    def followed(self, pages: Pages, parents: Pages) -> None:
        """Each of `pages`, published just now, follows one of `parents` in its prompt; 0: it begins it."""

    def found(self, pages: Pages) -> None:
        """A request goes on with published `pages`."""

    def left(self, rows: NDArray[np.int64], pages: Pages) -> None:
        """`pages` are about to leave these rows, as no later query of theirs sees them."""

    def changed(self, pages: Indices | int, come: bool, digests: Digests | int) -> None:
        """The index has `pages` by now, or not any more: their digests; of one page that went the last word alone."""


class Journal:
    """The readers of one pool's pages, by what they read."""

    def __init__(self) -> None:
        self.readers: tuple[PageReader, ...] = ()
        self._sort()

    def read(self, reader: PageReader, *, saves: bool = False) -> None:
        """Tell `reader` from now on. `saves`: before all others. Any thread may call this, and `end`."""
        self.readers = (reader, *self.readers) if saves else (*self.readers, reader)
        self._sort()

    def end(self, reader: PageReader) -> None:
        """Tell `reader` no more."""
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
