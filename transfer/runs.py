"""From strided boxes to runs of bytes. A template holds the runs of one pair of pages; a pull adds the pages to it.

Everything is numpy over whole batches: nothing here loops over pages or runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transfer.stacks import Ints, Stack, merged

_BOTH_STEP = (1 << 32) + 1


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of bytes to copy. No two write the same byte.

    They are the fewest that a pair of pages takes, and those of neighbouring pages are joined where a region's page is
    one run. (Where it is several, the last one of a page may meet the first of the next. Joining these would save one
    run of a page's many, and cost a sort over all.)

    Attributes:
        local: int64 `[runs]`, absolute address of each run on the reader's side.
        remote: int64 `[runs]`, on the other side.
        length: int64 `[runs]`, bytes.
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
        """The local and the remote side as NIXL takes them: uint64 `[runs, 3]` of address, bytes, device."""
        return self._rows(self.local, local_device), self._rows(self.remote, remote_device)

    def _rows(self, address: Ints, device: int) -> NDArray[np.uint64]:
        rows = np.empty((len(address), 3), np.uint64)
        rows[:, 0] = address
        rows[:, 1] = self.length
        rows[:, 2] = device
        return rows


def no_runs() -> Runs:
    """Nothing to copy."""
    none = np.empty(0, np.int64)
    return Runs(none, none, none)


def concatenated(parts: Sequence[Runs]) -> Runs:
    """All of `parts`, one after another."""
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
    """The same bytes in the fewest runs, sorted by local address."""
    order = np.argsort(runs.local, kind="stable")  # timsort: what comes here is a few sorted stretches
    local, remote, length = runs.local[order], runs.remote[order], runs.length[order]
    meets = (local[:-1] + length[:-1] == local[1:]) & (remote[:-1] + length[:-1] == remote[1:])
    starts = np.flatnonzero(np.concatenate(([True], ~meets)))
    return Runs(local[starts], remote[starts], np.add.reduceat(length, starts))


@dataclass(frozen=True, slots=True)
class Part:
    """The runs of one pair of pages that share their page strides.

    Attributes:
        local_region: int64 `[runs]`.
        local_offset: int64 `[runs]`, bytes from the region's start for page 0.
        remote_region: int64 `[runs]`.
        remote_offset: int64 `[runs]`.
        length: int64 `[runs]`.
        local_page: bytes between neighbouring pages on the local side.
        remote_page: bytes between neighbouring pages on the remote side.
        chains: each run fills its page on both sides, so those of neighbouring pages join.
    """

    local_region: Ints
    local_offset: Ints
    remote_region: Ints
    remote_offset: Ints
    length: Ints
    local_page: int
    remote_page: int
    chains: bool

    def runs(self, pages: PagePairs, local_bases: Ints, remote_bases: Ints) -> Runs:
        """The runs of all pairs of pages."""
        local_pages, remote_pages, counts = pages.chained if self.chains else pages.single
        local = local_bases[self.local_region] + self.local_offset
        remote = remote_bases[self.remote_region] + self.remote_offset
        shape = (len(local), len(local_pages))
        length = self.length[:, None]
        return Runs(
            np.add.outer(local, local_pages * self.local_page).reshape(-1),
            np.add.outer(remote, remote_pages * self.remote_page).reshape(-1),
            (np.broadcast_to(length, shape) if counts is None else length * counts).reshape(-1),
        )


class PagePairs:
    """Pages of both sides, paired, sorted by the local one."""

    __slots__ = ("_keys", "single")

    def __init__(self, local: Ints, remote: Ints) -> None:
        # Both ids in one number: one sort carries both along, and a difference of one value means that both step by 1.
        keys = (local << 32) | remote
        if len(keys) > 1 and (keys[1:] - keys[:-1]).min() < 0:
            keys.sort()
            local, remote = keys >> 32, keys & 0xFFFFFFFF
        self._keys = keys
        self.single: tuple[Ints, Ints, Ints | None] = (local, remote, None)

    @property
    def chained(self) -> tuple[Ints, Ints, Ints | None]:
        """First local and remote page of each stretch of neighbours, and how many pages it has."""
        breaks = np.flatnonzero(self._keys[1:] - self._keys[:-1] != _BOTH_STEP) + 1
        if len(breaks) == len(self._keys) - 1:
            return self.single
        starts = np.concatenate(([0], breaks))
        local, remote, _ = self.single
        return local[starts], remote[starts], np.diff(starts, append=len(self._keys))


def template(stacks: Iterable[Stack], local_token: int, remote_token: int, count: int) -> tuple[Part, ...]:
    """The runs of one pair of pages: `count` tokens, from `local_token` and `remote_token` of their page on."""
    table = np.concatenate([_expanded(stack, local_token, remote_token, count) for stack in stacks], axis=1)
    table = _join_rows(table)
    local_page, remote_page, length = table[_LOCAL_PAGE], table[_REMOTE_PAGE], table[_LENGTH]
    chains = (length == local_page) & (length == remote_page)
    parts: list[Part] = []
    for key in sorted({*zip(local_page.tolist(), remote_page.tolist(), chains.tolist(), strict=True)}):
        of_part = (local_page == key[0]) & (remote_page == key[1]) & (chains == key[2])
        rows = table[:, of_part]
        parts.append(Part(rows[0], rows[1], rows[2], rows[3], rows[_LENGTH], *key))
    return tuple(parts)


_LOCAL_PAGE, _REMOTE_PAGE, _LENGTH = 4, 5, 6


def _expanded(stack: Stack, local_token: int, remote_token: int, count: int) -> Ints:
    """int64 `[7, runs]`: region and offset of both sides, page strides, bytes."""
    local_step, remote_step = stack.token
    axes = [*stack.axes, (count, local_step, remote_step)] if count > 1 else stack.axes
    run, left = merged(stack.itemsize, axes)
    local = stack.local_offset + local_token * local_step
    remote = stack.remote_offset + remote_token * remote_step
    for extent, local_stride, remote_stride in left:
        steps = np.arange(extent, dtype=np.int64)
        local = np.add.outer(local, steps * local_stride).reshape(-1)
        remote = np.add.outer(remote, steps * remote_stride).reshape(-1)
    each = len(local) // len(stack.local_offset)
    table = np.empty((7, len(local)), np.int64)
    table[0], table[1] = np.repeat(stack.local_region, each), local
    table[2], table[3] = np.repeat(stack.remote_region, each), remote
    table[_LOCAL_PAGE], table[_REMOTE_PAGE], table[_LENGTH] = stack.local_page, stack.remote_page, run
    return table


def _join_rows(table: Ints) -> Ints:
    """Joins what abuts on both sides of every pair of pages, sorted by local region and offset."""
    table = table[:, np.lexsort((table[1], table[0]))]
    before, after = table[:, :-1], table[:, 1:]
    same = (before[[0, 2, _LOCAL_PAGE, _REMOTE_PAGE]] == after[[0, 2, _LOCAL_PAGE, _REMOTE_PAGE]]).all(axis=0)
    meets = same & (before[[1, 3]] + before[_LENGTH] == after[[1, 3]]).all(axis=0)
    starts = np.flatnonzero(np.concatenate(([True], ~meets)))
    length = np.add.reduceat(table[_LENGTH], starts)
    table = table[:, starts]
    table[_LENGTH] = length
    return table
