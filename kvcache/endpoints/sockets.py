"""Bound ZMQ sockets with limits. A socket that cannot be bound is closed.

A `Gate` protects a bound socket from peers without keys: it passes on only messages of few frames. libzmq limits the
size of a frame and the number of complete messages that wait, but not the number of frames in a message. It keeps all
frames of a message until the last one arrives. So a peer that never ends its message can fill the process's memory. A
peer that ends such a message keeps the reader busy for seconds.

Therefore the gate's thread owns the address, and libzmq listens on an abstract Unix socket to which only this process
may connect. For each connection from outside, the gate makes one connection to that socket. The gate follows a peer's
traffic frame by frame (ZMTP 3 without encryption; CURVE needs no gate), stores none of the traffic, and drops a peer
that exceeds a limit. Traffic to a peer is passed on unchanged.

A gate limits the frames per second of each peer and of all peers together. Frames beyond the limit wait at the peer.
"""

import contextlib
import errno
import functools
import logging
import math
import os
import re
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import zmq

from kvcache.arguments import shown
from kvcache.endpoints.addresses import check_scope, families_of, in_endpoint, split, to_bind
from kvcache.endpoints.dialer import dialed
from kvcache.errors import InvalidParamsError

Dropped = Literal["peers", "protocol", "frames", "bytes", "subscriptions"]
"""The limit that a dropped peer has exceeded."""

_GREETING = 64  # the number of bytes of a ZMTP 3 greeting
_MORE, _LONG, _COMMAND = 1, 2, 4
_SUBSCRIPTIONS = (b"SUBSCRIBE", b"CANCEL")
# The length of the longest command name that the gate has to know, with its length byte. Longer names need not be read.
_LONGEST_NAME = 10
_READ, _PASSED = 1 << 14, 1 << 18  # in bytes: the most that one call reads from a peer, and passes on to a peer
_FRAMES_AT_ONCE = 64  # the maximum number of frames from one peer before other peers have their turn
_ACCEPTS_PER_S = 500.0
_REFILL_S = 0.002
_IDLE_S = 3600.0  # in seconds: the longest wait for an event
_SAID_S = 60.0  # in seconds: the shortest time between two log messages
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9.])?")
_MAX_PORT = (1 << 16) - 1
_IPV6 = socket.AF_INET6
_log = logging.getLogger("pagewire")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the traffic of one peer and on the number of peers."""

    message_bytes: int
    frames: int = 8  # the maximum number of frames in one message
    # Frames per second allowed from one peer. Twice as many are allowed in a burst, and ten times as many from all
    # peers together.
    per_second: float = 300.0
    peers: int = 1024
    subscription_bytes: float = math.inf  # the most bytes of subscriptions on one connection

    @property
    def most_peers(self) -> int:
        """The most peers at the same time.

        Each peer takes three file descriptors, and half of the process's limit must stay free.
        """
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return self.peers if most == resource.RLIM_INFINITY else min(self.peers, max(8, most // 6))


class GateError(Exception):
    """A peer has sent something that is not allowed."""

    def __init__(self, limit: Dropped, reason: str) -> None:
        super().__init__(reason)
        self.limit: Dropped = limit


class FrameCounter:
    """Parses the bytes that one peer sends: its greeting, frames and messages."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._greeted = 0
        self._left = 0  # how many bytes of the current frame are still to come
        self._frames = self._bytes = 0  # the number of frames, and of bytes, of the current message so far
        self._subscribed = 0

    def passes(self, data: bytes, most: int) -> tuple[int, int]:
        """Returns how many bytes of `data` may be passed on now, and how many frames begin in these bytes.

        At most `most` frames begin in these bytes. If fewer frames begin, the bytes of `data` that must not be passed
        on yet are an incomplete header of a frame. Raises `GateError` if the data is not allowed.
        """
        at = self._greeting(data) if self._greeted < _GREETING else 0
        frames = 0
        while True:
            taken = min(self._left, len(data) - at)
            self._left -= taken
            at += taken
            if frames == most or not (header := self._header(data, at)):
                return at, frames
            at += header
            frames += 1

    def _greeting(self, data: bytes) -> int:
        """Check the peer's ZMTP greeting as it arrives. Returns how many bytes of `data` belong to the greeting."""
        part = data[: _GREETING - self._greeted]
        for at, byte in enumerate(part, self._greeted):
            expected = {0: (0xFF,), 9: (0x7F,), 10: range(3, 256)}.get(at)
            expected = b"NULL\0"[at - 12 : at - 11] if 12 <= at < 17 else expected
            if expected is not None and byte not in expected:
                raise GateError("protocol", "the peer does not speak ZMTP 3 without encryption")
        self._greeted += len(part)
        return len(part)

    def _header(self, data: bytes, at: int) -> int:
        """Begin the frame at index `at`. Returns the size of its header in bytes, or 0 if the header is incomplete."""
        if self._greeted < _GREETING or at >= len(data):
            return 0
        flags = data[at]
        if flags > (_MORE | _LONG | _COMMAND):
            raise GateError("protocol", f"a frame has the unknown flags {flags:#x}")
        length = 9 if flags & _LONG else 2
        if len(data) - at < length:
            return 0
        size = int.from_bytes(data[at + 1 : at + length], "big")
        if size > self._limits.message_bytes:
            raise GateError("bytes", f"a frame of {size} bytes; at most {self._limits.message_bytes} are allowed")
        begin = data[at + length : at + length + min(size, _LONGEST_NAME)]
        if len(begin) < min(size, _LONGEST_NAME):  # the name of a command must have arrived completely
            return 0
        self._count(flags, size, begin)
        self._left = size
        return length

    def _count(self, flags: int, size: int, begin: bytes) -> None:
        limits = self._limits
        is_command = flags & _COMMAND
        if not is_command:
            self._frames += 1
            self._bytes += size
            if self._frames > limits.frames:
                raise GateError("frames", f"a message of more than {limits.frames} frames")
            if self._bytes > limits.message_bytes:
                raise GateError("bytes", f"a message of more than {limits.message_bytes} bytes")
            if not flags & _MORE:
                self._frames = self._bytes = 0
        if not is_command or _name(begin) in _SUBSCRIPTIONS:
            self._subscribed += 1 + size
            if self._subscribed > limits.subscription_bytes:
                raise GateError("subscriptions", f"subscriptions of more than {limits.subscription_bytes} bytes")


