"""Turns the signals that stop a command into exceptions, so that the command can clean up everything it has created."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDING_S = 10.0  # in seconds; a second signal within this time is ignored, because cleaning up takes less
_AGAIN_S = 0.01


class Interrupted(KeyboardInterrupt):
    """Raised when a signal tells the command to stop.

    `status` is the matching exit status of a shell, 128 + the signal's number.
    """

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        self.status = 128 + number
        super().__init__(f"interrupted by {self.signal.name}")


@contextmanager
def raised() -> Generator[None]:
    """A `with` block in which signals raise `Interrupted` in the main thread. An ignored signal stays ignored.

    A second signal within ten seconds has no effect, because the command is still handling the first signal. Python
    discards an `Interrupted` that is raised in a finalizer or in a callback of the garbage collector. The signal is
    then sent again. Python wraps an `Interrupted` that is raised in `__set_name__` in another exception. The block then
    raises the original `Interrupted`.
    """
    obeyed, hook = float("-inf"), sys.unraisablehook

    def obey(number: int, _frame: Any) -> None:
        nonlocal obeyed
        if time.monotonic() - obeyed > _ENDING_S:
            obeyed = time.monotonic()
            raise Interrupted(number)

    def thrown_away(unraisable: sys.UnraisableHookArgs) -> None:
        nonlocal obeyed
        if not isinstance(unraisable.exc_value, Interrupted):
            hook(unraisable)
            return
        obeyed = float("-inf")
        main = threading.main_thread().ident
        again = threading.Timer(_AGAIN_S, signal.pthread_kill, (main, unraisable.exc_value.signal))
        again.daemon = True
        again.start()

    sys.unraisablehook = thrown_away
    try:
        with _handled(obey):
            yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, Interrupted):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None
    finally:
        sys.unraisablehook = hook


@contextmanager
def held() -> Generator[None]:
    """A `with` block that delays signals until it ends.

    Has no effect in other threads, because Python handles signals only in the main thread.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        with _handled(lambda number, _frame: came.append(number)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


@contextmanager
def _handled(handler: Callable[[int, Any], object]) -> Generator[None]:
    replaced = (number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None))
    before = {number: signal.signal(number, handler) for number in replaced}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
