"""`PageVersions`: the version of the weights of each page, as far as the eviction order and figures need it.

The names of pages keep versions apart, and no lookup needs these numbers.
"""

import numpy as np
from numpy.typing import NDArray

from kvcache.eviction_order import Pages
from kvcache.pool.journal import Digests, Indices, PageReader

NO_VERSION = -1
"""The number of a page of several versions that nobody finds any more."""


class PageVersions(PageReader):
    """The versions of the pages of a pool. In this class, all pages are of the first version, whose number is 0.

    Attributes:
        differ: whether pages may be of several versions.
    """

    differ = False

    def begin(self, number: int) -> None:
        """From now on, pages that are published are of the version with this `number`."""

    def name(self, pages: Pages | Indices, number: int) -> None:
        """Record that `pages` are of the version with this `number`."""

    def use(self, pages: Pages) -> None:
        """Record that a request under the current version uses `pages`, whatever their version is."""

    def moved(self, sources: Pages, targets: Pages) -> None:
        """Record that the content of `sources` is in `targets` now."""

    def numbers(self, pages: Pages | Indices) -> NDArray[np.int32]:
        """Returns the number of the version of each of `pages`."""
        return np.zeros(len(pages), np.int32)

    def are_old(self, pages: Pages | Indices) -> NDArray[np.bool_]:
        """Returns a mask of the `pages` that are of another version, and were last used under another version."""
        return np.zeros(len(pages), np.bool_)

    def num_older(self, published: NDArray[np.bool_]) -> int:  # noqa: ARG002 - all are of one version
        """Returns how many of the `published` pages, bool `[num_pages + 1]`, are not of the current version."""
        return 0


class SeveralVersions(PageVersions):
    """The versions of the pages of a pool after a switch, in two arrays, int32 `[num_pages + 1]`.

    Examples:
        >>> versions = SeveralVersions(3)
        >>> versions.begin(1)
        >>> versions.use(np.array([2]))  # a request that allows old pages has found it
        >>> versions.numbers(np.array([1, 2])).tolist(), versions.are_old(np.array([1, 2])).tolist()
        ([0, 0], [True, False])
    """

    differ = True

    def __init__(self, num_pages: int) -> None:
        self._of = np.zeros(num_pages + 1, np.int32)  # the version under which each page was completed
        self._used = np.zeros(num_pages + 1, np.int32)  # the last version under which it was computed or used
        self._now = 0

    def begin(self, number: int) -> None:
        self._now = number

    def name(self, pages: Pages | Indices, number: int) -> None:
        self._of[pages] = self._used[pages] = number

    def use(self, pages: Pages) -> None:
        self._used[pages] = self._now

    def moved(self, sources: Pages, targets: Pages) -> None:
        self._of[targets], self._used[targets] = self._of[sources], self._used[sources]

    def numbers(self, pages: Pages | Indices) -> NDArray[np.int32]:
        return self._of[pages]

    def are_old(self, pages: Pages | Indices) -> NDArray[np.bool_]:
        now = self._now
        return (self._of[pages] != now) & (self._used[pages] != now)

    def num_older(self, published: NDArray[np.bool_]) -> int:
        return int(np.count_nonzero(published & (self._of != self._now)))

    def changed(self, pages: Indices | int, come: bool, digests: Digests | int) -> None:  # noqa: ARG002 - any pages
        if come:
            self._of[pages] = self._used[pages] = self._now
