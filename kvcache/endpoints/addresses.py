"""Addresses of both IP families: which family an endpoint needs, and at which address a socket listens."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import re
import socket
import struct
from pathlib import Path

_INTERFACE_ADDRESS = 0x8915  # the ioctl SIOCGIFADDR
_ADDRESSES_OF_IPV6 = Path("/proc/net/if_inet6")
_PLACE = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:;\[\]]+):(?P<port>\d{1,5}|\*)")


def split(endpoint: str) -> tuple[str, str] | None:
    """Returns the host and the port of a `tcp://host:port` endpoint, or None for any other endpoint.

    An IPv6 address comes without its brackets.
    """
    found = _PLACE.fullmatch(endpoint)
    return None if found is None else (found["host"].strip("[]"), found["port"])


def in_endpoint(host: str) -> str:
    """Returns the host as an endpoint or a URL names it: an IPv6 address stands in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def families_of(host: str) -> set[socket.AddressFamily]:
    """Returns the IP families of an address or of a name's addresses. Empty if the name is unknown.

    The address may have a scope (`fe80::1%eth0`). A name is looked up, which may wait for a name server.
    """
    if ":" in host:
        return {socket.AF_INET6}
    if host.replace(".", "").isdecimal():
        return {socket.AF_INET}
    try:
        return {answer[0] for answer in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()


def check_scope(host: str) -> None:
    """Raises `OSError` if the address has a scope that is no network interface of this host."""
    _, percent, scope = host.partition("%")
    if percent and not scope.isdecimal():
        try:
            socket.if_nametoindex(scope)
        except OSError as error:
            reason = f"this host has no network interface {scope!r}: a link-local address needs its name on this host"
            raise OSError(errno.ENODEV, reason) from error


def has_ipv6() -> bool:
    """Whether this host can listen on IPv6 addresses."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as tried:
            tried.bind(("::", 0))
    except OSError:
        return False
    return True


def to_bind(host: str) -> str:
    """Returns the numeric address at which a socket listens for `host`.

    The host may be an address; `*`, which stands for all addresses of both families; the name of a network interface;
    or a name of this host. If an interface or a name has addresses of both families, its first IPv4 address is taken.
    Raises `OSError` if the host has no address here.
    """
    if host == "*":
        return "::" if has_ipv6() else "0.0.0.0"  # noqa: S104 - the caller asks for it
    if found := _of_interface(host):
        return found
    try:
        return resolved(host)
    except socket.gaierror as error:
        reason = f"{host!r} is no address, network interface or known name: give an address of this host, or *"
        raise OSError(errno.ENODEV, reason) from error


def resolved(host: str) -> str:
    """Returns the first numeric address of an address or a name, an IPv4 address if there is one.

    A name is looked up, which may wait for a name server. Raises `OSError` if there is none, or if the address has a
    scope that is no network interface of this host.
    """
    check_scope(host)
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
    return str(min(answers, key=lambda answer: answer[0] != socket.AF_INET)[4][0])


def _of_interface(name: str) -> str:
    """Returns an address of a network interface, IPv4 first; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        found = fcntl.ioctl(asked, _INTERFACE_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    with contextlib.suppress(OSError):
        rows = [line.split() for line in _ADDRESSES_OF_IPV6.read_text().splitlines()]
        own = sorted((row[3] != "00", row[0]) for row in rows if row[5] == name)  # scope 00 is global
        if own:
            is_local, digits = own[0]
            return str(ipaddress.IPv6Address(int(digits, 16))) + (f"%{name}" if is_local else "")
    return ""
