"""The peers that an engine is connected to, disconnected peers with copies in flight, and the peers' notifications."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from contextlib import suppress
from itertools import chain, product
from typing import Literal

from transfer.engine.metadata import KVTransferEngineMetadata, TransferReqData, check_metadata
from transfer.engine.tensor_agent import TensorAgent
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
from transfer.nixl.agent import Agent
from transfer.nixl.settings import reaches_other_hosts
from transfer.wire.handshake import differences


class LoadedPeer:
    """A peer that NIXL has loaded. Each local replica is connected to each replica of the peer, shard i to shard i.

    Attributes:
        metadata: the peer's checked metadata.
        failure: why the peer counts as dead; None while it is alive.
    """

    def __init__(self, agents: list[list[TensorAgent]], metadata: KVTransferEngineMetadata) -> None:
        self.metadata = metadata
        self.failure: TransferFailedError | None = None
        self._loaded: list[tuple[Agent, str]] = []
        try:
            for ours, theirs in product(agents, metadata.agents_meta):
                for shard, found in zip(ours, theirs, strict=True):
                    shard.agent.add_peer(found.agent_name, found.metadata)
                    self._loaded.append((shard.agent, found.agent_name))
        except AgentError:
            self.close()
            raise

    def close(self) -> None:
        """Unloads the peer. No copy may be in flight over its connection. Ignores NIXL's errors about a dead peer."""
        loaded, self._loaded = self._loaded, []
        for agent, name in loaded:
            with suppress(AgentError):
                agent.remove_peer(name)


class Peers:
    """The connected peers, and the disconnected peers that stay loaded because copies are still in flight.

    Attributes:
        connected: each loaded peer by engine name, including dead ones.
        sender: for each agent name of a connected peer, the engine name and the shard.
    """

    def __init__(self, engine: str) -> None:
        self.connected: dict[str, LoadedPeer] = {}
        self.sender: dict[str, tuple[str, int]] = {}
        self._here = f"engine {engine!r}"
        self._retiring: list[LoadedPeer] = []

    def connect(
        self, mine: KVTransferEngineMetadata, agents: list[list[TensorAgent]], remote: KVTransferEngineMetadata
    ) -> str:
        """Checks a peer, loads it, and returns its name. Raises as `KVTransferEngine.connect` does."""
        remote = check_metadata(remote)
        self._check_free(remote)
        _check_fit(mine, remote)
        self.connected[remote.name] = LoadedPeer(agents, remote)
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
                f"{self._here}: transfers with {remote.name!r} from before its disconnect still move bytes: call poll"
            )
        for agent in chain.from_iterable(remote.agents_meta):
            if agent.agent_name in self.sender:
                owner, _ = self.sender[agent.agent_name]
                raise MetadataError(f"{self._here}: agent {agent.agent_name!r} of {remote.name!r} belongs to {owner!r}")

    def connection(self, remote: KVTransferEngineMetadata) -> LoadedPeer:
        """Returns the live connection to this incarnation of a peer. Raises if there is none."""
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

    def disconnect(self, name: str) -> LoadedPeer:
        """Forgets a peer and returns its connection.

        `reap` unloads the connection once none of its copies is in flight.
        """
        connection = self.connected.pop(name, None)
        if connection is None:
            raise UnknownPeerError(f"{self._here} is not connected to engine {name!r}")
        self.sender = {agent: sender for agent, sender in self.sender.items() if sender[0] != name}
        self._retiring.append(connection)
        return connection

    def reap(self, moving: set[LoadedPeer]) -> None:
        """Unloads each forgotten connection that is not in `moving`."""
        for connection in [old for old in self._retiring if old not in moving]:
            self._retiring.remove(connection)
            connection.close()

    def close(self) -> None:
        """Unloads every peer."""
        for connection in [*self.connected.values(), *self._retiring]:
            connection.close()


