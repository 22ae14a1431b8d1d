"""A worker with a fuse: where a file named after its pid says so, it kills or stops itself in the midst of a move.

The file holds a phase, a signal and a delay in seconds. It goes when the fuse is lit.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

from scheduler_adapters.service import server
from scheduler_adapters.service.program import die_with_parent
from scheduler_adapters.service.requests import TrackedRequest

FOLDER_VARIABLE = "PAGEWIRE_FUSES"


def main() -> int:
    """Run one process, as `scheduler_adapters.service.server` does; the exit status."""
    die_with_parent()
    fuse = Path(os.environ[FOLDER_VARIABLE]) / str(os.getpid())
    move = TrackedRequest.move

    def move_and_look(request: TrackedRequest, phase: str, *deadline: Any) -> None:
        move(request, phase, *deadline)
        if fuse.exists():
            wanted, signal, delay = fuse.read_text().split()
            if phase == wanted:
                fuse.unlink()
                light(int(signal), float(delay))

    TrackedRequest.move = move_and_look  # type: ignore[method-assign]
    return server.main()


def light(signal: int, delay_s: float) -> None:
    """End or stop this process, all its threads, at once or a little later."""
    if delay_s:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal)).start()
    else:
        os.kill(os.getpid(), signal)


if __name__ == "__main__":
    sys.exit(main())
