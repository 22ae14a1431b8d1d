"""A worker process with a fuse. The worker kills or stops itself during a move if a file named after its pid says so.

The file holds a phase, a signal and a delay in seconds. It is removed when the fuse is lit. In addition to the phases
of requests there are phases of pages that one prefill process gets from another. The process that asks for pages is
first "fetching" and then "pulling". The process that has them is first "asked", and then has "lent" them. Pages are
always asked for, even if computing them would be quicker.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scheduler_adapters.pull_or_compute import PullOrCompute
from scheduler_adapters.service import server
from scheduler_adapters.service.program import die_with_parent
from scheduler_adapters.service.requests import TrackedRequest
from transfer.pull.exchange import PageExchange
from transfer.pull.lending import PageLending


def main(arguments: Sequence[str]) -> int:
    """Runs one process in the same way as `scheduler_adapters.service.server`. The first argument is the folder of the
    fuses.
    """
    die_with_parent()
    fuse = Path(arguments[0]) / str(os.getpid())

    def look(phase: str) -> None:
        if fuse.exists():
            wanted, signal, delay = fuse.read_text().split()
            if phase == wanted:
                fuse.unlink()
                light(int(signal), float(delay))

    move = TrackedRequest.move

    def move_and_look(request: TrackedRequest, phase: str, *deadline: Any) -> None:
        move(request, phase, *deadline)
        look(phase)

    TrackedRequest.move = move_and_look  # type: ignore[method-assign]
    moments = {"ask": (PageExchange, "fetching"), "pull": (PageExchange, "pulling"), "_lend": (PageLending, "asked")}
    for name, (owner, phase) in {**moments, "settle": (PageLending, "lent")}.items():
        setattr(owner, name, then(getattr(owner, name), look, phase))
    PullOrCompute.pays = lambda *_: True  # type: ignore[method-assign]
    return server.main()


def then(method: Callable[..., Any], look: Callable[[str], None], phase: str) -> Callable[..., Any]:
    """Wraps a method that begins a phase. If the method returns that there was nothing to do, the phase has not
    begun.
    """

    def act_and_look(*arguments: Any) -> Any:
        result = method(*arguments)
        if result is not False:
            look(phase)
        return result

    return act_and_look


def light(signal: int, delay_s: float) -> None:
    """Sends this process the signal that ends or stops the process with all of its threads. The signal is sent at once
    or after a delay.
    """
    if delay_s:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal)).start()
    else:
        os.kill(os.getpid(), signal)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
