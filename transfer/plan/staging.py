"""Pulling whole remote pages into a staging area and moving their elements home from there.

For layouts whose runs are too short for the wire: between tokens-first and heads-first pages a run is one head of one
token, a few hundred bytes, and each costs a system call. The pages arrive as they lie on the remote side, and numpy
copies with strides then do the rest. Host memory only. Which way is cheaper is estimated from measured costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from transfer.errors import InvalidTransferError
from transfer.plan.group_plan import GroupPlan, Pieces, cut
from transfer.plan.intersection import Axis, Ints, Stack, merged
from transfer.plan.runs import PagePairs, Part, Runs, concatenated, no_runs

Bytes: TypeAlias = NDArray[np.uint8]


class Costs(NamedTuple):
    """What a transfer costs, for the choice between direct runs and staging.

    The defaults are those of NIXL between two processes of one host, as `python -m benchmarks.plan` fits them, rounded
    (three runs on a busy machine gave 2.6 to 2.8 µs, 8.7 to 10.4 GB/s, 3.1 to 3.8 ns, 9.2 to 12.2 GB/s). So a
    run of less than some 28 KB costs more on the wire than its bytes cost in a copy.

    Attributes:
        run_us: microseconds of one run on the wire, whatever its length: a system call.
        wire_gbps: bytes on the wire, GB/s.
        copy_run_ns: nanoseconds of one run in a strided copy.
        copy_gbps: bytes in a strided copy, GB/s.
    """

    run_us: float = 2.6
    wire_gbps: float = 10.0
    copy_run_ns: float = 3.5
    copy_gbps: float = 11.0

    def wire_us(self, runs: int, num_bytes: int) -> float:
        """Microseconds of `runs` on the wire."""
        return runs * self.run_us + num_bytes / self.wire_gbps / 1e3

    def copy_us(self, runs: int, num_bytes: int) -> float:
        """Microseconds of a strided copy."""
        return (runs * self.copy_run_ns + num_bytes / self.copy_gbps) / 1e3


ONE_HOST = Costs()
_LINE = 64  # bytes of a cache line: where each span of the staging area begins
_NEVER = 1 << 63  # stride of the pages of a pool that has one


class _Span(NamedTuple):
    """Bytes that are pulled of each remote page in one piece."""

    region: int
    offset: int
    length: int
    remote_page: int
    staged_page: int


class _Atom(NamedTuple):
    """A pair of boxes, or a slice of it, that lies in one span on the remote side; offsets are of page 0."""

    stack: Stack
    inner: tuple[Axis, ...]
    local_region: int
    local_offset: int
    remote_region: int
    remote_offset: int

    def span(self, page_size: int) -> int:
        """Bytes from its first element of a remote page to the end of its last one."""
        steps = sum((n - 1) * step for n, _, step in self.inner) + (page_size - 1) * self.stack.token[1]
        return steps + self.stack.itemsize


MAX_COPIES = 1 << 14
"""Strided copies of one pull. A tensor for each layer, with K and V apart and heads outside of pages, takes thousands;
only a layout that scatters its elements takes more."""


def copies_of(plan: GroupPlan) -> int:
    """The strided copies that staging a group takes for pages that lie alike."""
    pages = [_NEVER if plan.remote.num_pages == 1 else stack.remote_page for stack in plan.stacks]
    outer = [[n for n, _, step in stack.axes if step >= page] for stack, page in zip(plan.stacks, pages, strict=True)]
    return sum(len(stack.local_region) * prod(steps) for stack, steps in zip(plan.stacks, outer, strict=True))


class Staging:
    """One group of a plan, staged. Made by `Plan.staging`.

    The staging area holds, for each span, that span of every remote page of the pull, in the order of the request.

    Raises:
        InvalidTransferError: the remote layout scatters its elements so that more than `MAX_COPIES` are needed.
    """

    def __init__(self, plan: GroupPlan) -> None:
        self._plan = plan
        if (copies := copies_of(plan)) > MAX_COPIES:
            raise InvalidTransferError(f"{plan.where}: staging takes {copies} copies, at most {MAX_COPIES} are made")
        single = plan.remote.num_pages == 1
        self._atoms = [atom for stack in plan.stacks for atom in _atoms(stack, _NEVER if single else stack.remote_page)]
        self._atoms.sort(key=lambda atom: (atom.remote_region, atom.stack.remote_page, atom.remote_offset))
        self._spans, self._span_of = _spans(self._atoms, plan.remote.page_size, single=single)
        self._parts = _parts(self._spans)

    def num_bytes(self, tokens: tuple[int, int]) -> int:
        """Bytes of the staging area that a pull of `tokens` needs."""
        return self._layout(self._num_pages(self._plan.tokens(tokens)))[1]

    def runs(
        self,
        remote_pages: ArrayLike,
        tokens: tuple[int, int],
        staging_base: int,
        remote_bases: ArrayLike,
    ) -> Runs:
        """The runs that bring the remote pages of `tokens` to the staging area.

        Args:
            remote_pages: as for `Plan.runs`.
            tokens: as for `Plan.runs`.
            staging_base: address of the staging area, of `num_bytes(tokens)` at the least.
            remote_bases: address of each remote region.

        Raises:
            InvalidTransferError: as `Plan.runs`.
        """
        tokens = self._plan.tokens(tokens)
        if tokens[0] == tokens[1]:
            return no_runs()
        pages = self._plan.remote_pages(remote_pages, tokens)
        starts, _ = self._layout(len(pages))
        pairs = PagePairs(np.arange(len(pages), dtype=np.int64), pages)
        local, remote = starts + staging_base, np.asarray(remote_bases, np.int64)
        return concatenated([part.over(pairs, local, remote) for part in self._parts])

    def permute(
        self, local_pages: ArrayLike, tokens: tuple[int, int], staging: Bytes, regions: Sequence[Bytes]
    ) -> None:
        """Moves what `runs` brought to its places in the local pages: the same elements that direct runs write.

        Args:
            local_pages: as for `Plan.runs`.
            tokens: as for `runs`.
            staging: uint8 `[num_bytes(tokens)]` or longer, contiguous.
            regions: uint8 over each local region, contiguous.

        Raises:
            InvalidTransferError: as `Plan.runs`, or the staging area or a region is too small.
        """
        tokens = self._plan.tokens(tokens)
        if tokens[0] == tokens[1]:
            return
        pages = self._plan.local_pages(local_pages, tokens)
        self._plan.refuse_repeated(PagePairs(pages, pages))
        starts, needed = self._layout(self._num_pages(tokens))
        if staging.nbytes < needed:
            raise InvalidTransferError(
                f"{self._plan.where}: a staging area of {staging.nbytes} bytes, {needed} are needed"
            )
        copies: list[tuple[NDArray[np.void], Ints, NDArray[np.void], slice]] = []
        for kind in cut(tokens, self._plan.local.page_size, self._plan.remote.page_size):
            taken, local = _evenly(kind.remote), pages[kind.local]
            for atom, number in zip(self._atoms, self._span_of, strict=True):
                span = self._spans[number]
                at = int(starts[number]) + atom.remote_offset - span.offset
                ours, theirs = self._views(atom, kind, regions, staging, at, span.staged_page)
                copies.append((ours, local, theirs, taken))
        for ours, local, theirs, taken in copies:  # nothing is written before all is known to fit
            ours[local] = theirs[taken]

    def _views(
        self, atom: _Atom, kind: Pieces, regions: Sequence[Bytes], staging: Bytes, at: int, staged_page: int
    ) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """The same elements of all local and of all staged pages, in runs."""
        local_step, remote_step = atom.stack.token
        axes = [*atom.inner, (kind.num_tokens, local_step, remote_step)] if kind.num_tokens > 1 else atom.inner
        run, left = merged(atom.stack.itemsize, axes)
        sizes = [n for n, _, _ in left]
        dtype = np.dtype(f"u{run}" if run in (1, 2, 4, 8) else f"V{run}")
        ours = (self._plan.local.num_pages, *sizes), (atom.stack.local_page, *(step for _, step, _ in left))
        theirs = (int(kind.remote[-1]) + 1, *sizes), (staged_page, *(step for _, _, step in left))
        offset = atom.local_offset + kind.local_token * local_step
        at += kind.remote_token * remote_step
        # numpy checks that the views lie within the memory.
        try:
            return (
                np.ndarray(ours[0], dtype, regions[atom.local_region], offset, ours[1]),
                np.ndarray(theirs[0], dtype, staging, at, theirs[1]),
            )
        except (IndexError, TypeError, ValueError) as error:
            raise InvalidTransferError(
                f"{self._plan.where}: local region {atom.local_region} is not as its layout says: {error}"
            ) from error

    def _num_pages(self, tokens: tuple[int, int]) -> int:
        size = self._plan.remote.page_size
        return 0 if tokens[0] == tokens[1] else -(-tokens[1] // size) - tokens[0] // size

    def _layout(self, num_pages: int) -> tuple[Ints, int]:
        """Where each span begins in the staging area, and how long that is."""
        sizes = np.array([_lines(span.staged_page * num_pages) for span in self._spans], np.int64)
        return np.cumsum(sizes) - sizes, int(sizes.sum())

    def size(self, tokens: tuple[int, int]) -> tuple[int, int]:
        """Runs, where no two pages are neighbours, and bytes on the wire for `tokens`, rounded."""
        pages = self._num_pages(tokens)
        return pages * len(self._spans), pages * sum(span.length for span in self._spans)


def _atoms(stack: Stack, remote_page: int) -> list[_Atom]:
    """The pairs of boxes of a stack; cut further along axes that step over whole remote pages (K and V apart)."""
    inner = tuple(axis for axis in stack.axes if axis[2] < remote_page)
    outer = [axis for axis in stack.axes if axis[2] >= remote_page]
    found: list[_Atom] = []
    columns = (stack.local_region, stack.local_offset, stack.remote_region, stack.remote_offset)
    for local_region, local, remote_region, remote in zip(*(column.tolist() for column in columns), strict=True):
        for place in product(*(range(n) for n, _, _ in outer)):
            steps = list(zip(place, outer, strict=True))
            found.append(
                _Atom(
                    stack,
                    inner,
                    local_region,
                    local + sum(index * axis[1] for index, axis in steps),
                    remote_region,
                    remote + sum(index * axis[2] for index, axis in steps),
                )
            )
    return found


def _spans(atoms: Sequence[_Atom], page_size: int, *, single: bool) -> tuple[list[_Span], list[int]]:
    """Spans of a remote page that hold all of `atoms`, sorted, and the span of each.

    A gap between two atoms is pulled along where that costs less than a run of its own; but no span is longer than a
    page, for the bytes of the next page would be pulled twice.
    """
    worth = int(ONE_HOST.run_us * ONE_HOST.wire_gbps * 1e3)
    spans: list[_Span] = []
    span_of: list[int] = []
    for atom in atoms:
        page = atom.stack.remote_page
        end = atom.remote_offset + atom.span(page_size)
        last = spans[-1] if spans else None
        if last is not None and (last.region, last.remote_page) == (atom.remote_region, page):
            length = max(last.length, end - last.offset)
            if atom.remote_offset <= last.offset + last.length + worth and (single or length <= page):
                spans[-1] = last._replace(length=length)
                span_of.append(len(spans) - 1)
                continue
        spans.append(_Span(atom.remote_region, atom.remote_offset, end - atom.remote_offset, page, 0))
        span_of.append(len(spans) - 1)
    # A span that is a whole page is staged without gaps, so that neighbouring remote pages arrive as one run.
    whole = [span.length == span.remote_page for span in spans]
    staged = [span.length if full else _lines(span.length) for span, full in zip(spans, whole, strict=True)]
    return [span._replace(staged_page=page) for span, page in zip(spans, staged, strict=True)], span_of


def _parts(spans: Sequence[_Span]) -> list[Part]:
    """The spans as runs of a page; each is a local region of its own."""
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for number, span in enumerate(spans):
        chains = span.length == span.remote_page == span.staged_page
        alike.setdefault((span.staged_page, span.remote_page, chains), []).append(number)
    return [
        Part(
            local_region=np.array(numbers, np.int64),
            local_offset=np.zeros(len(numbers), np.int64),
            remote_region=np.array([spans[number].region for number in numbers], np.int64),
            remote_offset=np.array([spans[number].offset for number in numbers], np.int64),
            length=np.array([spans[number].length for number in numbers], np.int64),
            local_page=staged_page,
            remote_page=remote_page,
            chains=chains,
        )
        for (staged_page, remote_page, chains), numbers in alike.items()
    ]


def _evenly(places: Ints) -> slice:
    """Evenly spaced indices as a slice."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1, max(1, (last - first) // max(1, len(places) - 1)))


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
