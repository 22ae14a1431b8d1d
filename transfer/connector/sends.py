"""The requests whose pages this rank leases to readers: what was asked for, what stands, and what has ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from transfer.errors import InvalidTransferError
from transfer.pull.replica import LeaseOver, Offered, ReplicaTransfer

if TYPE_CHECKING:
    from transfer.connector.metadata import ConnectorMetadata
    from transfer.pull.thread import TransferThread


class Sends:
    """Leases by request. For the thread that runs the model.

    Attributes:
        offered: requests whose lease stands since this was taken; with a reason, those whose lease was not granted.
        sent: requests whose lease has ended since this was taken, and how.
    """

    def __init__(self) -> None:
        self.offered: dict[str, str] = {}
        self.sent: dict[str, str] = {}
        self._leases: dict[str, int] = {}

    def check_new(self, request_ids: Iterable[str]) -> None:
        """Checks that no lease of a request stands.

        Raises:
            InvalidTransferError: names the first request whose lease does.
        """
        for request_id in request_ids:
            if request_id in self._leases:
                raise InvalidTransferError(f"request {request_id!r}: its lease {self._leases[request_id]:#x} stands")

    def begin(self, request_id: str, lease_id: int) -> None:
        """Books a lease that was asked for."""
        self._leases[request_id] = lease_id

    def go_on(self, metadata: ConnectorMetadata, thread: TransferThread) -> None:
        """Starts the time of leases, and ends others, as a step says. Those that have ended are left alone."""
        for request_id in metadata.reqs_computed:
            if (lease_id := self._leases.get(request_id)) is not None:
                thread.call_soon(ReplicaTransfer.start_clock, lease_id)
        for request_id, reason in metadata.reqs_not_processed.items():
            if (lease_id := self._leases.get(request_id)) is not None:
                thread.call_soon(ReplicaTransfer.revoke, lease_id, reason)

    def on_event(self, event: Offered | LeaseOver) -> None:
        """Books what became of a lease."""
        if self._leases.get(event.request_id) != event.lease_id:
            return
        if isinstance(event, Offered):
            self.offered[event.request_id] = event.error
            if event.error:
                del self._leases[event.request_id]
        else:
            del self._leases[event.request_id]
            self.sent[event.request_id] = event.reason
