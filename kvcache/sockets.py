"""ZMQ sockets that are bound: bounded, and closed where they cannot be."""

from collections.abc import Callable
from typing import Any, cast

import zmq

from kvcache.arguments import shown
from kvcache.errors import InvalidParamsError

_MAX_QUESTION_BYTES = 1 << 10
"""Of a message to such a socket, on which nobody says much: those of CURVE's greeting are the longest."""
_UNREAD_QUESTIONS = 100


def keep_alive(socket: "zmq.Socket[bytes]") -> None:
    """A host that is gone without a word is noticed within half a minute, and its queue freed.

    Not by the heartbeats of ZMQ: an assertion of libzmq 4.3.5 ends a process whose queue a dead peer has filled.
    """
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.setsockopt(option, value)


def bound_socket(
    what: str, kind: int, address: str, unread: int = 1, secure: Callable[[Any], None] | None = None
) -> "zmq.Socket[bytes]":
    """A socket of this kind at `address`; a peer has `unread` messages waiting for it at most.

    `secure` prepares it before it is bound. Raises what that raises, and `InvalidParamsError` where the address cannot
    be bound, under the name of `what` it is for.
    """
    context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
    socket = context.socket(kind)
    try:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, unread),
            (zmq.RCVHWM, _UNREAD_QUESTIONS),
            (zmq.MAXMSGSIZE, _MAX_QUESTION_BYTES),
            (zmq.IPV6, int("[" in address)),
        ):
            socket.setsockopt(option, value)
        keep_alive(socket)
        if secure is not None:
            secure(cast("Any", socket))
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise InvalidParamsError(f"{what}: cannot bind {shown(address)}: {error}") from error
    except BaseException:
        socket.close()
        raise
    return socket
