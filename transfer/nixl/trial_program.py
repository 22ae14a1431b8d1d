"""The program of `trial_process`, run by its path: `python trial_program.py PARENT`, a process id.

It ends with its parent from its first moment on: what `transfer` imports takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    """Imports what a trial needs, and serves the parent."""
    kernel = ctypes.CDLL(None)
    kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    from transfer.nixl import trial_process  # noqa: PLC0415  (heavy)

    # The kernel means the thread that started us. Others of the parent may need us when that one ends.
    verdicts = trial_process.prepare()
    kernel.prctl(_PR_SET_PDEATHSIG, 0)
    trial_process.Helper(0, verdicts, parent).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
