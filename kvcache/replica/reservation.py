"""`Reservation`: what a request is about to get, decided before anything moves."""

from typing import NamedTuple

from kvcache.replica.further_tables import FurtherPlan
from kvcache.replica.pages_below import Slots
from kvcache.replica.rows import Pages


class Reservation(NamedTuple):
    """What a reservation takes: `hits` replace the row's logical pages from `first` on, `new` pages are appended.

    Into the logical pages from `restored` on come those of the lower tier's `slots`. `cached` is the token up to which
    pages were found; 0: none that the request did not have. The request runs from `start`.
    """

    first: int
    hits: Pages
    replaced: Pages
    new: int
    cached: int
    start: int
    restored: int
    slots: Slots
    further: FurtherPlan
