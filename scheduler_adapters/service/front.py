"""What a process tells its front waits here until the front reads it: the process itself never waits."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import zmq

from scheduler_adapters.service import messages as msg

if TYPE_CHECKING:
    from scheduler_adapters.service.sockets import Socket

MAX_UNREAD = 16_384
"""Messages that wait for a front beyond those that its sockets hold (ZMQ: 1,000 at either end)."""


class Front:
    """The sending end of the connection to a front. It keeps the order, loses nothing, and never blocks.

    Args:
        socket: connected to the front.
        max_unread: messages that may wait. Beyond that the front counts as deaf, until half of them are read.
    """

    def __init__(self, socket: Socket, max_unread: int = MAX_UNREAD) -> None:
        self.max_unread = max_unread
        self._socket = socket
        self._unread: deque[bytes] = deque()
        self._is_deaf = False

    @property
    def num_unread(self) -> int:
        """Messages that wait here."""
        return len(self._unread)

    @property
    def is_deaf(self) -> bool:
        """Whether it reads too little. What it says itself had better wait: each request makes more to read."""
        return self._is_deaf

    def send(self, message: msg.ToFront) -> None:
        """Send, or keep what cannot be sent yet."""
        data = msg.encode(message)
        if self._unread or not self._sent(data):
            self._unread.append(data)

    def flush(self) -> bool:
        """Send what waits, as far as it goes. Whether the front has turned deaf since the last call."""
        while self._unread and self._sent(self._unread[0]):
            self._unread.popleft()
        was_deaf, limit = self._is_deaf, self.max_unread // 2 if self._is_deaf else self.max_unread
        self._is_deaf = len(self._unread) > limit
        return self._is_deaf and not was_deaf

    def _sent(self, data: bytes) -> bool:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
