"""Where a request resumes: the pages that were found for it (`Found`, `FromBelow`), and its `Reservation`.

A *column* is a position in a row of a block table: column 0 is for the page of the request's first `page_size` tokens,
column 1 for the page of the next `page_size` tokens. The function `resume` finds the longest prefix after which a
request can resume in every block table. Its callers look for the pages in different places: on the device, in host
memory and the tiers below it, in another process.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.layer_groups import TableGroup
from kvcache.pool.index import Digests, Pages
from kvcache.pool.pages_below import NO_SLOTS, Asked, Slots, last_end
from kvcache.replica.kept_pages import ColumnSet, ColumnSpan, KeptPages
from kvcache.states.state_pages import NO_STATE


class Found(NamedTuple):
    """The pages with which a request resumes. The request already has the pages of the first `first` columns.

    Attributes:
        end: the column after the last page of the prefix, where the request resumes.
        pages: by group of tables, the pages that a query at column `end` sees, without the row's own pages. The shape
            is `[tables, pages]`, or `[pages]` for a single table without `slots`.
        columns: the columns of `pages`; empty for a single table without `slots`, which has a page in each column.
        reached: the column up to which pages are cached. It is after `end` if no recurrent state is cached there.
        slots: for each page that is missing in `pages`, the host slot from which it is restored, one table after
            another.
    """

    first: int
    end: int
    pages: tuple[Pages, ...]
    columns: tuple[ColumnSet, ...]
    reached: int
    slots: Slots = NO_SLOTS

    @property
    def num_columns(self) -> int:
        """The number of columns from column `first` to the end of the prefix that was found."""
        return self.end - self.first


class FromBelow(NamedTuple):
    """A prefix after which a request could resume if it got some pages from a lower tier, and these pages."""

    pages: int  # the number of columns of the prefix
    # the number of columns for which all tables of full attention have pages, even if pages of windows are missing
    reach: int
    every: Digests  # the digest of each page in each table, `[tables, pages, words]`
    lacking: Asked  # marks each needed page that only the lower tier has, bool `[tables, pages]`
    # for each group of tables, the needed pages, with `NO_PAGE` in place of a page that only the lower tier has
    found: tuple[Pages, ...]
    columns: tuple[ColumnSet, ...]  # the columns of `found`
    here: Pages  # the needed pages that the device has, ordered by column

    @property
    def digests(self) -> Digests:
        """The digests of the needed pages that only the lower tier has, ordered by column."""
        return self.every.swapaxes(0, 1)[self.lacking.T]

    @property
    def tables(self) -> NDArray[np.int64]:
        """The index of the block table to which each of `digests` belongs."""
        return self.lacking.T.nonzero()[1]


class Reservation(NamedTuple):
    """The pages that a row takes and gives back.

    Attributes:
        spans: for each group of block tables, the columns that have pages after the reservation.
        coming: the found pages that the row does not have yet.
        leaving: the pages that leave the row, in the order of its columns.
        new: the number of pages to allocate.
        committed: the number of columns, from the first on, whose pages are published after the reservation.
        cost: an upper bound of the free pages that the reservation takes; negative if it frees more pages than it
            takes.
        start: the token from which the request runs. The reservation sets `start_idx` of its context to this token.
        active: the token at which the request's chunk ends. The reservation sets `active_idx` of its context to this
            token.
        cached: the token up to which pages were found; 0 if no page was found in addition to the row's own.
        reached: the column up to which pages are cached, as in `Found`.
        slots: for each page that is missing in the spans' `found`, the host slot from which it is restored, one table
            after another.
        state: the digest, `[1, words]`, of the last page before the cached recurrent state with which the request
            resumes; empty if the request keeps its own state, or has none.
        stops: the tokens at which chunks of the request's prompt must end, so that its recurrent state can be kept
            there; empty if they are not known yet.
    """

    spans: tuple[ColumnSpan, ...]
    coming: Pages
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
    there: Asked,
    groups: Sequence[KeptPages | TableGroup],
    page_size: int,
    first: int = 0,
    ends: Asked | None = None,
) -> int:
    """Returns the length of the longest prefix after which the request can resume in every table.

    The first `first` pages are not counted, because all tables have them. `there` says which of the later pages each
    table has, `[tables, pages]`. `ends` is a mask, `[pages]`, of the pages after which the request may resume as far as
    recurrent states are concerned. None means after any page.
    """
    count = there.shape[1]
    fits = np.ones(count, np.bool_) if ends is None else ends[:count].copy()
    for kept in groups:
        fits &= kept.group.good_ends(there[kept.tables], first, page_size)
    return last_end(fits)
