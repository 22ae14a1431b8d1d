"""Finds a free TCP port."""

from __future__ import annotations

import random
import socket

from transfer.errors import InvalidTransferError, NoFreePortError


def available_port(start_port: int = 8000, end_port: int = 9000, max_attempts: int = 100) -> int:
    """Returns a TCP port that was free on every IPv4 interface a moment ago.

    Another process may take the port before the caller does.

    Ports are tried in random order, so that processes that start together seldom collide.

    Args:
        start_port: lowest port to try, 1 or more.
        end_port: highest port to try, at most 65535.
        max_attempts: how many different ports to try.

    Raises:
        NoFreePortError: (a RuntimeError) all the ports that were tried are taken.
        InvalidTransferError: the range is empty or outside of 1 to 65535, or `max_attempts` is below 1.
    """
    if not 1 <= start_port <= end_port <= 65535:
        raise InvalidTransferError(f"ports {start_port} to {end_port} are not a range within 1 to 65535")
    if max_attempts < 1:
        raise InvalidTransferError(f"max_attempts is {max_attempts}: at least 1 is needed")
    ports = range(start_port, end_port + 1)
    tried = random.SystemRandom().sample(ports, min(max_attempts, len(ports)))
    for port in tried:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise NoFreePortError(f"none of the {len(tried)} ports tried from {start_port} to {end_port} is free")
