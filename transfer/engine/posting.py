"""The NIXL handles of one transfer that this engine started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer.errors import AgentError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from transfer.engine.connection import Connection
    from transfer.engine.metadata import TransferReqData
    from transfer.engine.tensor_agent import TensorAgent
    from transfer.errors import TransferFailedError
    from transfer.nixl.agent import Handle


class Posting:
    """One transfer: a handle per shard, each released as soon as it has ended, and never before.

    Releasing a handle earlier would not stop its copy, and NIXL could not tell any more when it is over.

    Attributes:
        request: the transfer.
        connection: the peer it goes to or comes from.
        failure: how it failed; None otherwise. Set by the engine.
    """

    def __init__(self, request: TransferReqData, connection: Connection) -> None:
        self.request = request
        self.connection = connection
        self.failure: TransferFailedError | None = None
        self._pending: dict[int, tuple[TensorAgent, Handle]] = {}

    @property
    def peer(self) -> str:
        """Name of the other engine."""
        return self.connection.metadata.name

    @property
    def local_replica(self) -> int:
        """Our replica."""
        return self.request.dst_replica_idx if self.request.is_read else self.request.src_replica_idx

    @property
    def local_pages(self) -> list[int]:
        """Pages of our replica: written by a READ, read by a WRITE."""
        return self.request.dst_idxs if self.request.is_read else self.request.src_idxs

    @property
    def in_flight(self) -> bool:
        """Whether a shard has not ended yet."""
        return bool(self._pending)

    def agents(self) -> list[TensorAgent]:
        """Returns the agents whose shards have not ended yet."""
        return [agent for agent, _ in self._pending.values()]

    def post(
        self, shard: int, agent: TensorAgent, local_idxs: npt.NDArray[np.int32], remote_idxs: npt.NDArray[np.int32]
    ) -> None:
        """Starts one shard.

        Raises:
            AgentError: NIXL refuses it; the shards before are still in flight.
        """
        request = self.request
        remote_replica = request.src_replica_idx if request.is_read else request.dst_replica_idx
        remote = self.connection.pages(self.local_replica, remote_replica, shard)
        handle, done = agent.post(request.is_read, local_idxs, remote, remote_idxs, request.transfer_name.encode())
        if done:
            agent.release(handle)
        else:
            self._pending[shard] = (agent, handle)

    def poll(self) -> None:
        """Moves every shard on, and releases those that have ended, in whatever way.

        Raises:
            AgentError: a shard ended in an error: the first one. All shards were polled.
        """
        first: AgentError | None = None
        for shard, (agent, handle) in list(self._pending.items()):
            try:
                if not agent.done(handle):
                    continue
            except AgentError as error:
                first = first or error
            del self._pending[shard]
            try:
                agent.release(handle)
            except AgentError as error:
                first = first or error
        if first is not None:
            raise first

    def drop(self) -> None:
        """Releases the handles of shards in flight. Only just before their agents are destroyed: the copies go on."""
        pending, self._pending = self._pending, {}
        for agent, handle in pending.values():
            try:
                agent.release(handle)
            except AgentError:
                continue
