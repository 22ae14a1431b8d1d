"""`Offers`: processes the page offers that a prefill process sends for one attempt, in the order of their pages.

Each offer names only new pages. An offer that arrives before the previous offer waits for the previous offer, because
pages after a gap can be neither checked nor read.
"""

from __future__ import annotations

from kvcache.replica.block_table import BlockTable
from scheduler_adapters.service import messages as msg


class Offers:
    """The offers of one attempt.

    Attributes:
        newest: the last offer that was processed.
        tables: block tables of processed offers that the import has not used yet, in order. They are not merged,
            because each table carries its own seals, by which a reader checks that a lease holds the table's pages.
    """

    def __init__(self) -> None:
        self.newest: msg.PagesOffer | None = None
        self.tables: list[BlockTable] = []
        # The key is the offer's number of tokens, and whether the offer is the last one of the attempt.
        self._waiting: dict[tuple[int, bool], msg.PagesOffer] = {}

    def has_had(self, offer: msg.PagesOffer) -> bool:
        """Whether an offer names no new page: it is a repetition, or is older than the newest processed offer."""
        before = self.newest
        if _key(offer) in self._waiting:
            return True
        if before is None or before.token is not None:
            return before is not None
        return offer.token is None and offer.table.num_tokens <= before.table.num_tokens

    def add(self, offer: msg.PagesOffer) -> None:
        """Adds an offer that has arrived."""
        self._waiting[_key(offer)] = offer

    def take(self) -> msg.PagesOffer | None:
        """Removes and returns the next offer in the order of the pages.

        Returns None if there is no offer, or if pages before the next offer have not been offered yet.
        """
        offer = self._waiting.get(min(self._waiting, default=(0, False)))
        before = None if self.newest is None else self.newest.table
        if offer is None or not offer.table.follows(before):
            return None
        del self._waiting[_key(offer)]
        self.newest = offer
        self.tables = [*self.tables, offer.table] if offer.table.first_page else [offer.table]
        return offer

    def imported(self) -> None:
        """Marks all present tables as used by the import."""
        self.tables = []


def _key(offer: msg.PagesOffer) -> tuple[int, bool]:
    return offer.table.num_tokens, offer.token is not None
