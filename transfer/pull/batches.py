"""How a part of a pull is cut into transfers, so that two threads copy, and neither for long without a pause.

Between processes of one host a READ is a copy by the processor. A transfer of few runs is copied by whoever posts it; a
larger one by a thread of NIXL's, which takes 50 µs to wake and one transfer at a time: the next post waits until it is
free. So at most one transfer of a source is in the background, of half of what is left, and meanwhile the polling
thread copies the rest, little by little: between two pieces it serves peers and other pulls. What is cut short by an
error or a cancellation ends with the transfers in flight, not with the pull.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from transfer.nixl.agent import BACKGROUND_RUNS

if TYPE_CHECKING:
    from transfer.pull.pull_state import Part

FOREGROUND_BYTES = 16 << 20
"""About 1.5 ms of copying: a transfer and the poll around it cost 15 to 90 µs, as the caches are."""
BACKGROUND_BYTES = 128 << 20
"""About 12 ms. More would save few wake-ups, and hold up the end of a pull that has failed."""
LONGEST_RUN = 512 << 10
"""Bytes of a run: more is cut, so that a transfer can end within. UCX copies as much in a system call."""
_FOR_TWO = 32 << 20
"""Bytes from which on a second thread is worth cutting longer runs further: a run costs 2 µs, this much 2.5 ms."""
_SHORTEST_CUT = 128 << 10


def longest_run(num_bytes: int) -> int:
    """Bytes at which the runs of a part of so many bytes are cut: where it pays, there are enough for both threads."""
    if num_bytes < _FOR_TWO:
        return LONGEST_RUN
    return min(LONGEST_RUN, max(num_bytes // (2 * BACKGROUND_RUNS), _SHORTEST_CUT))


def next_transfer(part: Part, *, background: bool) -> tuple[int, bool]:
    """Where the next transfer of a part ends.

    Args:
        part: with runs left to post.
        background: the thread in the background is free.

    Returns:
        The index after its last run, and whether it is for the background.
    """
    first, runs = part.posted, len(part.local)
    left = runs - first
    if not first and left < BACKGROUND_RUNS and part.num_bytes <= FOREGROUND_BYTES:
        return runs, False
    ends = part.ends
    start = int(ends[first - 1]) if first else 0
    if background and left >= 2 * BACKGROUND_RUNS:
        last = min(first + left // 2, _before(ends, start + BACKGROUND_BYTES))
        if last - first >= BACKGROUND_RUNS:
            return last, True
    last = min(first + BACKGROUND_RUNS - 1, runs, _before(ends, start + FOREGROUND_BYTES))
    return max(last, first + 1), False


def _before(ends: np.ndarray[tuple[int], np.dtype[np.int64]], num_bytes: int) -> int:
    return int(np.searchsorted(ends, num_bytes, "right"))
