"""`Reservation`: what a request is about to get, decided before anything moves."""

from typing import NamedTuple

from kvcache.pool.index import Digests, Pages
from kvcache.replica.resume import NO_SLOTS, Slots


class StatePlan(NamedTuple):
    """The part of a reservation that concerns the request's recurrent state.

    Attributes:
        digest: `[1, words]`, of the page after which its state is that of a cached one; None: its state is its own.
        ends: tokens after which chunks of its prompt end, as copies of its state are kept there; empty: not known yet.
    """

    digest: Digests | None
    ends: tuple[int, ...]


class Reservation(NamedTuple):
    """The pages that a row takes and gives back. A field by group of tables holds for each table of the group.

    Attributes:
        found: by group the pages that were found: they come into the columns before `ends_found`.
        ends_found: by group the column after these.
        firsts: by group the first column that has a page then.
        ends: by group the column after the last that has a page then.
        leaving: the pages that leave the row, in its order.
        new: pages to be allocated.
        committed: columns that are published then.
        cost: free pages that all this takes at most: below zero where it gives more back.
        start: the token from which the request runs, as its context is to say.
        active: the token at which its chunk ends, likewise.
        cached: the token up to which pages were found; 0: none that the request did not have.
        slots: of a lower tier, whose pages come where `found` has none: of one table after the other.
        state: of recurrent layers, if there are any.
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
