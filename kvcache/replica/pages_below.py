"""`PagesBelow`: the interface of a replica to the tier below its pool."""

from collections.abc import Callable, Iterable

import numpy as np

from kvcache.pool.index import Digests
from kvcache.replica.resume import Asked, Slots
from kvcache.replica.rows import Pages, Rows


class PagesBelow:
    """Stores published pages where evictions do not reach them. This base stores none, so none come back.

    `kvcache.tiers.host_tier` has the implementation that does.
    """

    keeps = False  # whether pages may come back
    generation = 0  # changes whenever pages come or go
    answers = 0  # changes whenever more is known about the tiers below the host
    brought_at_once = 0  # the most pages that one call of `bring` should bring
    fetches = False  # whether there are tiers below the host
    asks = False  # whether a remote store has to be asked which pages it has
    longest_tail = 0  # pages that may be there in a tail, beyond those found by asking for the whole prompt
    is_bringing = False  # whether `bring` has copies under way

    def has(self, digests: Digests, asked: Asked) -> Asked:  # noqa: ARG002 - there is nothing to look in
        """Which of the `asked` pages are known to be below, bool `[tables, pages]`."""
        return np.zeros_like(asked)

    def may_have(self, digests: Digests, asked: Asked) -> Asked:
        """`has`, plus pages that are not known to be absent."""
        return self.has(digests, asked)

    def host_has(self, digests: Digests, asked: Asked) -> Asked:
        """Which of the `asked` pages the host has, so that they can be copied now."""
        return self.has(digests, asked)

    def ask(self, digests: Digests, perhaps: Asked) -> bool:  # noqa: ARG002 - as above
        """Begin to ask for pages that are not known. Returns whether an answer is on its way."""
        return False

    def to_host(self, digests: Digests, wanted: Asked, gain: int, *, wait: bool) -> bool:  # noqa: ARG002 - as above
        """Bring the `wanted` pages, which are all below, to the host. Returns whether some are on their way.

        `gain`: the number of pages whose tokens then need not be computed. `wait`: wait a while for them.
        """
        return False

    def bring(self, pages: Pages, slots: Slots, digests: Digests) -> None:
        """Copy held `slots` to held `pages` that no row has. They are published when the copy is over."""

    def slots(self, digests: Digests) -> Slots:
        """The host slot of each of these pages, 0 if there is none."""
        return np.zeros(len(digests), np.int32)

    def touch(self, digests: Digests) -> None:
        """Mark the host's copies of these pages, in logical order, as just used. Lower tiers are not told."""

    def hold(self, slots: Slots) -> None:
        """Hold `slots` until `restore` takes them over."""

    def restore(self, row: int, pages: Pages, slots: Slots) -> None:
        """Copy held `slots` to `pages`, which only the row holds. They may be read after `arrive`."""

    def arrive(self, rows: Rows) -> None:
        """Make later reads of the pages of `rows` see the restored data."""

    def coming(self, row: int | None = None) -> list[Pages]:  # noqa: ARG002 - as above
        """The pages being copied to the device: those for the row, or all."""
        return []

    def mend(self, rows: Iterable[int]) -> None:
        """Rebuild the state after an interrupt, given the claimed rows. No copy is in flight any more."""

    def used(self, digests: Digests) -> None:
        """A request has just used these pages, in logical order, in whatever tier they are."""

    def leave(self, row: int, pages: Pages, names: Digests, ends: Callable[[Digests], Asked]) -> None:
        """The row releases its pages, and has just used the published `pages`, in logical order.

        `names`: the digests of its published columns. `ends`: returns after which of them other requests may resume.
        """
