"""A prefill or decode server: `python -m scheduler_adapters.service.program`, with its settings on standard input.

It ends with its parent from its first moment on: what `scheduler_adapters.service.server` imports takes seconds, and
nothing heavy is imported here.
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
"""Exit status of a process whose parent is gone."""


def die_with_parent() -> None:
    """End this process when its parent ends, in whatever way. Reads nothing from standard input, a pipe of the parent.

    The pipe hangs up with the parent. On Linux the kernel also kills us, should Python be stuck.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the kernel was asked: that shows at the pipe.
    hung_up = select.poll()
    hung_up.register(sys.stdin.fileno(), 0)  # hanging up is reported without being asked for

    def watch() -> None:
        hung_up.poll()
        os._exit(PARENT_GONE)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main() -> int:
    """Run the process; the exit status."""
    die_with_parent()
    from scheduler_adapters.service import server  # noqa: PLC0415  (heavy: torch, nixl)

    return server.main()


if __name__ == "__main__":
    sys.exit(main())