def _name(begin: bytes) -> bytes:
    return begin[1 : 1 + begin[0]] if begin else b""


class FrameAllowance:
    """Limits frames to `per_second` on average. A burst may have as many frames as the limit allows in two seconds."""

    def __init__(self, per_second: float) -> None:
        self._rate = per_second
        self._left, self._since = 2 * per_second, time.monotonic()

    def left(self) -> float:
        """Returns how much of the allowance is left now."""
        now = time.monotonic()
        self._left = min(2 * self._rate, self._left + (now - self._since) * self._rate)
        self._since = now
        return self._left

    def take(self, count: int) -> None:
        """Subtract `count` frames from the allowance. The allowance may become negative."""
        self._left -= count


class _Connection:
    """A connection from outside, and the inner connection to the ZMQ socket that was made for it."""

    def __init__(self, client: socket.socket, inner: socket.socket, limits: Limits) -> None:
        self.client, self.inner = client, inner
        self.counter = FrameCounter(limits)
        self.tokens = FrameAllowance(limits.per_second)
        self.unread = b""  # data from the peer that the gate has not checked yet
        self.up = b""  # checked data that waits for the ZMQ socket
        self.down = memoryview(b"")  # data from the ZMQ socket that waits for the peer
        self.is_held = False  # whether the peer has used up its allowance
        self.is_ending = False  # whether the ZMQ socket has closed, so that only remaining data goes to the peer

    def interest(self) -> tuple[int, int]:
        """The events to poll for on each of the two connections; 0 for none."""
        reads, writes = selectors.EVENT_READ, selectors.EVENT_WRITE
        client = (reads if not (self.up or self.is_held) else 0) | (writes if self.down else 0)
        inner = (reads if not (self.down or self.is_ending) else 0) | (writes if self.up else 0)
        return client, inner

    def read(self) -> None:
        """Read from the peer. Raises `OSError` if the peer is gone."""
        with contextlib.suppress(BlockingIOError):
            data = self.client.recv(_READ)
            if not data:
                raise ConnectionResetError
            self.unread += data

    def pass_up(self, most: int) -> int:
        """Pass on at most `most` frames. Returns by how much this lowers the allowance.

        Raises `GateError` or `OSError`.
        """
        passed, frames = self.counter.passes(self.unread, most)
        self.up, self.unread = self.unread[:passed], self.unread[passed:]
        self.is_held = frames == most and bool(self.unread)
        self.send_up()
        return 1 + frames

    def send_up(self) -> None:
        """Send as many waiting bytes to the ZMQ socket as it accepts now."""
        with contextlib.suppress(BlockingIOError):
            self.up = self.up[self.inner.send(self.up) :] if self.up else b""

    def send_down(self) -> None:
        """Send as many bytes from the ZMQ socket to the peer as the peer accepts now."""
        with contextlib.suppress(BlockingIOError):
            if not self.down:
                data = self.inner.recv(_PASSED)
                self.is_ending = not data
                self.down = memoryview(data)
            if self.down:
                self.down = self.down[self.client.send(self.down) :]


