"""A socket on which another process can ask to drop the prefix cache, for example after loading new weights."""

import logging
import os
import threading
import time
import weakref
from contextlib import closing, suppress

import zmq

from kvcache.arguments import of_kind, refusal
from kvcache.endpoints.sockets import BoundSocket, bound_socket

_PAUSE_S = 0.005  # in seconds: how long the thread pauses after it has read messages
_MESSAGES = 64

_log = logging.getLogger("pagewire")


def check_endpoint(endpoint_base: object) -> None:
    """Raise `InvalidParamsError` unless `endpoint_base` is None or can be the beginning of an address."""
    needed = "the start of a ZMQ address, such as ipc:///tmp/cache,"
    base = "" if endpoint_base is None else of_kind("zmq_endpoint_base", endpoint_base, str, needed)
    if "\0" in base:
        raise refusal("zmq_endpoint_base", base, needed)


def open_endpoint(endpoint_base: str | None, *, caching: bool) -> "ResetEndpoint":
    """Open the endpoint. Without a cache to drop, logs a warning, and returns an endpoint without an address."""
    if endpoint_base is not None and not caching:
        _log.warning("zmq_endpoint_base has no effect, because prefix caching is off")
        endpoint_base = None
    return ResetEndpoint(endpoint_base)


class ResetEndpoint:
    """A PULL socket at `<base>-reset_prefix_cache`. Any message asks for one reset.

    A thread reads the socket and sets `is_asked`, so the serving loop only has to test this flag. If the base is None,
    there is neither a socket nor a thread.

    Attributes:
        is_asked: whether a reset was requested since the loop last set this to False.
    """

    def __init__(self, endpoint_base: str | None) -> None:
        self.is_asked = False
        self._thread = None
        if endpoint_base is None:
            return
        self.address = f"{endpoint_base}-reset_prefix_cache"
        socket = bound_socket(f"zmq_endpoint_base {endpoint_base!r}", zmq.PULL, self.address)
        wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=_read, args=(socket, wake, weakref.ref(self)), name="pagewire-reset", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._thread, wake)

    def close(self) -> None:
        """Stop the thread and close the socket. Safe to call twice."""
        if self._thread is not None:
            self._end()
            self._thread.join(2.0)


def _end(thread: threading.Thread, wake: int) -> None:
    if thread.is_alive():  # the thread does not exist in a forked child, which must not wake its parent's thread
        os.eventfd_write(wake, 1)


def _read(socket: BoundSocket, wake: int, endpoint: "weakref.ref[ResetEndpoint]") -> None:
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(wake, zmq.POLLIN)  # `close` writes to `wake`; a timeout would keep waking an idle process
    with closing(socket), suppress(zmq.ContextTerminated):
        while wake not in dict(poller.poll()):
            taken = 0
            with suppress(zmq.Again):
                while taken < _MESSAGES:
                    socket.recv_multipart(zmq.NOBLOCK)
                    taken += 1
            if taken and (asked := endpoint()) is not None:
                asked.is_asked = True
                del asked
            time.sleep(_PAUSE_S)
        os.close(wake)  # `close` has written to `wake`, so no other thread needs `wake` any more
