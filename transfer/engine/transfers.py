"""The books of one engine's transfers: what it started, what its peers have told it, and what is in quarantine."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from transfer.engine.checks import check_replica, page_indices
from transfer.engine.metadata import TransferReqData
from transfer.engine.notifications import Inbox
from transfer.engine.quarantine import Quarantine
from transfer.errors import (
    AgentError,
    InvalidTransferError,
    PeerFailedError,
    TransferFailedError,
    TransferIncompleteError,
    TransferTimeoutError,
    UnknownPeerError,
    UnknownTransferError,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from transfer.engine.connection import Connection
    from transfer.engine.peers import Peers
    from transfer.engine.posting import Posting
    from transfer.engine.tensor_agent import TensorAgent

_FIRST_PAUSE_S = 20e-6  # most small transfers end within it
_LAST_PAUSE_S = 1e-3  # a stuck one is looked at each millisecond: 2 % of a core


class Transfers:
    """Every transfer of an engine until it is cleaned up or given up, and after that until it has really ended.

    Attributes:
        postings: transfer name to what this engine started and nobody has cleaned up.
        inbox: what peers have notified.
        quarantine: what was given up before its end.
        suspects: peers with whom a transfer was given up after a time-out, until one that we started ends well.
    """

    def __init__(self, name: str, agents: list[list[TensorAgent]], total_num_pages: int, peers: Peers) -> None:
        self.postings: dict[str, Posting] = {}
        self.inbox = Inbox(len(agents[0]))
        self.quarantine = Quarantine()
        self.suspects: set[str] = set()
        self._name = name
        self._here = f"engine {name!r}"
        self._agents = agents
        self._total_num_pages = total_num_pages
        self._peers = peers

    def start(self, posting: Posting, local_idxs: npt.NDArray[np.int32], remote_idxs: npt.NDArray[np.int32]) -> None:
        """Posts every shard of a transfer, int32 `[pairs]` of pages, and enters it into the books.

        Raises:
            TransferFailedError: NIXL refused a shard. Those before it are parked until they have ended.
        """
        for shard, agent in enumerate(self._agents[posting.local_replica]):
            try:
                posting.post(shard, agent, local_idxs, remote_idxs)
            except AgentError as error:
                raise self._fail(posting, error) from error
        self.postings[posting.request.transfer_name] = posting

    def is_complete(self, request: TransferReqData) -> bool:
        """Tells whether a transfer has ended well. Raises as `KVTransferEngine.is_complete` does."""
        return self._is_posting_done(request) if self._is_ours(request) else self._has_arrived(request)

    def _is_ours(self, request: TransferReqData) -> bool:
        if not isinstance(request, TransferReqData):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may be untyped
            raise InvalidTransferError(f"{self._here}: expected TransferReqData, got {type(request).__name__}")
        if self._name not in (request.src_name, request.dst_name):
            raise InvalidTransferError(
                f"{self._here} has no part in transfer {request.transfer_name} from {request.src_name!r} to "
                f"{request.dst_name!r}"
            )
        return request.initiator == self._name

    def _posting(self, request: TransferReqData) -> Posting:
        posting = self.postings.get(request.transfer_name)
        if posting is None:
            raise UnknownTransferError(
                f"{self._here} has no transfer {request.transfer_name}: it was cleaned up or given up, or never started"
            )
        return posting

    def _is_posting_done(self, request: TransferReqData) -> bool:
        posting = self._posting(request)
        if posting.failure is not None:
            raise posting.failure.with_traceback(None)
        try:
            posting.poll()
        except AgentError as error:
            raise self._fail(posting, error) from error
        if posting.in_flight:
            self._drain(posting.local_replica)  # peers may be waiting for us while we wait for them
            return False
        self.suspects.discard(posting.peer)
        return True

    def _has_arrived(self, request: TransferReqData) -> bool:
        replica = self._passive_replica(request)
        self._drain(replica)
        if self.inbox.is_complete(request.initiator, request.transfer_name):
            return True
        if request.transfer_name in self.quarantine or self.inbox.has_ended(request.transfer_name):
            raise UnknownTransferError(f"{self._here}: transfer {request.transfer_name} was cleaned up or given up")
        if (reason := self._peers.failed().get(request.initiator)) is not None:
            raise PeerFailedError(
                f"{self._here}: transfer {request.transfer_name} cannot end, peer {request.initiator!r} was lost: "
                f"{reason}"
            )
        if request.initiator not in self._peers.metadata:
            raise UnknownPeerError(
                f"{self._here} is not connected to engine {request.initiator!r}, which started transfer "
                f"{request.transfer_name}"
            )
        return False

    def _passive_replica(self, request: TransferReqData) -> int:
        replica = request.src_replica_idx if request.is_read else request.dst_replica_idx
        check_replica(f"{self._here}: replica of transfer {request.transfer_name}", replica, len(self._agents))
        return replica

    def _fail(self, posting: Posting, error: AgentError) -> TransferFailedError:
        kind = PeerFailedError if error.peer_lost else TransferFailedError
        failure = kind(
            f"{self._here}: transfer {posting.request.transfer_name} failed, peer {posting.peer!r}"
            f"{' is gone' if error.peer_lost else ''}: {error}"
        )
        posting.failure = failure
        if error.peer_lost and posting.connection.failure is None:
            posting.connection.failure = failure
        self.quarantine.park(posting)
        return failure

    def wait(self, request: TransferReqData, timeout_s: float) -> None:
        """Waits for the end of a transfer and forgets it. Raises as `KVTransferEngine.sync_and_release` does."""
        if not timeout_s >= 0:  # also refuses NaN, which no clock ever reaches
            raise InvalidTransferError(f"{self._here}: timeout_s is {timeout_s}, it must be 0 or more")
        deadline, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        try:
            while not self.is_complete(request):
                if time.monotonic() >= deadline:
                    raise self._timed_out(request, timeout_s)
                self.poll()
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)
        except TransferFailedError:
            self.clean_up(request)
            raise
        self.clean_up(request)

    def _timed_out(self, request: TransferReqData, timeout_s: float) -> TransferTimeoutError:
        self.give_up(request)
        peer = request.dst_name if request.src_name == self._name else request.src_name
        self.suspects.add(peer)
        return TransferTimeoutError(
            f"{self._here}: transfer {request.transfer_name} with peer {peer!r} did not end within {timeout_s} s; "
            "its pages here are in quarantine until it has"
        )

    def clean_up(self, request: TransferReqData) -> None:
        """Forgets a transfer that has ended. Raises as `KVTransferEngine.cleanup_transfer` does."""
        if self._is_ours(request):
            posting = self._posting(request)
            if posting.failure is None and not self._is_posting_done(request):
                raise TransferIncompleteError(f"{self._here}: transfer {request.transfer_name} has not ended yet")
            del self.postings[request.transfer_name]
            return
        with suppress(PeerFailedError):  # a dead peer's transfer is over
            if not self._has_arrived(request):
                raise TransferIncompleteError(
                    f"{self._here}: transfer {request.transfer_name} of {request.initiator!r} has not ended yet"
                )
        self.inbox.end(request.initiator, request.transfer_name)

    def give_up(self, request: TransferReqData) -> None:
        """Forgets a transfer in any state. Raises as `KVTransferEngine.abandon_transfer` does."""
        if self._is_ours(request):
            posting = self._posting(request)
            del self.postings[request.transfer_name]
            with suppress(AgentError):  # an error ends a shard as well as success: either way nothing is left of it
                posting.poll()
            self.quarantine.park(posting)
            return
        replica = self._passive_replica(request)
        pages = request.src_idxs if request.is_read else request.dst_idxs
        held = page_indices(f"{self._here}: transfer {request.transfer_name}", pages, self._total_num_pages)
        with suppress(UnknownPeerError, PeerFailedError):  # a peer that is not connected may be writing all the same
            if self._has_arrived(request):
                self.inbox.end(request.initiator, request.transfer_name)
                return
        self.quarantine.hold(request.transfer_name, request.initiator, replica, held.tolist())

    def poll(self) -> int:
        """Serves peers, books notifications, and moves on what was given up. Returns how many were accepted."""
        accepted = sum(self._drain(replica) for replica in range(len(self._agents)))
        self.quarantine.reap()
        self._peers.reap(self.quarantine.moves_over)
        return accepted

    def _drain(self, replica: int) -> int:
        before = self.inbox.counts["accepted"]
        for shard, agent in enumerate(self._agents[replica]):
            for sender, message in agent.notifications():
                peer = self._peers.sender(sender, shard)
                ended = self.inbox.accept(peer, shard, message)
                if peer is not None and ended is not None and ended in self.quarantine:
                    self.quarantine.release(ended)
                    self.inbox.end(peer, ended)
        return self.inbox.counts["accepted"] - before

    def disconnect(self, connection: Connection) -> None:
        """Fails what is in flight over a connection that the peers have forgotten."""
        name = connection.metadata.name
        for posting in self.postings.values():
            if posting.connection is not connection or posting.failure is not None:
                continue
            try:
                posting.poll()
            except AgentError as error:
                self._fail(posting, error)
                continue
            if posting.in_flight:
                posting.failure = PeerFailedError(
                    f"{self._here}: peer {name!r} was disconnected before transfer {posting.request.transfer_name} had "
                    "ended"
                )
                self.quarantine.park(posting)
        self.inbox.disconnect(name)
        self.suspects.discard(name)
        self.poll()

    def release_quarantine(self, peer: str) -> None:
        """Lets go of the pages of a peer's own transfers that were given up here."""
        for transfer_name in self.quarantine.of_peer(peer):
            self.quarantine.release(transfer_name)
            self.inbox.end(peer, transfer_name)

    def _drain_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(posting.in_flight for posting in self.postings.values()) or self.quarantine.has_parked:
            if time.monotonic() >= deadline:
                return
            for posting in self.postings.values():
                with suppress(AgentError):
                    posting.poll()
            with suppress(AgentError):
                self.poll()
            time.sleep(0.5e-3)

    def close(self, drain_s: float) -> list[TensorAgent]:
        """Gives all handles back, those in flight after `drain_s` seconds.

        Returns:
            The agents with a copy still in flight: they must be destroyed now.
        """
        self._drain_all(drain_s)
        busy: list[TensorAgent] = []
        for posting in {*self.postings.values(), *self.quarantine.empty()}:
            with suppress(AgentError):
                posting.poll()
            busy += posting.agents()
            posting.drop()
        self.postings.clear()
        return busy
