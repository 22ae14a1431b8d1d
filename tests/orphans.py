"""Ends the processes that a test run leaves behind, including processes with a session of their own.

After `adopt`, this process becomes the parent of every descendant whose own parent has ended. So it can find and end
all of them.
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
"""How many seconds the processes of a test file may take to end by themselves, after the last test of the file."""


def adopt() -> None:
    """Makes this process the parent of each descendant whose own parent has ended."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel lets this process adopt nobody")


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that has started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def children() -> dict[int, str]:
    """Returns the living children of this process, by process id, with their command lines."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # the process has ended meanwhile
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == os.getpid() and state != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
    return found


def end_children(but: AbstractSet[int] = frozenset(), grace_s: float = 0.0, within_s: float = 10.0) -> list[str]:
    """Kills the children of this process, and the descendants that it adopts from them, until none are left.

    Args:
        but: ids of processes that stay.
        grace_s: seconds in which processes may end by themselves.
        within_s: further seconds until the remaining processes are given up.

    Returns:
        The process ids and command lines of the killed processes.
    """
    own = time.monotonic() + grace_s
    while children().keys() - but and time.monotonic() < own:
        time.sleep(_LOOK_S)
    ended: dict[int, str] = {}
    deadline, empty = time.monotonic() + within_s, 0
    # One search is not enough. It may miss a process whose parent ends during the search.
    while empty < 2 and time.monotonic() < deadline:
        left = {pid: line for pid, line in children().items() if pid not in but}
        empty = 0 if left else empty + 1
        ended |= left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    return [f"{pid}: {line}" for pid, line in ended.items()]
