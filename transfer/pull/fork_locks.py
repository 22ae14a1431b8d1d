"""Locks that a forked child finds free, although another thread of its parent held them at the fork.

A child has only the thread that forked. A lock that another thread held would stay held there, and the child would wait
for it for ever, for example when it closes its copy of an exchange.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar
from weakref import WeakSet

_locks: WeakSet[Any] = WeakSet()
AnyLock = TypeVar("AnyLock")


def free_in_forks(lock: AnyLock) -> AnyLock:
    """Returns the lock, or condition, which forked children will find free."""
    _locks.add(lock)
    return lock


def _free() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # noqa: SLF001  (as `threading` and `logging` do)


os.register_at_fork(after_in_child=_free)
