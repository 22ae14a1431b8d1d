"""A peer with its own ZMTP implementation. It sends bytes that no ZMQ library would send."""

from __future__ import annotations

import contextlib
import os
import socket
from contextlib import closing
from pathlib import Path

PATIENCE_S = 30.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE_RSS = 32 << 20
"""How many bytes a flood may add to the memory of this process. Without a gate, each of these floods adds more than
five times as much.
"""


def frame(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def ready(kind: bytes = b"DEALER") -> bytes:
    return frame(4, b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind)


READY = ready()


def stranger(address: str, kind: bytes = b"DEALER") -> socket.socket:
    """Connects and completes the ZMTP greeting. After that the test sends raw bytes."""
    transport, _, place = address.partition("://")
    if transport == "ipc":
        made = socket.socket(socket.AF_UNIX)
        made.connect(place)
    else:
        host, _, port = place.rpartition(":")
        made = socket.create_connection((host.strip("[]"), int(port)))
    made.settimeout(PATIENCE_S)
    made.sendall(GREETING)
    got = b""
    while len(got) < len(GREETING):
        got += made.recv(len(GREETING) - len(got))
    made.sendall(ready(kind))
    return made


def flood(address: str, kind: bytes, data: bytes, most: int) -> int:
    """Sends the same data again and again.

    Returns how many bytes were sent before the other side closed the connection. Stops after `most` bytes.
    """
    sent = 0
    with closing(stranger(address, kind)) as peer, contextlib.suppress(ConnectionError):
        while sent < most:
            peer.sendall(data)
            sent += len(data)
    return sent


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
