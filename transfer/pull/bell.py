"""`Bell`: wakes a serving loop that sleeps on file descriptors when another thread has events for it."""

from __future__ import annotations

import os
import threading

from transfer.pull.fork_locks import free_in_forks


class Bell:
    """Any thread rings it, and one thread hears it. Its descriptor is readable from a ring until `hear`.

    The flag mirrors whether the descriptor is readable. The lock changes both together: a flag that stayed set would
    silence every later ring. A signal handler may also ring, in the middle of a call.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False
        self._lock = free_in_forks(threading.RLock())

    def fileno(self) -> int:
        """Returns the descriptor, which is readable from a ring until `hear`."""
        return self._fd

    def ring(self) -> None:
        """Signals that there are events. The caller must have stored them before this call."""
        if self._rung:  # no lock is needed: the thread that hears this ring finds everything stored before it
            return
        with self._lock:
            if not self._rung and self._fd >= 0:
                os.eventfd_write(self._fd, 1)
                self._rung = True  # last: if a signal handler rings in between, it only rings once more than needed

    def hear(self) -> None:
        """Acknowledge the bell: the caller now looks at all events so far, and a later event rings again."""
        if not self._rung:
            return
        with self._lock:
            if self._rung and self._fd >= 0:
                os.eventfd_read(self._fd)
                # Last: events of a signal handler in between are found by the caller, who looks after this call.
                self._rung = False

    def close(self) -> None:
        """Closes the bell. Safe to call twice."""
        with self._lock:  # a concurrent ring must not write to a descriptor that another file has reused
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
