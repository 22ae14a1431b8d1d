"""ZMQ sockets as the service uses them: bounded, with heartbeats, and never a reason to wait."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import zmq

from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import messages as msg
from transfer.errors import HandshakeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transfer.wire.keys import Keyring

MAX_UNREAD = 16_384
"""Messages that wait for a frontend beyond those that its sockets hold (ZMQ: 1,000 at either end)."""
_HEARTBEAT_MS = 500
_SILENT_MS = 2000
_MAX_QUEUED = 10_000
_BATCH = 256

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


def bounded_socket(context: Context, kind: int) -> Socket:
    """A socket whose peers cannot fill our memory, and that notices within seconds that one is dead or stopped.

    The heartbeat is ZMQ's own, of its own thread: a process that computes for long still answers, a stopped one not.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, msg.MAX_MESSAGE_BYTES)  # a longer one ends that connection, nothing else
    socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
    socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
    _watch_peers(socket)
    return socket


def join_frontend(socket: Socket, endpoint: str, name: str, keyring: Keyring | None) -> None:
    """Connect a DEALER to the frontend, under the name of this process.

    Messages to it are limited by its `FrontendQueue`, those of it by what the socket holds. A frontend that was started
    anew is found again. Over ipc no keys are needed: the folder is private. `ServiceError` where the endpoint is none.
    """
    _watch_peers(socket)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    if keyring is not None and not endpoint.startswith("ipc:"):
        keyring.secure_client(socket)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ServiceError(f"{endpoint!r} is no endpoint of a frontend: {error}") from error


def _watch_peers(socket: Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _SILENT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


def bind_router(context: Context, endpoint: str, keyring: Keyring | None = None) -> Socket:
    """A ROUTER that says so where a peer is gone, and lets a peer that comes back take its name over.

    A keyring lets in only the peers on its list, and needs the process's own context: `HandshakeError` where it cannot
    be used. `ServiceError` where the endpoint cannot be bound.
    """
    socket = bounded_socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        if keyring is not None:
            keyring.secure_server(socket)
        socket.bind(endpoint)
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


def wait_for_any(sockets: list[Socket], timeout_ms: int) -> None:
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
