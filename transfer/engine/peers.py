"""The peers of one engine: who is connected, which agents are theirs, and which connections are still draining."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from transfer.engine.connection import Connection
from transfer.engine.metadata import KVTransferEngineMetadata, check_metadata
from transfer.errors import (
    AlreadyConnectedError,
    InvalidTransferError,
    MetadataError,
    PeerFailedError,
    SettingsMismatchError,
    UnknownPeerError,
)
from transfer.nixl.settings import reaches_other_hosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer.engine.tensor_agent import TensorAgent


class Peers:
    """Connections by engine name, in one place with the maps that are read for each notification.

    Attributes:
        metadata: engine name to metadata of each connected peer.
        engine_of: agent name to engine name, of each agent of a connected peer.
    """

    def __init__(self, mine: KVTransferEngineMetadata) -> None:
        self.metadata: dict[str, KVTransferEngineMetadata] = {}
        self.engine_of: dict[str, str] = {}
        self._mine = mine
        self._here = f"engine {mine.name!r}"
        self._shard_of: dict[str, int] = {}
        self._connections: dict[str, Connection] = {}
        self._retiring: list[Connection] = []

    def connect(self, agents: list[list[TensorAgent]], remote: KVTransferEngineMetadata) -> str:
        """Checks a peer, loads it, and returns its name. Raises as `KVTransferEngine.connect` does."""
        remote = check_metadata(remote)
        self._check_free(remote)
        check_fit(self._mine, remote)
        connection = Connection(agents, remote)
        self._connections[remote.name] = connection
        self.metadata[remote.name] = remote
        for shards in connection.agent_names():
            for shard, agent_name in enumerate(shards):
                self.engine_of[agent_name] = remote.name
                self._shard_of[agent_name] = shard
        return remote.name

    def _check_free(self, remote: KVTransferEngineMetadata) -> None:
        known = self.metadata.get(remote.name)
        if known is not None:
            other = (
                "" if known.incarnation == remote.incarnation else ", in another incarnation: disconnect that one first"
            )
            raise AlreadyConnectedError(f"{self._here} is connected to engine {remote.name!r} already{other}")
        if any(old.metadata.incarnation == remote.incarnation for old in self._retiring):
            raise AlreadyConnectedError(
                f"{self._here}: transfers with {remote.name!r} from before its disconnect still move bytes: poll"
            )
        for agent in chain.from_iterable(remote.agents_meta):
            if agent.agent_name in self.engine_of:
                owner = self.engine_of[agent.agent_name]
                raise MetadataError(f"{self._here}: agent {agent.agent_name!r} of {remote.name!r} belongs to {owner!r}")

    def connection(self, remote: KVTransferEngineMetadata) -> Connection:
        """Returns the living connection to a peer.

        Raises:
            UnknownPeerError: no engine of this name, or not this incarnation of it, is connected.
            PeerFailedError: the peer is dead.
        """
        if not isinstance(remote, KVTransferEngineMetadata):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may be untyped
            raise InvalidTransferError(f"{self._here}: expected a peer's metadata, got {type(remote).__name__}")
        connection = self._connections.get(remote.name)
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
        """Returns why each connected peer that is dead is taken for dead."""
        return {name: str(peer.failure) for name, peer in self._connections.items() if peer.failure is not None}

    def sender(self, agent_name: str, shard: int) -> str | None:
        """Returns the engine that a notification on our `shard` comes from; None where no peer has such an agent."""
        return self.engine_of.get(agent_name) if self._shard_of.get(agent_name) == shard else None

    def disconnect(self, name: str) -> Connection:
        """Forgets a peer, and returns its connection, which is unloaded by `reap` once nothing moves over it.

        Raises:
            UnknownPeerError: no engine of this name is connected.
        """
        connection = self._connections.pop(name, None)
        if connection is None:
            raise UnknownPeerError(f"{self._here} is not connected to engine {name!r}")
        del self.metadata[name]
        for agent_name in chain.from_iterable(connection.agent_names()):
            del self.engine_of[agent_name], self._shard_of[agent_name]
        self._retiring.append(connection)
        return connection

    def reap(self, moving: Callable[[Connection], bool]) -> None:
        """Unloads each forgotten connection over which nothing moves. What NIXL says of a dead peer is of no use."""
        for connection in [old for old in self._retiring if not moving(old)]:
            self._retiring.remove(connection)
            connection.close()

    def close(self) -> None:
        """Unloads every peer."""
        for connection in [*self._connections.values(), *self._retiring]:
            connection.close()
        self._connections, self._retiring = {}, []
        for table in (self.metadata, self.engine_of, self._shard_of):
            table.clear()


def check_fit(mine: KVTransferEngineMetadata, remote: KVTransferEngineMetadata) -> None:
    """Checks that two engines can exchange pages.

    Raises:
        SettingsMismatchError: they run with other settings. Says which.
        MetadataError: their pages, shards, names or hosts do not go together.
    """
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
