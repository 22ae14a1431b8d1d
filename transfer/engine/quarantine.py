"""What nobody waits for any more but is not over: transfers still in flight, and the pages of ours that they touch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transfer.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transfer.engine.connection import Connection
    from transfer.engine.posting import Posting


@dataclass(frozen=True)
class _Held:
    peer: str
    replica: int
    pages: frozenset[int]


class Quarantine:
    """Holds the pages of transfers that were given up, each until its end is known.

    The end of a transfer that this engine started is seen by `reap`. That of a peer's is its last notification, or the
    caller's word that the peer is gone.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._parked: list[Posting] = []

    def __contains__(self, transfer_name: str) -> bool:
        return transfer_name in self._held

    def park(self, posting: Posting) -> None:
        """Takes over a transfer of ours. Nothing is held where it has ended."""
        if posting.in_flight and posting not in self._parked:
            self._parked.append(posting)
            self.hold(posting.request.transfer_name, posting.peer, posting.local_replica, posting.local_pages)

    def hold(self, transfer_name: str, peer: str, replica: int, pages: Iterable[int]) -> None:
        """Holds pages of one replica until `release` of the same transfer."""
        self._held[transfer_name] = _Held(peer, replica, frozenset(pages))

    def release(self, transfer_name: str) -> None:
        """Lets go of a transfer's pages; nothing happens where it holds none."""
        self._held.pop(transfer_name, None)

    def reap(self) -> None:
        """Polls the parked transfers, and lets go of the pages of those that have ended, in whatever way."""
        for posting in list(self._parked):
            with suppress(AgentError):  # nobody waits for it, and an error ends it as well as success
                posting.poll()
            if not posting.in_flight:
                self._parked.remove(posting)
                self.release(posting.request.transfer_name)

    @property
    def has_parked(self) -> bool:
        """Whether a transfer of ours is in flight that nobody waits for."""
        return bool(self._parked)

    def moves_over(self, connection: Connection) -> bool:
        """Tells whether a parked transfer still uses a connection."""
        return any(posting.connection is connection for posting in self._parked)

    def of_peer(self, peer: str) -> list[str]:
        """Returns the peer's own transfers that hold pages of ours."""
        ours = {posting.request.transfer_name for posting in self._parked}
        return [name for name, held in self._held.items() if held.peer == peer and name not in ours]

    def pages(self, replica: int) -> frozenset[int]:
        """Returns every page of one replica that is held."""
        if not self._held:
            return frozenset()
        return frozenset[int]().union(*(held.pages for held in self._held.values() if held.replica == replica))

    def empty(self) -> list[Posting]:
        """Returns the parked transfers, and holds nothing any more. Only for an engine that destroys its agents."""
        parked, self._parked, self._held = self._parked, [], {}
        return parked
