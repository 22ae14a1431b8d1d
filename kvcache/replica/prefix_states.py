"""`PrefixStates`: what a replica asks where cached pages alone do not let a request go on from the end of a prefix.

Recurrent layers keep one state of all tokens so far. It is cached after some pages only, so a prefix is found as far as
the last of its pages after which there is one.
"""

from typing import Protocol

from kvcache.pool.index import Digests
from kvcache.replica.context import Context
from kvcache.types import RequestID


class PrefixStates(Protocol):
    """The cached states of one replica. Where they lie the replica does not know."""

    def bring_newest(self, digests: Digests, *, wait: bool) -> bool:
        """Have the state after the last of these pages, one after another, for which files have one, where it is found.

        Whether it is on its way. `wait`: for a while.
        """
        ...

    def longest(self, request_id: RequestID | None, digests: Digests) -> int:
        """Of found pages of these digests, one after another, how many the request, or one to come, may go on after."""
        ...

    def reserved(self, context: Context, digest: Digests | None) -> None:
        """The request is about to get its pages, and goes on from where it is.

        `digest`, `[1, words]`: of the page after which its state is that of a cached one; None: its state is its own.
        """


def up_to_state(states: PrefixStates, request_id: RequestID, digests: Digests, *, below: bool, wait: bool) -> int:
    """`PrefixStates.longest`, for a request that is about to go on. `below`: states may be in files, too."""
    if below:
        states.bring_newest(digests, wait=wait)
    return states.longest(request_id, digests)
