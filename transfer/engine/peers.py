"""Which engines an engine is connected to, what each of them is, and whose connections are still draining."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from transfer.engine.metadata import KVTransferEngineMetadata, check_metadata
from transfer.errors import (
    AgentError,
    AlreadyConnectedError,
    InvalidTransferError,
    MetadataError,
    PeerFailedError,
    SettingsMismatchError,
    TransferFailedError,
    UnknownPeerError,
)
from transfer.nixl.settings import reaches_other_hosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer.engine.tensor_agent import TensorAgent
    from transfer.nixl.agent import Agent, PageList


class Connection:
    """A peer that is loaded, wholly or not at all: each replica of ours to each of the peer's, shard i to shard i.

    Attributes:
        metadata: the peer's, checked.
        failure: why the peer is taken for dead; None while it lives.
        pages: (replica, remote replica, shard) to the list of the peer's pages there.
    """

    def __init__(self, agents: list[list[TensorAgent]], metadata: KVTransferEngineMetadata) -> None:
        self.metadata = metadata
        self.failure: TransferFailedError | None = None
        self.pages: dict[tuple[int, int, int], PageList] = {}
        self._loaded: list[tuple[Agent, str]] = []
        try:
            for replica, shards in enumerate(agents):
                for shard, ours in enumerate(shards):
                    for there in range(len(metadata.agents_meta)):
                        self.pages[replica, there, shard] = self._load(ours.agent, there, shard)
        except AgentError:
            self.close()
            raise

    def _load(self, agent: Agent, replica: int, shard: int) -> PageList:
        peer, found = self.metadata, self.metadata.agents_meta[replica][shard]
        agent.add_peer(found.agent_name, found.metadata)
        self._loaded.append((agent, found.agent_name))
        pages = (found.base_addr, peer.bytes_per_page, found.device_id, peer.total_num_pages)
        return agent.list_pages(pages, peer.memory_type, found.agent_name)

    def close(self) -> None:
        """Unloads the peer, over which nothing moves any more. What NIXL says of a dead one is of no use."""
        self.pages.clear()  # a list keeps the agent that made it
        loaded, self._loaded = self._loaded, []
        for agent, name in loaded:
            with suppress(AgentError):
                agent.remove_peer(name)


class Peers:
    """Connections by engine name.

    Attributes:
        connected: engine name to the connection with it, dead ones included.
        sender: agent name to engine name and shard, of each agent of a connected peer.
    """

    def __init__(self, mine: KVTransferEngineMetadata, agents: list[list[TensorAgent]]) -> None:
        self.connected: dict[str, Connection] = {}
        self.sender: dict[str, tuple[str, int]] = {}
        self._mine = mine
        self._here = f"engine {mine.name!r}"
        self._agents = agents
        self._retiring: list[Connection] = []

    def connect(self, remote: KVTransferEngineMetadata) -> str:
        """Checks a peer, loads it, and returns its name. Raises as `KVTransferEngine.connect` does."""
        remote = check_metadata(remote)
        self._check_free(remote)
        _check_fit(self._mine, remote)
        self.connected[remote.name] = Connection(self._agents, remote)
        for shards in remote.agents_meta:
            self.sender |= {agent.agent_name: (remote.name, shard) for shard, agent in enumerate(shards)}
        return remote.name

    def _check_free(self, remote: KVTransferEngineMetadata) -> None:
        known = self.connected.get(remote.name)
        if known is not None:
            same = known.metadata.incarnation == remote.incarnation
            other = "" if same else ", in another incarnation: disconnect that one first"
            raise AlreadyConnectedError(f"{self._here} is connected to engine {remote.name!r} already{other}")
        if any(old.metadata.incarnation == remote.incarnation for old in self._retiring):
            raise AlreadyConnectedError(
                f"{self._here}: transfers with {remote.name!r} from before its disconnect still move bytes: poll"
            )
        for agent in chain.from_iterable(remote.agents_meta):
            if agent.agent_name in self.sender:
                owner, _ = self.sender[agent.agent_name]
                raise MetadataError(f"{self._here}: agent {agent.agent_name!r} of {remote.name!r} belongs to {owner!r}")

    def connection(self, remote: KVTransferEngineMetadata) -> Connection:
        """The living connection to a peer, of this incarnation."""
        if not isinstance(remote, KVTransferEngineMetadata):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may be untyped
            raise InvalidTransferError(f"{self._here}: expected a peer's metadata, got {type(remote).__name__}")
        connection = self.connected.get(remote.name)
        if connection is None:
            raise UnknownPeerError(f"{self._here} is not connected to engine {remote.name!r}")
        if connection.metadata.incarnation != remote.incarnation:
            raise UnknownPeerError(
                f"{self._here} is connected to engine {remote.name!r} of incarnation "
                f"{connection.metadata.incarnation}, not {remote.incarnation}: disconnect it and connect again"
            )
        if connection.failure is not None:
            raise PeerFailedError(f"{self._here}: peer {remote.name!r} was lost: {connection.failure}")
        return connection

    def failed(self) -> dict[str, str]:
        """Why each connected peer that is dead is taken for dead."""
        return {name: str(peer.failure) for name, peer in self.connected.items() if peer.failure is not None}

    def disconnect(self, name: str) -> Connection:
        """Forgets a peer, and returns its connection, which `reap` unloads once nothing moves over it."""
        connection = self.connected.pop(name, None)
        if connection is None:
            raise UnknownPeerError(f"{self._here} is not connected to engine {name!r}")
        self.sender = {agent: sender for agent, sender in self.sender.items() if sender[0] != name}
        self._retiring.append(connection)
        return connection

    def reap(self, moving: Callable[[Connection], bool]) -> None:
        """Unloads each forgotten connection over which nothing moves."""
        for connection in [old for old in self._retiring if not moving(old)]:
            self._retiring.remove(connection)
            connection.close()

    def close(self) -> None:
        """Unloads every peer."""
        for connection in [*self.connected.values(), *self._retiring]:
            connection.close()


def _check_fit(mine: KVTransferEngineMetadata, remote: KVTransferEngineMetadata) -> None:
    """Checks that two engines can exchange pages."""
    pair = f"engines {mine.name!r} and {remote.name!r}"
    if remote.name == mine.name:
        raise MetadataError(f"engine {mine.name!r} cannot connect to an engine of its own name")
    if remote.settings_fingerprint != mine.settings_fingerprint:
        keys = sorted(mine.settings.keys() | remote.settings.keys())
        differ = [key for key in keys if mine.settings.get(key) != remote.settings.get(key)]
        said = "; ".join(f"{k} is {mine.settings.get(k)} here, {remote.settings.get(k)} there" for k in differ)
        raise SettingsMismatchError(f"{pair} run with different settings: {said or 'their fingerprints differ'}")
    if remote.bytes_per_page != mine.bytes_per_page:
        raise MetadataError(f"{pair} have pages of {mine.bytes_per_page} and {remote.bytes_per_page} bytes")
    shards, remote_shards = len(mine.agents_meta[0]), len(remote.agents_meta[0])
    if shards != remote_shards:
        raise MetadataError(f"{pair} have {shards} and {remote_shards} shards per replica")
    if remote.hostname != mine.hostname and not reaches_other_hosts(mine.settings):
        raise MetadataError(
            f"{pair} are on hosts {mine.hostname!r} and {remote.hostname!r}, and "
            f"UCX_TLS={mine.settings.get('UCX_TLS')} leaves no host: set UCX_TLS and UCX_NET_DEVICES"
        )
