"""`PagesBelow`: what a replica asks of the tier below its pool; and what is fetched of it for the longest prefix."""

from collections.abc import Iterable

import numpy as np

from kvcache.pool.index import Digests
from kvcache.replica.request_states import RequestStates
from kvcache.replica.resume import Asked, FromBelow, Slots
from kvcache.replica.rows import Pages, Rows
from kvcache.replica.tables import RowTables


class PagesBelow:
    """Pages that a replica has published, kept where an eviction does not reach them. Here: nowhere, so none come back.

    `kvcache.tiers.host_tier` has the one that keeps them.
    """

    keeps = False  # whether pages may come back
    generation = 0  # counts what has come and gone
    brought_at_once = 0  # pages, for others than rows
    fetches = False  # whether some lie below the host
    asks = False  # whether somebody has to be asked for what lies there
    longest_tail = 0  # pages that may lie there beyond what is found by asking for the whole prompt
    is_bringing = False  # whether pages are on their way that no row has

    def has(self, digests: Digests, asked: Asked) -> Asked:  # noqa: ARG002 - here there is nothing to look in
        """Which of these pages lie below, `[tables, pages]`, as far as is known."""
        return np.zeros_like(asked)

    def may_have(self, digests: Digests, asked: Asked) -> Asked:
        """Those, and those of which nothing is known yet."""
        return self.has(digests, asked)

    def host_has(self, digests: Digests, asked: Asked) -> Asked:
        """Which of them the host has: these can be brought up now."""
        return self.has(digests, asked)

    def ask(self, digests: Digests, perhaps: Asked) -> bool:  # noqa: ARG002 - as above
        """Begin to ask for those of which nothing is known; whether an answer is on its way."""
        return False

    def to_host(self, digests: Digests, wanted: Asked, gain: int, *, wait: bool) -> bool:  # noqa: ARG002 - as above
        """Have the `wanted` pages, all of them below, brought to the host; whether some are on their way.

        `gain`: of how many pages the tokens need not be computed then. `wait`: for a while.
        """
        return False

    def bring(self, wanted: FromBelow, most: int) -> None:
        """Have the first `most` of these pages, which the host has, on the device, for others than rows.

        They are published once they are there.
        """

    def slots(self, digests: Digests) -> Slots:
        """Where the host has each of these pages; 0: nowhere."""
        return np.zeros(len(digests), np.int32)

    def hold(self, slots: Slots) -> None:
        """Keep `slots` until `restore` has taken them over."""

    def restore(self, row: int, pages: Pages, slots: Slots) -> None:
        """Bring held `slots` into `pages`, which the row alone holds. They may be read after `arrive`."""

    def arrive(self, rows: Rows) -> None:
        """Make later reads of the pages of `rows` see the restored data."""

    def coming(self, row: int | None = None) -> list[Pages]:  # noqa: ARG002 - as above
        """Pages that are on their way back: those that the row waits for, or all."""
        return []

    def mend(self, rows: Iterable[int]) -> None:
        """Rebuild the books after an interrupt, given the claimed rows. No copy is in flight any more."""

    def leave(self, row: int, pages: Pages, names: Digests, states: RequestStates) -> None:
        """The row gives up its pages, and has used the published `pages`, in logical order, just now.

        `names`: the digests of its published columns, of their tokens. `states`: those after its pages.
        """


def fetch_prefix(
    tables: RowTables, tier: PagesBelow, states: RequestStates, digests: Digests, first: int = 0, *, wait: bool
) -> bool:
    """Bring the pages that the longest prefix of these digests needs to the host; whether some are on their way.

    The caller already has the `first` pages. With recurrent states the prefix ends after a page with a cached state, in
    any tier, and that state is brought as well. `wait`: wait a while for reads that are running, but not for answers.

    If a tier has to be asked for its contents, it is asked for the longest prefix that may exist.
    """
    if len(digests) <= first or not (tier.fetches or states.keeps):
        return False
    before, coming = tier.generation, False
    if tier.asks:
        perhaps = tables.from_below(digests, tier.may_have, None, first)
        coming = tier.ask(perhaps.every, perhaps.lacking)
        if states.keeps and coming and not wait:
            return True  # which pages there are, is being asked
        if states.keeps:
            asking, digests = _up_to_known_state(tables, tier, states, digests, first)
            if asking and not wait:
                return True  # a later state may be found, and a state is large
            coming |= asking
    wanted = tables.from_below(digests, tier.has, states.there(digests), first)
    coming |= states.bring_newest(digests[: wanted.pages], wait=wait)
    ends = states.ends(None, digests)
    if len(wanted.digests):
        there = tables.from_below(digests, tier.host_has, ends, first)
        coming |= tier.to_host(wanted.every, wanted.lacking, wanted.pages - there.pages, wait=wait)
    # An answer that has come just now may be another question.
    return coming or (tier.asks and tier.generation != before)


def _up_to_known_state(
    tables: RowTables, tier: PagesBelow, states: RequestStates, digests: Digests, first: int
) -> tuple[bool, Digests]:
    """Ask for states, and for what lies below up to them; whether an answer is on its way, and the pages to look at.

    A run of pages whose end is in an object of its own ends with a state: so it is looked for where one is.
    """
    found = tables.from_below(digests, tier.has, None, first)
    behind = digests[: found.reach + tier.longest_tail]
    if states.ask(behind):
        return True, digests[: found.pages]
    for end in (found.pages + 1 + np.flatnonzero(states.there(behind[found.pages :])))[::-1].tolist():
        perhaps = tables.from_below(digests[:end], tier.may_have, None, first)
        asking = perhaps.pages == end and tier.ask(perhaps.every, perhaps.lacking)
        if tables.from_below(digests[:end], tier.has, None, first).pages == end:
            return False, digests[:end]
        if asking:
            return True, digests[: found.pages]
    return False, digests[: found.pages]
