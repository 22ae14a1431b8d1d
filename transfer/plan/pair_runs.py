"""From strided boxes to the runs of one pair of pages. Made once; a pull adds its pages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from transfer.plan.intersection import Ints, Stack, merged
from transfer.plan.runs import Part

_LOCAL_REGION, _LOCAL, _REMOTE_REGION, _REMOTE, _LOCAL_PAGE, _REMOTE_PAGE, _LENGTH = range(7)
"""Rows of a table of runs: the fields of `Part`, in another order."""


def template(stacks: Iterable[Stack], local_token: int, remote_token: int, num_tokens: int) -> tuple[Part, ...]:
    """The fewest runs of a pair of pages: `num_tokens`, from `local_token` and `remote_token` of their page on."""
    tables = [_expanded(stack, local_token, remote_token, num_tokens) for stack in stacks]
    if not tables:
        return ()
    table = _joined(np.concatenate(tables, axis=1))
    chains = (table[_LENGTH] == table[_LOCAL_PAGE]) & (table[_LENGTH] == table[_REMOTE_PAGE])
    keys = np.stack([table[_LOCAL_PAGE], table[_REMOTE_PAGE], chains])
    alike: dict[tuple[int, ...], list[int]] = {}
    for run, key in enumerate(zip(*keys.tolist(), strict=True)):
        alike.setdefault(key, []).append(run)
    return tuple(_part(table if len(alike) == 1 else table[:, runs], bool(key[2])) for key, runs in alike.items())


def token_template(stack: Stack) -> Part:
    """The runs of a pair of pages for their first token, which go on with the next ones."""
    return _part(_expanded(stack, 0, 0, 1), chains=False)


def _part(table: Ints, chains: bool) -> Part:
    return Part(
        local_region=table[_LOCAL_REGION],
        local_offset=table[_LOCAL],
        remote_region=table[_REMOTE_REGION],
        remote_offset=table[_REMOTE],
        length=table[_LENGTH],
        local_page=int(table[_LOCAL_PAGE, 0]),
        remote_page=int(table[_REMOTE_PAGE, 0]),
        chains=chains,
    )


def _expanded(stack: Stack, local_token: int, remote_token: int, num_tokens: int) -> Ints:
    """int64 `[7, runs]`: each pair of boxes in runs."""
    local_step, remote_step = stack.token
    axes = [*stack.axes, (num_tokens, local_step, remote_step)] if num_tokens > 1 else stack.axes
    run, left = merged(stack.itemsize, axes)
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


_PLACE = [_LOCAL_REGION, _REMOTE_REGION, _LOCAL_PAGE, _REMOTE_PAGE]


def _joined(table: Ints) -> Ints:
    """Joins runs that abut on both sides in every pair of pages; sorted by local region and offset."""
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
