"""Where a request resumes: the pages that are found for it (`Found`, `FromBelow`), and the `Reservation` made of them.

`resume` computes the last end of a prefix from which every block table of a request can resume. Its callers look for
pages in different places: the device, the host and the tiers below it, other replicas, a peer.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.layer_groups import TableGroup
from kvcache.pool.index import Digests, Pages
from kvcache.pool.pages_below import NO_SLOTS, Asked, Slots, last_end
from kvcache.states.state_pages import NO_STATE

Below = Callable[[Digests, Asked], Asked]
"""Takes the digests of pages, `[tables, pages, words]`, and a mask of pages to look for. Returns the mask of those
found.
"""

Host = Callable[[Digests], Slots]
"""Maps digests to the host slots of these pages, 0 if there is none."""


class Found(NamedTuple):
    """The pages with which a request resumes, after the first `first` columns, which are its own.

    Attributes:
        end: the column after the last of them.
        pages: by group of tables, `[tables, pages]` (`[pages]` for one table without `slots`): the columns before `end`
            that are seen from there and are not the row's own.
        reached: the column up to which pages are cached, whether or not there is a recurrent state after the last one.
        slots: host slots of the pages that `pages` lacks, one table after the other.
    """

    first: int
    end: int
    pages: tuple[Pages, ...]
    reached: int
    slots: Slots = NO_SLOTS

    @property
    def num_columns(self) -> int:
        """The number of columns that were found."""
        return self.end - self.first


class FromBelow(NamedTuple):
    """The pages that a request needs to resume from the end of a prefix and that only a lower tier has."""

    pages: int  # the number of columns of the prefix
    reach: int  # the number of columns that the tables which keep all pages have, whatever windows lack
    every: Digests  # the digest of each page in each table, `[tables, pages, words]`
    lacking: Asked  # marks pages that only the tier has
    found: tuple[Pages, ...]  # by group of tables: the needed pages, `NO_PAGE` if the tier has them
    here: Pages  # the needed pages that the device has, by column

    @property
    def digests(self) -> Digests:
        """The digests of the pages that only the tier has, ordered by column."""
        return self.every.swapaxes(0, 1)[self.lacking.T]

    @property
    def tables(self) -> NDArray[np.int64]:
        """The block table of each of `digests`."""
        return self.lacking.T.nonzero()[1]


class Reservation(NamedTuple):
    """The pages that a row takes and gives back. A field "by group" has an item for each group of block tables.

    Attributes:
        found: by group, the pages that were found; they go to the columns before `ends_found`.
        ends_found: by group, the column after the found pages.
        firsts: by group, the first column that will have a page.
        ends: by group, the column after the last that will have a page.
        leaving: the pages that leave the row, in the order of its columns.
        new: the number of pages to allocate.
        committed: the number of columns that will be published.
        cost: the most free pages that all this takes; negative if it gives more back.
        start: the token from which the request runs; its context is set to it.
        active: the token at which its chunk ends; its context is set to it, too.
        cached: the token up to which pages were found; 0 if the request found none beyond its own.
        reached: as in `Found`.
        slots: host slots of the pages that `found` lacks, one table after the other.
        state: the digest, `[1, words]`, of the page after whose cached recurrent state the request resumes; empty if it
            keeps its own state, or has none.
        stops: tokens at which chunks of its prompt end, so that its state is kept there; empty: not known yet.
    """

    found: tuple[Pages, ...]
    ends_found: tuple[int, ...]
    firsts: tuple[int, ...]
    ends: tuple[int, ...]
    leaving: Pages
    new: int
    committed: int
    cost: int
    start: int
    active: int
    cached: int = 0
    reached: int = 0
    slots: Slots = NO_SLOTS
    state: Digests = NO_STATE
    stops: tuple[int, ...] = ()


def resume(
    there: Asked, groups: Sequence[TableGroup], page_size: int, first: int = 0, ends: Asked | None = None
) -> int:
    """The number of pages, after the first `first` ones, up to the last end from which every table can resume.

    `there`: the pages that each table has, `[tables, pages]`; all tables have the first `first` pages. `ends`: after
    which pages a request may resume for other reasons (such as its state), `[pages]`; None means after any page.
    """
    columns = np.arange(first, first + there.shape[1], dtype=np.int64)
    fits = np.ones(len(columns), np.bool_) if ends is None else ends[: len(columns)].copy()
    for group, tables in groups:
        last_missing = np.maximum.accumulate(np.where(there[tables].all(axis=0), -1, columns))
        fits &= last_missing < group.first_seen((columns + 1) * page_size) // page_size
    return last_end(fits)
