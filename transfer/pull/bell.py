"""`Bell`: wakes a serving loop that sleeps on file descriptors once another thread has something for it."""

from __future__ import annotations

import os
import threading


class Bell:
    """Rung by any thread, heard by one. It can be waited for like a file, which can be read once it has rung.

    The flag says whether the file can be read. The lock changes both together: a flag that outlives what it stands for
    would keep every later ring silent. A signal handler may ring, too, in the middle of a call.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """Can be read from a ring on until `hear`."""
        return self._fd

    def ring(self) -> None:
        """There is something to look at: it was put there before this call."""
        if self._rung:  # without the lock: who hears this ring looks at what was put there before it
            return
        with self._lock:
            if not self._rung and self._fd >= 0:
                os.eventfd_write(self._fd, 1)
                self._rung = True  # last: a signal handler that rings in between rings once for nothing

    def hear(self) -> None:
        """Acknowledge the bell: the caller now looks at all events so far, and a later event rings again."""
        if not self._rung:
            return
        with self._lock:
            if self._rung and self._fd >= 0:
                os.eventfd_read(self._fd)
                self._rung = False  # last: what a signal handler puts there in between is looked at now

    def close(self) -> None:
        """Close the bell. Calling it twice is safe."""
        with self._lock:  # a concurrent ring must not write to a descriptor that another file has reused
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
