"""Which idle page goes first. Chooses, frees nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError

Pages = NDArray[np.int32]

_SCAN = 64


class IdleOrder:
    """Least recently used order of the idle pages: published, held by nobody.

    A log of page ids, oldest first. An entry counts only while the page's stamp names its place, so a page leaves from
    the middle by clearing its stamp, and the log is squeezed when it is full: at least `num_pages` appends after the
    last time, so that every operation costs what it changes, at any pool size.
    """

    __slots__ = ("_head", "_log", "_stamp", "_tail", "count")

    def __init__(self, num_pages: int) -> None:
        self._log = np.zeros(2 * num_pages + 1, np.int32)
        self._stamp = np.full(num_pages + 1, -1, np.int32)
        self._head = 0
        self._tail = 0
        self.count = 0

    def append(self, pages: Pages) -> None:
        """Put `pages`, none of them in the order, behind all others; the first of them goes first."""
        count = len(pages)
        if self._tail + count > len(self._log):
            self._squeeze()
        self._log[self._tail : self._tail + count] = pages
        self._stamp[pages] = np.arange(self._tail, self._tail + count, dtype=np.int32)
        self._tail += count
        self.count += count

    def remove(self, pages: Pages) -> None:
        """Take `pages`, all of them in the order, out of it."""
        self._stamp[pages] = -1
        self.count -= len(pages)

    def pop(self, count: int) -> Pages:
        """Take the `count` oldest pages out, oldest first. At most `self.count`."""
        taken: list[Pages] = []
        missing = count
        while missing:
            if self._head == self._tail:
                raise InvariantError(f"idle order: {count} pages asked for, {count - missing} are there")
            places = np.arange(self._head, min(self._head + missing + _SCAN, self._tail), dtype=np.int32)
            pages = self._log[self._head : self._head + len(places)]
            live = np.flatnonzero(self._stamp[pages] == places)[:missing]
            taken.append(pages[live])
            missing -= len(live)
            self._head += len(places) if missing else int(live[-1]) + 1  # entries before the last one taken are dead
        popped = np.concatenate(taken) if taken else np.zeros(0, np.int32)
        self.remove(popped)
        return popped

    def pages(self) -> Pages:
        """Every page of the order, oldest first."""
        places = np.arange(self._head, self._tail, dtype=np.int32)
        pages = self._log[self._head : self._tail]
        return pages[self._stamp[pages] == places]

    def check(self) -> None:
        """Raise `InvariantError` unless log, stamps and count agree."""
        pages = self.pages()
        stamped = np.flatnonzero(self._stamp >= 0)
        if len(pages) != self.count or not np.array_equal(np.sort(pages), stamped):
            raise InvariantError(
                f"idle order: {len(pages)} live entries, {len(stamped)} stamped pages, count {self.count}"
            )

    def _squeeze(self) -> None:
        pages = self.pages()
        self._head, self._tail = 0, len(pages)
        self._log[: self._tail] = pages
        self._stamp[pages] = np.arange(self._tail, dtype=np.int32)
