"""Sockets of HTTP servers, which listen on an address of either IP family. Imports nothing heavy."""

from __future__ import annotations

import errno
import socket


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens for TCP connections at an address or a name.

    A name of both families listens on IPv4. `*` and `::` accept connections of both families; `*` also works without
    IPv6. Raises `OSError` if the address cannot be bound, and `UnicodeError` if the name is malformed.
    """
    if host == "*":
        try:
            return listen("::", port)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            return listen("0.0.0.0", port)  # noqa: S104 - the caller asks for it
    host = host.strip("[]")
    answers = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, at = min(answers, key=lambda answer: answer[0] != socket.AF_INET)
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(at, family=family, dualstack_ipv6=both)


def in_url(host: str) -> str:
    """Returns the host as a URL names it: an IPv6 address stands in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