class Gate:
    """Listens on `address` until it is closed, and connects peers to the ZMQ socket that listens on `inner`.

    Attributes:
        address: the bound address. If the port was 0, it has the chosen port.
        inner: the address for the ZMQ socket. That socket must set `zmq.IPC_FILTER_PID` to this process's id.
        dropped: the number of dropped peers, by the limit that they exceeded.

    Raises `OSError` if the address cannot be bound.
    """

    def __init__(self, what: str, address: str, limits: Limits) -> None:
        self.dropped: Counter[Dropped] = Counter()
        self._inner_name = f"pagewire-gate-{secrets.token_hex(16)}"
        self.inner = f"ipc://@{self._inner_name}"
        self._listener, self.address = listener(address)
        self._what, self._limits = what, limits
        self._tokens, self._accepts = FrameAllowance(10 * limits.per_second), FrameAllowance(_ACCEPTS_PER_S)
        # for each peer, the events that are polled for on its two connections
        self._peers: dict[_Connection, tuple[int, int]] = {}
        self._held: deque[_Connection] = deque()
        self._said_at = -_SAID_S
        self._is_listening = True
        self._ends_at = math.inf  # the time until which remaining data is passed on after `close`
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The selector's data for each registered connection is the function that handles its events.
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._stop_listening)
        self._thread = threading.Thread(target=self._run, name="pagewire-gate", daemon=True)
        self._thread.start()

    def close(self, linger_s: float = 0.0) -> None:
        """Stop listening, and stop the thread. Messages already sent are delivered for up to `linger_s` seconds.

        Safe to call twice.
        """
        if self._listener.fileno() < 0:
            return
        # The thread does not exist in a forked child, and a child must not stop its parent's gate.
        is_own = self._thread.is_alive()
        if is_own:
            self._ends_at = time.monotonic() + linger_s
            os.eventfd_write(self._wake, 1)
            self._thread.join(linger_s + 2.0)
        self._listener.close()
        if is_own and self.address.startswith("ipc://") and not self.address.startswith("ipc://@"):
            with contextlib.suppress(OSError):
                Path(self.address.removeprefix("ipc://")).unlink()

    def _run(self) -> None:
        try:
            while self._is_listening or (self._peers and time.monotonic() < self._ends_at):
                try:
                    self._turn()
                except Exception:  # noqa: BLE001 - one peer must not stop the service of others
                    _log.exception("%s: a turn of its gate failed", self._what)
                    time.sleep(_REFILL_S)
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            self._selector.close()
            self._listener.close()
            os.close(self._wake)

    def _turn(self) -> None:
        wait = _REFILL_S if self._held else min(_IDLE_S, self._ends_at - time.monotonic())
        for key, events in self._selector.select(max(0.0, wait)):
            key.data(events)
        for _ in range(len(self._held)):
            self._serve((peer := self._held.popleft()), peer.client, 0)

    def _stop_listening(self, _: int) -> None:
        self._is_listening = False
        self._selector.unregister(self._wake)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self, _: int) -> None:
        if self._accepts.left() < 1:
            time.sleep(_REFILL_S)
            return
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_REFILL_S)
            return
        self._accepts.take(1)
        if len(self._peers) >= self._limits.most_peers:
            client.close()
            self._say("peers", f"more than {self._limits.most_peers} peers")
            return
        try:
            with contextlib.ExitStack() as opened:
                opened.enter_context(client)
                inner = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                client.setblocking(False)
                if client.family != socket.AF_UNIX:
                    keep_connected(client)
                inner.connect("\0" + self._inner_name)
                opened.pop_all()
        except OSError:  # the gate cannot connect to the ZMQ socket, so it drops the peer, which will connect again
            return
        peer = _Connection(client, inner, self._limits)
        self._peers[peer] = (0, 0)
        self._poll(peer)

    def _serve(self, peer: _Connection, which: socket.socket, events: int) -> None:
        if peer not in self._peers:  # the peer was dropped earlier in this turn
            return
        try:
            is_inner = which is peer.inner
            if events & (selectors.EVENT_READ if is_inner else selectors.EVENT_WRITE):
                peer.send_down()
            if events & (selectors.EVENT_WRITE if is_inner else selectors.EVENT_READ):
                peer.send_up() if is_inner else peer.read()
            if peer.unread and not peer.up:
                self._pass_up(peer)
        except GateError as error:
            self._drop(peer)
            self._say(error.limit, str(error))
        except OSError:
            self._drop(peer)
        else:
            if peer.is_ending and not peer.down:
                self._drop(peer)
            else:
                self._poll(peer)

    def _pass_up(self, peer: _Connection) -> None:
        most = int(min(_FRAMES_AT_ONCE, peer.tokens.left(), self._tokens.left()))
        if most < 1:
            peer.is_held = True
        else:
            cost = peer.pass_up(most)
            peer.tokens.take(cost)
            self._tokens.take(cost)
        if peer.is_held:
            self._held.append(peer)

    def _poll(self, peer: _Connection) -> None:
        before, wanted = self._peers[peer], peer.interest()
        self._peers[peer] = wanted
        for which, was, now in zip((peer.client, peer.inner), before, wanted, strict=True):
            if was == now:
                continue
            if not was:
                self._selector.register(which, now, functools.partial(self._serve, peer, which))
            elif not now:
                self._selector.unregister(which)
            else:
                self._selector.modify(which, now, functools.partial(self._serve, peer, which))

    def _drop(self, peer: _Connection) -> None:
        polled = self._peers.pop(peer)
        for which, was in zip((peer.client, peer.inner), polled, strict=True):
            if was:
                self._selector.unregister(which)
            which.close()

    def _say(self, limit: Dropped, reason: str) -> None:
        self.dropped[limit] += 1
        if (now := time.monotonic()) - self._said_at >= _SAID_S:
            self._said_at = now
            total = self.dropped.total()
            _log.warning("%s: dropped a peer of %s: %s (%d dropped so far)", self._what, self.address, reason, total)


