"""`PagesBelow`: the interface through which a replica reaches the tiers below a pool of the device."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.index import Digests, Pages

Slots = NDArray[np.int32]
"""Slots of pages in a lower tier. The tier decides what the numbers mean."""
NO_SLOTS: Slots = np.zeros(0, np.int32)
Asked = NDArray[np.bool_]
"""A mask over the pages of block tables, `[tables, pages]`. It marks pages to look for, or pages that were found."""


def last_end(ends: Asked) -> int:
    """Returns the number of pages up to the last one that `ends` marks, bool `[pages]`; 0 if it marks none.

    `ends` marks the pages after which a request may resume.
    """
    found = ends.nonzero()[0]
    return int(found[-1]) + 1 if found.size else 0


class PagesBelow:
    """Stores published pages in lower tiers, where they survive evictions.

    This base class stores nothing. The class in `kvcache.tiers.host_tier` does.
    """

    keeps = False  # whether lower tiers keep pages, so that pages may be restored from them
    generation = 0  # a number that changes whenever lower tiers gain or lose pages
    answers = 0  # a number that changes whenever more is known about the contents of the tiers below the host
    brought_at_once = 0  # the most pages that a caller should pass to one call of `bring`
    fetches = False  # whether there are tiers below the host
    asks = False  # whether a remote store must be asked which pages it has
    # If a state is kept after the end of a prompt, the last pages of the prompt are stored in one object, even if they
    # are fewer than an object usually has. `longest_tail` is the most pages of such an object. A lookup of states goes
    # this many pages beyond the pages that it finds.
    longest_tail = 0
    stored = loaded = 0  # the number of pages copied to the host, and to the device, so far
    is_bringing = False  # whether copies that `bring` has begun are still running

    def has(self, digests: Digests, asked: Asked) -> Asked:  # noqa: ARG002 - there is nothing to look in
        """Returns which of the `asked` pages lower tiers are known to have, bool `[tables, pages]`."""
        return np.zeros_like(asked)

    def may_have(self, digests: Digests, asked: Asked) -> Asked:
        """Returns which of the `asked` pages lower tiers have or may have, bool `[tables, pages]`."""
        return self.has(digests, asked)

    def host_has(self, digests: Digests, asked: Asked) -> Asked:
        """Returns which of the `asked` pages host memory has. Only these pages can be copied to the device at once."""
        return self.has(digests, asked)

    def ask(self, digests: Digests, perhaps: Asked) -> bool:  # noqa: ARG002 - as above
        """Begin to ask remote stores which of the `perhaps` pages they have, unless the answer is already known.

        Returns whether an answer is on its way.
        """
        return False

    def to_host(self, digests: Digests, wanted: Asked, gain: int, *, wait: bool) -> bool:  # noqa: ARG002 - as above
        """Load the `wanted` pages from lower tiers into host memory. Returns whether any pages are on their way.

        `gain` is the number of pages whose tokens need not be computed once the `wanted` pages are loaded. With
        `wait`, the call waits a limited time for the pages.
        """
        return False

    def bring(self, pages: Pages, slots: Slots, digests: Digests) -> None:
        """Copy host `slots` to device `pages`. The caller holds the slots and the pages, and no row has the pages.

        The pages are published when the copy is over.
        """

    def slots(self, digests: Digests) -> Slots:
        """Returns the host slot of each of these pages; 0 if there is none."""
        return np.zeros(len(digests), np.int32)

    def touch(self, digests: Digests) -> None:
        """Mark the host's copies of these pages, in logical order, as just used.

        The tiers below the host do not count this as a use.
        """

    def hold(self, slots: Slots) -> None:
        """Hold host `slots`, so that they are not evicted. `restore` or `bring` takes over the hold; `drop` ends it."""

    def drop(self, slots: Slots) -> None:
        """End the hold of host `slots` without copying them to the device."""

    def restore(self, row: int, pages: Pages, slots: Slots) -> None:
        """Copy held host `slots` to `pages`, which only the row holds. The pages may be read after `arrive`."""

    def arrive(self, rows: NDArray[np.int64] | slice) -> None:
        """Order the copies from host memory to the pages of `rows` before all later reads of these pages."""

    def load_all(self) -> None:
        """Wait for all copies to the device."""

    def coming(self) -> list[Pages]:
        """Returns the pages that are being copied to the device."""
        return []

    def restart(self) -> None:
        """End all copies after an interrupt, when none of them runs any more. Queue the published pages again."""

    def used(self, digests: Digests) -> None:
        """Record that a request has just used these pages, in logical order. Any tier may have them."""

    def leave(self, row: int, pages: Pages, names: Digests, ends: Callable[[Digests], Asked]) -> None:
        """Called when the row releases its pages. Its request has used the published `pages`, in logical order.

        `names` has the digests of the tokens in the row's published columns. `ends` returns a mask of the columns after
        which other requests may resume.
        """
