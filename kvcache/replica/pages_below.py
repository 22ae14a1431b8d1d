"""`PagesBelow`: what a replica asks of the tier below its pool."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from kvcache.pool.index import Digests
from kvcache.replica.context import Context, HasherOfRow
from kvcache.replica.resume import NO_SLOTS, Asked, FromBelow, Slots
from kvcache.replica.rows import Ints, Pages, Rows
from kvcache.types import RequestID


class StateEnds(Protocol):
    """Tells after which pages a request may go on: the part of `PrefixStates` that a tier asks."""

    def ends(self, request_id: RequestID | None, digests: Digests) -> Asked: ...


class PagesBelow:
    """Pages that a replica has published, kept where an eviction does not reach them. Here: nowhere, so none come back.

    `kvcache.tiers.host_tier` has the one that keeps them.
    """

    keeps = False  # whether pages may come back
    generation = 0  # counts what has come and gone
    brought_at_once = 0  # pages, for others than rows

    asks = False  # whether somebody has to be asked for what lies there

    def has(self, digests: Digests, asked: Asked) -> Asked:  # noqa: ARG002 - here there is nothing to look in
        """Which of these pages lie below, `[tables, pages]`, as far as is known."""
        return np.zeros_like(asked)

    def may_have(self, digests: Digests, asked: Asked) -> Asked:
        """Those, and those of which nothing is known yet."""
        return self.has(digests, asked)

    def host_has(self, digests: Digests, asked: Asked) -> Asked:
        """Which of them can be lifted now."""
        return self.has(digests, asked)

    def ask(self, perhaps: FromBelow) -> bool:  # noqa: ARG002 - as above
        """Begin to ask for those of which nothing is known; whether an answer is on its way."""
        return False

    def to_host(self, wanted: FromBelow, gain: int, *, wait: bool) -> bool:  # noqa: ARG002 - as above
        """Have these pages, all of them below, where they can be lifted; whether some are on their way.

        `gain`: of how many pages the tokens need not be computed then. `wait`: for a while.
        """
        return False

    def lift(self, digests: Digests, tables: Ints, here: Pages) -> None:
        """Publish these pages on the device, all of which can be lifted, and keep what is `here`; `tables`: of each.

        Whatever reads them from now on reads what lay below.
        """

    def find(self, row: int, context: Context, first: int, hasher_of: HasherOfRow, *, wait: bool) -> Slots:  # noqa: ARG002 - as above
        """The slots that hold the row's context from page `first` on, without a gap; what was restored before arrives.

        The last known token is not covered. `wait`: for a while, where pages are on their way from files.
        """
        return NO_SLOTS

    def hold(self, slots: Slots) -> None:
        """Keep `slots` until `restore` has taken them over."""

    def restore(self, row: int, pages: Pages, slots: Slots) -> None:
        """Bring held `slots` into `pages`, which the row alone holds. They may be read after `arrive`."""

    def arrive(self, rows: Rows) -> None:
        """Whatever reads the pages of `rows` from now on reads what was restored."""

    def coming(self, row: int | None = None) -> list[Pages]:  # noqa: ARG002 - as above
        """Pages that are on their way back: those that the row waits for, or all."""
        return []

    def bring(self, digests: Digests, first: int, most: int) -> bool:  # noqa: ARG002 - as above
        """Have `most` pages of these digests at most on the device, published, for others than rows: the rest of a run.

        `first`: which page of its prompt the first is. To be called again while it says that some are on their way.
        """
        return False

    def mend(self, rows: Iterable[int]) -> None:
        """After an interrupt: these rows are claimed. Nothing is being copied any more."""

    def leave(self, row: int, pages: Pages, states: StateEnds | None) -> None:
        """The row gives up its pages, and has used the published `pages`, in logical order, just now.

        `states`: of recurrent layers, those after its pages.
        """
