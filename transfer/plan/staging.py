"""Pulls whole remote pages into a staging area, and copies their elements from there to the local pages.

Staging is for layouts whose runs are too short for the wire. For example, between tokens-first and heads-first pages, a
run is one head of one token. Such a run has only a few hundred bytes, and each run costs a system call. Staged pages
arrive in the remote layout, and strided numpy copies rearrange them. Staging works only in host memory. Measured costs
decide whether staging or direct runs are cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from transfer.errors import InvalidTransferError
from transfer.plan.group_plan import GroupPlan, PieceKind, cut
from transfer.plan.intersection import Axis, Ints, Stack, merged
from transfer.plan.runs import PagePairs, Runs, concatenated, no_runs, runs_of_table

Bytes: TypeAlias = NDArray[np.uint8]


# Costs of a transfer between two processes of one host, fitted by `python -m benchmarks.plan` and rounded. A run
# below about 28 KB thus costs more on the wire than in a copy.
_RUN_US = 2.6  # cost of one run on the wire, whatever its length: the time of a system call
_WIRE_GBPS = 10.0
_COPY_RUN_NS = 3.5  # cost of one run in a strided copy
_COPY_GBPS = 11.0
MAX_COPIES = 1 << 14
"""The largest number of strided copies in one pull.

If each layer has its own tensor, with separate K and V and with heads as an outer axis, a pull takes thousands. Only a
layout that scatters its elements takes more than the limit.
"""
_LINE = 64  # bytes of a cache line; each segment of the staging area begins at the start of a cache line
_NEVER = 1 << 63  # stands for the page stride of a pool that has only one page


def wire_us(runs: int, num_bytes: int) -> float:
    """Returns the estimated microseconds of `runs` runs on the wire."""
    return runs * _RUN_US + num_bytes / _WIRE_GBPS / 1e3


def copy_us(runs: int, num_bytes: int) -> float:
    """Returns the estimated microseconds of a strided copy."""
    return (runs * _COPY_RUN_NS + num_bytes / _COPY_GBPS) / 1e3


class _Segment(NamedTuple):
    """A range of bytes of each remote page, pulled as one run. `staged_page` is its page stride in the staging area."""

    region: int
    offset: int
    length: int
    remote_page: int
    staged_page: int


class _StridedCopy(NamedTuple):
    """A pair of boxes, or a slice of such a pair, whose remote side lies in one segment. Offsets are for page 0."""

    stack: Stack
    inner: tuple[Axis, ...]
    local_region: int
    local_offset: int
    remote_region: int
    remote_offset: int

    def remote_end(self, page_size: int) -> int:
        """Returns the byte offset in the remote region at which this copy's last element of page 0 ends."""
        steps = sum((n - 1) * step for n, _, step in self.inner) + (page_size - 1) * self.stack.token[1]
        return self.remote_offset + steps + self.stack.itemsize


def copies_of(plan: GroupPlan) -> int:
    """Returns the number of strided copies that staging a group takes, for each kind of pieces."""
    pages = [_NEVER if plan.remote.num_pages == 1 else stack.remote_page for stack in plan.stacks]
    outer = [[n for n, _, step in stack.axes if step >= page] for stack, page in zip(plan.stacks, pages, strict=True)]
    return sum(len(stack.local_region) * prod(steps) for stack, steps in zip(plan.stacks, outer, strict=True))


