"""Transfers that this engine started, and the quarantine of pages for whose transfers nobody waits any more."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from transfer.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transfer.engine.checks import Indices
    from transfer.engine.metadata import TransferReqData
    from transfer.engine.peers import Connection
    from transfer.engine.tensor_agent import TensorAgent
    from transfer.errors import TransferFailedError
    from transfer.nixl.agent import Agent, Handle


@dataclass(eq=False)
class Posting:
    """One transfer: a handle of NIXL's for each shard, released as soon as that has ended, and never before.

    Releasing a handle earlier would not stop its copy, and NIXL could not tell any more when it is over.

    Attributes:
        request: the transfer.
        connection: the peer it goes to or comes from.
        failure: how it failed; None otherwise. Set by the engine.
        pending: shard to agent and handle, of those that have not ended.
    """

    request: TransferReqData
    connection: Connection
    failure: TransferFailedError | None = None
    pending: dict[int, tuple[Agent, Handle]] = field(default_factory=dict[int, "tuple[Agent, Handle]"])

    @property
    def peer(self) -> str:
        """Name of the other engine."""
        return self.connection.metadata.name

    @property
    def replica(self) -> int:
        """Our replica."""
        return self.request.dst_replica_idx if self.request.is_read else self.request.src_replica_idx

    @property
    def pages(self) -> list[int]:
        """Pages of our replica: written by a READ, read by a WRITE."""
        return self.request.dst_idxs if self.request.is_read else self.request.src_idxs

    def post(self, shard: int, ours: TensorAgent, local_idxs: Indices, remote_idxs: Indices) -> None:
        """Starts one shard. Where NIXL refuses it (`AgentError`), the shards before are still in flight."""
        request = self.request
        there = request.src_replica_idx if request.is_read else request.dst_replica_idx
        remote = self.connection.pages[self.replica, there, shard]
        operation: Literal["READ", "WRITE"] = "READ" if request.is_read else "WRITE"
        note = request.transfer_name.encode()
        handle, done = ours.agent.post(operation, (ours.pages, local_idxs), (remote, remote_idxs), note)
        if done:
            ours.agent.release(handle)
        else:
            self.pending[shard] = (ours.agent, handle)

    def poll(self) -> None:
        """Moves every shard on, and releases those that have ended; raises the first error (`AgentError`) of them."""
        first: AgentError | None = None
        for shard, (agent, handle) in list(self.pending.items()):
            try:
                if not agent.done(handle):
                    continue
            except AgentError as error:
                first = first or error
            del self.pending[shard]
            try:
                agent.release(handle)
            except AgentError as error:
                first = first or error
        if first is not None:
            raise first

    def drop(self) -> None:
        """Releases the handles of shards in flight. Only just before their agents are destroyed: the copies go on."""
        pending, self.pending = self.pending, {}
        for agent, handle in pending.values():
            with suppress(AgentError):
                agent.release(handle)


@dataclass(frozen=True)
class _Held:
    """Pages of one replica of ours; of a transfer that we started its posting, too."""

    peer: str
    replica: int
    pages: frozenset[int]
    posting: Posting | None


class Quarantine:
    """Holds the pages of transfers that were given up, each until its end is known.

    The end of a transfer that this engine started is seen by `reap`. That of a peer's is its last notification, or the
    caller's word that the peer is gone.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def __contains__(self, transfer_name: str) -> bool:
        return transfer_name in self._held

    def park(self, posting: Posting) -> None:
        """Takes over a transfer of ours. Nothing is held where it has ended."""
        if posting.pending:
            self.hold(posting.request.transfer_name, posting.peer, posting.replica, posting.pages, posting)

    def hold(
        self, transfer_name: str, peer: str, replica: int, pages: Iterable[int], posting: Posting | None = None
    ) -> None:
        """Holds pages of one replica until `release` of the same transfer."""
        self._held[transfer_name] = _Held(peer, replica, frozenset(pages), posting)

    def release(self, transfer_name: str) -> None:
        """Lets go of a transfer's pages; nothing happens where it holds none."""
        self._held.pop(transfer_name, None)

    def reap(self) -> None:
        """Polls the parked transfers, and lets go of the pages of those that have ended, in whatever way."""
        for posting in self.parked():
            with suppress(AgentError):  # nobody waits for it, and an error ends it as well as success
                posting.poll()
            if not posting.pending:
                self.release(posting.request.transfer_name)

    def parked(self) -> list[Posting]:
        """Transfers of ours that are in flight, and that nobody waits for."""
        return [held.posting for held in self._held.values() if held.posting is not None]

    def of_peer(self, peer: str) -> list[str]:
        """The peer's own transfers that hold pages of ours."""
        return [name for name, held in self._held.items() if held.peer == peer and held.posting is None]

    def pages(self, replica: int) -> frozenset[int]:
        """Every page of one replica that is held."""
        return frozenset[int]().union(*(held.pages for held in self._held.values() if held.replica == replica))
