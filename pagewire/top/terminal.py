"""Runs `pagewire top` in this terminal. A hangup or a signal makes the process exit, even if threads hang.

Textual reads and writes in its own threads. If the terminal is gone, these threads fail or spin. If the terminal
accepts no output, the main thread blocks in the middle of an update, and an exception from a signal cannot interrupt
it.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import termios
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from pagewire.top.app import TopApp
from scheduler_adapters import interrupts

_LAST_S = 0.5  # in seconds: how long after a signal the process exits, even if Textual has not finished
_LAST_WRITE_S = 0.05
# Leave the alternate screen, show the cursor, report no mouse, focus or pasted text, and take plain keys again.
_RESTORE = b"\x1b[<u\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1004l\x1b[?7h\x1b[?1049l\x1b[?25h"


def has_terminal() -> bool:
    """Whether standard input, output and error are terminals: `top` reads keys from one and draws on another."""
    return all(map(os.isatty, range(3)))


def run_in_terminal(app: TopApp) -> int:
    """Draws until the viewer quits. Returns the exit status.

    A signal restores the terminal and raises `Interrupted`.
    """
    return _run(app, (0, 2), 128 + signal.SIGHUP)


def run_for_browser(app: TopApp) -> int:
    """Draws for a browser. The server is at the other end of standard input. Returns the exit status."""
    return _run(app, (0,), 0)


def _run(app: TopApp, descriptors: Sequence[int], hung_up: int) -> int:
    """Runs the app. The process exits with status `hung_up` when a descriptor hangs up.

    A signal first stops the app. If the process still runs half a second later, it is terminated. No data are lost,
    because a recording stores each snapshot as it arrives.
    """
    attributes = termios.tcgetattr(0) if os.isatty(0) else None
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    threading.Thread(target=_end, args=(tuple(descriptors), hung_up, told, attributes), daemon=True).start()
    before: dict[int, Any] = {
        number: handler for number in interrupts.SIGNALS if callable(handler := signal.getsignal(number))
    }
    came: list[int] = []

    def obey(number: int, frame: FrameType | None) -> None:
        with suppress(BlockingIOError):
            os.write(tell, bytes([number]))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the app has not started, or has already stopped
            before[number](number, frame)
            return
        came.append(number)
        loop.call_soon_threadsafe(app.exit)  # an exception here would leave the terminal in Textual's state

    for number in before:
        signal.signal(number, obey)
    try:
        app.run()
    finally:
        # The pipe stays open and the thread keeps waiting. The thread can then still terminate the program if it hangs
        # later.
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise interrupts.Interrupted(came[0])
    return app.return_code or 0


def _end(descriptors: Sequence[int], hung_up: int, told: int, attributes: list[Any] | None) -> None:
    """Waits for a hangup or a signal, and terminates the process."""
    waited = select.poll()
    for descriptor in descriptors:
        waited.register(descriptor, 0)  # no events are requested, because hangups and errors are always reported
    waited.register(told, select.POLLIN)
    if told not in dict(waited.poll()):
        os._exit(hung_up)
    (number,) = os.read(told, 1)
    time.sleep(_LAST_S)  # usually the process, and this thread with it, exits during this sleep
    if attributes is not None:
        threading.Thread(target=os.write, args=(2, _RESTORE), daemon=True).start()
        time.sleep(_LAST_WRITE_S)  # if the terminal accepts no output, the write never returns
        with suppress(termios.error):
            termios.tcsetattr(0, termios.TCSANOW, attributes)
    os._exit(128 + number)
