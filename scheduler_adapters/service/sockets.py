"""The ZMQ sockets of the service. Their queues are bounded, lost peers are detected, and no call blocks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias, TypeVar, cast

import zmq

from kvcache.endpoints.sockets import BoundSocket, Limits, connect, keep_alive
from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import messages as msg
from transfer.errors import HandshakeError
from transfer.wire.keys import Keyring

MAX_UNREAD = 16_384
"""The most messages that wait for a frontend, besides those in its sockets (ZMQ keeps up to 1,000 at either end)."""
LAST_WORDS_MS = 1000
"""In milliseconds: how long an exiting process waits for its frontend to take the last messages."""
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
    """An object that can be waited on: a socket, or another object with a file descriptor."""

    def fileno(self) -> int:
        """Returns the descriptor that is polled for reading."""
        ...


def bounded_socket(context: Context, kind: int) -> Socket:
    """Returns a socket with bounded queues, so that a peer cannot fill our memory.

    The socket does not detect a peer that is stopped or unreachable; use a `Pulse` for that.
    """
    return _bounded(context.socket(kind))


def _bounded(socket: AnySocket) -> AnySocket:
    socket.setsockopt(zmq.LINGER, 0)
    # a longer message closes only the connection that it came from
    socket.setsockopt(zmq.MAXMSGSIZE, msg.MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
    socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
    _follow_peers(socket)
    return socket


def join_frontend(socket: Socket, endpoint: str, name: str, keyring: Keyring | None) -> None:
    """Connects a DEALER to the frontend, under the name of this process.

    A `FrontendQueue` limits the number of messages to the frontend. The socket itself limits the messages from the
    frontend. The socket reconnects to a restarted frontend. Over ipc no keys are needed, because the folder of the
    socket is private. Raises `ServiceError` for an invalid endpoint.
    """
    _follow_peers(socket)
    socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    if keyring is not None and not endpoint.startswith("ipc:"):
        keyring.secure_client(socket)
    try:
        connect(socket, endpoint)
    except zmq.ZMQError as error:
        raise ServiceError(f"{endpoint!r} is not the endpoint of a frontend: {error}") from error


def _follow_peers(socket: Socket) -> None:
    """Makes a socket reconnect to a restarted peer, and notice within a minute if a host has silently vanished."""
    keep_alive(socket)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _SILENT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


class Pulse:
    """Detects within seconds that a connected process is dead, stopped or unreachable.

    It relies on ZMQ's heartbeats. A ZMQ thread answers the heartbeats, so a process that is busy computing does not
    count as stopped. The connection carries no messages, because of a fault in libzmq 4.3.5: if the peer of a
    connection with heartbeats dies while messages of this connection are unread, an assertion kills this process.

    Args:
        context: the context of its sockets.
        endpoint: any ROUTER of that process. An invalid endpoint raises `ZMQError`.
        keyring: keys for the connection to that process; None if there are none.

    Attributes:
        socket: becomes readable when the connection is lost.
    """

    def __init__(self, context: Context, endpoint: str, keyring: Keyring | None) -> None:
        self._idle = context.socket(zmq.DEALER)
        self._idle.setsockopt(zmq.LINGER, 0)
        self._idle.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._idle.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
        _follow_peers(self._idle)
        if keyring is not None:
            keyring.secure_client(self._idle)
        self.socket = monitor_of(self._idle, zmq.EVENT_DISCONNECTED)
        try:
            connect(self._idle, endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        """Whether the connection to the process was lost."""
        return has_news(self.socket)

    def close(self) -> None:
        """Closes the connection. Safe to call twice."""
        if not self._idle.closed:
            self._idle.disable_monitor()
            self._idle.close()
            self.socket.close()


def monitor_of(socket: Socket, events: int) -> Socket:
    """Returns a socket that becomes readable once one of these events has happened to `socket`."""
    # The name must be unique. pyzmq derives its default name from the file descriptor, and the name may still belong to
    # a socket that is being closed.
    return socket.get_monitor_socket(events, f"inproc://pagewire-monitor-{next(_monitors)}")


def bind_router(context: Context, endpoint: str, keyring: Keyring | None = None) -> BoundSocket:
    """Returns a bound ROUTER. The socket reports unreachable peers. A peer that reconnects keeps its name.

    A keyring admits only the peers on its list. `context` must then be `zmq.Context.instance()`; otherwise
    `HandshakeError` is raised. Without a keyring a `Gate` protects the socket, except over ipc, whose folder is
    private. Raises `ServiceError` if the endpoint cannot be bound.
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
        raise ServiceError(f"no socket can be opened at {endpoint!r}: {error}") from error
    return socket


def received(socket: Socket) -> Iterator[list[bytes]]:
    """Yields the frames of messages that have arrived, up to a limit, without waiting."""
    for _ in range(_BATCH):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def has_news(socket: Socket) -> bool:
    """Returns whether a message has arrived, without waiting.

    Reading the socket option is five times as quick as pyzmq's `poll`, which first creates a poller.
    """
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def wait_for_any(sockets: Sequence[Awaited], timeout_ms: int) -> None:
    """Waits until one of the sockets is readable, or until the time-out."""
    zmq.zmq_poll([(socket, zmq.POLLIN) for socket in sockets], timeout_ms)


class FrontendQueue:
    """A process's messages to its frontend, in order. They are queued here, so that the process never blocks.

    If more than `max_unread` messages are queued, the frontend counts as deaf (`is_deaf`) until half of them have been
    read. Meanwhile the caller should read no message from the frontend, because each request causes further messages
    for the frontend to read.
    """

    def __init__(self, socket: Socket, max_unread: int = MAX_UNREAD) -> None:
        self.max_unread = max_unread
        self.is_deaf = False
        self._socket = socket
        self._unread: deque[bytes] = deque()

    @property
    def is_behind(self) -> bool:
        """Whether any message is queued."""
        return bool(self._unread)

    def send(self, message: msg.ToFrontend) -> None:
        """Sends a message. Queues it if earlier messages are queued, or if it cannot be sent now."""
        data = msg.encode(message)
        if self._unread or not self._sent(data):
            self._unread.append(data)

    def flush(self) -> bool:
        """Sends as many queued messages as possible.

        Returns whether the frontend counts as deaf (`is_deaf`) after this call but did not before.
        """
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
