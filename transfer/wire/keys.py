"""Access control for the ZMQ sockets of a fleet: CURVE keys with an allow-list, and a throttle.

A keyring file for each process turns access control on. The engines of a fleet share the *service* key pair, which
proves to a client that its peer is an engine of the fleet. Every client has its own key pair, and an engine admits the
clients on its list. CURVE is ZeroMQ's own encryption and authentication (RFC 26). A client without a key gets no answer
at all.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import zmq
import zmq.auth.thread
from msgspec import Meta

from transfer.errors import HandshakeError

_MAX_SENDERS = 4096
Key: TypeAlias = Annotated[str, Meta(pattern="^[!-~]{40}$")]


class Keyring(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of one process, as its keyring file holds them: Z85 strings of 40 characters each.

    Attributes:
        service_public: public key of the fleet's engines.
        service_secret: secret key of the fleet's engines. Empty in a process that runs no engine and only asks others.
        public: public key of this process as a client.
        secret: secret key of this process as a client.
        allowed: public keys of the clients that an engine admits.
    """

    service_public: Key
    public: Key
    secret: Key
    service_secret: Annotated[str, Meta(pattern="^([!-~]{40})?$")] = ""
    allowed: tuple[Key, ...] = ()

    def __repr__(self) -> str:
        return f"Keyring(service_public={self.service_public!r}, public={self.public!r}, ...)"

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Sets the CURVE options of an unconnected client socket.

        The socket then connects only to engines of the fleet.
        """
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.service_public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Sets the CURVE options of an unbound server socket. The socket then admits only the clients on the list.

        Raises:
            HandshakeError: this keyring has no service key, or the socket's context is not `zmq.Context.instance()`.
                The key checker serves only that context; a socket of another context would admit every key.
        """
        if not self.service_secret:
            raise HandshakeError("keyring: an engine needs the service key, and this file has none")
        if socket.context.underlying != zmq.Context.instance().underlying:  # pyright: ignore[reportUnknownMemberType]
            raise HandshakeError("keyring: the allow-list works only for sockets of zmq.Context.instance()")
        with _one_at_a_time:
            domain = _key_checker().domain_of(frozenset(key.encode() for key in self.allowed))
        socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.service_secret.encode())
        socket.setsockopt(zmq.CURVE_SERVER, 1)


class _KeyChecker:
    """Answers ZMQ's key checks for every socket of the process.

    The process has a single key checker, because ZMQ allows one handler for each context.
    """

    def __init__(self) -> None:
        self._lists: dict[str, frozenset[bytes]] = {}
        # pyzmq types neither the authenticator nor the arguments of its callback.
        self._handler: Any = zmq.auth.thread.ThreadAuthenticator(zmq.Context.instance())  # pyright: ignore[reportUnknownMemberType]
        self._handler.start()

    def domain_of(self, allowed: frozenset[bytes]) -> str:
        """Returns the ZAP domain that admits exactly these keys."""
        for domain, known in self._lists.items():
            if known == allowed:
                return domain
        domain = f"pagewire-{len(self._lists)}"
        self._lists[domain] = allowed
        self._handler.configure_curve_callback(domain, self)
        return domain

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether `key` is admitted to `domain`. Called by the handler's thread."""
        return key in self._lists[domain]


_key_checker = cache(_KeyChecker)  # started with the first allow-list; lives as long as the process
_one_at_a_time = threading.Lock()


def make_keyrings(clients: int) -> list[Keyring]:
    """Returns the keyrings of a new fleet of `clients` processes. Each process may be a client and run an engine."""
    service_public, service_secret = _key_pair()
    pairs = [_key_pair() for _ in range(clients)]
    allowed = tuple(public for public, _ in pairs)
    return [
        Keyring(
            service_public=service_public, service_secret=service_secret, public=public, secret=secret, allowed=allowed
        )
        for public, secret in pairs
    ]


def _key_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def save_keyring(keyring: Keyring, path: Path) -> None:
    """Writes a keyring to a new file that only its owner can read. Raises `HandshakeError` if the write fails."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(keyring)))
    except OSError as error:
        raise HandshakeError(f"keyring {path}: {error}") from error


def load_keyring(path: Path) -> Keyring:
    """Returns the keyring in a file. Raises `HandshakeError` if others can read the file, or it holds no keyring."""
    try:
        return msgspec.json.decode(private_bytes(path), type=Keyring)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeError(f"keyring {path}: {error}") from error


def private_bytes(path: Path) -> bytes:
    """Returns the contents of a file that only its owner may read.

    Raises `OSError` if others may read the file, or if it cannot be read.
    """
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"{str(path)!r} can be read by other users; set its mode to 600")
    return path.read_bytes()


class Throttle:
    """Limits the messages from each sender to `per_second`, and from all senders together to ten times `per_second`.

    Each sender has a token bucket that holds two seconds' worth of messages. To bound the memory, the senders that were
    heard least recently are forgotten. They start again with a full bucket.
    """

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._rate = per_second
        self._clock = clock
        self._buckets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        self._all = (20 * per_second, clock())

    def admits(self, sender: bytes) -> bool:
        """Returns whether a message from this sender may be answered now. If so, the message is counted."""
        now = self._clock()
        tokens, since = self._buckets.pop(sender, (2 * self._rate, now))
        tokens, of_all = self._refilled(tokens, now - since, 1), self._refilled(self._all[0], now - self._all[1], 10)
        admitted = tokens >= 1 and of_all >= 1
        self._buckets[sender] = (tokens - admitted, now)
        self._all = (of_all - admitted, now)
        if len(self._buckets) > _MAX_SENDERS:
            self._buckets.popitem(last=False)
        return admitted

    def _refilled(self, tokens: float, seconds: float, share: int) -> float:
        return min(2 * self._rate * share, tokens + seconds * self._rate * share)
