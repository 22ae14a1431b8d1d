"""What one rank reads from another one: a plan, and where the regions of both sides are.

A page or two take plain Python: the calls into numpy would take eight times as long as the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transfer.plan.group_plan import GroupPlan, PieceKind
from transfer.plan.page_lists import NOTHING, BlocksOfGroup, PageList, PageLists, pages_of
from transfer.plan.plan import Plan
from transfer.plan.runs import LONGEST_RUN, Runs

MOST_FEW = 64
"""Runs up to which a list of tuples takes less time than arrays do."""

Rows: TypeAlias = list[tuple[int, int, int]]
"""Address, bytes and device of each run."""


class _Run(NamedTuple):
    """A run of page 0 on both sides: addresses, bytes, and bytes from a page to the next."""

    local: int
    remote: int
    length: int
    local_page: int
    remote_page: int


class RankPlan:
    """A plan for one rank of a source, whose memory and ours it knows.

    Args:
        rank: of the source.
        plan: what is read from it.
        bases: addresses of the regions here and there.
        devices: that they are on.
    """

    def __init__(
        self, rank: int, plan: Plan, bases: tuple[Sequence[int], Sequence[int]], devices: tuple[int, int]
    ) -> None:
        self.rank = rank
        self.plan = plan
        self.bases = bases
        self.devices = devices
        self._runs_of_page: list[tuple[_Run, ...]] | None = None

    def pages(self, named: PageLists) -> list[PageList]:
        """The page lists of a pull, blocks turned into pages; of a group that the rank has no part of, none.

        Raises:
            InvalidTransferError: as `pages_of`.
        """
        return [
            NOTHING
            if isinstance(one, BlocksOfGroup) and not group.stacks
            else pages_of(group.where, one, group.local, group.remote)
            for group, one in zip(self.plan.groups, named, strict=True)
        ]

    def runs(self, group: int, pages: PageList) -> Runs:
        """As `Plan.runs`."""
        return self.plan.runs(group, *pages, *self.bases)

    def descriptors(self, runs: Runs) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """As `Runs.descriptors`."""
        return runs.descriptors(*self.devices)

    def few(self, named: PageLists) -> tuple[Rows, Rows, int] | None:
        """The descriptors of both sides, and their bytes, of the runs that `runs` gives for all groups.

        None where they are many, or `runs` has to be asked: page sizes that differ, tokens within a page, states, a
        source's blocks, and whatever is wrong.
        """
        if self._runs_of_page is None:  # not at first contact, which would wait for it
            self._runs_of_page = [self._of_page_0(group) for group in self.plan.groups]
        here, there, num_bytes = list[tuple[int, int, int]](), list[tuple[int, int, int]](), 0
        our_device, their_device = self.devices
        for group, runs, pages in zip(self.plan.groups, self._runs_of_page, named, strict=True):
            pairs = _few_pairs(group, len(runs), pages)
            if pairs is None:
                return None
            for run in runs:
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
        return (here, there, num_bytes) if len(here) <= MOST_FEW else None

    def _of_page_0(self, group: GroupPlan) -> tuple[_Run, ...]:
        """The runs of a page of a group; none where they are not for `few`."""
        size, (ours, theirs) = group.local.page_size, self.bases
        if group.local.state or size != group.remote.page_size:
            return ()
        none = np.empty(0, np.int64)
        found = [
            _Run(ours[region] + offset, theirs[there] + remote, length, runs.local_page, runs.remote_page)
            for runs in group.page_runs(PieceKind(0, 0, size, none, none))
            for region, offset, there, remote, length in zip(
                runs.local_region.tolist(),
                runs.local_offset.tolist(),
                runs.remote_region.tolist(),
                runs.remote_offset.tolist(),
                runs.length.tolist(),
                strict=True,
            )
        ]
        return tuple(found) if len(found) <= MOST_FEW else ()


def _few_pairs(group: GroupPlan, num_runs: int, named: PageList | BlocksOfGroup) -> list[tuple[int, int]] | None:
    """The local and remote pages, in pairs, where they are few and nothing is wrong with them."""
    if not num_runs or isinstance(named, BlocksOfGroup):
        return None
    local, remote, (start, stop) = named
    size, most_local, most_remote = group.local.page_size, group.local.num_pages, group.remote.num_pages
    count = -(-stop // size) - start // size
    if start % size or not 0 <= start < stop or count * num_runs > MOST_FEW:
        return None
    here: Any = local
    there: Any = remote
    try:
        pairs = [(int(here[at]), int(there[at])) for at in range(count)]
    except (IndexError, TypeError, ValueError):
        return None
    if not all(0 <= ours < most_local and 0 <= theirs < most_remote for ours, theirs in pairs):
        return None
    return pairs if count == 1 or len({ours for ours, _ in pairs}) == count else None
