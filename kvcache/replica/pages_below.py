"""`PagesBelow`: what a replica asks of the tier below its pool."""

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.index import Digests
from kvcache.replica.context import Context, HasherOfRow
from kvcache.replica.rows import Pages, Rows

Slots = NDArray[np.int32]
"""Where pages lie below; what they number is the tier's own."""

NO_SLOTS: Slots = np.zeros(0, np.int32)


class PagesBelow:
    """Pages that a replica has published, kept where an eviction does not reach them. Here: nowhere, so none come back.

    `kvcache.tiers.host_tier` has the one that keeps them.
    """

    def published(self, pages: Pages, digests: Digests) -> None:
        """`pages` were published just now: they are to be copied."""

    def find(self, row: int, context: Context, first: int, hasher_of: HasherOfRow, *, wait: bool) -> Slots:  # noqa: ARG002 - here there is nothing to look in
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

    def leave(self, row: int, pages: Pages) -> None:
        """The row gives up its pages, and has used the published `pages`, in logical order, just now."""
