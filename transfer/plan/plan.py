"""From the layouts of two shards and two lists of pages to the runs of bytes that a pull copies.

One rule for every pair of layouts: a box of the local shard and a box of the remote one are intersected, axis by axis.
Tensor and pipeline parallelism, replicated heads, page sizes, the order of axes, tensors apart or together: none is a
case of its own. `transfer.plan.source_ranks` says which remote shards to plan with.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from transfer.errors import InvalidTransferError, MetadataError
from transfer.plan.boxes import Group, ShardLayout
from transfer.plan.group_plan import GroupPlan
from transfer.plan.intersection import Ints, common
from transfer.plan.runs import Runs, keep_memory, no_runs
from transfer.plan.staging import MAX_COPIES, ONE_HOST, Costs, StagingPlan, copies_of


class Plan:
    """What a shard copies from another one, for any pages. Made by `plan`; not safe for several threads at once.

    Attributes:
        groups: one for each group of the layouts.
        num_regions: regions of the local and of the remote shard.
    """

    def __init__(self, groups: tuple[GroupPlan, ...], num_regions: tuple[int, int]) -> None:
        self.groups = groups
        self.num_regions = num_regions
        self._staging: dict[int, StagingPlan] = {}

    def runs(
        self,
        group: int,
        local_pages: ArrayLike,
        remote_pages: ArrayLike,
        tokens: tuple[int, int],
        local_bases: ArrayLike,
        remote_bases: ArrayLike,
    ) -> Runs:
        """The runs that bring `tokens` of one request from the remote pages to the local ones.

        Nothing before the first token is written: the pages before it may be shared. After the last one, the rest of
        its page is copied along, up to the nearer page end of the two sides. A state group has one page on each side,
        and takes any tokens that are not empty.

        Args:
            group: index of the group.
            local_pages: ids of the local pages from the one that holds the first token on; what is left over is
                ignored. Integers, best as an array.
            remote_pages: the same on the remote side.
            tokens: first token to copy, and the one after the last.
            local_bases: address of each local region.
            remote_bases: address of each remote region.

        Raises:
            InvalidTransferError: too few pages for the tokens, a page that the pool does not have, a local page named
                twice, a negative first token or more tokens than the pool holds, not one address for each region, or
                more than `transfer.plan.group_plan.MAX_RUNS` runs.
        """
        plan = self.groups[group]
        tokens = plan.tokens(tokens)
        if tokens[0] == tokens[1]:
            return no_runs()
        ours, theirs = plan.local_pages(local_pages, tokens), plan.remote_pages(remote_pages, tokens)
        return plan.runs(ours, theirs, tokens, *self._bases(local_bases, remote_bases))

    def staging(self, group: int) -> StagingPlan:
        """The other way for a group: whole remote pages into a staging area, and home from there. Host memory only.

        Raises:
            InvalidTransferError: as `StagingPlan`; `prefers_staging` is never True then.
        """
        found = self._staging.get(group)
        if found is None:
            found = self._staging[group] = StagingPlan(self.groups[group])
        return found

    def prefers_staging(self, group: int, tokens: tuple[int, int], costs: Costs = ONE_HOST) -> bool:
        """Whether a pull of `tokens` is estimated to take less time staged than with direct runs."""
        plan = self.groups[group]
        rounded = plan.tokens(tokens)
        if rounded[0] == rounded[1]:
            return False
        runs, num_bytes = plan.size(rounded)
        direct = costs.wire_us(runs, num_bytes)
        # What is copied home is what direct runs would copy: as many bytes, and as many runs.
        home = costs.copy_us(runs, num_bytes)
        if home >= direct or copies_of(plan) > MAX_COPIES:
            return False
        return costs.wire_us(*self.staging(group).size(rounded)) + home < direct

    def _bases(self, local: ArrayLike, remote: ArrayLike) -> tuple[Ints, Ints]:
        bases = np.asarray(local, np.int64), np.asarray(remote, np.int64)
        for side, found, needed in zip(("local", "remote"), bases, self.num_regions, strict=True):
            if found.shape != (needed,):
                raise InvalidTransferError(f"{found.size} addresses of {side} regions: the shard has {needed}")
        return bases


def plan(local: ShardLayout, remote: ShardLayout) -> Plan:
    """What `local` copies from `remote`: all that both hold. Both must have passed `transfer.plan.boxes.check`.

    Raises:
        MetadataError: the sides differ in the number or the kind of their groups, or in the type of common elements.
    """
    keep_memory()
    if len(local.groups) != len(remote.groups):
        raise MetadataError(
            f"{len(local.groups)} groups on one side, {len(remote.groups)} on the other: there must be as many"
        )
    return Plan(
        tuple(
            _plan_group(f"group {number}", ours, theirs)
            for number, (ours, theirs) in enumerate(zip(local.groups, remote.groups, strict=True))
        ),
        (len(local.region_bytes), len(remote.region_bytes)),
    )


def _plan_group(where: str, local: Group, remote: Group) -> GroupPlan:
    if local.state != remote.state:
        raise MetadataError(f"{where}: recurrent state on one side, tokens on the other")
    return GroupPlan(where, local, remote, common(where, local.boxes, remote.boxes))
