"""`Bell`: wakes a serving loop that sleeps on file descriptors once another thread has something for it."""

from __future__ import annotations

import os
from contextlib import suppress


class Bell:
    """Rung by any thread, heard by one. It can be waited for like a file, which can be read once it has rung."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False

    def fileno(self) -> int:
        """Can be read from a ring on until `hear`."""
        return self._fd

    def ring(self) -> None:
        """There is something to look at: it was put there before this call."""
        if not self._rung and self._fd >= 0:
            os.eventfd_write(self._fd, 1)
            self._rung = True  # last: who hears in between leaves the file as it is, and wakes once for nothing

    def hear(self) -> None:
        """Who has heard looks at everything that is there from now on: what comes later rings again."""
        if self._rung and self._fd >= 0:
            self._rung = False
            with suppress(BlockingIOError):  # read, for a ring that came this moment
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Nobody listens any more. Safe twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
