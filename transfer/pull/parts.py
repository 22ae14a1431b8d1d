"""Parts of a pull: the runs from one rank of the source, and the transfers that they are split into.

Between processes of one host, the processor copies the bytes of a READ. A transfer with few runs is copied by the
thread that posts it, and a transfer with more runs by a NIXL thread. The NIXL thread takes time to wake and copies one
transfer at a time: a second post waits until the NIXL thread is free. Therefore each source has at most one transfer on
the NIXL thread, with at most half of the remaining runs. Meanwhile the polling thread copies the other runs in small
pieces. Between two pieces, it serves peers and other pulls. After an error or a cancellation, the pull ends when its
transfers in flight have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer.nixl.agent import BACKGROUND_RUNS, RunList
from transfer.plan.runs import LONGEST_RUN

FOREGROUND_BYTES = 16 << 20
"""In bytes: the largest transfer that the polling thread copies, in about 1.5 ms."""
BACKGROUND_BYTES = 128 << 20
"""In bytes: the largest transfer that NIXL's thread copies, in about 12 ms.

A larger one would save only few wake-ups, and delay the end of a failed pull.
"""
_FOR_TWO = 32 << 20
"""In bytes: the runs of a part of at least this size are split, so that two threads can copy the part.

Copying these bytes takes a thousand times as long as a further run.
"""
_SHORTEST_CUT = 128 << 10


@dataclass(slots=True, eq=False)
class Part:
    """Runs to read from one rank of the source, in one or more transfers.

    Attributes:
        rank: the rank of the source.
        local: local side of the runs.
        remote: remote side of the runs.
        num_bytes: bytes of all runs.
        arrived: a function that compares or moves the data when all runs have arrived; None if the data needs neither.
            The function returns a part that must be read next, or None. It raises `PullFailedError` if the data is
            unusable.
    """

    rank: int
    local: RunList
    remote: RunList
    num_bytes: int
    arrived: Callable[[], Part | None] | None = None
    posted: int = 0  # number of runs that were posted
    in_flight: int = 0  # number of transfers in flight
    _ends: NDArray[np.int64] | None = None  # for each run, the cumulative bytes up to its end

    @property
    def is_here(self) -> bool:
        """Whether all runs were posted and have arrived."""
        return not self.in_flight and self.posted == len(self.local)

    def runs(self, last: int) -> tuple[RunList, RunList]:
        """Returns the local and the remote sides of the unposted runs up to, but not including, index `last`."""
        if not self.posted and last == len(self.local):
            return self.local, self.remote
        return self.local[self.posted : last], self.remote[self.posted : last]

    def is_ready(self) -> bool:
        """Whether the part can be posted now.

        The caller repeats this call until it returns True, and then posts the part's first transfer at once.
        """
        return True

    def settle(self) -> None:
        """Called when none of the part's transfers is in flight and no more will be posted."""

    def next_transfer(self, *, background: bool) -> tuple[int, bool]:
        """Returns the end index of the next transfer's runs, and whether the NIXL thread copies that transfer.

        `background` is True if the NIXL thread is free.
        """
        first, runs = self.posted, len(self.local)
        left = runs - first
        if not first and left < BACKGROUND_RUNS and self.num_bytes <= FOREGROUND_BYTES:
            return runs, False
        if self._ends is None:
            self._ends = np.cumsum(np.asarray(self.local)[:, 1], dtype=np.int64)
        ends = self._ends
        start = int(ends[first - 1]) if first else 0
        if background and left >= 2 * BACKGROUND_RUNS:
            last = min(first + left // 2, int(np.searchsorted(ends, start + BACKGROUND_BYTES, "right")))
            if last - first >= BACKGROUND_RUNS:
                return last, True
        within = int(np.searchsorted(ends, start + FOREGROUND_BYTES, "right"))
        return max(min(first + BACKGROUND_RUNS - 1, runs, within), first + 1), False


def longest_run(num_bytes: int) -> int:
    """Returns the longest run, in bytes, for a part of this size. A large part is cut into runs for two threads."""
    if num_bytes < _FOR_TWO:
        return LONGEST_RUN
    return min(LONGEST_RUN, max(num_bytes // (2 * BACKGROUND_RUNS), _SHORTEST_CUT))
