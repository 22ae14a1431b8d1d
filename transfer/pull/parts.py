"""Parts of a pull: runs from one rank of the source, and the transfers that they are cut into.

Between processes of one host a READ is a copy by the processor. A transfer of few runs is copied by whoever posts it; a
larger one by a thread of NIXL's, which takes 50 µs to wake and one transfer at a time: the next post waits until it is
free. So at most one transfer of a source is in the background, of half of what is left, and meanwhile the polling
thread copies the rest, little by little: between two pieces it serves peers and other pulls. What is cut short by an
error or a cancellation ends with the transfers in flight, not with the pull.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer.errors import AgentError
from transfer.nixl.agent import BACKGROUND_RUNS, Agent, Handle, RunList
from transfer.plan.runs import LONGEST_RUN

FOREGROUND_BYTES = 16 << 20
"""About 1.5 ms of copying: a transfer and the poll around it cost 15 to 90 µs, as the caches are."""
BACKGROUND_BYTES = 128 << 20
"""About 12 ms. More would save few wake-ups, and hold up the end of a pull that has failed."""
_FOR_TWO = 32 << 20
"""Bytes from which on a second thread is worth cutting longer runs further: a run costs 2 µs, this much 2.5 ms."""
_SHORTEST_CUT = 128 << 10


@dataclass(slots=True, eq=False)
class Part:
    """Runs to read from one rank of the source, by one transfer or several.

    Attributes:
        arrived: called once they are there, to compare or to move them; returns what must be read after them, if
            anything, and raises PullFailedError if they are of no use. None if nothing is to be done.
    """

    rank: int
    local: RunList
    remote: RunList
    num_bytes: int
    arrived: Callable[[], Part | None] | None = None
    posted: int = 0  # runs
    in_flight: int = 0  # transfers
    _ends: NDArray[np.int64] | None = None  # bytes up to the end of each run

    @property
    def is_here(self) -> bool:
        """Whether all of it was posted and has ended."""
        return not self.in_flight and self.posted == len(self.local)

    def runs(self, last: int) -> tuple[RunList, RunList]:
        """The local and the remote side of the runs that are not posted yet, up to the index `last`."""
        if not self.posted and last == len(self.local):
            return self.local, self.remote
        return self.local[self.posted : last], self.remote[self.posted : last]

    def is_ready(self) -> bool:
        """Whether it can be posted now; asked again until it can, and its first transfer posted then."""
        return True

    def settle(self) -> None:
        """Called once none of its transfers is in flight and no more will be posted."""

    def next_transfer(self, *, background: bool) -> tuple[int, bool]:
        """The index after the last run of its next transfer, and whether `background`, if it is free, is to copy it."""
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
    """Bytes at which the runs of a part of so many bytes are cut: where it pays, there are enough for both threads."""
    if num_bytes < _FOR_TWO:
        return LONGEST_RUN
    return min(LONGEST_RUN, max(num_bytes // (2 * BACKGROUND_RUNS), _SHORTEST_CUT))


def is_over(agent: Agent, handle: Handle) -> tuple[bool, AgentError | None]:
    """Whether a transfer has ended, and how. Its handle is released then."""
    failed: AgentError | None = None
    try:
        if not agent.done(handle):
            return False, None
    except AgentError as error:
        failed = error
    with suppress(AgentError):  # the transfer has ended, which is all that counts
        agent.release(handle)
    return True, failed
