"""How a NIXL agent says to readers on its host that a description of it is its own.

What NIXL loads names the processes to contact, in bytes that only UCX reads. One wrong byte there, and the process that
is contacted dies of it, which may be anybody's. So an agent whose metadata no key vouches for listens at a socket that
is named by the digest of the metadata. The kernel tells who listens: agents reach each other through shared memory only
where they run as one user, and who runs as this user needs no lie to end our processes. The name is abstract: it is
gone with the process, and there is no file.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct

from transfer.errors import AgentError

_WAITING = 4096
_EVERY = 1024
_CREDENTIALS = struct.Struct("3i")  # of Linux: pid, user, group


def _name(metadata: bytes) -> str:
    return f"\0pagewire/{hashlib.blake2b(metadata, digest_size=32).hexdigest()}"


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


class Voucher:
    """Stands for an agent's metadata until it is closed, or the process ends. `AgentError` if it cannot listen."""

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
        """Closes the connections of askers, now and then: an asker has its answer once it is connected."""
        self._polls += 1
        if self._polls % _EVERY:
            return
        try:
            while True:
                self._listening.accept()[0].close()
        except OSError:  # nobody is left
            return

    def __del__(self) -> None:
        """An agent that was dropped vouches for nothing."""
        if hasattr(self, "_listening"):
            self.close()

    def close(self) -> None:
        """Stands for nothing any more. Safe to call twice."""
        self._listening.close()


def is_vouched(metadata: bytes) -> bool:
    """Whether a process of this user on this host says that some metadata is that of an agent of its own."""
    with _socket() as asking:
        try:
            asking.connect(_name(metadata))
        except OSError:
            return False
        found = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] == os.geteuid()
