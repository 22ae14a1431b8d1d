"""Computes runs of bytes. The runs of one page are computed once, from strided boxes, and repeated for all pages.

For each pull, numpy works on all pages at once. No Python code loops over pages or runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from transfer.plan.intersection import Ints, Stack, merged

LONGEST_RUN = 512 << 10
"""In bytes: longer runs are cut, so that a transfer can end early.

UCX copies this many bytes in one system call.
"""
_BOTH_STEP = (1 << 32) + 1
# In bytes: the largest block that raises glibc's threshold (see `keep_memory`), minus glibc's own overhead.
_LARGEST_BLOCK = (32 << 20) - (64 << 10)
_NEXT_LOCAL = 1 << 31
"""The least difference between two sorted keys of page pairs whose local pages differ."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of bytes to copy. No byte is written twice.

    Each pair of pages has as few runs as possible. If a page of a region is a single run, the runs of neighbouring
    pages are joined too. If a page has several runs, its last run may be adjacent to the first run of the next page.
    These two runs are not joined: joining them would save only one of many runs for each page, and would need a sort
    over all runs.

    Attributes:
        local: int64 `[runs]`, absolute address of each run in the reader's memory.
        remote: int64 `[runs]`, absolute address of each run in the source's memory.
        length: int64 `[runs]`, in bytes.

    Examples:
        >>> runs = Runs(np.array([0, 4096]), np.array([8192, 0]), np.array([4096, 1024]))
        >>> runs.num_bytes, len(runs.shortened(1024))
        (5120, 5)
    """

    local: Ints
    remote: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.length.sum())

    def descriptors(
        self, local_device: int = 0, remote_device: int = 0
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Returns the local and the remote descriptors for NIXL: uint64 `[runs, 3]` of address, bytes and device."""
        return self._rows(self.local, local_device), self._rows(self.remote, remote_device)

    def shortened(self, longest: int) -> Runs:
        """Returns the same bytes in runs of at most `longest` bytes."""
        if not len(self) or int(self.length.max()) <= longest:
            return self
        counts = -(-self.length // longest)
        skipped = (np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
        return Runs(
            np.repeat(self.local, counts) + skipped,
            np.repeat(self.remote, counts) + skipped,
            np.minimum(np.repeat(self.length, counts) - skipped, longest),
        )

    def _rows(self, address: Ints, device: int) -> NDArray[np.uint64]:
        rows = np.empty((len(address), 3), np.uint64)
        rows[:, 0] = address
        rows[:, 1] = self.length
        rows[:, 2] = device
        return rows


@cache
def keep_memory() -> None:
    """Makes the C library keep the freed memory of large arrays, up to 64 MiB, for reuse.

    Runs once, with the first plan.

    glibc maps each block above a threshold anew, and the page faults of 131,072 descriptors take ten times as long as
    their arithmetic (5.7 ms against 0.55 ms). It raises the threshold to the largest block that it has seen freed, up
    to 32 MiB. This function therefore allocates and frees one such block. The block is never touched, so this is
    quick. (`mallopt` would fix the threshold and turn off that adaptation for the whole program.)
    """
    np.empty(_LARGEST_BLOCK, np.uint8)


def no_runs() -> Runs:
    """Returns runs that copy nothing."""
    none = np.empty(0, np.int64)
    return Runs(none, none, none)


def concatenated(parts: Sequence[Runs]) -> Runs:
    """Returns all of `parts`, one after another."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return no_runs()
    return Runs(
        np.concatenate([part.local for part in parts]),
        np.concatenate([part.remote for part in parts]),
        np.concatenate([part.length for part in parts]),
    )


def joined(runs: Runs) -> Runs:
    """Returns the same bytes in the fewest runs, sorted by local address."""
    order = np.argsort(runs.local)
    local, remote, length = runs.local[order], runs.remote[order], runs.length[order]
    meets = (local[:-1] + length[:-1] == local[1:]) & (remote[:-1] + length[:-1] == remote[1:])
    starts = np.flatnonzero(np.concatenate(([True], ~meets)))
    return Runs(local[starts], remote[starts], np.add.reduceat(length, starts))


class PagePairs:
    """Pairs of a local page and a remote page, sorted by the local page.

    `repeated` is the id of a local page that is named twice, or None.
    """

    __slots__ = ("_local", "_remote", "_steps", "repeated")

    def __init__(self, local: Ints, remote: Ints) -> None:
        # Both page ids are packed into one number. A single sort then moves both, and a single difference shows whether
        # both increase by 1.
        keys = (local << 32) | remote
        steps = keys[1:] - keys[:-1]
        self.repeated: int | None = None
        if len(steps) and int(steps.min()) < _NEXT_LOCAL:
            keys.sort()
            local, remote = keys >> 32, keys & 0xFFFFFFFF
            steps = keys[1:] - keys[:-1]
            if int(steps.min()) < _NEXT_LOCAL:
                self.repeated = int(local[int(steps.argmin())])
        self._local, self._remote, self._steps = local, remote, steps

    def single(self) -> tuple[Ints, Ints, None]:
        """Returns the local page and the remote page of each pair. The third value is None: no chain was formed."""
        return self._local, self._remote, None

    def chained(self) -> tuple[Ints, Ints, Ints | None]:
        """Returns the first local and remote page of each chain of neighbours, and the length of each chain.

        The lengths are None if no two pairs are neighbours.
        """
        breaks = np.flatnonzero(self._steps != _BOTH_STEP) + 1
        if len(breaks) == len(self._steps):
            return self.single()
        starts = np.concatenate(([0], breaks))
        return self._local[starts], self._remote[starts], np.diff(starts, append=len(self._local))


@dataclass(frozen=True, slots=True)
class PageRuns:
    """Runs of a page that share their local and their remote page stride. Arrays are int64 `[runs]`, in bytes."""

    local_region: Ints
    local_offset: Ints  # bytes from the start of the region, in page 0
    remote_region: Ints
    remote_offset: Ints
    length: Ints
    local_page: int  # bytes from one page to the next
    remote_page: int
    chains: bool  # whether each run fills its page on both sides, so that runs of neighbouring pages can be joined

    def over(self, pages: PagePairs, local_bases: Ints, remote_bases: Ints) -> Runs:
        """Returns the runs that copy all of the page pairs."""
        local, remote, counts = pages.chained() if self.chains else pages.single()
        length = self.length[:, None] if counts is None else self.length[:, None] * counts
        return self.spread(local * self.local_page, remote * self.remote_page, length, local_bases, remote_bases)

    def spread(self, local: Ints, remote: Ints, length: Ints, local_bases: Ints, remote_bases: Ints) -> Runs:
        """Returns a copy of each run at each position. A position is a pair of a local and a remote offset.

        `local` and `remote` are the offsets of the positions in bytes from page 0, int64 `[positions]`. `length` must
        broadcast to `[runs, positions]`.
        """
        local = np.add.outer(local_bases[self.local_region] + self.local_offset, local)
        remote = np.add.outer(remote_bases[self.remote_region] + self.remote_offset, remote)
        return Runs(local.reshape(-1), remote.reshape(-1), np.broadcast_to(length, local.shape).reshape(-1))


_LOCAL_REGION, _LOCAL, _REMOTE_REGION, _REMOTE, _LENGTH, _LOCAL_PAGE, _REMOTE_PAGE = range(7)
"""The rows of a table of runs. They are the fields of `PageRuns`."""
_PLACE = [_LOCAL_REGION, _REMOTE_REGION, _LOCAL_PAGE, _REMOTE_PAGE]


def page_runs(stacks: Iterable[Stack], local_token: int, remote_token: int, num_tokens: int) -> tuple[PageRuns, ...]:
    """Returns the fewest runs that copy `num_tokens` tokens between two pages, from the given token of each page."""
    tables = [_expanded(stack, local_token, remote_token, num_tokens) for stack in stacks]
    return runs_of_table(_abutting_joined(np.concatenate(tables, axis=1))) if tables else ()


def runs_of_table(table: Ints) -> tuple[PageRuns, ...]:
    """Returns the runs of a table, grouped by their local and remote page strides.

    `table` is int64 `[7, runs]`, with the fields of `PageRuns` as rows.
    """
    chains = (table[_LENGTH] == table[_LOCAL_PAGE]) & (table[_LENGTH] == table[_REMOTE_PAGE])
    keys = np.stack([table[_LOCAL_PAGE], table[_REMOTE_PAGE], chains])
    alike: dict[tuple[int, ...], list[int]] = {}
    for run, key in enumerate(zip(*keys.tolist(), strict=True)):
        alike.setdefault(key, []).append(run)
    return tuple(_of_table(table if len(alike) == 1 else table[:, runs], bool(key[2])) for key, runs in alike.items())


def token_runs(stack: Stack) -> PageRuns:
    """Returns the runs that copy the first token of a pair of pages. Further tokens only lengthen these runs."""
    return _of_table(_expanded(stack, 0, 0, 1), chains=False)


def _of_table(table: Ints, chains: bool) -> PageRuns:
    local_region, local, remote_region, remote, length, local_page, remote_page = table
    return PageRuns(local_region, local, remote_region, remote, length, int(local_page[0]), int(remote_page[0]), chains)


def _expanded(stack: Stack, local_token: int, remote_token: int, num_tokens: int) -> Ints:
    """Returns the runs of all pairs of boxes in a stack, as a table for `runs_of_table`."""
    local_step, remote_step = stack.token
    run, left = merged(stack.itemsize, (*stack.axes, *stack.tokens(num_tokens)))
    local = stack.local_offset + local_token * local_step
    remote = stack.remote_offset + remote_token * remote_step
    for extent, local_stride, remote_stride in left:
        steps = np.arange(extent, dtype=np.int64)
        local = np.add.outer(local, steps * local_stride).reshape(-1)
        remote = np.add.outer(remote, steps * remote_stride).reshape(-1)
    each = len(local) // len(stack.local_offset)
    table = np.empty((7, len(local)), np.int64)
    table[_LOCAL_REGION], table[_LOCAL] = np.repeat(stack.local_region, each), local
    table[_REMOTE_REGION], table[_REMOTE] = np.repeat(stack.remote_region, each), remote
    table[_LOCAL_PAGE], table[_REMOTE_PAGE], table[_LENGTH] = stack.local_page, stack.remote_page, run
    return table


def _abutting_joined(table: Ints) -> Ints:
    """Joins runs that are adjacent on both sides in every pair of pages.

    Sorts the result by local region and offset.
    """
    table = table[:, np.lexsort((table[_LOCAL], table[_LOCAL_REGION]))]
    before, after = table[:, :-1], table[:, 1:]
    meets = (before[_PLACE] == after[_PLACE]).all(axis=0)
    meets &= before[_LOCAL] + before[_LENGTH] == after[_LOCAL]
    meets &= before[_REMOTE] + before[_LENGTH] == after[_REMOTE]
    starts = np.flatnonzero(np.concatenate(([True], ~meets)))
    length = np.add.reduceat(table[_LENGTH], starts)
    table = table[:, starts]
    table[_LENGTH] = length
    return table
