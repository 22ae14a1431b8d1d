"""Bound ZMQ sockets with limits. A socket that cannot be bound is closed."""

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import zmq

from kvcache.arguments import shown
from kvcache.errors import InvalidParamsError
from kvcache.gate import Gate, Limits, remove_left

_MAX_QUESTION_BYTES = 1 << 10
"""The most bytes of a message to such a socket. Messages are short; those of CURVE's handshake are the longest."""
_UNREAD_QUESTIONS = 100
_FREED_WITHIN_S = 1.0
QUESTIONS = Limits(message_bytes=_MAX_QUESTION_BYTES)
"""The limits of a socket on which each peer asks a few times a second."""
SUBSCRIPTIONS = Limits(message_bytes=_MAX_QUESTION_BYTES, peers=256, subscription_bytes=1 << 14)
"""The limits of a PUB socket. libzmq stores 40 bytes for each byte of a topic, so a peer takes at most 640 KiB."""


class BoundSocket(zmq.Socket[bytes]):
    """A socket that listens, behind a `Gate` if strangers can reach it."""

    _gate: Gate | None = None

    @property
    def address(self) -> str:
        """The address as bound, with the chosen port if the port was 0."""
        return self.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") if self._gate is None else self._gate.address

    def listen(self, what: str, address: str, limits: Limits | None) -> None:
        """Bind the socket. `limits` is None if strangers cannot reach it, so it needs no gate. Raises `ZMQError`."""
        try:
            if limits is None or not address.startswith(("tcp://", "ipc://")):
                if address.startswith("ipc://"):
                    remove_left(address.removeprefix("ipc://"))
                self.bind(address)
                return
            self.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
            self._gate = Gate(what, address, limits)
        except zmq.ZMQError:
            raise
        except OSError as error:
            raise zmq.ZMQError(error.errno or errno.EINVAL, error.strerror or str(error)) from error
        self.bind(self._gate.inner)

    def close(self, linger: int | None = None) -> None:
        """Close the socket. Sent messages are delivered for up to `linger` milliseconds. Safe to call twice."""
        bound = "" if self.closed or self._gate is not None else self.address
        super().close(linger)
        if self._gate is not None:
            self._gate.close((linger or 0) / 1000)
        elif bound:
            _await_free(bound)


def _await_free(address: str) -> None:
    """Return once nothing listens at the address of a closed socket, or after a second.

    libzmq closes a listening socket in its own thread, some time after `close` has returned.
    """
    transport, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    deadline = time.monotonic() + _FREED_WITHIN_S
    while time.monotonic() < deadline:
        if transport == "tcp":
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with suppress(OSError), socket.socket(family) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind((host.strip("[]"), int(port)))  # it does not listen, so no peer gets to it
                return
        elif transport != "ipc" or place.startswith("@") or not Path(place).exists():
            return
        time.sleep(0.0005)


def keep_alive(socket: "zmq.Socket[bytes]") -> None:
    """Notice that a host is gone without a word, and find it again within seconds once it is back.

    TCP alone retries ever less often, both to connect and to send unacknowledged data: after a minute without a link,
    up to a minute later. So a connection ends if it gets no acknowledgement for 15 s, an idle connection if it hears
    nothing for 25 s, and an attempt to connect after 2 s. ZMQ then begins anew.

    ZMQ's heartbeats are not used: an assertion of libzmq 4.3.5 ends a process whose queue a dead peer has filled.
    """
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
        (zmq.TCP_KEEPALIVE_CNT, 3),
        (zmq.TCP_MAXRT, 15_000),
        (zmq.CONNECT_TIMEOUT, 2_000),
    ):
        socket.setsockopt(option, value)


def listening(
    what: str,
    kind: int,
    address: str,
    options: Mapping[zmq.SocketOption, int],
    limits: Limits | None,
    secure: Callable[[Any], None] | None,
) -> BoundSocket:
    """A socket of this kind at `address`. `secure` prepares it, and then no stranger can reach it.

    Raises `zmq.ZMQError` if the address cannot be bound, and what `secure` raises; nothing stays open then.
    """
    context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
    socket = cast("BoundSocket", context.socket(kind, socket_class=BoundSocket))
    try:
        for option, value in {zmq.LINGER: 0, zmq.IPV6: int("[" in address), **options}.items():
            socket.setsockopt(option, value)
        keep_alive(socket)
        if secure is not None:
            secure(cast("Any", socket))
        socket.listen(what, address, limits if secure is None else None)
    except BaseException:
        socket.close()
        raise
    return socket


def bound_socket(
    what: str,
    kind: int,
    address: str,
    unread: int = 1,
    secure: Callable[[Any], None] | None = None,
    limits: Limits = QUESTIONS,
) -> BoundSocket:
    """A socket of this kind at `address`. At most `unread` messages wait for each peer.

    `secure` prepares it before it is bound. Raises what that raises, and `InvalidParamsError`, which names the purpose
    `what`, if the address cannot be bound.
    """
    options = {zmq.SNDHWM: unread, zmq.RCVHWM: _UNREAD_QUESTIONS, zmq.MAXMSGSIZE: _MAX_QUESTION_BYTES}
    try:
        return listening(what, kind, address, options, limits, secure)
    except zmq.ZMQError as error:
        raise InvalidParamsError(f"{what}: cannot bind {shown(address)}: {error}") from error
