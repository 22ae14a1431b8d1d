"""`resume`: the last end of a prefix from which every block table of a request can go on.

Callers differ only in where they look for pages (the device, the host and the tiers below it, other replicas, a peer).
They pass the pages that are there as `there`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.layer_groups import TableGroup
from kvcache.pool.index import Digests, Pages

Slots = NDArray[np.int32]
"""Where pages lie below; what they number is the tier's own."""

NO_SLOTS: Slots = np.zeros(0, np.int32)

Asked = NDArray[np.bool_]
"""Which pages of several block tables are asked for, or are there: `[tables, pages]`."""
Below = Callable[[Digests, Asked], Asked]
"""Given the digests of pages, `[tables, pages, words]`, which of those that are asked for there are."""

Host = Callable[[Digests], Slots]
"""Where the host has each of these pages; 0: nowhere."""


class Found(NamedTuple):
    """The pages with which a request goes on, behind the `first` columns of its own.

    Attributes:
        end: the column after the last of them.
        pages: by group of tables `[tables, pages]` (of one table without `slots` `[pages]`), the last columns before
            `end`: those that are seen from there, as far as they are not the row's own.
        slots: of a lower tier, whose pages come where `pages` has none: of one table after the other.
    """

    first: int
    end: int
    pages: tuple[Pages, ...]
    slots: Slots = NO_SLOTS

    @property
    def num_columns(self) -> int:
        """How many columns were found."""
        return self.end - self.first


class FromBelow(NamedTuple):
    """The pages that a request needs to go on from the end of a prefix, and that only a tier below has."""

    pages: int  # columns up to that end
    reach: int  # columns up to which tables that keep all pages have them, wherever windows end
    every: Digests  # of each table and page, `[tables, pages, words]`
    lacking: Asked  # what the tier has
    found: tuple[Pages, ...]  # by group of tables what is needed: `NO_PAGE` where the tier has it
    here: Pages  # what the device has of it, by column

    @property
    def digests(self) -> Digests:
        """Digests of the pages that the tier has, by column."""
        return self.every.swapaxes(0, 1)[self.lacking.T]

    @property
    def tables(self) -> NDArray[np.int64]:
        """The table of each of these."""
        return self.lacking.T.nonzero()[1]


def last_end(ends: Asked) -> int:
    """How many pages there are up to the last one after which a request may go on, `[pages]`."""
    found = ends.nonzero()[0]
    return int(found[-1]) + 1 if found.size else 0


def resume(
    there: Asked, groups: Sequence[TableGroup], page_size: int, first: int = 0, ends: Asked | None = None
) -> int:
    """The number of pages, after the `first` ones, up to the last end from which every table can go on.

    `there`: which of them each table has, `[tables, pages]`; all have the `first` ones. `ends`: after which of them a
    request may go on for the sake of all else, `[pages]`; None: after each.
    """
    columns = np.arange(first, first + there.shape[1], dtype=np.int64)
    fits = np.ones(len(columns), np.bool_) if ends is None else ends[: len(columns)].copy()
    for group, tables in groups:
        last_missing = np.maximum.accumulate(np.where(there[tables].all(axis=0), -1, columns))
        fits &= last_missing < group.first_seen((columns + 1) * page_size) // page_size
    return last_end(fits)
