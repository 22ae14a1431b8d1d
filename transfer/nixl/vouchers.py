"""Lets a NIXL agent prove to readers on its host that a piece of metadata is its own.

NIXL metadata names the processes to contact, in bytes that only UCX can read. A single wrong byte can make
UCX contact, and thereby kill, any other process. Therefore, if no key authenticates its metadata, an agent listens
on a socket whose name is the digest of that metadata. The kernel tells a reader which user owns the listener. Knowing
the user suffices: agents reach each other through shared memory only if they run as one user. A process of the same
user could kill our process without NIXL, too. The socket name is abstract, so it disappears with the process and leaves
no file.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct

from transfer.errors import AgentError

_WAITING = 4096
_EVERY = 1024
_CREDENTIALS = struct.Struct("3i")  # Linux's ucred: pid, user, group


def _name(metadata: bytes) -> str:
    return f"\0pagewire/{hashlib.blake2b(metadata, digest_size=32).hexdigest()}"


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


class Voucher:
    """Proves that metadata is an agent's own, until `close` or the end of the process.

    Raises `AgentError` if the operating system refuses the listening socket.
    """

    def __init__(self, metadata: bytes) -> None:
        self._polls = 0
        self._listening = _socket()
        try:
            self._listening.bind(_name(metadata))
            self._listening.listen(_WAITING)
        except OSError as error:
            self._listening.close()
            raise AgentError(f"vouching for {len(metadata)} bytes of metadata: {error}") from error

    def poll(self) -> None:
        """Accepts and closes the pending connections, in every 1,024th call.

        A connection carries no data. A reader only checks whether it can connect.
        """
        self._polls += 1
        if self._polls % _EVERY:
            return
        try:
            while True:
                self._listening.accept()[0].close()
        except OSError:  # no connection is left
            return

    def __del__(self) -> None:
        """Stops vouching for an agent that was dropped without `close`."""
        if hasattr(self, "_listening"):
            self.close()

    def close(self) -> None:
        """Stops vouching. Safe to call twice."""
        self._listening.close()


def is_vouched(metadata: bytes) -> bool:
    """Whether a process of this user on this host vouches for the metadata."""
    with _socket() as asking:
        try:
            asking.connect(_name(metadata))
        except OSError:
            return False
        found = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] == os.geteuid()
