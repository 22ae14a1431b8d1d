"""The messages and sockets through which decode servers ask prefill servers for requests.

A room is SGLang's number for a request.

decode ──RoomWanted──► prefill    as soon as decode has the request: from then on prefill computes it
decode ◄──RoomReady─── prefill    its pages are computed and leased
decode ◄──RoomFailed── prefill
decode ──RoomDropped─► prefill    decode has given it up

The messages carry only parameters for the transfer and SGLang's own metadata row. The transfer reads the pages
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import zmq
from msgspec import Meta

from kvcache.endpoints import sockets
from kvcache.endpoints.addresses import in_endpoint
from scheduler_adapters.service.sockets import Pulse, Socket, bind_router, bounded_socket, monitor_of, received
from transfer.errors import HandshakeError
from transfer.wire.allowed_peers import AllowedPeers
from transfer.wire.keys import Keyring

_MAX_REASON = 2000
Room: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Reason: TypeAlias = Annotated[str, Meta(max_length=_MAX_REASON)]


class RoomWanted(msgspec.Struct, frozen=True, tag="wanted"):
    """A rank of decode wants to read the room's pages."""

    room: Room


class RoomDropped(msgspec.Struct, frozen=True, tag="dropped"):
    """A rank of decode no longer wants the room."""

    room: Room
    reason: Reason


class RoomReady(msgspec.Struct, frozen=True, tag="ready"):
    """The room's pages are computed and leased.

    Attributes:
        room: number of the room.
        params: `kv_transfer_params`, as JSON.
        row: SGLang's metadata row of the room: the first token, its probabilities, the room. One entry per buffer.
    """

    room: Room
    params: bytes
    row: Annotated[tuple[bytes, ...], Meta(max_length=64)]


class RoomFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Prefill has given the room up, or does not know it."""

    room: Room
    reason: Reason


class RankOutput(msgspec.Struct, frozen=True, tag="output"):
    """The output of a rank of prefill, for rank 0. The token authenticates it."""

    rank: int
    token: bytes
    output: bytes


class RankStep(msgspec.Struct, frozen=True, tag="step"):
    """The leases and loads of a step, from rank 0 of prefill to the other ranks."""

    metadata: bytes


ToServer: TypeAlias = RoomWanted | RoomDropped | RankOutput
FromDecode: TypeAlias = RoomWanted | RoomDropped
FromPrefill: TypeAlias = RoomReady | RoomFailed
_to_server = msgspec.msgpack.Decoder(ToServer)
_from_prefill = msgspec.msgpack.Decoder(FromPrefill)
_encode = msgspec.msgpack.Encoder().encode


def short(reason: str) -> str:
    """Returns a reason, cut to the length that messages allow."""
    return reason[:_MAX_REASON]


def endpoint(host: str, port: int) -> str:
    """Returns a ZMQ endpoint."""
    return f"tcp://{in_endpoint(host)}:{port}"


def _context() -> Any:
    return zmq.Context.instance()


def _dealer(keyring: Keyring | None) -> Socket:
    socket = bounded_socket(_context(), zmq.DEALER)
    if keyring is not None:
        keyring.secure_client(socket)
    return socket


def connect(endpoint: str, keyring: Keyring | None) -> Socket:
    """Returns a socket that is connected to the `RoomServer` at `endpoint`."""
    socket = _dealer(keyring)
    sockets.connect(socket, endpoint)
    return socket


class _PrefillSockets(NamedTuple):
    """The sockets to a prefill process: for messages, for ZMQ's connection events, and for detecting its death."""

    socket: Socket
    monitor: Socket
    pulse: Pulse

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
        self.pulse.close()


class RoomServer:
    """Prefill's end of the sockets. Only the scheduler's thread may use it. No call waits.

    Args:
        host: address to bind. The system chooses the port.
        keyring: keys of the fleet. Only processes of the fleet are then admitted. With None, every process is admitted.

    Attributes:
        port: the bound port.
        malformed: number of messages that could not be decoded.
    """

    def __init__(self, host: str, keyring: Keyring | None) -> None:
        self._socket = bind_router(_context(), endpoint(host, 0), keyring)
        self.port = int(self._socket.address.rpartition(":")[2])
        self.malformed = 0

    def received(self) -> Iterator[tuple[bytes, ToServer]]:
        """Yields the messages that have arrived, each with its sender: a rank of decode or of this engine."""
        for frames in received(self._socket):
            try:
                yield frames[0], _to_server.decode(frames[-1])
            except msgspec.DecodeError:
                self.malformed += 1

    def send(self, reader: bytes, message: FromPrefill | RankStep) -> bool:
        """Sends a message to a rank. Returns False if the rank is no longer connected."""
        try:
            self._socket.send_multipart([reader, _encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(linger=0)


class RoomClient:
    """The sockets of decode, one for each prefill process. Only the scheduler's thread may use them. No call waits.

    Args:
        keyring: keys of the fleet. Only processes of the fleet are then contacted. With None, any process may be
            contacted.
        allowed: hosts that may be contacted. This must be checked, because the addresses come with requests.
    """

    def __init__(self, keyring: Keyring | None, allowed: AllowedPeers) -> None:
        self._keyring = keyring
        self._allowed = allowed
        self._connections: dict[str, _PrefillSockets] = {}

    def send(self, address: str, message: FromDecode) -> str:
        """Sends a message. Returns "" if the message was sent, and otherwise the reason."""
        try:
            connection = self._connections.get(address) or self._connect(address)
            connection.socket.send(_encode(message), zmq.NOBLOCK)
        except (HandshakeError, zmq.ZMQError) as error:
            return f"prefill at {address} cannot be asked: {error}"
        return ""

    def _connect(self, address: str) -> _PrefillSockets:
        self._allowed.check(address)
        socket = _dealer(self._keyring)
        monitor = monitor_of(socket, zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        sockets.connect(socket, address)
        made = self._connections[address] = _PrefillSockets(socket, monitor, Pulse(_context(), address, self._keyring))
        return made

    def received(self) -> Iterator[FromPrefill]:
        """Yields the messages that have arrived from prefill."""
        for connection in list(self._connections.values()):
            for frames in received(connection.socket):
                try:
                    yield _from_prefill.decode(frames[-1])
                except msgspec.DecodeError:
                    continue  # the message cannot be decoded, so its room will time out

    def lost(self) -> Iterator[str]:
        """Yields the endpoints of processes that have exited or cannot be reached.

        Such a process will not answer earlier messages. A new process may have started at the same endpoint.
        """
        for address, connection in list(self._connections.items()):
            if connection.monitor.poll(0) or connection.pulse.is_over:
                del self._connections[address]
                connection.close()
                yield address

    def close(self) -> None:
        """Closes the sockets."""
        while self._connections:
            self._connections.popitem()[1].close()