def keep_connected(client: socket.socket) -> None:
    """Let the kernel notice within half a minute that the other host has vanished. Also send small messages at once."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3, socket.TCP_NODELAY: 1}
    # the time limit for data without acknowledgement, in milliseconds, as in `keep_alive`
    options[socket.TCP_USER_TIMEOUT] = 15_000
    for option, value in options.items():
        client.setsockopt(socket.IPPROTO_TCP, option, value)


def listener(address: str) -> tuple[socket.socket, str]:
    """Returns a socket that listens on a tcp or ipc address of ZMQ, and the bound address. Raises `OSError`."""
    transport, _, rest = address.partition("://")
    if transport == "ipc":
        remove_left(rest)
        return _listener_at(socket.AF_UNIX, "\0" + rest[1:] if rest.startswith("@") else rest), address
    host, _, port = rest.rpartition(":")
    if not host or not (port.isdecimal() or port == "*"):
        raise OSError(errno.EINVAL, "Invalid argument")
    host = to_bind(host.strip("[]"))
    at = _in_socket(host, 0 if port == "*" else int(port))
    made = _listener_at(socket.AF_INET6 if len(at) > 2 else socket.AF_INET, at)
    return made, f"tcp://{in_endpoint(host)}:{made.getsockname()[1]}"


def _in_socket(host: str, port: int) -> tuple[Any, ...]:
    """Returns an address in the form that Python's sockets take. An IPv6 address needs the number of its scope."""
    if ":" not in host:
        return (host, port)
    address, _, scope = host.partition("%")
    return (address, port, 0, (int(scope) if scope.isdecimal() else socket.if_nametoindex(scope)) if scope else 0)


