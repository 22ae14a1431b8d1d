"""What an engine holds of one peer: the peer's agents loaded into ours, and the prepared lists of the peer's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer.errors import AgentError

if TYPE_CHECKING:
    from transfer.engine.metadata import KVTransferEngineMetadata
    from transfer.engine.tensor_agent import Pages, TensorAgent
    from transfer.errors import TransferFailedError


class Connection:
    """One connected peer. Every replica of ours is wired to every replica of the peer, shard i to shard i.

    The constructor loads all or nothing.

    Attributes:
        metadata: the peer's, checked.
        failure: why the peer is taken for dead; None while it lives.

    Raises:
        AgentError: NIXL refuses one of the peer's agents.
    """

    def __init__(self, agents: list[list[TensorAgent]], metadata: KVTransferEngineMetadata) -> None:
        self.metadata = metadata
        self.failure: TransferFailedError | None = None
        self._loaded: list[tuple[TensorAgent, str]] = []
        self._pages: dict[tuple[int, int, int], tuple[TensorAgent, Pages]] = {}
        try:
            for replica, shards in enumerate(agents):
                for shard, agent in enumerate(shards):
                    self._load(replica, shard, agent)
        except AgentError:
            self.close()
            raise

    def _load(self, replica: int, shard: int, agent: TensorAgent) -> None:
        meta = self.metadata
        for remote_replica, remote_shards in enumerate(meta.agents_meta):
            remote = remote_shards[shard]
            agent.add_peer(remote)
            self._loaded.append((agent, remote.agent_name))
            pages = agent.peer_pages(remote, meta.memory_type, meta.total_num_pages)
            self._pages[replica, remote_replica, shard] = (agent, pages)

    def agent_names(self) -> list[list[str]]:
        """Returns the names of the peer's agents, `[replica][tp_shard]`."""
        return [[agent.agent_name for agent in replica] for replica in self.metadata.agents_meta]

    def pages(self, replica: int, remote_replica: int, shard: int) -> Pages:
        """Returns the list of the peer's pages for our agent of `replica` and `shard`."""
        return self._pages[replica, remote_replica, shard][1]

    def close(self) -> list[AgentError]:
        """Unloads the peer. Its transfers must have ended. Safe to call twice.

        Returns:
            What NIXL refused. Everything else is unloaded all the same.
        """
        refused: list[AgentError] = []
        for agent, pages in self._pages.values():
            try:
                agent.release_pages(pages)
            except AgentError as error:
                refused.append(error)
        for agent, name in self._loaded:
            try:
                agent.remove_peer(name)
            except AgentError as error:
                refused.append(error)
        self._pages, self._loaded = {}, []
        return refused
