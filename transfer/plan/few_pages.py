"""The runs of a page or two in plain Python, where the calls into numpy would take eight times as long as the sums.

What is unusual is left to `transfer.plan.plan`: page sizes that differ, tokens within a page, states, and whatever is
wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from transfer.plan.group_plan import Pieces
from transfer.plan.plan import Plan
from transfer.pull.batches import LONGEST_RUN
from transfer.pull.pull_state import BlocksOfGroup, PagesOfGroup, Part

MOST_RUNS = 64
"""Up to here a list of tuples takes less time than arrays do."""
_WHOLE = Pieces(0, 0, 0, np.empty(0, np.int64), np.empty(0, np.int64))


class _Run(NamedTuple):
    """A run of page 0 on both sides: addresses, bytes, and bytes from a page to the next."""

    local: int
    remote: int
    length: int
    local_page: int
    remote_page: int


class _Group(NamedTuple):
    page_size: int
    local_pages: int
    remote_pages: int
    runs: tuple[_Run, ...]


class FewPages:
    """What one rank reads from another one, for pulls of few runs.

    Args:
        rank: of the source.
        planned: what is read from it.
        bases: addresses of the regions here and there.
        devices: that they are on.
    """

    def __init__(
        self, rank: int, planned: Plan, bases: tuple[Sequence[int], Sequence[int]], devices: tuple[int, int]
    ) -> None:
        self._rank = rank
        self._planned = planned
        self._bases = bases
        self._devices = devices
        self._groups: list[_Group | None] | None = None

    def part(self, named: Sequence[PagesOfGroup | BlocksOfGroup]) -> Part | None:
        """As one part what `Plan.runs` would give, page by page; None where that has to be asked."""
        if self._groups is None:  # not before the first pull: what it finds out, that pull needs to know
            self._groups = [_group(self._planned, at, self._bases) for at in range(len(self._planned.groups))]
        here, there, num_bytes = list[tuple[int, int, int]](), list[tuple[int, int, int]](), 0
        our_device, their_device = self._devices
        for group, pages in zip(self._groups, named, strict=True):
            pairs = None if group is None else _pairs(group, pages)
            if group is None or pairs is None:
                return None
            for run in group.runs:
                our_end = their_end = joined = 0
                for ours, theirs in pairs:
                    local, remote = run.local + ours * run.local_page, run.remote + theirs * run.remote_page
                    if local == our_end and remote == their_end and joined + run.length <= LONGEST_RUN:
                        joined += run.length  # neighbours on both sides: NIXL takes 2 to 4 µs for each run
                        here[-1], there[-1] = (here[-1][0], joined, our_device), (there[-1][0], joined, their_device)
                    else:
                        joined = run.length
                        here.append((local, joined, our_device))
                        there.append((remote, joined, their_device))
                    our_end, their_end = local + run.length, remote + run.length
                    num_bytes += run.length
        return Part(self._rank, here, there, num_bytes) if len(here) <= MOST_RUNS else None


def _pairs(group: _Group, pages: PagesOfGroup | BlocksOfGroup) -> list[tuple[int, int]] | None:
    """The local and remote pages, in pairs, where they are few and nothing is wrong with them."""
    if not isinstance(pages, PagesOfGroup):
        return None
    size, most_local, most_remote, runs = group
    start, stop = pages.tokens
    count = -(-stop // size) - start // size
    if start % size or not 0 <= start < stop or count * len(runs) > MOST_RUNS:
        return None
    local: Any = pages.local
    remote: Any = pages.remote
    try:
        pairs = [(int(local[at]), int(remote[at])) for at in range(count)]
    except (IndexError, TypeError, ValueError):
        return None
    if not all(0 <= ours < most_local and 0 <= theirs < most_remote for ours, theirs in pairs):
        return None
    return pairs if count == 1 or len({ours for ours, _ in pairs}) == count else None


def _group(planned: Plan, at: int, bases: tuple[Sequence[int], Sequence[int]]) -> _Group | None:
    plan = planned.groups[at]
    size = plan.local.page_size
    if plan.local.state or size != plan.remote.page_size or not plan.stacks:
        return None
    runs = [
        _Run(bases[0][region] + offset, bases[1][there] + remote, length, part.local_page, part.remote_page)
        for part in plan.parts(_WHOLE._replace(num_tokens=size))
        for region, offset, there, remote, length in zip(
            part.local_region.tolist(),
            part.local_offset.tolist(),
            part.remote_region.tolist(),
            part.remote_offset.tolist(),
            part.length.tolist(),
            strict=True,
        )
    ]
    if not 0 < len(runs) <= MOST_RUNS:
        return None
    return _Group(size, plan.local.num_pages, plan.remote.num_pages, tuple(runs))
