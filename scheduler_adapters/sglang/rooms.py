"""How decode asks prefill for a request: messages, and sockets at both ends. A room is SGLang's number of a request.

decode ──RoomWanted──► prefill    as soon as decode has the request: from then on prefill computes it
decode ◄──RoomReady─── prefill    its pages are computed and leased
decode ◄──RoomFailed── prefill
decode ──RoomDropped─► prefill    decode has given it up

What is said here are pointers and SGLang's own row of metadata. The bytes of pages are read by the transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import zmq
from msgspec import Meta

from scheduler_adapters.service.sockets import Pulse, Socket, bind_router, bounded_socket, monitor_of, received
from transfer.errors import HandshakeError
from transfer.wire.allowed_peers import AllowedPeers
from transfer.wire.keys import Keyring

_MAX_REASON = 2000
Room: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Reason: TypeAlias = Annotated[str, Meta(max_length=_MAX_REASON)]


class RoomWanted(msgspec.Struct, frozen=True, tag="wanted"):
    """A rank of decode will read the room's pages."""

    room: Room


class RoomDropped(msgspec.Struct, frozen=True, tag="dropped"):
    """It will not."""

    room: Room
    reason: Reason


class RoomReady(msgspec.Struct, frozen=True, tag="ready"):
    """The room's pages are computed, and a lease stands over them.

    Attributes:
        room: the room.
        params: `kv_transfer_params`, as JSON.
        row: SGLang's row of metadata, buffer by buffer: the first token, its probabilities, the room.
    """

    room: Room
    params: bytes
    row: Annotated[tuple[bytes, ...], Meta(max_length=64)]


class RoomFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Prefill has given it up, or has never had it."""

    room: Room
    reason: Reason


class RankOutput(msgspec.Struct, frozen=True, tag="output"):
    """What a rank of prefill tells rank 0, which knows it by its token."""

    rank: int
    token: bytes
    output: bytes


class RankStep(msgspec.Struct, frozen=True, tag="step"):
    """A step's leases and loads, from rank 0 of prefill to the other ranks."""

    metadata: bytes


ToServer: TypeAlias = RoomWanted | RoomDropped | RankOutput
FromDecode: TypeAlias = RoomWanted | RoomDropped
FromPrefill: TypeAlias = RoomReady | RoomFailed
_to_server = msgspec.msgpack.Decoder(ToServer)
_from_prefill = msgspec.msgpack.Decoder(FromPrefill)
_encode = msgspec.msgpack.Encoder().encode


def short(reason: str) -> str:
    """A reason as a message may carry it."""
    return reason[:_MAX_REASON]


def endpoint(host: str, port: int) -> str:
    """A ZMQ endpoint."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _context() -> Any:
    return zmq.Context.instance()


def _dealer(endpoint: str, keyring: Keyring | None) -> Socket:
    socket = bounded_socket(_context(), zmq.DEALER)
    if keyring is not None:
        keyring.secure_client(socket)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    return socket


def connect(endpoint: str, keyring: Keyring | None) -> Socket:
    """A socket to a `RoomServer`."""
    socket = _dealer(endpoint, keyring)
    socket.connect(endpoint)
    return socket


class _PrefillSockets(NamedTuple):
    """To a prefill process: where messages go, what ZMQ tells of it, and whether the process is still there."""

    socket: Socket
    monitor: Socket
    pulse: Pulse

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
        self.pulse.close()


class RoomServer:
    """Prefill's end. For the thread of the scheduler, which never waits here.

    Args:
        host: address to bind, on a port of the system's choice.
        keyring: lets in only the processes of the fleet; None for anybody.

    Attributes:
        port: as bound.
        malformed: messages that were none.
    """

    def __init__(self, host: str, keyring: Keyring | None) -> None:
        self._socket = bind_router(_context(), endpoint(host, 0), keyring)
        self.port = int(self._socket.address.rpartition(":")[2])
        self.malformed = 0

    def received(self) -> Iterator[tuple[bytes, ToServer]]:
        """The messages that have arrived, each with the rank that sent it, of decode or of this engine."""
        for frames in received(self._socket):
            try:
                yield frames[0], _to_server.decode(frames[-1])
            except msgspec.DecodeError:
                self.malformed += 1

    def send(self, reader: bytes, message: FromPrefill | RankStep) -> bool:
        """Whether the rank is still connected."""
        try:
            self._socket.send_multipart([reader, _encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(linger=0)


class RoomClient:
    """Decode's end: a socket for each prefill process. For the thread of the scheduler, which never waits here.

    Args:
        keyring: speaks only to processes of the fleet; None to whoever answers.
        allowed: who may be asked: addresses come with requests.
    """

    def __init__(self, keyring: Keyring | None, allowed: AllowedPeers) -> None:
        self._keyring = keyring
        self._allowed = allowed
        self._connections: dict[str, _PrefillSockets] = {}

    def send(self, address: str, message: FromDecode) -> str:
        """Sends, and returns why that was not possible; empty if it was."""
        try:
            connection = self._connections.get(address) or self._connect(address)
            connection.socket.send(_encode(message), zmq.NOBLOCK)
        except (HandshakeError, zmq.ZMQError) as error:
            return f"prefill at {address} cannot be asked: {error}"
        return ""

    def _connect(self, address: str) -> _PrefillSockets:
        self._allowed.check(address)
        socket = _dealer(address, self._keyring)
        monitor = monitor_of(socket, zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        socket.connect(address)
        made = self._connections[address] = _PrefillSockets(socket, monitor, Pulse(_context(), address, self._keyring))
        return made

    def received(self) -> Iterator[FromPrefill]:
        """The messages of prefill that have come."""
        for connection in list(self._connections.values()):
            for frames in received(connection.socket):
                try:
                    yield _from_prefill.decode(frames[-1])
                except msgspec.DecodeError:
                    continue  # its room runs into its deadline

    def lost(self) -> Iterator[str]:
        """The endpoints that have gone away. Questions sent there stay unanswered; a new process may be there now."""
        for address, connection in list(self._connections.items()):
            if connection.monitor.poll(0) or connection.pulse.is_over:
                del self._connections[address]
                connection.close()
                yield address

    def close(self) -> None:
        """Closes the sockets."""
        while self._connections:
            self._connections.popitem()[1].close()
