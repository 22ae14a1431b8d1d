"""The engines that a replica reads from.

An engine is found by its address and engine id, watched while pulls read from it, and finally forgotten.

A request names its source. If the name is wrong, only the requests with this name fail. At the first request for an
engine, the directory asks for the engine's metadata. It forgets the engine when the engine dies, is replaced, or stays
idle. If a second engine answers under the id of a loaded engine, the directory first pings the loaded engine. It
replaces the loaded engine only if the loaded engine is gone. If no key authenticates metadata, an engine is loaded only
if a process on this host confirms that the metadata is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transfer.errors import HandshakeError, MetadataError, TransferError
from transfer.failures import Failure, FailureKind
from transfer.nixl.vouchers import is_vouched
from transfer.pull.rank import RankTransfer
from transfer.pull.remote import RemoteEngine
from transfer.pull.source import Contact
from transfer.wire.handshake import HandshakeClient
from transfer.wire.messages import Answer, MetadataQuery, MetadataReply, Ping, Pong, open_rank

_UNKNOWN = (
    "no key authenticates its metadata, and no process of this user on this host confirms it as its own; "
    "sources on other hosts need a shared `secret`, the same on both sides"
)


class Times(NamedTuple):
    """Time limits in seconds.

    Attributes:
        handshake_timeout_s: time that a source may take to answer.
        heartbeat_s: interval between pings to a source that is being read.
        dead_after_s: how long a source may be silent after a ping.
        idle_s: how long a source is remembered without a pull.
    """

    handshake_timeout_s: float = 5.0
    heartbeat_s: float = 1.0
    dead_after_s: float = 5.0
    idle_s: float = 3600.0


class _Candidate(NamedTuple):
    """An engine that has answered and is not loaded yet: its incarnation, and a `RemoteEngine` for each local rank."""

    incarnation: str
    remotes: list[RemoteEngine]


@dataclass(slots=True, eq=False)
class Peer:
    """An engine at an address, with the times of its last use, last sign of life and last ping."""

    contact: Contact
    incarnation: str = ""  # the loaded incarnation; empty until it is known
    used: float = 0.0
    heard: float = 0.0
    asked: float = 0.0
    connecting: bool = False
    pinging: bool = False
    candidate: _Candidate | None = None  # an engine that has answered, until it is loaded or refused


class Directory:
    """The engines that all local ranks have loaded, or whose metadata was requested. Single-threaded.

    Args:
        ranks: the local ranks.
        client: asks engines for metadata and pings them.
        times: time limits.
        clock: a monotonic clock, in seconds.
        on_ready: called whenever an engine has confirmed its identity.
        on_lost: called with an engine that must no longer be read, and the reason.

    Attributes:
        failed_handshakes: number of engines that gave no answer, or an unusable one.
    """

    def __init__(
        self,
        ranks: Sequence[RankTransfer],
        client: HandshakeClient,
        times: Times,
        clock: Callable[[], float],
        on_ready: Callable[[Peer], None],
        on_lost: Callable[[Peer, Failure], None],
    ) -> None:
        self.failed_handshakes = 0
        self._ranks = ranks
        self._client = client
        self._times = times
        self._clock = clock
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._compatibility: Mapping[str, str] = ranks[0].identity.compatibility
        self._peers: dict[Contact, Peer] = {}
        self._has_key = bool(ranks[0].identity.key)
        self._next_watch = 0.0

    def __len__(self) -> int:
        return len(self._peers)

    def use(self, contact: Contact) -> Peer | None:
        """Returns the engine at a contact if all local ranks have loaded it; otherwise None.

        Also records the current time as the engine's last use, so that the engine is not forgotten as idle.
        """
        peer = self._peers.get(contact)
        if peer is None or not self._is_connected(peer):
            return None
        peer.used = self._clock()
        return peer

    def connect(self, contact: Contact) -> None:
        """Asks the engine at a contact for its metadata unless the engine is loaded.

        `on_ready` or `on_lost` reports the outcome.
        """
        peer = self._peers.setdefault(contact, Peer(contact))
        peer.used = self._clock()
        if peer.connecting or self._is_connected(peer):
            return
        peer.connecting = True

        def done(answer: Answer | TransferError) -> None:
            if self._peers.get(contact) is peer:
                self._on_metadata(peer, answer)

        query = MetadataQuery(query_id=0, engine_id=contact[1], compatibility=dict(self._compatibility))
        self._client.ask(contact[0], query, done, self._times.handshake_timeout_s)

    def add(self, address: str, ranks: Sequence[bytes]) -> str:
        """Loads an engine whose metadata did not arrive through the handshake. Returns its id.

        Args:
            address: ZMQ endpoint at which the engine answers pings, in the form in which requests will name it.
            ranks: the sealed metadata of each rank, in order.

        Raises:
            TransferError: the metadata is damaged or does not match ours, or neither a key nor a process vouches for
                it. Nothing stays loaded.
        """
        if not ranks:
            raise MetadataError(f"{address}: got the metadata of 0 ranks; an engine has at least one")
        first = open_rank(ranks[0], self._ranks[0].identity.key)
        start = first.engine_id, first.incarnation
        remotes = [] if self._is_loaded(*start) else self._inspect(ranks, *start)
        if remotes and not self._has_key and not _is_vouched(remotes[0]):
            raise HandshakeError(f"engine {first.engine_id!r} at {address}: {_UNKNOWN}")
        peer = Peer((address, first.engine_id), used=self._clock(), heard=self._clock())
        if remotes:
            self._load(peer, remotes)
        peer.incarnation = first.incarnation
        self._peers[peer.contact] = peer
        self._on_ready(peer)
        return first.engine_id

    def _inspect(self, ranks: Sequence[bytes], engine_id: str, incarnation: str) -> list[RemoteEngine]:
        return [rank.inspect(ranks, (engine_id, incarnation)) for rank in self._ranks]

    def _is_connected(self, peer: Peer) -> bool:
        return bool(peer.incarnation) and self._is_loaded(peer.contact[1], peer.incarnation)

    def _is_loaded(self, engine_id: str, incarnation: str) -> bool:
        for rank in self._ranks:  # each pull calls this method several times, and a generator would take twice as long
            remote = rank.remote(engine_id)
            if remote is None or remote.incarnation != incarnation:
                return False
        return True

    def _on_metadata(self, peer: Peer, answer: Answer | TransferError) -> None:
        address, engine_id = peer.contact
        try:
            if not isinstance(answer, MetadataReply):
                raise answer if isinstance(answer, TransferError) else HandshakeError(f"{address}: no metadata")
            loaded = self._is_loaded(engine_id, answer.incarnation)
            remotes = [] if loaded else self._inspect(answer.ranks, engine_id, answer.incarnation)
        except TransferError as error:
            self._refuse(peer, str(error))
            return
        self._admit(peer, _Candidate(answer.incarnation, remotes))

    def _admit(self, peer: Peer, candidate: _Candidate) -> None:
        """Loads a candidate. If another incarnation of its engine is loaded, pings the loaded incarnation instead."""
        peer.candidate = candidate
        try:
            if not self._is_loaded(peer.contact[1], candidate.incarnation):
                if known := self._others(peer, candidate.incarnation):
                    for other in known:
                        self._ping(other)
                    return
                if not (self._has_key or self._client.is_keyed or _is_vouched(candidate.remotes[0])):
                    raise HandshakeError(_UNKNOWN)
                self._load(peer, candidate.remotes)
        except TransferError as error:
            self._refuse(peer, str(error))
            return
        peer.candidate, peer.connecting = None, False
        peer.incarnation, peer.heard = candidate.incarnation, self._clock()
        self._on_alive(peer)

    def _others(self, peer: Peer, incarnation: str) -> list[Peer]:
        """Returns the contacts where another incarnation of the engine is loaded."""
        same = [other for other in self._peers.values() if other.contact[1] == peer.contact[1] and other is not peer]
        return [other for other in same if other.incarnation != incarnation and self._is_connected(other)]

    def _candidates(self, engine_id: str) -> list[tuple[Peer, _Candidate]]:
        same = [peer for peer in self._peers.values() if peer.contact[1] == engine_id]
        return [(peer, peer.candidate) for peer in same if peer.candidate is not None]

    def _on_alive(self, peer: Peer) -> None:
        """Reports that an engine is ready. Refuses candidates that have its id but another incarnation."""
        self._on_ready(peer)
        address, engine_id = peer.contact
        for other, candidate in self._candidates(engine_id):
            if candidate.incarnation != peer.incarnation and other.candidate is candidate:
                self._refuse(
                    other,
                    f"an engine with this id still answers at {address}, with incarnation {peer.incarnation!r}; the "
                    f"one at {other.contact[0]} has incarnation {candidate.incarnation!r}",
                )

    def _refuse(self, peer: Peer, reason: str) -> None:
        self.failed_handshakes += 1
        text = f"handshake with engine {peer.contact[1]!r} at {peer.contact[0]}: {reason}"
        self._forget(peer, Failure(FailureKind.HANDSHAKE, text))

    def _load(self, peer: Peer, remotes: Sequence[RemoteEngine]) -> None:
        address, engine_id = peer.contact
        try:
            for rank, remote in zip(self._ranks, remotes, strict=True):
                rank.load(remote)
        except TransferError as error:
            for rank in self._ranks:
                rank.disconnect(engine_id, error.failure, remotes[0].incarnation)
            raise
        peer.incarnation = remotes[0].incarnation
        for other in [other for other in self._peers.values() if other.contact[1] == engine_id]:
            if other.incarnation not in {"", peer.incarnation}:
                self._forget(other, _gone(f"engine {engine_id!r} was restarted at {address}"))

    def watch(self, busy: Callable[[], set[Contact]]) -> None:
        """Pings engines in use, and forgets idle ones. Must be called often; usually returns at once.

        `busy` returns the contacts of the engines from which pulls read, or for which pulls wait.
        """
        now = self._clock()
        if now < self._next_watch:
            return
        self._next_watch = now + self._times.heartbeat_s / 4
        used = busy()
        for contact, peer in list(self._peers.items()):
            if contact in used:
                peer.used = now
            if peer.connecting:
                continue
            if contact not in used:
                if now - peer.used > self._times.idle_s:
                    self._forget(peer, _gone("idle"))
            elif peer.incarnation and not self._is_connected(peer):
                self._forget(peer, _gone(f"engine {contact[1]!r} was lost"))
            elif now - max(peer.heard, peer.asked) > self._times.heartbeat_s:
                self._ping(peer)

    def check(self, contact: Contact) -> None:
        """Pings the engine at a contact, if any. The answer shows whether the loaded incarnation is still alive."""
        if (peer := self._peers.get(contact)) is not None:
            self._ping(peer)

    def _ping(self, peer: Peer) -> None:
        if peer.pinging or peer.connecting:
            return
        peer.pinging, peer.asked = True, self._clock()

        def done(answer: Answer | TransferError) -> None:
            peer.pinging = False
            engine_id = peer.contact[1]
            if self._peers.get(peer.contact) is not peer:
                return
            if not isinstance(answer, Pong):
                self._forget(peer, _gone(f"engine {engine_id!r} is silent: {answer}"))
            elif answer.incarnation != peer.incarnation:
                self._forget(peer, _gone(f"engine {engine_id!r} was restarted"))
            else:
                peer.heard = self._clock()
                self._on_alive(peer)

        self._client.ask(peer.contact[0], Ping(query_id=0, engine_id=peer.contact[1]), done, self._times.dead_after_s)

    def _forget(self, peer: Peer, failure: Failure) -> None:
        """Forgets an engine and everything that was learnt about it. The next request asks for its metadata again."""
        address, engine_id = peer.contact
        self._peers.pop(peer.contact, None)
        peer.candidate = None
        others = [other for other in self._peers.values() if other.contact[1] == engine_id]
        if peer.incarnation and all(other.incarnation != peer.incarnation for other in others):
            for rank in self._ranks:
                rank.disconnect(engine_id, failure, peer.incarnation)
        self._on_lost(peer, failure)
        self._client.forget(address)
        # If this was the engine's last contact, a waiting candidate can be loaded.
        for other, candidate in self._candidates(engine_id):
            if other.candidate is candidate:
                self._admit(other, candidate)


def _gone(text: str) -> Failure:
    return Failure(FailureKind.SOURCE_GONE, text)


def _is_vouched(remote: RemoteEngine) -> bool:
    return all(is_vouched(rank.agent_metadata) for rank in remote.ranks)
