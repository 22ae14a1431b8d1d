"""A prefill or decode server: `python -m scheduler_adapters.service.program`, with its settings on standard input.

The process exits when its parent exits, even while it is still starting. This module therefore imports nothing heavy
before it watches its parent: importing `scheduler_adapters.service.server` takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
PARENT_GONE = 3
"""The exit status of a process whose parent has exited."""


def die_with_parent() -> None:
    """Makes this process exit when its parent exits, even if the parent is killed.

    Standard input must be a pipe from the parent. A thread waits until the pipe hangs up, which happens when the parent
    exits. It reads nothing from the pipe.

    On Linux, the kernel is also told to kill this process when the parent exits, in case Python is stuck.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent exited before the call to `prctl`, the kernel sends no signal. Only the pipe then shows that the
    # parent has exited.
    hung_up = select.poll()
    hung_up.register(sys.stdin.fileno(), 0)  # POLLHUP is reported without being requested

    def watch() -> None:
        hung_up.poll()
        os._exit(PARENT_GONE)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main() -> int:
    """Runs the process. Returns the exit status."""
    die_with_parent()
    from scheduler_adapters.service import server  # noqa: PLC0415  (heavy: torch, nixl)

    return server.main()


if __name__ == "__main__":
    sys.exit(main())
