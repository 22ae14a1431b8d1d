"""Where a request resumes: the pages that are found for it (`Found`, `FromBelow`), and its `Reservation`.

`resume` computes the last end of a prefix from which every block table of a request can resume. Its callers look for
pages in different places: on the device, on the host and in the tiers below it, on other replicas, at a peer.
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
"""Takes the digests of pages, `[tables, pages, words]`, and a mask of pages to look for. Returns a mask of the pages
found.
"""

Host = Callable[[Digests], Slots]
"""Returns the host slots of the pages with these digests; 0 if there is none."""


class Found(NamedTuple):
    """The pages with which a request resumes, after its own first `first` columns.

    Attributes:
        end: the column after the last of these pages.
        pages: by group of tables, `[tables, pages]` (`[pages]` for one table without `slots`): the columns that a query
            at column `end` sees and that are not the row's own.
        reached: the column up to which pages are cached. A recurrent state need not exist there.
        slots: host slots of the pages that `pages` lacks, one table after another.
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
    """The pages that a request needs to resume after a prefix and that only a lower tier has."""

    pages: int  # the number of columns of the prefix
    reach: int  # how many columns the tables of full attention have, whatever windows lack
    every: Digests  # the digest of each page in each table, `[tables, pages, words]`
    lacking: Asked  # marks pages that only the tier has
    found: tuple[Pages, ...]  # by group of tables: the needed pages, with `NO_PAGE` for a page that the tier has
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
        found: by group, the pages that were found. They take the columns before `ends_found`.
        ends_found: by group, the column after the found pages.
        firsts: by group, the first column that will have a page.
        ends: by group, the column after the last one that will have a page.
        leaving: the pages that leave the row, in the order of its columns.
        new: the number of pages to allocate.
        committed: the number of columns that will be published.
        cost: an upper bound of the free pages that the reservation takes; negative if it gives back more than it takes.
        start: the token from which the request runs. The reservation sets its context's `start_idx` to this.
        active: the token at which the request's chunk ends. The reservation sets its context's `active_idx` to this.
        cached: the token up to which pages were found; 0 if the request found no page besides its own.
        reached: as in `Found`.
        slots: host slots of the pages that `found` lacks, one table after another.
        state: the digest, `[1, words]`, of the page whose cached recurrent state the request resumes from; empty if it
            keeps its own state, or has none.
        stops: the tokens at which chunks of the request's prompt end, so that its state can be kept there; empty if not
            known yet.
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
    """Returns how many pages, after the first `first` ones, precede the last end from which every table can resume.

    `there` says which pages each table has, `[tables, pages]`; all tables have the first `first` pages. `ends` says
    after which pages a request may resume for other reasons (such as its state), `[pages]`; None means after any page.
    """
    columns = np.arange(first, first + there.shape[1], dtype=np.int64)
    fits = np.ones(len(columns), np.bool_) if ends is None else ends[: len(columns)].copy()
    for group, tables in groups:
        last_missing = np.maximum.accumulate(np.where(there[tables].all(axis=0), -1, columns))
        fits &= last_missing < group.first_seen((columns + 1) * page_size) // page_size
    return last_end(fits)
