"""Turns the layouts of two shards and two lists of pages into the runs of bytes that a pull copies.

One rule covers every pair of layouts: each local box is intersected with each remote box, axis by axis. Tensor and
pipeline parallelism, replicated heads, page sizes, axis orders, and separate or packed tensors need no special cases.
`transfer.plan.source_ranks` chooses the remote shards to plan with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.replica.block_table import PageCopy
from transfer.errors import MetadataError
from transfer.plan.boxes import Group, ShardLayout
from transfer.plan.group_plan import GroupPlan, PieceKind
from transfer.plan.intersection import common
from transfer.plan.page_lists import NOTHING, BlocksOfGroup, PageLists, first_read, pages_of
from transfer.plan.runs import LONGEST_RUN, Runs, keep_memory
from transfer.plan.staging import MAX_COPIES, StagingPlan, copies_of, copy_us, wire_us

MOST_FEW = 64
"""Up to this many runs, a list of tuples is faster than arrays."""

RunRows: TypeAlias = list[tuple[int, int, int]]
"""Address, bytes and device of each run."""


class _Run(NamedTuple):
    """A run of bytes in page 0: its local and remote address, its length, and the stride between pages on each side."""

    local: int
    remote: int
    length: int
    local_page: int
    remote_page: int


class Plan:
    """The copy from one remote shard to the local shard, for any pages. Created by `plan`. Not thread-safe.

    Attributes:
        groups: the plan of each group of the layouts.
        rank: rank of the remote shard.
        bases: addresses of the local regions and of the remote regions, int64 `[regions]` each.
        devices: device indices of the local regions and of the remote ones.
    """

    def __init__(
        self, groups: tuple[GroupPlan, ...], rank: int, bases: Sequence[ArrayLike], devices: tuple[int, int]
    ) -> None:
        self.groups = groups
        self.rank = rank
        self.bases = np.asarray(bases[0], np.int64), np.asarray(bases[1], np.int64)
        self.devices = devices
        self._staging: dict[int, StagingPlan] = {}
        self._runs_of_page: list[tuple[_Run, ...]] | None = None

    def pages(self, named: PageLists) -> list[PageCopy]:
        """Returns the local and remote pages of each group of a pull. `pages_of` turns a source's blocks into pages.

        A group whose source names blocks gets no pages if it has no element in common with this remote shard.
        """
        return [
            NOTHING
            if isinstance(one, BlocksOfGroup) and not group.stacks
            else pages_of(group.where, one, group.local, group.remote)
            for group, one in zip(self.groups, named, strict=True)
        ]

    def begins(self, named: PageLists) -> list[int]:
        """Returns the first token to read for each group whose source has named its blocks, and 0 for other groups."""
        return [
            first_read(one, group.remote) if isinstance(one, BlocksOfGroup) and group.stacks else 0
            for group, one in zip(self.groups, named, strict=True)
        ]

    def runs(self, group: int, local_pages: ArrayLike, remote_pages: ArrayLike, tokens: tuple[int, int]) -> Runs:
        """Returns the runs that copy `tokens` of one request from the remote pages to the local ones.

        Memory before the first token is not written, because other requests may share the tokens that lie there. The
        rest of the last token's page is copied too, up to the end of the local or the remote page, whichever is first.
        A state group has one page on each side and accepts any non-empty range of tokens. The page ids of a side are
        integers, preferably an array. They start with the page that holds the first token. Surplus pages are ignored.

        Raises:
            InvalidTransferError: too few pages for the tokens, a page that the pool does not have, a local page named
                twice, a negative first token or more tokens than the pool holds, or more than
                `transfer.plan.group_plan.MAX_RUNS` runs.
        """
        return self.groups[group].runs(local_pages, remote_pages, tokens, *self.bases)

    def few(self, named: PageLists) -> tuple[RunRows, RunRows, int] | None:
        """Returns the descriptors of both sides, and their total bytes, for the runs of all groups.

        This method is plain Python for one or two pages: calls into numpy would take eight times as long as the
        arithmetic. Returns None if there are many runs, and in the cases that only `runs` handles: page sizes that
        differ, a first token that does not begin a page, states, a source's blocks, and invalid input.
        """
        if self._runs_of_page is None:  # computed on first use, so that first contact does not wait
            self._runs_of_page = [self._of_page_0(group) for group in self.groups]
        here: RunRows = []
        there: RunRows = []
        num_bytes = 0
        our_device, their_device = self.devices
        for group, runs, pages in zip(self.groups, self._runs_of_page, named, strict=True):
            pairs = _few_pages(group, len(runs), pages)
            if pairs is None:
                return None
            for first_local, first_remote, length, local_page, remote_page in runs:
                our_end = their_end = joined = 0
                for ours, theirs in zip(*pairs, strict=True):
                    local, remote = first_local + ours * local_page, first_remote + theirs * remote_page
                    if local == our_end and remote == their_end and joined + length <= LONGEST_RUN:
                        # pages that are adjacent on both sides are one run, because each run costs time in NIXL
                        joined += length
                        here[-1], there[-1] = (here[-1][0], joined, our_device), (there[-1][0], joined, their_device)
                    else:
                        joined = length
                        here.append((local, length, our_device))
                        there.append((remote, length, their_device))
                    our_end, their_end = local + length, remote + length
                num_bytes += length * len(pairs[0])
        return (here, there, num_bytes) if len(here) <= MOST_FEW else None

    def _of_page_0(self, group: GroupPlan) -> tuple[_Run, ...]:
        """Returns the runs of page 0 of a group. Empty if `few` cannot handle the group."""
        size, (ours, theirs) = group.local.page_size, (bases.tolist() for bases in self.bases)
        if group.local.state or size != group.remote.page_size:
            return ()
        none = np.empty(0, np.int64)
        found: list[_Run] = []
        for runs in group.page_runs(PieceKind(0, 0, size, none, none)):
            columns = runs.local_region, runs.local_offset, runs.remote_region, runs.remote_offset, runs.length
            for here, local, there, remote, length in zip(*(column.tolist() for column in columns), strict=True):
                first = ours[here] + local, theirs[there] + remote
                found.append(_Run(*first, length, runs.local_page, runs.remote_page))
        return tuple(found) if len(found) <= MOST_FEW else ()

    def staging(self, group: int) -> StagingPlan:
        """Returns the staged plan of a group: whole remote pages go to a staging area first. Only for host memory."""
        found = self._staging.get(group)
        if found is None:
            found = self._staging[group] = StagingPlan(self.groups[group])
        return found

    def prefers_staging(self, group: int, tokens: tuple[int, int]) -> bool:
        """Whether staging a pull of `tokens` is estimated to take less time than direct runs."""
        plan = self.groups[group]
        rounded = plan.tokens(tokens)
        if rounded[0] == rounded[1]:
            return False
        runs, num_bytes = plan.size(rounded)
        direct = wire_us(runs, num_bytes)
        # The copy from the staging area moves the same bytes as a direct pull, in the same number of runs.
        home = copy_us(runs, num_bytes)
        if home >= direct or copies_of(plan) > MAX_COPIES:
            return False
        return wire_us(*self.staging(group).size(rounded)) + home < direct


def plan(
    local: ShardLayout,
    remote: ShardLayout,
    bases: Sequence[ArrayLike] | None = None,
    devices: tuple[int, int] = (0, 0),
    rank: int = 0,
) -> Plan:
    """Plans the copy of everything that both shards hold. Both layouts must have passed `transfer.plan.boxes.check`.

    `bases` are the addresses of the local and the remote regions. None stands for zeros; use it if only the plan's
    shape matters. `devices` are the device indices of the two sides, and `rank` is the rank of the remote shard.

    Raises:
        MetadataError: the two sides differ in the number or the kinds of their groups, or in the type of an element
            that both hold.
    """
    keep_memory()
    if len(local.groups) != len(remote.groups):
        raise MetadataError(
            f"this engine has {len(local.groups)} groups, the source has {len(remote.groups)}: the numbers must be "
            "equal"
        )
    groups: list[GroupPlan] = []
    for number, (ours, theirs) in enumerate(zip(local.groups, remote.groups, strict=True)):
        where = f"group {number}"
        if ours.state != theirs.state:
            raise MetadataError(f"{where}: one side keeps a recurrent state, the other keeps tokens")
        _check_of_page(where, ours, theirs)
        groups.append(GroupPlan(where, ours, theirs, common(where, ours.boxes, theirs.boxes)))
    zeros = [0] * len(local.region_bytes), [0] * len(remote.region_bytes)
    return Plan(tuple(groups), rank, zeros if bases is None else bases, devices)


def _check_of_page(where: str, local: Group, remote: Group) -> None:
    """Raises if a side has one scale for a whole page, unless both sides do and their page sizes are equal."""
    ours, theirs = ({box.kind: box.of_page for box in group.boxes} for group in (local, remote))
    for kind in ours.keys() & theirs.keys():
        same_pages = ours[kind] == theirs[kind] and local.page_size == remote.page_size
        if (ours[kind] or theirs[kind]) and not same_pages:
            here, there = (
                f"{'a page' if of_page else 'a token'} (pages of {size})"
                for of_page, size in ((ours[kind], local.page_size), (theirs[kind], remote.page_size))
            )
            raise MetadataError(
                f"{where}, {kind!r}: a scale is shared by {here} here but by {there} at the source; such "
                "scales cannot be converted"
            )


def _few_pages(group: GroupPlan, num_runs: int, named: PageCopy | BlocksOfGroup) -> tuple[list[int], list[int]] | None:
    """Returns the local pages and the remote pages of a group. None unless they are few and valid."""
    if not num_runs or isinstance(named, BlocksOfGroup):
        return None
    local, remote, (start, stop) = named
    size = group.local.page_size
    count = -(-stop // size) - start // size
    if start % size or not 0 <= start < stop or count * num_runs > MOST_FEW:
        return None
    here, there = _listed(local, count, group.local.num_pages), _listed(remote, count, group.remote.num_pages)
    if here is None or there is None or (count > 1 and len(set(here)) < count):
        return None
    return here, there


def _listed(pages: Any, count: int, pool: int) -> list[int] | None:
    """Returns the first `count` pages as a list. None if there are fewer pages, or if a page is not in the pool."""
    try:
        found = _integers(pages[:count])
        least, most = (found[0], found[0]) if len(found) == 1 else (min(found), max(found))
    except (IndexError, TypeError, ValueError):
        return None
    return found if len(found) == count and least >= 0 and most < pool else None


def _integers(pages: Sequence[int] | NDArray[np.integer[Any]]) -> list[int]:
    if isinstance(pages, np.ndarray):
        return pages.tolist() if pages.dtype.kind in "iu" and pages.ndim == 1 else []
    return [int(page) for page in pages]
