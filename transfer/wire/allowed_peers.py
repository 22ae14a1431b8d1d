"""The hosts that a reader may contact. A source's address arrives with the request, so it must not be trusted."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from transfer.errors import HandshakeError, InvalidEngineError

LOOPBACK = ("127.0.0.0/8", "::1", "localhost")
"""Hosts that may always be contacted. Endpoints that do not leave this host may be contacted, too."""

_LOCAL = ("ipc://", "inproc://")
# ZMQ accepts more forms than this, such as a source address and a semicolon before the host. The check refuses those.
_TCP = re.compile(r"tcp://(?:\[(?P<six>[0-9a-fA-F:.]+(%[\w.-]+)?)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class AllowedPeers:
    """An allow-list of addresses, networks ("10.0.0.0/8") and host names, besides the loopback interface.

    A host name matches only an identical entry, because names are never resolved. So does an address with a scope
    (`fe80::1%eth0`), because the same address on another link is another host. A network matches in every scope.
    An entry that is neither an address, a network nor a host name raises `InvalidEngineError`.

    Examples:
        >>> peers = AllowedPeers(["10.0.0.0/8"])
        >>> peers.check("tcp://10.1.2.3:5600")
        >>> peers.check("tcp://192.168.0.1:5600")
        Traceback (most recent call last):
        transfer.errors.HandshakeError: tcp://192.168.0.1:5600 is not in allowed_peers: 127.0.0.0/8, ::1, ...
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self._entries = tuple(dict.fromkeys((*LOOPBACK, *entries)))
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in self._entries:
            if "%" in entry:
                self._names.add(_scoped(entry))
                continue
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError as error:
                if not _NAME.fullmatch(entry) or entry.replace(".", "").isdigit():
                    raise InvalidEngineError(
                        f"allowed_peers: {entry!r} is not a host name, an address or a network"
                    ) from error
                self._names.add(entry.lower())

    def check(self, address: str) -> None:
        """Raises a `HandshakeError` if the endpoint is malformed or its host is not on the list."""
        if address.startswith(_LOCAL):
            return
        host = _host(address)
        if not host:
            raise HandshakeError(f"{address[:200]!r} is not an endpoint of the form tcp://host:port")
        if not self._has(host):
            raise HandshakeError(f"{address} is not in allowed_peers: {', '.join(self._entries)}")

    def _has(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host.lower() in self._names
        if str(address).lower() in self._names:
            return True
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address.version == network.version and address in network for network in self._networks)


def _scoped(entry: str) -> str:
    try:
        return str(ipaddress.IPv6Address(entry)).lower()
    except ValueError as error:
        raise InvalidEngineError(f"allowed_peers: {entry!r} is not an address with a scope") from error


def _host(endpoint: str) -> str:
    found = _TCP.fullmatch(endpoint)
    return "" if found is None else found["six"] or found["host"]


def host_of(endpoint: str) -> tuple[str, ...]:
    """Returns the host of one of our own endpoints as an entry of the list. Empty for a wildcard address."""
    host = _host(endpoint.replace(":*", ":0"))
    return () if host in ("", "0.0.0.0", "::") else (host,)  # noqa: S104  (nothing binds here)


def listed_peers(option: str | Iterable[object], endpoint: str) -> tuple[str, ...]:
    """Returns the host of our own endpoint, then the entries of `option`, a list or a comma-separated string."""
    entries = option.split(",") if isinstance(option, str) else [str(entry) for entry in option]
    return tuple(dict.fromkeys([*host_of(endpoint), *(entry.strip() for entry in entries if entry.strip())]))
