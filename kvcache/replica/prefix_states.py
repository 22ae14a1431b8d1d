"""`PrefixStates`: what a replica asks where cached pages alone do not let a request go on from the end of a prefix.

Recurrent layers keep one state of all tokens so far. It is cached after some pages only, so a prefix is found as far as
the last of its pages after which there is one. Where there are several block tables that is the last of those after
which all of them can go on: a state is of no use where a window is gone, nor a window where there is no state.
"""

from typing import Protocol

from kvcache.pool.index import Digests
from kvcache.replica.context import Context
from kvcache.replica.resume import Asked
from kvcache.types import RequestID


class PrefixStates(Protocol):
    """The cached states of one replica. Where they lie the replica does not know."""

    def there(self, digests: Digests) -> Asked:
        """After which of these pages there is a state, on any tier, as far as is known."""
        ...

    def ask(self, digests: Digests) -> bool:
        """Have asked for states after the last of these pages, where nothing is known; is an answer on its way?"""
        ...

    def bring_newest(self, digests: Digests, *, wait: bool) -> bool:
        """Have the state after the last of these pages, of those after which one lies below, where it is found.

        Whether it is on its way. `wait`: for a while.
        """
        ...

    def ends(self, request_id: RequestID | None, digests: Digests) -> Asked:
        """Of found pages of these digests, one after another, after which the request, or any other, may go on."""
        ...

    def ends_unclaimed(self, digests: Digests) -> Asked:
        """After which of these pages a request that is not claimed may go on: its claim takes room for its own state.

        The cached state that has to go for that is of no use to it.
        """
        ...

    @property
    def may_lose_pages(self) -> bool:
        """Whether the next claim may evict pages or states, and nobody knows which."""
        ...

    @property
    def generation(self) -> int:
        """Counts what has come and gone, on the device and below it."""
        ...

    def reserved(self, context: Context, digest: Digests | None) -> None:
        """The request is about to get its pages, and goes on from where it is.

        `digest`, `[1, words]`: of the page after which its state is that of a cached one; None: its state is its own.
        """
