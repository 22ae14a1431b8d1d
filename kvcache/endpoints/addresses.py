"""Which IP family an address needs."""

from __future__ import annotations

import socket


def needs_ipv6(endpoint: str) -> bool:
    """Whether a `tcp://host:port` endpoint can only be reached over IPv6.

    The host may be an address, with or without a scope (`[fe80::1%eth0]`), or a name. A name is looked up, which may
    wait for a name server. It needs IPv6 if all of its addresses are of IPv6. An unknown name does not need IPv6.
    """
    transport, _, place = endpoint.partition("://")
    host = place.rpartition(":")[0]
    if transport != "tcp" or not host or host.startswith("["):
        return host.startswith("[")
    if host.replace(".", "").isdecimal():
        return False
    try:
        found = {answer[0] for answer in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return found == {socket.AF_INET6}
