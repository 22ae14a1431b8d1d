"""Two ways to wake a thread that sleeps, and locks that are free in a forked child.

A forked child has only the thread that forked. If another thread of the parent held a lock at that moment, the lock
would stay held in the child. The child would then wait for this lock for ever, for example when the child closes its
copy of an exchange.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, TypeVar
from weakref import WeakSet

_locks: WeakSet[Any] = WeakSet()
AnyLock = TypeVar("AnyLock")


def free_in_forks(lock: AnyLock) -> AnyLock:
    """Registers a lock or a condition. Each forked child process releases its copy of this lock at the fork.

    Returns the lock or condition.
    """
    _locks.add(lock)
    return lock


def _free() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # noqa: SLF001  (as `threading` and `logging` do)


os.register_at_fork(after_in_child=_free)


class Alarm:
    """Wakes a thread that sleeps. Any thread, and a signal handler, may ring it. Only one thread may sleep on it.

    The alarm is a lock that stays held until the next ring. `SimpleQueue.get` with a timeout cannot be used instead:
    before CPython 3.13 it sleeps for ever if its timeout has passed before it begins to wait. With our shortest pauses
    that happened within minutes on a busy machine, and a pull then neither ended nor timed out.
    """

    def __init__(self) -> None:
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def ring(self) -> None:
        """Ends the current sleep, or the next one. Several rings before a sleep count as one."""
        with contextlib.suppress(RuntimeError):  # the lock is free, because the alarm was already rung
            self._quiet.release()

    def sleep(self, seconds: float) -> bool:
        """Sleeps until a ring, but at most `seconds`. Returns whether the alarm was rung since the last sleep."""
        return self._quiet.acquire(timeout=seconds)


class Bell:
    """A bell that any thread may ring and one thread hears. A ring makes its descriptor readable until `hear`.

    The flag `_rung` says whether the descriptor is readable. The flag and the descriptor change together, under the
    lock. If the flag stayed set while the descriptor is not readable, every later ring would do nothing. A signal
    handler may also ring, even if the signal interrupts a call that holds the lock.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False
        self._lock = free_in_forks(threading.RLock())

    def fileno(self) -> int:
        """Returns the file descriptor. It becomes readable at a ring and stays readable until `hear`."""
        return self._fd

    def ring(self) -> None:
        """Signals that there are events. The caller must store the events before this call."""
        # No lock is needed here. The earlier ring has not been heard yet, and the thread that hears it will also find
        # the events that were stored before this ring.
        if self._rung:
            return
        with self._lock:
            if not self._rung and self._fd >= 0:
                os.eventfd_write(self._fd, 1)
                # The flag is set last. A signal handler that rings in between then writes to the descriptor once too
                # often, but no ring is lost.
                self._rung = True

    def hear(self) -> None:
        """Silences the bell until the next ring. The caller must look for events after this call."""
        if not self._rung:
            return
        with self._lock:
            if self._rung and self._fd >= 0:
                os.eventfd_read(self._fd)
                # The flag is cleared last. If a signal handler rings in between, its ring does nothing. The caller
                # finds the handler's events all the same, because it looks for events after this call.
                self._rung = False

    def close(self) -> None:
        """Closes the bell. Safe to call twice."""
        with self._lock:  # a concurrent ring must not write to a descriptor that another file has reused
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
