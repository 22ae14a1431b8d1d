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

    def longest(self, request_id: RequestID | None, digests: Digests) -> int:
        """Of found pages of these digests, one after another, how many the request, or one to come, may go on after."""
        ...

    def reserved(self, context: Context, cached: int) -> None:
        """The request has its pages. `cached`: it goes on from the state after so many tokens; 0: from where it was."""