def _check_fit(mine: KVTransferEngineMetadata, remote: KVTransferEngineMetadata) -> None:
    """Raises `MetadataError` or `SettingsMismatchError` if two engines cannot exchange pages."""
    pair = f"engines {mine.name!r} and {remote.name!r}"
    if remote.name == mine.name:
        raise MetadataError(f"engine {mine.name!r} cannot connect to an engine of its own name")
    if differ := differences(mine.settings, remote.settings, (f"at {remote.name!r}", f"at {mine.name!r}")):
        raise SettingsMismatchError(f"{pair} have different UCX or NIXL settings: {differ}")
    if remote.bytes_per_page != mine.bytes_per_page:
        raise MetadataError(
            f"{pair} have pages of {mine.bytes_per_page} and {remote.bytes_per_page} bytes; they must be equal"
        )
    shards, remote_shards = len(mine.agents_meta[0]), len(remote.agents_meta[0])
    if shards != remote_shards:
        raise MetadataError(f"{pair} have {shards} and {remote_shards} shards per replica; they must be equal")
    if remote.hostname != mine.hostname and not reaches_other_hosts(mine.settings):
        raise MetadataError(
            f"{pair} are on hosts {mine.hostname!r} and {remote.hostname!r}, and "
            f"UCX_TLS={mine.settings.get('UCX_TLS')} cannot reach another host: set UCX_TLS and UCX_NET_DEVICES"
        )


_NAME = re.compile(rb"[0-9a-f]{32}")
_MAX_OPEN = 1 << 16
_MAX_ENDED = 1 << 16

Verdict = Literal["accepted", "unknown", "malformed", "duplicate", "late"]


class NotificationBook:
    """Records, from the peers' notifications, which shards of the peers' transfers have ended.

    Unexpected notifications are counted and dropped, because peers are not trusted.

    Attributes:
        completed: the shards that have ended, by engine name and transfer name. Each peer has at most 65,536 entries;
            beyond that the oldest is dropped.
        counts: number of notifications by verdict.
        given_up: the requests of transfers that were given up here before their end was known, by transfer name.
    """

    def __init__(self, tp: int) -> None:
        self.completed: dict[str, dict[str, set[int]]] = {}
        self.counts: Counter[str] = Counter()
        self.given_up: dict[str, TransferReqData] = {}
        self._shards = set(range(tp))
        self._ended: OrderedDict[str, None] = OrderedDict()

    def connect(self, peer: str) -> None:
        """Starts to record notifications from a peer."""
        self.completed.setdefault(peer, {})

    def disconnect(self, peer: str) -> None:
        """Forgets a peer's transfers, except complete transfers that have not been cleaned up yet."""
        left = {name: shards for name, shards in self.completed.pop(peer, {}).items() if shards == self._shards}
        if left:
            self.completed[peer] = left

    def accept(self, peer: str | None, shard: int, message: bytes) -> None:
        """Records a notification that our agent of `shard` has received.

        If this engine has given up a transfer, the notification about the last shard ends the transfer. The pages of
        the transfer then leave the quarantine.

        `peer` is None if the sending agent belongs to no connected engine on this shard.
        """
        verdict = self._verdict(peer, shard, message)
        self.counts[verdict] += 1
        if peer is None or verdict != "accepted":
            return
        transfers, name = self.completed[peer], message.decode()
        transfers.setdefault(name, set()).add(shard)
        if len(transfers) > _MAX_OPEN:
            del transfers[next(iter(transfers))]
        if name in self.given_up and self.is_complete(peer, name):
            self.end(peer, name)

    def _verdict(self, peer: str | None, shard: int, message: bytes) -> Verdict:
        if peer is None or peer not in self.completed:
            return "unknown"
        if not _NAME.fullmatch(message):
            return "malformed"
        name = message.decode()
        if name in self._ended:
            return "late"
        return "duplicate" if shard in self.completed[peer].get(name, ()) else "accepted"

    def is_complete(self, peer: str, transfer_name: str) -> bool:
        """Whether every shard of a transfer has ended."""
        return self.completed.get(peer, {}).get(transfer_name) == self._shards

    def has_ended(self, transfer_name: str) -> bool:
        """Whether a transfer was given up, or was recently ended by `end`."""
        return transfer_name in self.given_up or transfer_name in self._ended

    def end(self, peer: str, transfer_name: str) -> None:
        """Forgets a transfer. Later notifications about it are dropped."""
        self.completed.get(peer, {}).pop(transfer_name, None)
        self.given_up.pop(transfer_name, None)
        self._ended[transfer_name] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
