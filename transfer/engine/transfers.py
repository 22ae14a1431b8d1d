"""The books of one engine's transfers: what it started, what its peers have told it, and what is in quarantine."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from transfer.engine.checks import Indices, check_replica, page_indices
from transfer.engine.metadata import KVTransferEngineMetadata, TransferReqData
from transfer.engine.notifications import NotificationBook
from transfer.engine.peers import Peers
from transfer.engine.postings import Posting, Quarantine
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
    from transfer.engine.tensor_agent import TensorAgent
    from transfer.nixl.agent import Agent

_FIRST_PAUSE_S = 20e-6  # most small transfers end within it
_LAST_PAUSE_S = 1e-3  # a stuck one is looked at each millisecond: 2 % of a core


class TransferBook:
    """Every transfer of an engine until it is cleaned up or given up, and after that until it has really ended.

    What its methods raise is said where `KVTransferEngine` calls them.

    Attributes:
        peers: connected engines.
        postings: transfer name to what this engine started and nobody has cleaned up.
        notifications: what peers have told.
        quarantine: what was given up before its end.
        suspects: peers with whom a transfer was given up after a time-out, until one that we started ends well.
    """

    def __init__(self, mine: KVTransferEngineMetadata, agents: list[list[TensorAgent]]) -> None:
        self.peers = Peers(mine, agents)
        self.postings: dict[str, Posting] = {}
        self.notifications = NotificationBook(len(agents[0]))
        self.quarantine = Quarantine()
        self.suspects: set[str] = set()
        self._name = mine.name
        self._here = f"engine {mine.name!r}"
        self._agents = agents
        self._total_num_pages = mine.total_num_pages

    def start(self, posting: Posting, local_idxs: Indices, remote_idxs: Indices) -> None:
        """Posts every shard of a transfer. Where NIXL refuses one, those before it are parked until they have ended."""
        for shard, agent in enumerate(self._agents[posting.replica]):
            try:
                posting.post(shard, agent, local_idxs, remote_idxs)
            except AgentError as error:
                raise self._fail(posting, error) from error
        self.postings[posting.request.transfer_name] = posting

    def is_complete(self, request: TransferReqData) -> bool:
        """Whether a transfer has ended well."""
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
        if posting.pending:
            self._drain(posting.replica)  # peers may be waiting for us while we wait for them
            return False
        self.suspects.discard(posting.peer)
        return True

    def _has_arrived(self, request: TransferReqData) -> bool:
        self._drain(self._passive_replica(request))
        peer, name = request.initiator, request.transfer_name
        if self.notifications.is_complete(peer, name):
            return True
        if name in self.quarantine or self.notifications.has_ended(name):
            raise UnknownTransferError(f"{self._here}: transfer {name} was cleaned up or given up")
        if (reason := self.peers.failed().get(peer)) is not None:
            raise PeerFailedError(f"{self._here}: transfer {name} cannot end, peer {peer!r} was lost: {reason}")
        if peer not in self.peers.connected:
            raise UnknownPeerError(f"{self._here} is not connected to engine {peer!r}, which started transfer {name}")
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
        """Waits for the end of a transfer and forgets it."""
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
        """Forgets a transfer that has ended."""
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
        self.notifications.end(request.initiator, request.transfer_name)

    def give_up(self, request: TransferReqData) -> None:
        """Forgets a transfer in any state."""
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
                self.notifications.end(request.initiator, request.transfer_name)
                return
        self.quarantine.hold(request.transfer_name, request.initiator, replica, held.tolist())

    def poll(self) -> int:
        """Serves peers, books notifications, and moves on what was given up. Returns how many were accepted."""
        accepted = sum(self._drain(replica) for replica in range(len(self._agents)))
        self.quarantine.reap()
        parked = [posting.connection for posting in self.quarantine.parked()]
        self.peers.reap(lambda connection: connection in parked)
        return accepted

    def _drain(self, replica: int) -> int:
        before = self.notifications.counts["accepted"]
        for shard, ours in enumerate(self._agents[replica]):
            for sender, message in ours.agent.notifications():
                peer, of_shard = self.peers.sender.get(sender, (None, shard))
                ended = self.notifications.accept(peer if of_shard == shard else None, shard, message)
                if peer is not None and ended is not None and ended in self.quarantine:
                    self.quarantine.release(ended)
                    self.notifications.end(peer, ended)
        return self.notifications.counts["accepted"] - before

    def disconnect(self, name: str) -> None:
        """Forgets a peer, and fails what is in flight over its connection."""
        connection = self.peers.disconnect(name)
        for posting in self.postings.values():
            if posting.connection is not connection or posting.failure is not None:
                continue
            try:
                posting.poll()
            except AgentError as error:
                self._fail(posting, error)
                continue
            if posting.pending:
                posting.failure = PeerFailedError(
                    f"{self._here}: peer {name!r} was disconnected before transfer {posting.request.transfer_name} had "
                    "ended"
                )
                self.quarantine.park(posting)
        self.notifications.disconnect(name)
        self.suspects.discard(name)
        self.poll()

    def release_quarantine(self, peer: str) -> None:
        """Lets go of the pages of a peer's own transfers that were given up here."""
        for transfer_name in self.quarantine.of_peer(peer):
            self.quarantine.release(transfer_name)
            self.notifications.end(peer, transfer_name)

    def close(self, drain_s: float) -> set[Agent]:
        """Gives all handles and peers back. Returns the agents that copy after `drain_s` seconds: destroy them now."""
        deadline = time.monotonic() + drain_s
        while (moving := self._still_moving()) and time.monotonic() < deadline:
            with suppress(AgentError):
                self.poll()
            time.sleep(0.5e-3)
        busy = {agent for posting in moving for agent, _ in posting.pending.values()}
        for posting in moving:
            posting.drop()
        self.postings.clear()
        self.quarantine = Quarantine()
        self.peers.close()
        return busy

    def _still_moving(self) -> list[Posting]:
        every = {*self.postings.values(), *self.quarantine.parked()}
        for posting in every:
            with suppress(AgentError):
                posting.poll()
        return [posting for posting in every if posting.pending]
