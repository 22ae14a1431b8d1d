"""Runs `pagewire top` beside a command that shows its own pages, in this terminal or in a browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from pagewire.arguments import option

PROGRAM = (sys.executable, "-m", "pagewire", "top")
_END_S = 5.0


def top_option(told: str) -> Any:
    """Returns a field for the option `--top`, which also accepts `--top web`."""
    told += "; web: in a browser"
    return option(None, str, None, told, nargs="?", const="here", choices=("here", "web"))


@contextmanager
def viewer(addresses: Sequence[str], where: str, more: Sequence[str] = ()) -> Generator[Callable[[], bool]]:
    """Shows the processes at these addresses. The `with` block does not end before the viewer quits.

    Yields a function that returns whether the viewer is still open.
    """
    told = [*addresses, *more, *(["--web"] if where == "web" else [])]
    program = subprocess.Popen([*PROGRAM, *told])  # noqa: S603  (our own)
    try:
        yield lambda: program.poll() is None
        program.wait()
    finally:
        program.terminate()
        try:
            program.wait(_END_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
