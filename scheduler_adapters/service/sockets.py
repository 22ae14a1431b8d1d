"""ZMQ sockets as the service uses them: bounded, watched, and never a reason to wait."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias, TypeVar, cast

import zmq

from kvcache.gate import Limits
from kvcache.sockets import BoundSocket, keep_alive
from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import messages as msg
from transfer.errors import HandshakeError
from transfer.wire.keys import Keyring

MAX_UNREAD = 16_384
"""Messages that wait for a frontend beyond those that its sockets hold (ZMQ: 1,000 at either end)."""
LAST_WORDS_MS = 1000
"""How long a process that ends waits for its frontend to take what it has said."""
_HEARTBEAT_MS = 500
_SILENT_MS = 2000
_MAX_QUEUED = 10_000
_BATCH = 256
_monitors = itertools.count()
_LIMITS = Limits(message_bytes=msg.MAX_MESSAGE_BYTES, per_second=20_000.0)

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
AnySocket = TypeVar("AnySocket", bound=Socket)


class Awaited(Protocol):
    """Anything that can be waited on: a socket, or another object with a file descriptor."""

    def fileno(self) -> int:
        """The descriptor that is polled for reading."""
        ...


def bounded_socket(context: Context, kind: int) -> Socket:
    """A socket whose peers cannot fill our memory. A `Pulse` tells that one is stopped or out of reach."""
    return _bounded(context.socket(kind))


def _bounded(socket: AnySocket) -> AnySocket:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, msg.MAX_MESSAGE_BYTES)  # a longer one ends that connection, nothing else
    socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
    socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
    _follow_peers(socket)
    return socket


def join_frontend(socket: Socket, endpoint: str, name: str, keyring: Keyring | None) -> None:
    """Connect a DEALER to the frontend, under the name of this process.

    Messages to it are limited by its `FrontendQueue`, those of it by what the socket holds. A frontend that was started
    anew is found again. Over ipc no keys are needed: the folder is private. `ServiceError` if the endpoint is none.
    """
    _follow_peers(socket)
    socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    if keyring is not None and not endpoint.startswith("ipc:"):
        keyring.secure_client(socket)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ServiceError(f"{endpoint!r} is no endpoint of a frontend: {error}") from error


def _follow_peers(socket: Socket) -> None:
    """Connect again where a peer is started anew. A host that is gone without a word is given up within a minute."""
    keep_alive(socket)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _SILENT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


class Pulse:
    """Tells within seconds that a process which was there is dead, stopped or out of reach.

    By the heartbeats of ZMQ, which a thread of its own answers: a process that computes for long is not taken for a
    stopped one. They are on a connection that carries nothing: on one with messages, an assertion of libzmq 4.3.5 ends
    a process that has not read them all when the peer dies.

    Args:
        endpoint: of any ROUTER of that process. `ZMQError` if it is none.
        keyring: of its keys; None if it has none.

    Attributes:
        socket: can be read once there is something to tell.
    """

    def __init__(self, context: Context, endpoint: str, keyring: Keyring | None) -> None:
        self._idle = context.socket(zmq.DEALER)
        self._idle.setsockopt(zmq.LINGER, 0)
        self._idle.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._idle.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._idle.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
        _follow_peers(self._idle)
        if keyring is not None:
            keyring.secure_client(self._idle)
        self.socket = monitor_of(self._idle, zmq.EVENT_DISCONNECTED)
        try:
            self._idle.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        """Whether the process has gone since."""
        return has_news(self.socket)

    def close(self) -> None:
        """Close the connection. Safe twice."""
        if not self._idle.closed:
            self._idle.disable_monitor()
            self._idle.close()
            self.socket.close()


def monitor_of(socket: Socket, events: int) -> Socket:
    """A socket that can be read once one of these events has happened to another one."""
    # Named by us: the name that pyzmq makes of the file descriptor is taken while an earlier socket still closes.
    return socket.get_monitor_socket(events, f"inproc://pagewire-monitor-{next(_monitors)}")


def bind_router(context: Context, endpoint: str, keyring: Keyring | None = None) -> BoundSocket:
    """A ROUTER that says so where a peer is gone, and lets a peer that comes back take its name over.

    A keyring lets in only the peers on its list, and needs the process's own context: `HandshakeError` if it cannot
    be used. `ServiceError` if the endpoint cannot be bound. Without one a `Gate` stands before the socket, but over
    ipc, whose folder is private.
    """
    socket = _bounded(cast("BoundSocket", context.socket(zmq.ROUTER, socket_class=BoundSocket)))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        if keyring is not None:
            keyring.secure_server(socket)
        socket.listen("service", endpoint, None if keyring is not None or endpoint.startswith("ipc:") else _LIMITS)
    except HandshakeError:
        socket.close()
        raise
    except zmq.ZMQError as error:
        socket.close()
        raise ServiceError(f"no socket can be made at {endpoint!r}: {error}") from error
    return socket


def received(socket: Socket) -> Iterator[list[bytes]]:
    """The frames of the messages that have come, a bounded number, without waiting."""
    for _ in range(_BATCH):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def has_news(socket: Socket) -> bool:
    """Whether a message has come. `poll` of pyzmq makes a poller first, and takes five times as long."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def wait_for_any(sockets: Sequence[Awaited], timeout_ms: int) -> None:
    """Wait until one of the sockets has something, or the time is over."""
    zmq.zmq_poll([(socket, zmq.POLLIN) for socket in sockets], timeout_ms)


class FrontendQueue:
    """What a process tells its frontend, in order: it waits here until the frontend reads it, and nothing else waits.

    Where more than `max_unread` messages wait, the frontend counts as deaf (`is_deaf`) until half of them are read:
    what it says itself had better wait, for each request makes more to read.
    """

    def __init__(self, socket: Socket, max_unread: int = MAX_UNREAD) -> None:
        self.max_unread = max_unread
        self.is_deaf = False
        self._socket = socket
        self._unread: deque[bytes] = deque()

    @property
    def is_behind(self) -> bool:
        """Whether something waits."""
        return bool(self._unread)

    def send(self, message: msg.ToFrontend) -> None:
        """Send, or keep what cannot be sent yet."""
        data = msg.encode(message)
        if self._unread or not self._sent(data):
            self._unread.append(data)

    def flush(self) -> bool:
        """Send what waits, as far as it goes. Whether the frontend has turned deaf since the last call."""
        while self._unread and self._sent(self._unread[0]):
            self._unread.popleft()
        was_deaf, limit = self.is_deaf, self.max_unread // 2 if self.is_deaf else self.max_unread
        self.is_deaf = len(self._unread) > limit
        return self.is_deaf and not was_deaf

    def _sent(self, data: bytes) -> bool:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