def remove_left(name: str) -> None:
    """Remove the socket file that a killed process has left at an ipc address.

    If the file stayed, libzmq would remove it, but it would also remove the socket of a live process, and take over its
    address. Therefore this function comes first. It raises `OSError` if a process listens on the address, or if the
    file is not a socket. Abstract addresses (`@name`) have no file.
    """
    path = Path(name)
    if name.startswith("@") or not path.exists():
        return
    if not (_refuses(str(path)) and path.is_socket()):
        raise OSError(errno.EADDRINUSE, "Address already in use")
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _refuses(at: str) -> bool:
    """Whether no process listens on this address of a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as asked:
        # the result is 0 if a process listens, or EAGAIN if its queue is full
        return asked.connect_ex(at) == errno.ECONNREFUSED


def _listener_at(family: socket.AddressFamily, at: str | tuple[Any, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if family != socket.AF_UNIX:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(at)
        made.listen(128)
    except OSError:
        made.close()
        raise
    except (OverflowError, ValueError) as error:
        made.close()
        raise OSError(errno.EINVAL, str(error)) from error
    return made


_MAX_QUESTION_BYTES = 1 << 10
"""The most bytes of a message to a socket that answers requests. CURVE's handshake has the longest messages."""
_UNREAD_QUESTIONS = 100
_FREED_WITHIN_S = 1.0
QUESTIONS = Limits(message_bytes=_MAX_QUESTION_BYTES)
"""The limits of a socket to which each peer sends a few requests a second."""
SUBSCRIPTIONS = Limits(message_bytes=_MAX_QUESTION_BYTES, peers=256, subscription_bytes=1 << 14)
"""The limits of a PUB socket. libzmq stores 40 bytes for each byte of a topic, so one peer takes at most 640 KiB."""


class BoundSocket(zmq.Socket[bytes]):
    """A socket that listens. If peers without keys can reach the socket, a `Gate` protects it.

    Attributes:
        address: the bound address. If the port was 0, it has the chosen port. Empty if the socket is not bound.
    """

    address = ""
    _gate: Gate | None = None  # None if peers without keys cannot connect; libzmq then listens on the address

    def listen(self, what: str, address: str, limits: Limits | None) -> None:
        """Bind the socket to `address`.

        `limits` are the limits of the `Gate` that protects the socket. If `limits` is None, the socket has no gate:
        peers without keys cannot reach it.

        Raises `ZMQError` if the address cannot be bound.
        """
        try:
            if limits is None or not address.startswith(("tcp://", "ipc://")):
                if address.startswith("ipc://"):
                    remove_left(address.removeprefix("ipc://"))
                if found := split(address):
                    host = in_endpoint(to_bind(found[0]))
                    address = f"tcp://{host}:{found[1]}"
                    self.setsockopt(zmq.IPV6, int(host.startswith("[")))
                self.bind(address)
                self.address = self.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
                return
            self.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
            self._gate = gate = Gate(what, address, limits)
            self.address = gate.address
        except zmq.ZMQError:
            raise
        except OSError as error:
            raise zmq.ZMQError(error.errno or errno.EINVAL, error.strerror or str(error)) from error
        self.bind(gate.inner)

    def close(self, linger: int | None = None) -> None:
        """Close the socket. Sent messages are delivered for up to `linger` milliseconds. Safe to call twice."""
        was_open = not self.closed
        super().close(linger)
        if self._gate is not None:
            self._gate.close((linger or 0) / 1000)
        elif was_open and self.address:
            _await_free(self.address)