class StagingPlan:
    """The plan that pulls one group through a staging area. `Plan.staging` creates it.

    Raises `InvalidTransferError` if staging takes more than `MAX_COPIES` strided copies.

    The staging area is divided into segments. A segment holds one range of bytes of every remote page. Its pages are in
    the order in which the request names them.
    """

    def __init__(self, plan: GroupPlan) -> None:
        self._plan = plan
        if (copies := copies_of(plan)) > MAX_COPIES:
            raise InvalidTransferError(f"{plan.where}: staging takes {copies} copies; at most {MAX_COPIES} are allowed")
        single = plan.remote.num_pages == 1
        self._copies = [one for stack in plan.stacks for one in _copies(stack, _NEVER if single else stack.remote_page)]
        self._copies.sort(key=lambda copy: (copy.remote_region, copy.stack.remote_page, copy.remote_offset))
        self._segments, self._segment_of = _segments(self._copies, plan.remote.page_size, single=single)
        # Each segment takes the role of a local region.
        rows = [
            (at, 0, one.region, one.offset, one.length, one.staged_page, one.remote_page)
            for at, one in enumerate(self._segments)
        ]
        self._page_runs = runs_of_table(np.array(rows, np.int64).reshape(-1, 7).T.copy())

    def num_bytes(self, tokens: tuple[int, int]) -> int:
        """Returns the bytes of staging area that a pull of `tokens` needs."""
        return self._layout(self._num_pages(self._plan.tokens(tokens)))[1]

    def runs(
        self, remote_pages: ArrayLike, tokens: tuple[int, int], staging_base: int, remote_bases: ArrayLike
    ) -> Runs:
        """Returns the runs that copy the remote pages of `tokens` to the staging area at `staging_base`.

        Raises the same errors as `Plan.runs`.
        """
        tokens = self._plan.tokens(tokens)
        if tokens[0] == tokens[1]:
            return no_runs()
        pages = self._plan.remote_pages(remote_pages, tokens)
        starts, _ = self._layout(len(pages))
        pairs = PagePairs(np.arange(len(pages), dtype=np.int64), pages)
        local, remote = starts + staging_base, np.asarray(remote_bases, np.int64)
        return concatenated([runs.over(pairs, local, remote) for runs in self._page_runs])

    def permute(
        self, local_pages: ArrayLike, tokens: tuple[int, int], staging: Bytes, regions: Sequence[Bytes]
    ) -> None:
        """Copies the staged elements into the local pages. Direct runs would have written the same bytes.

        `staging` is uint8 `[num_bytes(tokens)]` or longer. `regions` has a uint8 array over each local region. All of
        these arrays are contiguous.

        Raises:
            InvalidTransferError: for the same reasons as `Plan.runs`; also if the staging area or a region is too
                small.
        """
        tokens = self._plan.tokens(tokens)
        if tokens[0] == tokens[1]:
            return
        pages = self._plan.local_pages(local_pages, tokens)
        self._plan.refuse_repeated(PagePairs(pages, pages))
        starts, needed = self._layout(self._num_pages(tokens))
        if staging.nbytes < needed:
            raise InvalidTransferError(
                f"{self._plan.where}: the staging area has {staging.nbytes} bytes, but {needed} are needed"
            )
        views: list[tuple[NDArray[np.void], Ints, NDArray[np.void], slice]] = []
        for kind in cut(tokens, self._plan.local.page_size, self._plan.remote.page_size):
            taken, local = _evenly(kind.remote), pages[kind.local]
            for copy, number in zip(self._copies, self._segment_of, strict=True):
                segment = self._segments[number]
                at = int(starts[number]) + copy.remote_offset - segment.offset
                ours, theirs = self._views(copy, kind, regions, staging, at, segment.staged_page)
                views.append((ours, local, theirs, taken))
        for ours, local, theirs, taken in views:  # nothing is written before every copy is known to fit
            ours[local] = theirs[taken]

    def _views(
        self, copy: _StridedCopy, kind: PieceKind, regions: Sequence[Bytes], staging: Bytes, at: int, staged_page: int
    ) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Returns two views of the same elements: in all local pages, and in all staged pages. An item is one run."""
        local_step, remote_step = copy.stack.token
        run, left = merged(copy.stack.itemsize, (*copy.inner, *copy.stack.tokens(kind.num_tokens)))
        sizes = [n for n, _, _ in left]
        dtype = np.dtype(f"u{run}" if run in (1, 2, 4, 8) else f"V{run}")
        ours = (self._plan.local.num_pages, *sizes), (copy.stack.local_page, *(step for _, step, _ in left))
        theirs = (int(kind.remote[-1]) + 1, *sizes), (staged_page, *(step for _, _, step in left))
        offset = copy.local_offset + kind.local_token * local_step
        at += kind.remote_token * remote_step
        # numpy raises if a view lies outside of its memory
        try:
            return (
                np.ndarray(ours[0], dtype, regions[copy.local_region], offset, ours[1]),
                np.ndarray(theirs[0], dtype, staging, at, theirs[1]),
            )
        except (IndexError, TypeError, ValueError) as error:
            raise InvalidTransferError(
                f"{self._plan.where}: local region {copy.local_region} does not match its layout: {error}"
            ) from error

    def _num_pages(self, tokens: tuple[int, int]) -> int:
        size = self._plan.remote.page_size
        return 0 if tokens[0] == tokens[1] else -(-tokens[1] // size) - tokens[0] // size

    def _layout(self, num_pages: int) -> tuple[Ints, int]:
        """Returns the start of each segment in the staging area, and the size of the area, both in bytes."""
        sizes = np.array([_lines(segment.staged_page * num_pages) for segment in self._segments], np.int64)
        return np.cumsum(sizes) - sizes, int(sizes.sum())

    def size(self, tokens: tuple[int, int]) -> tuple[int, int]:
        """Returns how many runs and bytes the pull of a rounded range of tokens moves over the wire.

        The numbers assume that no two pages are neighbours.
        """
        pages = self._num_pages(tokens)
        return pages * len(self._segments), pages * sum(segment.length for segment in self._segments)


def _copies(stack: Stack, remote_page: int) -> Iterator[_StridedCopy]:
    """Yields the strided copies of a stack, at least one for each pair of boxes.

    A pair is cut along each axis whose stride is a remote page or more, for example if all K pages lie before all V
    pages.
    """
    inner = tuple(axis for axis in stack.axes if axis[2] < remote_page)
    outer = [axis for axis in stack.axes if axis[2] >= remote_page]
    columns = (stack.local_region, stack.local_offset, stack.remote_region, stack.remote_offset)
    for local_region, local, remote_region, remote in zip(*(column.tolist() for column in columns), strict=True):
        for indices in product(*(range(n) for n, _, _ in outer)):
            ours = local + sum(index * step for index, (_, step, _) in zip(indices, outer, strict=True))
            theirs = remote + sum(index * step for index, (_, _, step) in zip(indices, outer, strict=True))
            yield _StridedCopy(stack, inner, local_region, ours, remote_region, theirs)


def _segments(copies: Sequence[_StridedCopy], page_size: int, *, single: bool) -> tuple[list[_Segment], list[int]]:
    """Returns the segments of a remote page that hold all `copies`, and the index of the segment of each copy.

    `copies` must be sorted. A gap between two copies is pulled too if pulling the gap costs less than a separate run.
    No segment is longer than a page, because the bytes of the next page would then be pulled twice.
    """
    worth = int(_RUN_US * _WIRE_GBPS * 1e3)
    found: list[_Segment] = []
    segment_of: list[int] = []
    for copy in copies:
        page, end = copy.stack.remote_page, copy.remote_end(page_size)
        last = found[-1] if found else None
        if (
            last is not None
            and (last.region, last.remote_page) == (copy.remote_region, page)
            and copy.remote_offset <= last.offset + last.length + worth
            and (single or max(last.length, end - last.offset) <= page)
        ):
            found[-1] = last._replace(length=max(last.length, end - last.offset))
        else:
            found.append(_Segment(copy.remote_region, copy.remote_offset, end - copy.remote_offset, page, 0))
        segment_of.append(len(found) - 1)
    # A segment that is a whole page is staged without gaps, so that neighbouring remote pages arrive as one run.
    return [
        one._replace(staged_page=one.length if one.length == one.remote_page else _lines(one.length)) for one in found
    ], segment_of


def _evenly(indices: Ints) -> slice:
    """Returns evenly spaced indices as a slice."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1, max(1, (last - first) // max(1, len(indices) - 1)))


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
