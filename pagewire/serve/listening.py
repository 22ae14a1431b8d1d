"""Opens the front's HTTP socket. Imports nothing heavy, so that a taken port is reported at once."""

from __future__ import annotations

import os
import socket


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises `OSError`, with a one-sentence message, for a taken or invalid address."""
    try:
        return socket.create_server((host, port))
    except UnicodeError as error:  # the host is not a valid name
        raise OSError(f"HTTP cannot listen at {host}:{port}: {error}") from error
    except OSError as error:
        # The system's message without the address, which Python adds except to errors of the resolver.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise OSError(f"HTTP cannot listen at {host}:{port}: {reason}") from error
