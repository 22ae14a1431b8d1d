"""The host memory for staged pulls, which is divided into buffers, and the parts of a pull that pass through it."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.replica.block_table import PageCopy
from transfer.plan.boxes import ShardLayout
from transfer.plan.plan import Plan
from transfer.pull.parts import Part

BUFFERS = 4
BUFFER_BYTES = 16 << 20
"""In bytes. Pages are read into a buffer, and are then copied to their pages while other pages are read into
the next buffer.
"""


class StagingArea:
    """The staging area of a rank, and the rank's regions as arrays. The system allocates the area on first use.

    Attributes:
        num_bytes: size of the area.
        address: address of the area. The area must be registered with every agent that reads.
        regions: uint8 over each region of the layout.
    """

    def __init__(self, layout: ShardLayout, bases: Sequence[int]) -> None:
        self.num_bytes = BUFFERS * BUFFER_BYTES
        memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.address: int = self._bytes.ctypes.data
        self.regions = [_bytes_at(base, size) for base, size in zip(bases, layout.region_bytes, strict=True)]
        self._free = list(range(BUFFERS))

    def take(self) -> int | None:
        """Returns a free buffer; None if there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, buffer: int) -> None:
        """Frees a buffer to which no READ writes any longer."""
        self._free.append(buffer)

    def view(self, buffer: int) -> NDArray[np.uint8]:
        """Returns the memory of a buffer: uint8 `[BUFFER_BYTES]`."""
        return self._bytes[buffer * BUFFER_BYTES : (buffer + 1) * BUFFER_BYTES]


def _bytes_at(address: int, num_bytes: int) -> NDArray[np.uint8]:
    memory: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memory, np.uint8)


class StagedPart(Part):
    """A part that is read into a buffer of the staging area, and copied from there to its pages.

    The part can be posted when it has a buffer. Before that, its local addresses are offsets in the buffer.
    """

    __slots__ = ("_area", "_buffer", "_pages", "_rows", "_staging")

    def __init__(self, area: StagingArea, plan: Plan, group: int, pages: PageCopy) -> None:
        self._staging = plan.staging(group)
        runs = self._staging.runs(*pages[1:], 0, plan.bases[1])
        local, remote = runs.descriptors(0, plan.devices[1])
        super().__init__(plan.rank, local, remote, runs.num_bytes, self._move)
        self._rows, self._area, self._pages = local, area, pages
        self._buffer: int | None = None

    def is_ready(self) -> bool:
        """Takes a buffer. Returns False if none is free."""
        self._buffer = self._area.take()
        if self._buffer is None:
            return False
        self._rows[:, 0] += np.uint64(self._area.address + self._buffer * BUFFER_BYTES)
        return True

    def settle(self) -> None:
        """Frees the buffer. No READ writes to the buffer any more."""
        if self._buffer is not None:
            self._area.give_back(self._buffer)
            self._buffer = None

    def _move(self) -> None:
        if self._buffer is not None:
            local, _, tokens = self._pages
            self._staging.permute(local, tokens, self._area.view(self._buffer), self._area.regions)


def staged_parts(area: StagingArea, plan: Plan, group: int, pages: PageCopy) -> list[Part] | None:
    """Returns the parts that read a group's pages, each through one buffer. None if direct runs are preferred.

    Raises:
        InvalidTransferError: as for `Plan.runs`.
    """
    local, _, (start, stop) = pages
    of_group = plan.groups[group]
    if start >= stop or of_group.local.state or not plan.prefers_staging(group, (start, stop)):
        return None
    staging, sides = plan.staging(group), (of_group.local, of_group.remote)
    step = math.lcm(*(side.page_size for side in sides))
    held = min(side.page_size * side.num_pages for side in sides)  # no pull has more tokens than this
    if step > held or staging.num_bytes((0, step)) > BUFFER_BYTES:
        return None
    most = held // step * step
    while step < min(stop, most) and staging.num_bytes((0, min(2 * step, most))) <= BUFFER_BYTES:
        step = min(2 * step, most)
    # This raises if the pages do not fit, before anything is read.
    of_group.local_pages(local, of_group.tokens((start, stop)))
    return [StagedPart(area, plan, group, cut) for cut in _cut(pages, sides[0].page_size, sides[1].page_size, step)]


def _cut(pages: PageCopy, ours: int, theirs: int, step: int) -> Iterator[PageCopy]:
    """Yields the page lists of one range of tokens after another. Each range ends at a multiple of `step` tokens."""
    local, remote, (start, stop) = np.asarray(pages[0]), np.asarray(pages[1]), pages[2]
    first = start
    while first < stop:
        last = min(stop, (first // step + 1) * step)
        here, there = local[first // ours - start // ours :], remote[first // theirs - start // theirs :]
        yield PageCopy(here, there, (first, last))
        first = last
