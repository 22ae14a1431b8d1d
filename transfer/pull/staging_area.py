"""Host memory that staged pulls go through, in slabs; and the parts of a pull that do."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer.pull.pull_state import PagesOfGroup, Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from transfer.plan.boxes import ShardLayout
    from transfer.plan.plan import Plan

SLABS = 4
SLAB_BYTES = 16 << 20
"""A slab's pages are read, then moved home, while the next slab's are read."""


class StagingArea:
    """Memory of its own, and the local pages as arrays. Pages of the system are only taken once it is used.

    Args:
        layout: the local shard.
        bases: address of each of its regions, in host memory of this process.

    Attributes:
        address: of the area. To be registered with every agent that reads.
        num_bytes: of the area.
        regions: uint8 over each region of the layout.
    """

    def __init__(self, layout: ShardLayout, bases: Sequence[int]) -> None:
        self.num_bytes = SLABS * SLAB_BYTES
        memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.address: int = self._bytes.ctypes.data
        self.regions = [_bytes_at(base, size) for base, size in zip(bases, layout.region_bytes, strict=True)]
        self._free = list(range(SLABS))

    def take(self) -> int | None:
        """Returns a free slab; None while there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, slab: int) -> None:
        """Nothing is read into a slab any more."""
        self._free.append(slab)

    def view(self, slab: int) -> NDArray[np.uint8]:
        """uint8 `[SLAB_BYTES]`."""
        return self._bytes[slab * SLAB_BYTES : (slab + 1) * SLAB_BYTES]


def _bytes_at(address: int, num_bytes: int) -> NDArray[np.uint8]:
    memory: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memory, np.uint8)


class StagedPart(Part):
    """A part that goes through a slab. It is posted once it has one; its addresses count from the slab's start."""

    __slots__ = ("_area", "_group", "_pages", "_plan", "_rows", "_slab")

    def __init__(
        self,
        rank: int,
        area: StagingArea,
        plan: Plan,
        group: int,
        pages: PagesOfGroup,
        bases: Sequence[int],
        device: int,
    ) -> None:
        runs = plan.staging(group).runs(pages.remote, pages.tokens, 0, bases)
        local, remote = runs.descriptors(0, device)
        super().__init__(rank, local, remote, runs.num_bytes, self._move)
        self._rows = local
        self._area, self._plan, self._group, self._pages = area, plan, group, pages
        self._slab: int | None = None

    def is_ready(self) -> bool:
        """Takes a slab, if there is one."""
        self._slab = self._area.take()
        if self._slab is None:
            return False
        self._rows[:, 0] += np.uint64(self._area.address + self._slab * SLAB_BYTES)
        return True

    def settle(self) -> None:
        """Nothing is read into the slab any more."""
        if self._slab is not None:
            self._area.give_back(self._slab)
            self._slab = None

    def _move(self) -> None:
        if self._slab is not None:
            staged = self._area.view(self._slab)
            self._plan.staging(self._group).permute(self._pages.local, self._pages.tokens, staged, self._area.regions)


def staged_pages(plan: Plan, group: int, pages: PagesOfGroup) -> list[PagesOfGroup] | None:
    """The pages of a group, cut so that each piece fits a slab; None where they are to be read directly."""
    start, stop = pages.tokens
    if start >= stop or plan.groups[group].local.state or not plan.prefers_staging(group, pages.tokens):
        return None
    sides = plan.groups[group].local, plan.groups[group].remote
    ours, theirs = (side.page_size for side in sides)
    step = math.lcm(ours, theirs)
    held = min(side.page_size * side.num_pages for side in sides)  # no pull has more tokens
    if step > held or plan.staging(group).num_bytes((0, step)) > SLAB_BYTES:
        return None
    most = held // step * step
    while step < min(stop, most) and plan.staging(group).num_bytes((0, min(2 * step, most))) <= SLAB_BYTES:
        step = min(2 * step, most)
    return list(_windows(pages, ours, theirs, step))


def _windows(pages: PagesOfGroup, ours: int, theirs: int, step: int) -> Iterator[PagesOfGroup]:
    local, remote = np.asarray(pages.local), np.asarray(pages.remote)
    start, stop = pages.tokens
    first = start
    while first < stop:
        last = min(stop, (first // step + 1) * step)
        here, there = first // ours - start // ours, first // theirs - start // theirs
        yield PagesOfGroup(local[here:], remote[there:], (first, last))
        first = last
