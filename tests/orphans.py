"""Ends the processes that a run of tests leaves behind, also those with a session of their own.

A process that has adopted is the parent of whatever descends from it and has lost its own parent: nothing escapes.
"""

import ctypes
import os
import signal
import time
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_LOOK_S = 0.005
GRACE_S = 10.0
"""In which the processes of a test file may end by themselves when its last test has."""


def adopt() -> None:
    """From now on this process is the parent of each descendant whose own parent has ended."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel lets this process adopt nobody")


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def children() -> dict[int, str]:
    """The children of this process that are alive, with their command lines."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == os.getpid() and state != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
    return found


def end_children(but: AbstractSet[int] = frozenset(), grace_s: float = 0.0, within_s: float = 10.0) -> list[str]:
    """Kill the children of this process, and whom it adopts from them, until there are none.

    Args:
        but: ids of those that stay.
        grace_s: seconds in which they may end by themselves.
        within_s: seconds after that until those that are still there are given up.

    Returns:
        The process ids and command lines of those that were killed.
    """
    own = time.monotonic() + grace_s
    while children().keys() - but and time.monotonic() < own:
        time.sleep(_LOOK_S)
    ended: dict[int, str] = {}
    deadline, empty = time.monotonic() + within_s, 0
    while empty < 2 and time.monotonic() < deadline:  # whose parent ends during a look may be missed by that one
        left = {pid: line for pid, line in children().items() if pid not in but}
        empty = 0 if left else empty + 1
        ended |= left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    return [f"{pid}: {line}" for pid, line in ended.items()]
