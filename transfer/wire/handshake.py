"""The side channel: an engine serves its metadata, its leases and signs of life, and a reader queries many engines.

The server is a ROUTER socket on a thread of its own, and no message that it receives can kill that thread. The client
belongs to the thread that calls it and never blocks: each peer has a separate socket and a separate deadline. A peer
that cannot be reached is given up after one timeout. A peer that can be reached but stays silent is asked again, and is
given up only after six timeouts. It may be alive but busy: on a host with ten processes for each core, sources took
more than five seconds to answer.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self, TypeAlias

import msgspec
import zmq

from kvcache.endpoints.sockets import Limits, connect, keep_alive, listening
from transfer.errors import HandshakeError, MetadataError, TransferError
from transfer.wire import messages as msg
from transfer.wire.allowed_peers import AllowedPeers
from transfer.wire.keys import Throttle

log = logging.getLogger("pagewire.handshake")

MAX_QUERY_BYTES = msg.MAX_DIGEST_BYTES + (1 << 16)
_BATCH = 64
# How many metadata queries and pings one sender may make per second. An engine asks a source for metadata once and
# pings it once a second, but a host may run many engines.
_QUERIES_PER_S = 100
_PATIENCE = 6  # a peer that can be reached but stays silent is given up after this many timeouts
_UNREAD = 128  # how many queries from one peer are queued in this process; further queries wait in the peer's process
# How long, in seconds, a content query is held while its answer is prepared. After that, the reader is told what the
# answer still waits for.
_HOLD_S = 0.1
_MOST_HELD = 256
# How many queries of `_OF_LEASES` one rank of a reader may make per second. A rank asks once for each request, and
# asks again while the lease is being granted.
_LEASES_PER_S = 4000
_OF_LEASES = (msg.LeaseQuery, msg.LeaseRefusal, msg.ContentQuery)

# The rate is in frames per second of one connection. It is four times that of a rank: a REQ socket sends an empty
# frame before each query, and a reader asks for all its ranks over one connection.
_LIMITS = Limits(message_bytes=MAX_QUERY_BYTES, per_second=4 * _LEASES_PER_S)

Done: TypeAlias = "Callable[[msg.Answer | TransferError], None]"
QueryOutcome = Literal["answered", "refused", "malformed", "throttled", "failed"]


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    return zmq.Context.instance()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] -- pyzmq has no type here


@dataclass(frozen=True)
class EngineCard:
    """What an engine tells its readers about itself.

    Attributes:
        engine_id: the engine.
        incarnation: a random name, new at each start.
        ranks: the sealed metadata of each rank, from `sealed_rank`.
        compatibility: entries whose values must be equal at a reader.
        leased: answers a lease query; called on the server's thread. None if readers learn of leases in another way.
        lent: answers a content query; called on the server's thread. None if the engine lends no pages by content. If
            the answer only names what the engine waits for, the server does not send it, but holds the query for a
            moment: see `HandshakeServer.look_again`.
        refused: called on the server's thread if a reader will not read under a lease. None if the engine grants no
            leases.
    """

    engine_id: str
    incarnation: str
    ranks: tuple[bytes, ...]
    compatibility: Mapping[str, str] = field(default_factory=dict[str, str])
    leased: Callable[[msg.LeaseQuery], msg.LeaseReply] | None = None
    lent: Callable[[msg.ContentQuery], msg.LeaseReply] | None = None
    refused: Callable[[msg.LeaseRefusal], object] | None = None


def differences(
    ours: Mapping[str, str], theirs: Mapping[str, str], where: tuple[str, str] = ("at the source", "at the reader")
) -> str:
    """Returns the entries in which two compatibility maps differ, with both values; empty if they agree.

    If two values are lists of equally many properties, only the properties that differ are named. `where` has labels
    for `theirs` and for `ours`, because the text appears in the reader's log.
    """
    found: list[str] = []
    for key in sorted({*ours, *theirs}):
        values = theirs.get(key), ours.get(key)
        parts = [(value or "").split(", ") for value in values]
        if len(parts[0]) == len(parts[1]) > 1:
            pairs = [pair for pair in zip(*parts, strict=True) if len(set(pair)) == 2]
            values = tuple(", ".join(part) for part in zip(*pairs, strict=True)) or ("", "")
        if values[0] != values[1]:
            found.append(f"{key}: {values[0]!r} {where[0]}, {values[1]!r} {where[1]}")
    return ", ".join(found)


class _HeldQuery(NamedTuple):
    """A content query that waits for its answer.

    The server sends the answer once it is more than "waiting", but no later than the time `until`.
    """

    envelope: list[bytes]
    query: msg.ContentQuery
    until: float


class HandshakeServer:
    """Answers the queries of readers for one or more engines of this process, until `close`.

    It binds the loopback interface by default, because its answers reveal memory addresses of this process. `secure`
    sets the socket's CURVE options before the bind. With None, the socket is plain.

    Attributes:
        endpoint: the bound address. If the port was 0, it has the chosen port.
        counts: number of queries that were answered, refused, malformed, throttled, or failed.
    """

    def __init__(
        self,
        cards: list[EngineCard],
        bind: str = "tcp://127.0.0.1:0",
        secure: Callable[[zmq.Socket[bytes]], None] | None = None,
    ) -> None:
        self.counts: Counter[QueryOutcome] = Counter()
        self._throttle = Throttle(_QUERIES_PER_S, time.monotonic)
        self._lease_throttle = Throttle(_LEASES_PER_S, time.monotonic)
        self._cards = {card.engine_id: card for card in cards}
        self._stopping = False
        self._held: dict[tuple[bytes, int], _HeldQuery] = {}  # by the identity of the sender and the id of its query
        # ZMQ drops an answer if this many already wait for its peer.
        options = {zmq.MAXMSGSIZE: MAX_QUERY_BYTES, zmq.RCVHWM: _UNREAD, zmq.SNDHWM: 1000}
        try:
            self._socket = listening("handshake", zmq.ROUTER, bind, options, _LIMITS, secure)
        except zmq.ZMQError as error:
            raise HandshakeError(f"handshake server: cannot bind {bind!r}: {error}") from error
        self.endpoint: str = self._socket.address
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._main, name="handshake", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve(self, card: EngineCard) -> None:
        """Adds an engine, or replaces the `EngineCard` of an engine whose ranks have changed."""
        # replaced as a whole, because the server's thread may read it at any time
        self._cards = {**self._cards, card.engine_id: card}

    def look_again(self) -> None:
        """Makes the server answer the held content queries whose answer is ready. Their readers need not ask again."""
        # a forked child does not have the thread, and its write would wake the server of its parent
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stops the thread. Safe to call twice."""
        self._stopping = True
        self.look_again()
        self._thread.join(10)
        self._socket.close()
        if not self._thread.is_alive() and self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _main(self) -> None:
        waited = zmq.Poller()
        waited.register(self._socket, zmq.POLLIN)
        waited.register(self._wake, zmq.POLLIN)  # a poll with a timeout would wake an idle engine again and again
        while not self._stopping:
            try:
                ready = dict(waited.poll(self._wait_ms()))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._held:
                    self._answer_held(is_told=self._wake in ready)
                if self._socket in ready:
                    for _ in range(_BATCH):
                        self._answer(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                continue
            except Exception:  # a bad query must not stop the server, which has other peers to answer
                log.exception("a handshake query could not be answered")
                self.counts["failed"] += 1

    def _wait_ms(self) -> int | None:
        """Returns the milliseconds until the first held query must be answered. None if no query is held."""
        if not self._held:
            return None
        return max(0, math.ceil((min(held.until for held in self._held.values()) - time.monotonic()) * 1e3))

    def _answer_held(self, *, is_told: bool) -> None:
        now = time.monotonic()
        for key, (envelope, query, until) in list(self._held.items()):
            if is_told or until <= now:
                answer = self._answer_to(query)
                if until <= now or not _is_waiting(answer):
                    del self._held[key]
                    self._say(envelope, answer)

    def _answer(self, frames: list[bytes]) -> None:
        # a REQ socket puts an empty frame after its identity, and expects it back
        envelope = frames[: 2 if b"" in frames[1:2] else 1]
        identity, rest = frames[0], frames[len(envelope) :]
        query: msg.Query | msg.QueryRefusal
        try:
            query = msg.decode_query(rest[0]) if len(rest) == 1 else _refusal(f"{len(rest)} frames, 1 is expected")
        except MetadataError as error:
            query = _refusal(str(error)[:500])
        throttle = self._lease_throttle if isinstance(query, _OF_LEASES) else self._throttle
        if not throttle.admits(identity):
            self.counts["throttled"] += 1  # the query gets no answer, because the peer asks too often
            return
        if isinstance(query, msg.QueryRefusal):
            self.counts["malformed"] += 1
        answer = query if isinstance(query, msg.QueryRefusal) else self._answer_to(query)
        if isinstance(query, msg.ContentQuery) and _is_waiting(answer) and len(self._held) < _MOST_HELD:
            held = _HeldQuery(envelope, msgspec.structs.replace(query, digests=b""), time.monotonic() + _HOLD_S)
            self._held[identity, query.query_id] = held
        else:
            self._say(envelope, answer)

    def _say(self, envelope: list[bytes], answer: msg.Answer) -> None:
        self.counts["refused" if isinstance(answer, msg.QueryRefusal) else "answered"] += 1
        self._socket.send_multipart([*envelope, msg.encode_message(answer)], zmq.NOBLOCK)

    def _answer_to(self, query: msg.Query) -> msg.Answer:
        cards = self._cards
        engine_id = query.engine_id
        card = cards.get(engine_id) or (next(iter(cards.values())) if cards and not engine_id else None)
        if card is None:
            return _refusal(f"engine {engine_id[:100]!r} is not here: {sorted(cards)[:8]}", query.query_id)
        if isinstance(query, msg.LeaseRefusal) and card.refused is not None:
            card.refused(query)
        if isinstance(query, msg.Ping | msg.LeaseRefusal):
            return msg.Pong(query_id=query.query_id, engine_id=card.engine_id, incarnation=card.incarnation)
        if isinstance(query, msg.LeaseQuery):
            if card.leased is None:
                reason = "answers no lease queries: its readers learn of leases in other messages"
                return _refusal(f"engine {card.engine_id!r} {reason}", query.query_id)
            return card.leased(query)
        if differ := differences(query.compatibility, card.compatibility):
            return _refusal(f"engine {card.engine_id!r} is not compatible: {differ[:2000]}", query.query_id)
        if isinstance(query, msg.ContentQuery):
            if card.lent is None:
                return _refusal(f"engine {card.engine_id!r} lends no pages by content", query.query_id)
            return card.lent(query)
        return msg.MetadataReply(
            query_id=query.query_id, engine_id=card.engine_id, incarnation=card.incarnation, ranks=card.ranks
        )


def _is_waiting(answer: msg.Answer) -> bool:
    return isinstance(answer, msg.LeaseReply) and bool(answer.waits_for) and not (answer.pages or answer.error)


def _refusal(reason: str, query_id: int = -1) -> msg.QueryRefusal:
    return msg.QueryRefusal(query_id=query_id, reason=reason)


@dataclass(slots=True)
class _Asked:
    """A query that has no answer yet. It is sent again after a while, because a silent peer may only be busy."""

    address: str
    message: bytes
    timeout_s: float
    begin: float
    deadline: float  # extended each time the query reaches the peer, up to a limit
    done: Done
    send_at: float = -math.inf
    refused: HandshakeError | None = None


class HandshakeClient:
    """Queries any number of engines at once. Single-threaded; `poll` delivers the answers and the timeouts.

    Only peers in `allowed` are contacted. With None, only this host is contacted. No socket is opened to any other
    peer. `secure` is as in `HandshakeServer`. If it is given, a peer can answer only if it has the keys of the fleet
    (`is_keyed`).
    """

    def __init__(
        self,
        secure: Callable[[zmq.Socket[bytes]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        allowed: AllowedPeers | None = None,
    ) -> None:
        self._allowed = allowed or AllowedPeers()
        self.is_keyed = secure is not None
        self._secure = secure
        self._clock = clock
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._asked: dict[int, _Asked] = {}
        self._ids = itertools.count()

    def ask(self, address: str, query: msg.Query, done: Done, timeout_s: float = 5.0) -> None:
        """Asks the engine at a ZMQ address. `done` gets the answer to the query, or the error.

        The call sets the query's `query_id`.
        """
        query = msgspec.structs.replace(query, query_id=next(self._ids))
        now = self._clock()
        asked = _Asked(address, msg.encode_message(query), timeout_s, now, now + timeout_s, done)
        self._asked[query.query_id] = asked
        try:
            self._allowed.check(address)
            self._send(asked, now)
        except (zmq.ZMQError, TypeError, ValueError) as error:  # the address came with a request and may be malformed
            # the next `poll` will report the error, because `done` must not run within this call
            asked.deadline = -math.inf
            asked.refused = HandshakeError(f"cannot ask {address[:100]!r}: {error}")
        except HandshakeError as error:
            asked.deadline, asked.refused = -math.inf, error

    def _send(self, asked: _Asked, now: float) -> None:
        """Sends a query if the peer is connected; otherwise a later poll tries again."""
        with suppress(zmq.Again):
            self._socket(asked.address).send(asked.message, zmq.NOBLOCK)
            asked.send_at = now + asked.timeout_s / 2
            asked.deadline = min(now, asked.begin + (_PATIENCE - 1) * asked.timeout_s) + asked.timeout_s

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        if (socket := self._sockets.get(address)) is None:
            socket = _context().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, msg.MAX_METADATA_BYTES + (1 << 16))
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            # A socket with this option accepts a message only while its peer is connected. A send that succeeds
            # therefore proves that the peer was reached.
            socket.setsockopt(zmq.IMMEDIATE, 1)
            keep_alive(socket)
            try:
                if self._secure is not None:
                    self._secure(socket)
                connect(socket, address)
            except (zmq.ZMQError, TypeError, ValueError):
                socket.close()
                raise
            self._sockets[address] = socket
        return socket

    @property
    def is_waiting(self) -> bool:
        """Whether a query is open."""
        return bool(self._asked)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets on which the answers to open queries arrive."""
        addresses = {asked.address for asked in self._asked.values()}
        return [self._sockets[address] for address in addresses if address in self._sockets]

    def poll(self) -> None:
        """Hands every answer and every timeout to the `done` callback of its query."""
        if not self._asked:
            return
        # usually, queries are open at only one of hundreds of addresses
        for address in {asked.address for asked in self._asked.values()}:
            socket = self._sockets.get(address)
            for _ in range(_BATCH):
                if socket is None or socket.closed:
                    break  # the callback of the previous answer has called `forget` for this address
                try:
                    data = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._deliver(address, data)
        now = self._clock()
        for query_id, asked in list(self._asked.items()):
            # A due query is sent before its deadline is checked. If the last poll was long ago, the deadline may have
            # passed before the query was sent at all. Sending the query extends the deadline, up to a limit.
            if asked.refused is None and asked.send_at <= now:
                self._send(asked, now)
            if asked.deadline <= now:
                del self._asked[query_id]
                self.forget(asked.address)
                keys = "; a peer with other keys, or without keys, never answers" if self._secure is not None else ""
                waited = f"no answer from {asked.address} in {now - asked.begin:.1f} s{keys}"
                asked.done(asked.refused or HandshakeError(waited))

    def _deliver(self, address: str, data: bytes) -> None:
        try:
            answer = msg.decode_answer(data)
        except MetadataError as error:
            log.warning("dropped a handshake answer that could not be read: %s", error)
            return
        asked = self._asked.get(answer.query_id)
        if asked is None or asked.address != address:
            return  # a late answer, or one from a peer that was not asked
        del self._asked[answer.query_id]
        if isinstance(answer, msg.QueryRefusal):
            asked.done(HandshakeError(f"{asked.address} refuses: {answer.reason}"))
        elif isinstance(answer, msg.MetadataReply) and not 0 < len(answer.ranks) <= msg.MAX_RANKS:
            many = f"{asked.address} answers for {len(answer.ranks)} ranks; 1 to {msg.MAX_RANKS} are allowed"
            asked.done(HandshakeError(many))
        else:
            asked.done(answer)

    def forget(self, address: str) -> None:
        """Closes the socket to an address unless a query still waits for an answer on it."""
        if any(asked.address == address for asked in self._asked.values()):
            return
        if (socket := self._sockets.pop(address, None)) is not None:
            socket.close()

    def close(self) -> None:
        """Closes every socket. The callbacks of open queries are never called. Safe to call twice."""
        self._asked.clear()
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()
