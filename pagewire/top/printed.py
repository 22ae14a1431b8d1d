"""`pagewire top` without a terminal: prints one snapshot of each process as text."""

from __future__ import annotations

import select
import sys
import time

import msgspec

from kvcache.errors import WatchError
from pagewire.top import panels
from pagewire.top.sources import LiveSource, PlayedSource
from pagewire.top.view import ANSWER_S, TopView, nobody_answers

_TICK_MS = 50
# Rates are left out, because they need several snapshots.
_PANELS = ("processes", "requests", "transfers", "tree", "evictions")


def print_looks(source: LiveSource | PlayedSource, *, until_interrupted: bool) -> int:
    """Prints a snapshot of each process, or the last snapshots of a recording. Returns 0.

    Args:
        source: the source of the snapshots.
        until_interrupted: whether to keep polling afterwards, in order to record every snapshot. The program then exits
            on a signal, or when standard output is closed.

    Raises:
        WatchError: an address has not answered within a few seconds, or its answer is not a snapshot. The snapshots of
            the other addresses have been printed.
    """
    view = _looked(source)
    print(text_of(view), end="", flush=True)  # noqa: T201  (the command line's own output)
    _check_answers(view)
    if until_interrupted and isinstance(source, LiveSource):
        _go_on(source, view)
    return 0


def one_look(source: LiveSource | PlayedSource) -> dict[str, object]:
    """Returns a snapshot of each process by address. For a recording, it is the last snapshot of the process.

    Raises as `print_looks` does.
    """
    view = _looked(source)
    _check_answers(view)
    return {address: msgspec.to_builtins(process.followed.look) for address, process in view.processes.items()}


def _looked(source: LiveSource | PlayedSource) -> TopView:
    view = TopView(list(source.addresses))
    if isinstance(source, PlayedSource):
        source.seek(source.length)
        view.take(source.poll(view.followed), source.now)
    else:
        _wait_for_all(source, view)
    return view


def _check_answers(view: TopView) -> None:
    if silent := [address for address, process in view.processes.items() if not process.heard_at]:
        raise WatchError(f"{nobody_answers(silent)} (waited {ANSWER_S:g} s)")
    for address, process in view.processes.items():
        if process.error:
            raise WatchError(f"{address} sent an answer that cannot be read: {process.error}")


def text_of(view: TopView) -> str:
    """Returns the panels as columns of text, without a limit of width."""
    parts: list[str] = []
    for name in _PANELS:
        rows_of, headings = panels.HEADINGS[name]
        if rows := rows_of(view):
            table = [headings, *rows]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
            parts.append("\n".join([name, *(f"  {line}" for line in lines), ""]))
    return "\n".join(parts)


def _wait_for_all(source: LiveSource, view: TopView) -> None:
    deadline = time.monotonic() + ANSWER_S
    while not all(process.heard_at for process in view.processes.values()) and time.monotonic() < deadline:
        view.take(source.poll(view.followed))
        time.sleep(_TICK_MS / 1000)


def _go_on(source: LiveSource, view: TopView) -> None:
    read = select.poll()
    if sys.__stdout__ is not None:
        read.register(sys.__stdout__.fileno(), 0)
    while not any(event & (select.POLLERR | select.POLLHUP) for _, event in read.poll(_TICK_MS)):
        view.take(source.poll(view.followed))
    raise BrokenPipeError
