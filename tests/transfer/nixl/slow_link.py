"""A link to a TCP server on this host. The link can be slowed down, as if the server were far away."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

_PIECE = 1 << 16


class SlowLink:
    """Forwards connections on `port` to the server, with a thread for each direction.

    Attributes:
        delay_s: delay of each piece of at most 64 KiB, in either direction.
        bytes_per_s: limit for each connection and direction; None for no limit.
    """

    def __init__(self, url: str) -> None:
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self._server = (urlsplit(url).hostname, urlsplit(url).port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # `close` alone would leave a thread in `accept`.
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                for one, other in ((client, server), (server, client)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := one.recv(_PIECE):
                time.sleep(self.delay_s + (len(piece) / self.bytes_per_s if self.bytes_per_s else 0.0))
                other.sendall(piece)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        one.close()  # The thread of the other direction closes the other socket.


@contextlib.contextmanager
def slow_link(url: str) -> Iterator[SlowLink]:
    made = SlowLink(url)
    try:
        yield made
    finally:
        made.close()
