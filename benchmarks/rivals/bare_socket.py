"""A bare TCP socket between the two hosts. It carries as many bytes as a pull, without any protocol."""

from __future__ import annotations

import socket
from time import perf_counter_ns as now

from benchmarks.pools import expect


class BareSocket:
    """The receiving end of `Lender.listen`."""

    def __init__(self, address: str, port: int) -> None:
        self._socket = socket.create_connection((address, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = memoryview(bytearray(8 << 20))

    def receive(self, num_bytes: int) -> float:
        """Microseconds from the request for this many bytes until all have arrived."""
        start = now()
        self._socket.sendall(num_bytes.to_bytes(8, "big"))
        left = num_bytes
        while left:
            got = self._socket.recv_into(self._memory, min(left, len(self._memory)))
            expect(got > 0, "the source sends what it was asked for")
            left -= got
        return (now() - start) / 1e3
