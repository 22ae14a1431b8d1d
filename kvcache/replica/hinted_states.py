"""`HintedStates`: what hints and quotas of pages are told to, where cached recurrent states follow them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvcache.pool.index import Digests
from kvcache.pool.quotas import TenantQuotas
from kvcache.retention import PageHints


class LeftPrefix(NamedTuple):
    """What a request says of the prefixes that it leaves.

    Attributes:
        digests: `[pages, words]` of its published pages.
        hints: what it says of these, None for nothing.
        ends: pages, from the first on, up to which others will come for its prefixes: the whole of it, its prompt, and
            each range that a hint is for.
        salt: of its pages: whose they are.
    """

    digests: Digests
    hints: PageHints | None
    ends: Sequence[int]
    salt: str | None


class HintedStates(Protocol):
    """The cached states of one replica, as hints and quotas order them."""

    def begin(self, quotas: TenantQuotas | None) -> None:
        """There are hints, or these quotas of pages, from now on."""

    def clear(self) -> None:
        """After an interrupt: no state counts as a tenant's idle one, until the pool says which are idle."""

    def leave(self, leaving: LeftPrefix, share: float) -> None:
        """A request is about to be released. `share`: of what is cached, how much follows hints."""
