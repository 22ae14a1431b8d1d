"""A socket on which another process asks for the prefix cache to be dropped (new weights, say)."""

import logging

import zmq

from kvcache.arguments import shown
from kvcache.errors import InvalidParamsError
from kvcache.sockets import bound_socket

_MESSAGES_A_CALL = 64

_log = logging.getLogger("pagewire")


def check_endpoint(endpoint_base: object) -> None:
    """Raise `InvalidParamsError` unless this may be the beginning of an address, or None."""
    if endpoint_base is not None and (not isinstance(endpoint_base, str) or "\0" in endpoint_base):
        raise InvalidParamsError(f"zmq_endpoint_base is {shown(endpoint_base)}: the beginning of an address is needed")


def open_endpoint(endpoint_base: str | None, *, caching: bool) -> "ResetEndpoint | None":
    """The endpoint; None where none is asked for, or there is nothing to drop."""
    if endpoint_base is not None and not caching:
        _log.warning("zmq_endpoint_base opens nothing without prefix caching")
    return ResetEndpoint(endpoint_base) if endpoint_base is not None and caching else None


class ResetEndpoint:
    """A PULL socket at `<base>-reset_prefix_cache`; any message asks for one reset."""

    def __init__(self, endpoint_base: str) -> None:
        self.address = f"{endpoint_base}-reset_prefix_cache"
        self._socket = bound_socket(f"zmq_endpoint_base {endpoint_base!r}", zmq.PULL, self.address)

    def asked(self) -> bool:
        """Whether a reset was asked for. Never waits; takes up at most `_MESSAGES_A_CALL` messages."""
        for taken in range(_MESSAGES_A_CALL):
            try:
                self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return taken > 0
        return True

    def close(self) -> None:
        """Close the socket. Safe twice."""
        self._socket.close()
