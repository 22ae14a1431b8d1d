"""The ranks of one engine that live in this process, driven as one: leases on all of them, pulls by all or by none.

Single-threaded: `transfer.thread` runs it. A source is found by address and engine id. Its metadata is asked for at the
first pull from it, its life is watched while pulls go on, and it is forgotten when it dies, is replaced, or is idle.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from transfer.errors import HandshakeError, PullFailedError, TransferError
from transfer.handshake import HandshakeClient
from transfer.pull_state import LeaseRef, PullEvent
from transfer.stats import TransferStats
from transfer.wire import Answer, MetadataReply, Pong

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike

    from transfer.pull_state import PagesOfGroup
    from transfer.rank import RankTransfer


class Source(NamedTuple):
    """Where a request's pages are to be read from.

    Attributes:
        address: ZMQ endpoint of the handshake.
        engine_id: the engine there.
        lease: under which it holds the pages.
        incarnation: the start of the engine that granted the lease; empty where that is not known, and then a source
            that was restarted is only noticed by the lease word.
    """

    address: str
    engine_id: str
    lease: LeaseRef
    incarnation: str = ""


class LeaseOver(NamedTuple):
    """A lease has ended on every rank here: every word is cleared, so the pages may go.

    Attributes:
        request_id: as it was offered.
        lease_id: the lease.
        reason: "read", or why it ended otherwise.
    """

    request_id: str
    lease_id: int
    reason: str


class Offered(NamedTuple):
    """A lease stands on every rank here: its id may leave the process. `error` says why it does not."""

    request_id: str
    lease_id: int
    error: str


Event = PullEvent | LeaseOver | Offered


class _Pages(NamedTuple):
    groups: Sequence[PagesOfGroup]
    last: bool
    layer_chunks: int


@dataclass(slots=True, eq=False)
class _Pull:
    source: Source
    deadline: float
    waiting: list[_Pages] = field(default_factory=list["_Pages"])
    open_ranks: set[int] = field(default_factory=set[int])
    started: bool = False
    error: str = ""
    told: bool = False


@dataclass(slots=True, eq=False)
class _Peer:
    """An engine at an address: when it was last used and heard of, and what has been asked of it.

    A request says where its source is, and may be wrong: what it says touches no request that says otherwise.
    """

    address: str
    engine_id: str
    incarnation: str = ""
    used: float = 0.0
    heard: float = 0.0
    asked: float = 0.0
    connecting: bool = False
    pinging: bool = False


class ReplicaTransfer:
    """Leases and pulls of one replica, over all its ranks in this process.

    Args:
        ranks: of one engine, in order.
        client: asks sources for their metadata.
        handshake_timeout_s: how long a source may take to answer.
        heartbeat_s: how often a source is asked for a sign of life while pulls from it go on.
        dead_after_s: how long it may be silent then.
        idle_s: how long a source is remembered without a pull.
        clock: seconds, monotonic.

    Attributes:
        events: what happened, until the owner takes it.
        stats: counters and the last pulls.
    """

    def __init__(
        self,
        ranks: Sequence[RankTransfer],
        client: HandshakeClient,
        *,
        handshake_timeout_s: float = 5.0,
        heartbeat_s: float = 1.0,
        dead_after_s: float = 5.0,
        idle_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ranks = list(ranks)
        self.events: deque[Event] = deque()
        self.stats = TransferStats()
        self._client = client
        self._times = (handshake_timeout_s, heartbeat_s, dead_after_s, idle_s)
        self._clock = clock
        self._compatibility: Mapping[str, str] = self.ranks[0].identity.compatibility
        self._pulls: dict[str, _Pull] = {}
        self._peers: dict[tuple[str, str], _Peer] = {}  # by address and engine id, as requests name them
        self._leases: dict[int, set[int]] = {}
        self._next_watch = 0.0

    def offer(
        self, request_id: str, lease: LeaseRef, *, engines: int = 1, pages: Sequence[ArrayLike] | None = None
    ) -> None:
        """Lets a lease stand on every rank, or on none. `Offered` comes as an event.

        Args:
            request_id: whose pages the caller holds until `LeaseOver`.
            lease: a new id, a free slot, and seconds that it stands without a renewal.
            engines: reading engines that must have ended before the lease does.
            pages: for each group the pages under it, so that readers can verify them; None where nobody does.
        """
        granted: list[RankTransfer] = []
        try:
            for rank in self.ranks:
                if pages is not None:
                    rank.seal(pages)
                rank.leases.grant(lease.lease_id, request_id, lease.slot, lease.duration_s, engines=engines)
                granted.append(rank)
        except TransferError as error:
            for rank in granted:
                rank.leases.end(lease.lease_id, "not granted by every rank")
            self.events.append(Offered(request_id, lease.lease_id, str(error)))
            return
        self._leases[lease.lease_id] = set(range(len(self.ranks)))
        self.events.append(Offered(request_id, lease.lease_id, ""))

    def revoke(self, lease_id: int, reason: str) -> None:
        """Ends a lease on every rank. `LeaseOver` comes as an event where it stood."""
        for rank in self.ranks:
            rank.end_lease(lease_id, reason)
        self._collect_leases()

    def pull(self, key: str, source: Source, timeout_s: float) -> None:
        """Begins a pull by all ranks; `add_pages` says of what. Its `PullEvent`s come as events, also for bad input."""
        if key in self._pulls:
            # Nothing is known of it under this name yet, so the owner is told at once and the older one goes on.
            raise PullFailedError(f"request {key!r}: a pull of this name has not ended yet")
        self._pulls[key] = _Pull(source, self._clock() + timeout_s)
        self._connect(source)
        self._start(key)

    def add_pages(self, key: str, groups: Sequence[PagesOfGroup], *, last: bool, layer_chunks: int = 1) -> None:
        """Reads pages of a pull, or further ones. Nothing happens where it has ended already."""
        pull = self._pulls.get(key)
        if pull is None or pull.error:
            return
        pull.waiting.append(_Pages(groups, last, layer_chunks))
        self._start(key)

    def cancel(self, key: str, reason: str) -> None:
        """Gives a pull up. Nothing happens where it has ended already."""
        if key in self._pulls:
            self._fail(key, reason)

    def poll(self) -> bool:
        """Moves everything on. Whether pulls are going on.

        Raises:
            AgentError: NIXL fails.
        """
        self._client.poll()
        for rank in self.ranks:
            rank.poll()
        self._collect_leases()
        for at, rank in enumerate(self.ranks):
            while rank.events:
                self._on_rank(at, rank.events.popleft())
            while rank.puller.ended:
                self.stats.record(rank.puller.ended.popleft())
        now = self._clock()
        if now >= self._next_watch:
            self._next_watch = now + self._times[1] / 4
            self._watch(now)
        return bool(self._pulls)

    def _collect_leases(self) -> None:
        for at, rank in enumerate(self.ranks):
            while rank.released:
                lease = rank.released.popleft()
                left = self._leases.get(lease.lease_id)
                if left is None:
                    continue
                left.discard(at)
                if not left:
                    del self._leases[lease.lease_id]
                    self.stats.record_lease(lease.ended)
                    self.events.append(LeaseOver(lease.request_id, lease.lease_id, lease.ended))

    def _connect(self, source: Source) -> None:
        key = source[:2]
        peer = self._peers.setdefault(key, _Peer(*key))
        peer.used = self._clock()
        if peer.connecting or self._is_connected(peer):
            return
        peer.connecting = True

        def done(answer: Answer | TransferError) -> None:
            if self._peers.get(key) is peer:
                peer.connecting = False
                self._on_metadata(peer, answer)

        self._client.ask_metadata(source.address, source.engine_id, self._compatibility, done, self._times[0])

    def _is_connected(self, peer: _Peer) -> bool:
        return bool(peer.incarnation) and self._is_loaded(peer.engine_id, peer.incarnation)

    def _is_loaded(self, engine_id: str, incarnation: str) -> bool:
        remotes = [rank.remote(engine_id) for rank in self.ranks]
        return all(remote is not None and remote.incarnation == incarnation for remote in remotes)

    def _on_metadata(self, peer: _Peer, answer: Answer | TransferError) -> None:
        try:
            if not isinstance(answer, MetadataReply):
                raise answer if isinstance(answer, TransferError) else HandshakeError(f"{peer.address}: no metadata")
            if not self._is_loaded(peer.engine_id, answer.incarnation):
                self._load(peer, answer)
        except TransferError as error:
            self.stats.failed_handshakes += 1
            self._forget(peer, f"handshake with engine {peer.engine_id!r} at {peer.address}: {error}")
            return
        peer.incarnation, peer.heard = answer.incarnation, self._clock()
        self._start_all(peer)

    def _start_all(self, peer: _Peer) -> None:
        """The source has just said who it is: what another start of it has promised comes to nothing."""
        for key in [key for key, pull in self._pulls.items() if pull.source[:2] == (peer.address, peer.engine_id)]:
            if self._pulls[key].source.incarnation not in ("", peer.incarnation):
                self._fail(key, f"engine {peer.engine_id!r} is not the start of it that granted the lease")
            else:
                self._start(key)

    def _load(self, peer: _Peer, answer: MetadataReply) -> None:
        loaded: list[RankTransfer] = []
        try:
            for rank in self.ranks:
                rank.connect(answer.ranks, (peer.engine_id, answer.incarnation))
                loaded.append(rank)
        except TransferError as error:
            for rank in loaded:
                rank.disconnect(peer.engine_id, str(error))
            raise
        for other in [other for other in self._peers.values() if other.engine_id == peer.engine_id]:
            if other.incarnation not in {"", answer.incarnation}:
                self._forget(other, f"engine {peer.engine_id!r} was started anew, at {peer.address}")

    def _start(self, key: str) -> None:
        """Opens a pull on every rank once its source is known, and reads what has been asked for."""
        pull = self._pulls[key]
        peer = self._peers.get(pull.source[:2])
        if pull.error or peer is None or not self._is_connected(peer):
            return
        if pull.source.incarnation not in ("", peer.incarnation):
            self._ping(peer)  # the source was restarted, or the request is older than that: only the source knows
            return
        try:
            if not pull.started:
                pull.started = True
                left = max(pull.deadline - self._clock(), 1e-3)
                for at, rank in enumerate(self.ranks):
                    remote = rank.remote(pull.source.engine_id)
                    if remote is not None:
                        rank.open_pull(key, remote, pull.source.lease, left)
                        pull.open_ranks.add(at)
            while pull.waiting:
                groups, last, layer_chunks = pull.waiting.pop(0)
                for rank in self.ranks:
                    rank.add_pages(key, groups, last=last, layer_chunks=layer_chunks)
        except TransferError as error:
            self._fail(key, str(error))

    def _on_rank(self, at: int, event: PullEvent) -> None:
        pull = self._pulls.get(event.key)
        if pull is None:
            return
        if event.safe:
            pull.open_ranks.discard(at)
        if event.error:
            self._fail(event.key, event.error)
            if (peer := self._peers.get(pull.source[:2])) is not None:
                self._ping(peer)  # does it live, and is it still the one that we know?
        elif not pull.open_ranks and not pull.error:
            del self._pulls[event.key]
            self.events.append(PullEvent(event.key, "", safe=True))

    def _fail(self, key: str, reason: str) -> None:
        """All or none: what one rank lacks, no rank needs. Tells of it at once, and again when the pages are safe."""
        pull = self._pulls[key]
        if not pull.error:
            pull.error = reason
            pull.waiting.clear()
            self.stats.record_failure(reason)
            for at in sorted(pull.open_ranks):
                self.ranks[at].puller.fail(key, reason)
                self._take_safe(at, key, pull)
        if not pull.open_ranks:
            del self._pulls[key]
            self.events.append(PullEvent(key, pull.error, safe=True))
        elif not pull.told:
            pull.told = True
            self.events.append(PullEvent(key, pull.error, safe=False))

    def _take_safe(self, at: int, key: str, pull: _Pull) -> None:
        """A pull that had nothing in flight is safe as soon as it has failed."""
        puller = self.ranks[at].puller
        if key not in puller:
            pull.open_ranks.discard(at)
            # The name is free from here on: what the rank still has to say of this pull would be taken for a new one's.
            puller.events = deque(event for event in puller.events if event.key != key)

    def _watch(self, now: float) -> None:
        _, heartbeat_s, _, idle_s = self._times
        for key in [key for key, pull in self._pulls.items() if not pull.started and now >= pull.deadline]:
            self._fail(key, f"timed out: engine {self._pulls[key].source.engine_id!r} did not answer the handshake")
        busy = {pull.source[:2] for pull in self._pulls.values()}
        for key, peer in list(self._peers.items()):
            if key in busy:
                peer.used = now
            if peer.connecting:
                continue
            if key not in busy:
                if now - peer.used > idle_s:
                    self._forget(peer, "idle")
            elif peer.incarnation and not self._is_connected(peer):
                self._forget(peer, f"engine {peer.engine_id!r} was lost")
            elif now - max(peer.heard, peer.asked) > heartbeat_s:
                self._ping(peer)

    def _ping(self, peer: _Peer) -> None:
        if peer.pinging or peer.connecting:
            return
        peer.pinging, peer.asked = True, self._clock()

        def done(answer: Answer | TransferError) -> None:
            peer.pinging = False
            if self._peers.get((peer.address, peer.engine_id)) is not peer:
                return
            if not isinstance(answer, Pong):
                self._forget(peer, f"engine {peer.engine_id!r} is silent: {answer}")
            elif answer.incarnation != peer.incarnation:
                self._forget(peer, f"engine {peer.engine_id!r} was restarted")
            else:
                peer.heard = self._clock()
                self._start_all(peer)

        self._client.ping(peer.address, peer.engine_id, done, self._times[2])

    def _forget(self, peer: _Peer, reason: str) -> None:
        """Fails the pulls from an engine at an address, and drops what was learnt there; the next pull asks anew."""
        self._peers.pop((peer.address, peer.engine_id), None)
        others = [other for other in self._peers.values() if other.engine_id == peer.engine_id]
        if peer.incarnation and all(other.incarnation != peer.incarnation for other in others):
            for rank in self.ranks:
                rank.disconnect(peer.engine_id, reason, peer.incarnation)
        for key in [key for key, pull in self._pulls.items() if pull.source[:2] == (peer.address, peer.engine_id)]:
            self._fail(key, reason)
        self._client.forget(peer.address)

    def close(self) -> None:
        """Ends everything; events of what was still open are there to be taken. Safe to call twice."""
        for key in list(self._pulls):
            self._fail(key, "this engine was shut down")
        for rank in self.ranks:
            rank.close()
        self._collect_leases()
        for key, pull in list(self._pulls.items()):
            del self._pulls[key]  # the agents are gone, so nothing is in flight
            self.events.append(PullEvent(key, pull.error, safe=True))
        self._client.close()
