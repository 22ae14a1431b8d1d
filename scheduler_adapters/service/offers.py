"""`Offers`: what a prefill process offers of one attempt, taken in the order in which its pages follow each other.

An offer names the pages that are new. One that has overtaken another waits for it: what stands behind a hole cannot be
checked, nor read.
"""

from __future__ import annotations

from kvcache.replica.block_table import BlockTable
from scheduler_adapters.service import messages as msg


class Offers:
    """Those of one attempt.

    Attributes:
        newest: the last that was taken.
        tables: of those that were taken, in order, the block tables that an import is still to begin and go on with.
            They stay as they came: each has a seal of its own.
    """

    def __init__(self) -> None:
        self.newest: msg.PagesOffer | None = None
        self.tables: list[BlockTable] = []
        self._waiting: dict[tuple[int, bool], msg.PagesOffer] = {}  # by tokens, and whether it is the last

    def has_had(self, offer: msg.PagesOffer) -> bool:
        """Whether an offer says nothing new: it comes again, or after a younger one."""
        before = self.newest
        if _place(offer) in self._waiting:
            return True
        if before is None or before.token is not None:
            return before is not None
        return offer.token is None and offer.table.num_tokens <= before.table.num_tokens

    def add(self, offer: msg.PagesOffer) -> None:
        """One that has come."""
        self._waiting[_place(offer)] = offer

    def take(self) -> msg.PagesOffer | None:
        """The next, unless it leaves out pages that none before has named."""
        offer = self._waiting.get(min(self._waiting, default=(0, False)))
        before = None if self.newest is None else self.newest.table
        if offer is None or not offer.table.follows(before):
            return None
        del self._waiting[_place(offer)]
        self.newest = offer
        self.tables = [*self.tables, offer.table] if offer.table.first_page else [offer.table]
        return offer

    def imported(self) -> None:
        """An import goes on with what was taken so far."""
        self.tables = []


def _place(offer: msg.PagesOffer) -> tuple[int, bool]:
    return offer.table.num_tokens, offer.token is not None
