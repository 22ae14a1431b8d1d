"""`PagesBelow`: what a replica asks of the tier below its pool."""

from collections.abc import Callable, Iterable

import numpy as np

from kvcache.pool.index import Digests
from kvcache.replica.resume import Asked, Slots
from kvcache.replica.rows import Pages, Rows


class PagesBelow:
    """Pages that a replica has published, kept where an eviction does not reach them. Here: nowhere, so none come back.

    `kvcache.tiers.host_tier` has the one that keeps them.
    """

    keeps = False  # whether pages may come back
    generation = 0  # counts what has come and gone
    answers = 0  # counts what has become known of what lies below the host
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

    def bring(self, pages: Pages, slots: Slots, digests: Digests) -> None:
        """Bring held `slots` into held `pages`, for others than rows: they are published once they are there."""

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

    def used(self, digests: Digests) -> None:
        """A request has used these pages just now, in logical order, wherever they lie."""

    def leave(self, row: int, pages: Pages, names: Digests, ends: Callable[[Digests], Asked]) -> None:
        """The row gives up its pages, and has used the published `pages`, in logical order, just now.

        `names`: the digests of its published columns, of their tokens. `ends`: after which of them others may go on.
        """
