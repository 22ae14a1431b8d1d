"""Where the front's HTTP listens. Imports nothing heavy: a port that is taken is said at once."""

from __future__ import annotations

import os
import socket


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `OSError` if the address is taken, or is none; the message is one sentence."""
    try:
        return socket.create_server((host, port))
    except UnicodeError as error:  # a host that is no name at all
        raise OSError(f"HTTP cannot listen at {host}:{port}: {error}") from error
    except OSError as error:
        # Python adds the address to the system's own words, but for those of the resolver.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise OSError(f"HTTP cannot listen at {host}:{port}: {reason}") from error
