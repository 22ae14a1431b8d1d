"""`Reservation`: the pages that a request will get, decided before anything changes."""

from typing import NamedTuple

from kvcache.pool.index import Digests, Pages
from kvcache.replica.resume import NO_SLOTS, Slots


class StatePlan(NamedTuple):
    """The part of a reservation that concerns the request's recurrent state.

    Attributes:
        digest: `[1, words]`, of the page after whose cached state the request resumes; None: it keeps its own state.
        ends: tokens after which chunks of its prompt end, so that its state is kept there; empty: not known yet.
    """

    digest: Digests | None
    ends: tuple[int, ...]


class Reservation(NamedTuple):
    """The pages that a row takes and gives back. A field "by group" has an item for each group of block tables.

    Attributes:
        found: by group, the pages that were found; they go to the columns before `ends_found`.
        ends_found: by group, the column after these.
        firsts: by group, the first column that will have a page.
        ends: by group, the column after the last that will have a page.
        leaving: the pages that leave the row, in its order.
        new: the number of pages to allocate.
        committed: the number of columns that will be published.
        cost: the most free pages that all this takes; negative if it gives more back.
        start: the token from which the request runs; its context is set to it.
        active: the token at which its chunk ends; likewise.
        cached: the token up to which pages were found; 0 if none were found that the request did not have.
        slots: host slots of the pages that `found` lacks, one table after the other.
        state: the plan for recurrent layers, if there are any.
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
    slots: Slots = NO_SLOTS
    state: StatePlan | None = None
