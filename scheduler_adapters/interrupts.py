"""Signals that end a command: each becomes an exception, so that everything the command has made is ended with it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDING_S = 10.0  # a command that is told to end is left alone for so long: ending takes less
_AGAIN_S = 0.01


class Interrupted(KeyboardInterrupt):
    """A signal has told the command to end; `status` is the exit status that says so, by the convention of shells."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        self.status = 128 + number
        super().__init__(f"interrupted by {self.signal.name}")


@contextmanager
def raised() -> Generator[None]:
    """Within the block, a signal raises `Interrupted` in the main thread; a signal that is ignored stays ignored.

    A second signal within ten seconds does nothing: the first is still being obeyed. Where a signal comes within a
    finalizer or a callback of the garbage collector, Python throws the exception away: the signal is sent once more.
    Where it is the cause of another exception, as Python makes one of what is raised in `__set_name__`, it is raised.
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
    """A signal that comes within the block acts at its end, so that whatever is made in the block is also booked.

    Does nothing outside of the main thread, where no signal is handled.
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