def _await_free(address: str) -> None:
    """Wait until nothing listens on the address of a closed socket, but at most a second.

    libzmq closes a listening socket in its own thread, some time after `close` has returned.
    """
    deadline = time.monotonic() + _FREED_WITHIN_S
    while not _is_free(address) and time.monotonic() < deadline:
        time.sleep(0.0005)


def _is_free(address: str) -> bool:
    """Whether nothing listens on the address. Removes the file of an ipc address, because libzmq leaves it there."""
    transport, _, rest = address.partition("://")
    try:
        if transport == "tcp":
            host, _, port = rest.rpartition(":")
            at = _in_socket(host.strip("[]"), int(port))
            with socket.socket(socket.AF_INET6 if len(at) > 2 else socket.AF_INET) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(at)  # `tried` does not listen, so no peer can connect to it
        elif transport == "ipc" and rest.startswith("@"):
            return _refuses("\0" + rest[1:])
        elif transport == "ipc":
            remove_left(rest)
    except OSError:
        return False
    return True


def connect(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Connect a socket to an address of either IP family, or to a name.

    A name of one family is left to libzmq. For a name of both families, or one that is not known yet, a thread of this
    process tries all addresses (`dialer.py`). Raises `zmq.ZMQError` for an invalid address, and for a link-local one
    whose network interface this host does not have.
    """
    if found := split(address):
        host, port = found
        try:
            check_scope(host)
        except OSError as error:
            raise zmq.ZMQError(error.errno or errno.ENODEV, f"{shown(address)}: {error.strerror}") from error
        families = families_of(host)
        if len(families) != 1 and _NAME.fullmatch(host) and port.isdecimal() and 0 < int(port) <= _MAX_PORT:
            address = dialed(socket, host, int(port), keep_connected)
        else:
            socket.setsockopt(zmq.IPV6, int(":" in host or families == {_IPV6}))
    socket.connect(address)


def keep_alive(socket: "zmq.Socket[bytes]") -> None:
    """Notice that a host has vanished, and reconnect within seconds once it is back.

    TCP alone waits longer after each failed attempt, both to connect and to send data again. After a minute without a
    link, it may take another minute to notice that the link is back. So a connection is closed if data is not
    acknowledged for 15 s, or if nothing was heard for 25 s on an idle connection. An attempt to connect is given up
    after 2 s. ZMQ then tries again.

    ZMQ's heartbeats are not used, because of an assertion in libzmq 4.3.5: it kills a process whose queue a dead peer
    has filled.
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
    """Returns a socket of this kind at `address`.

    If `secure` is given, it prepares the socket so that only peers with keys can reach it, and the socket gets no gate.

    Raises `zmq.ZMQError` if the address cannot be bound, and whatever `secure` raises. In both cases nothing stays
    open.
    """
    context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
    socket = cast("BoundSocket", context.socket(kind, socket_class=BoundSocket))
    try:
        for option, value in {zmq.LINGER: 0, **options}.items():
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
    """Returns a socket of this kind, bound to `address`. At most `unread` messages wait for each peer.

    `secure` prepares the socket before it is bound. Raises whatever `secure` raises. Raises `InvalidParamsError`, which
    names the purpose `what`, if the address cannot be bound.
    """
    options = {zmq.SNDHWM: unread, zmq.RCVHWM: _UNREAD_QUESTIONS, zmq.MAXMSGSIZE: _MAX_QUESTION_BYTES}
    try:
        return listening(what, kind, address, options, limits, secure)
    except zmq.ZMQError as error:
        raise InvalidParamsError(f"{what}: cannot bind {shown(address)}: {error}") from error
