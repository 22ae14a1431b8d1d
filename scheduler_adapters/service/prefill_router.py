"""A decode process's connections to the prefill processes: who is there, and who is gone."""

from __future__ import annotations

import itertools
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from scheduler_adapters.errors import MessageError
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.affinity import AskedFor, chunks_of
from scheduler_adapters.service.sockets import Context, Socket, bounded_socket, received

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transfer.wire.keys import Keyring

_serial = itertools.count()
_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0


class PrefillLink:
    """The connection to one prefill process. A connection that is lost is never taken up again: a new one is made.

    What was asked for on a lost connection is over, on both sides. So nothing that waits in a socket for a dead process
    is delivered to its successor.

    Args:
        context: makes the sockets.
        endpoint: of the prefill process.
        hello: who we are.
        clock: seconds, monotonic.
        keyring: what we show there, and know it by; None for plain sockets.

    Attributes:
        welcome: what the process says of itself; None while it is not there.
        lost: reasons of losses since the owner looked.
        load: prompt tokens that it has to compute for us and that have not come.
        asked_for: what it may have cached.
        malformed: messages that could not be decoded.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        hello: msg.Hello,
        clock: Callable[[], float] = time.monotonic,
        keyring: Keyring | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._keyring = keyring
        self.welcome: msg.Welcome | None = None
        self.lost: list[str] = []
        self.load = 0
        self.asked_for = AskedFor()
        self.malformed = 0
        self._context = context
        self._hello = hello
        self._clock = clock
        self._pause_s = _PAUSE_S
        self._again_at = 0.0
        self._socket: Socket | None = None
        self._monitor: Socket | None = None
        self._open()

    @property
    def name(self) -> str:
        """Of the process, or of the endpoint where it has not said."""
        return self.endpoint if self.welcome is None else self.welcome.name

    @property
    def sockets(self) -> list[Socket]:
        """What to wait for."""
        return [socket for socket in (self._socket, self._monitor) if socket is not None]

    def send(self, message: msg.ToPrefill) -> bool:
        """Send, without waiting. Whether it could be queued."""
        if self._socket is None:
            return False
        try:
            self._socket.send(msg.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def cancel(self, request_id: str, attempt: int, reason: str) -> None:
        """Nobody waits for this any more, and nothing of it is read."""
        self.send(msg.Cancel(request_id=request_id, attempt=attempt, reason=msg.clipped(reason)))

    def poll(self) -> Iterator[msg.ToDecode]:
        """What the process has said; losses are in `lost`."""
        if self._socket is None:
            if self._clock() >= self._again_at:
                self._open()
            return
        if self._monitor is not None and self._monitor.poll(0):
            recv_monitor_message(self._monitor)  # only of the one event that was asked for
            self.lose(f"prefill process {self.name!r} is gone, or silent")
            return
        for frames in received(self._socket):
            message = self._decoded(frames)
            match message:
                case msg.Welcome():
                    self.welcome, self._pause_s = message, _PAUSE_S
                    yield message
                case msg.Rejected(stranger=True):
                    self.lose(f"prefill process {self.name!r} was restarted, or has given this connection up")
                    return
                case msg.Offer() | msg.Failed() | msg.Rejected():
                    yield message
                case _:
                    pass

    def lose(self, reason: str) -> None:
        """Give the connection up, and make a new one a little later."""
        if self.welcome is not None:
            self.lost.append(reason)
        self.close()
        self.welcome, self.load = None, 0
        self.asked_for.clear()
        self._again_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def close(self) -> None:
        """Close the sockets. Safe twice."""
        socket, monitor, self._socket, self._monitor = self._socket, self._monitor, None, None
        if socket is not None:
            socket.disable_monitor()
            socket.close()
        if monitor is not None:
            monitor.close()

    def _open(self) -> None:
        socket = bounded_socket(self._context, zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        if self._keyring is not None:
            self._keyring.secure_client(socket)
        # Named by us: the name that pyzmq makes of the file descriptor is taken while an earlier socket still closes.
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED, f"inproc://pagewire-link-{next(_serial)}")
        socket.connect(self.endpoint)
        self._socket = socket
        self.send(self._hello)

    def _decoded(self, frames: list[bytes]) -> msg.AnyMessage | None:
        try:
            return msg.decode_frames(frames, msg.ToDecode)
        except MessageError as error:
            self.malformed += 1
            self.send(msg.Rejected(reason=msg.clipped(str(error))))
            return None


class Choice(NamedTuple):
    """Whom to ask for a prompt: the link, the tokens it has to compute, and what it will have cached then."""

    link: PrefillLink
    load: int
    chunks: list[int]


def choose(links: Sequence[PrefillLink], tokens: Sequence[int], salt: str | None, avoid: set[str]) -> Choice | None:
    """The prefill process that will have computed the prompt first; None where none is there.

    Between equals the one with less in its cache; one that is to be avoided only where there is no other.
    """
    there = [link for link in links if link.welcome]
    if not there:
        return None
    chunks = chunks_of(tokens, salt) if len(links) > 1 else []
    missing = {link: len(tokens) - link.asked_for.tokens_of(chunks) for link in there}
    link = min(there, key=lambda one: (one.name in avoid, one.load + missing[one], len(one.asked_for)))
    return Choice(link, missing[link], chunks)
