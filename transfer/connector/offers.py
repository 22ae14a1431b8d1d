"""The source's side of a scheduler: one lease for each request, granted and ended by every rank on its own."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from transfer.connector.metadata import ConnectorMetadata, SendRequest
from transfer.errors import InvalidLeaseError
from transfer.pull.lease import new_lease_id
from transfer.pull.pull_state import LeaseRef


@dataclass(slots=True, eq=False)
class Offer:
    """The lease of one request.

    Attributes:
        lease: as all ranks know it.
        offered: ranks on which it has stood.
        over: ranks on which it has ended, or was not granted.
        reason: "read", or the first other reason why it ended on a rank.
        aborted: its end was asked for.
    """

    lease: LeaseRef
    offered: set[int] = field(default_factory=set[int])
    over: set[int] = field(default_factory=set[int])
    reason: str = "read"
    aborted: bool = False


class Offers:
    """Leases by request, and the slots of their words. A request's pages go when every rank's lease has ended.

    Args:
        ranks: of the engine.
        duration_s: that a lease lasts without a word of its readers.
        slots: lease words that every rank has.
    """

    def __init__(self, ranks: int, duration_s: float, slots: int) -> None:
        self._ranks = ranks
        self._duration_s = duration_s
        self._num_slots = slots
        self._slots = list(range(slots))
        self._by_request: dict[str, Offer] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def begin(
        self,
        metadata: ConnectorMetadata,
        request_id: str,
        *,
        running: bool,
        engines: int,
        block_ids: tuple[tuple[int, ...], ...],
    ) -> None:
        """Asks every rank for a lease; see `SendRequest`.

        Raises:
            InvalidLeaseError: the request has one, or no slot is free.
        """
        if request_id in self._by_request:
            raise InvalidLeaseError(f"request {request_id!r}: its lease has not ended on every rank yet")
        if not self._slots:
            raise InvalidLeaseError(f"request {request_id!r}: all {self._num_slots} lease slots are taken")
        lease = LeaseRef(new_lease_id(), heapq.heappop(self._slots), self._duration_s)
        self._by_request[request_id] = Offer(lease)
        metadata.reqs_to_send[request_id] = SendRequest(
            lease=lease, engines=engines, running=running, block_ids=block_ids
        )

    def standing(self, request_id: str) -> LeaseRef | None:
        """Returns the lease of a request if it stands on every rank: only then may its id leave the scheduler."""
        offer = self._by_request.get(request_id)
        if offer is None or len(offer.offered) < self._ranks or offer.over or offer.aborted:
            return None
        return offer.lease

    def promised(self, request_id: str) -> LeaseRef | None:
        """Returns the lease of a request that no rank has ended or refused, whether or not all have granted it yet."""
        offer = self._by_request.get(request_id)
        return None if offer is None or offer.over or offer.aborted else offer.lease

    def missing(self, request_id: str) -> str:
        """Says why a lease does not stand."""
        offer = self._by_request.get(request_id)
        if offer is None:
            return "it has none"
        if offer.aborted:
            return "it is being ended"
        if offer.over:
            return f"it has ended on ranks {sorted(offer.over)[:16]}: {offer.reason}"
        return f"ranks {sorted(set(range(self._ranks)) - offer.offered)[:16]} have not granted it yet"

    def end(self, metadata: ConnectorMetadata, request_id: str, reason: str) -> bool:
        """Ends the lease of a request on every rank. Whether there is one: it is over when all ranks have said so."""
        if (offer := self._by_request.get(request_id)) is None:
            return False
        offer.aborted = True
        metadata.reqs_not_processed[request_id] = reason
        return True

    def on_offered(self, metadata: ConnectorMetadata, rank: int, request_id: str, error: str) -> str | None:
        """Books that a rank has granted a lease, or has not.

        Returns:
            Why the lease is over, where that was the last rank that had to say so.
        """
        if (offer := self._by_request.get(request_id)) is None:
            return None
        if not error:
            offer.offered.add(rank)
            return None
        self.end(metadata, request_id, "not granted by every rank")
        return self._over(offer, rank, request_id, error)

    def on_sent(self, rank: int, request_id: str, reason: str) -> str | None:
        """Books that a rank's lease has ended. Returns as `on_offered` does."""
        offer = self._by_request.get(request_id)
        return None if offer is None else self._over(offer, rank, request_id, reason)

    def _over(self, offer: Offer, rank: int, request_id: str, reason: str) -> str | None:
        offer.over.add(rank)
        if reason != "read" and offer.reason == "read":
            offer.reason = reason
        if len(offer.over) < self._ranks:
            return None
        del self._by_request[request_id]
        heapq.heappush(self._slots, offer.lease.slot)
        return offer.reason
