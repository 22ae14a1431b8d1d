"""What two sets of boxes have in common: pairs of strided boxes, stacked where only their starts differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transfer.errors import MetadataError
from transfer.plan.boxes import DIM, TOKEN, Box

Ints: TypeAlias = NDArray[np.int64]
Axis: TypeAlias = tuple[int, int, int]
"""Elements, then bytes between neighbours on the local and on the remote side."""

_FOUR = [0, 1, 2, DIM]
"""The axes without the token, whose range comes with each pull."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Pairs of boxes that differ only in where they start, each cut to what both sides hold.

    Attributes:
        local_region: int64 `[pairs]`.
        local_offset: int64 `[pairs]`, bytes from the region's start to the first common element of page 0.
        remote_region: int64 `[pairs]`.
        remote_offset: int64 `[pairs]`.
        itemsize: bytes of an element.
        axes: layer, side, head and dim, those with more than one common element.
        token: bytes between neighbouring tokens, local and remote.
        local_page: bytes between neighbouring pages on the local side.
        remote_page: bytes between neighbouring pages on the remote side.
    """

    local_region: Ints
    local_offset: Ints
    remote_region: Ints
    remote_offset: Ints
    itemsize: int
    axes: tuple[Axis, ...]
    token: tuple[int, int]
    local_page: int
    remote_page: int

    def flows(self, local_page_size: int, remote_page_size: int) -> bool:
        """Whether runs can go on from one piece of a page to the next: tokens, then pages, abut on a side."""
        run, _ = merged(self.itemsize, self.axes)
        local_token, remote_token = self.token
        return run == local_token == remote_token and (
            self.local_page == local_token * local_page_size or self.remote_page == remote_token * remote_page_size
        )


def merged(itemsize: int, axes: Iterable[Axis]) -> tuple[int, list[Axis]]:
    """The bytes that are contiguous on both sides, and the axes that are left, largest local stride first."""
    run, left = itemsize, sorted(axes, key=lambda axis: (axis[1], axis[2]))
    while True:
        found = next((axis for axis in left if axis[1] == run and axis[2] == run), None)
        if found is None:
            return run, left[::-1]
        left.remove(found)
        run *= found[0]


class _Table(NamedTuple):
    """Boxes as arrays; `first` and `end` without the token axis."""

    kind: Ints
    first: Ints
    end: Ints
    region: Ints
    offset: Ints
    page: Ints
    strides: Ints


def _table(boxes: Sequence[Box], kinds: dict[str, int]) -> _Table:
    strides = np.array([box.strides for box in boxes], np.int64)
    page = np.array([box.page_stride for box in boxes], np.int64)
    # Where a page holds one token, the next token is the next page.
    one_token = np.array([box.extent[TOKEN] == 1 for box in boxes])
    strides[one_token, TOKEN] = page[one_token]
    return _Table(
        np.array([kinds.setdefault(box.kind, len(kinds)) for box in boxes], np.int64),
        np.array([box.first for box in boxes], np.int64),
        np.array([box.end for box in boxes], np.int64),
        np.array([box.region for box in boxes], np.int64),
        np.array([box.offset for box in boxes], np.int64),
        page,
        strides,
    )


def common(where: str, local: Sequence[Box], remote: Sequence[Box]) -> tuple[Stack, ...]:
    """Everything that a local and a remote box of one kind both hold; tokens left open.

    Raises:
        MetadataError: two boxes that meet differ in the type of their elements.
    """
    if not local or not remote:
        return ()
    kinds: dict[str, int] = {}
    ours, theirs = _table(local, kinds), _table(remote, kinds)
    meet = ours.kind[:, None] == theirs.kind[None]
    for axis in range(len(_FOUR)):
        meet &= ours.first[:, None, axis] < theirs.end[None, :, axis]
        meet &= theirs.first[None, :, axis] < ours.end[:, None, axis]
    mine, other = np.nonzero(meet)
    first = np.maximum(ours.first[mine], theirs.first[other])
    extent = np.minimum(ours.end[mine], theirs.end[other]) - first
    local_offset = ours.offset[mine] + _skipped(first - ours.first[mine], ours.strides[mine])
    remote_offset = theirs.offset[other] + _skipped(first - theirs.first[other], theirs.strides[other])
    pairs = zip(mine.tolist(), other.tolist(), strict=True)
    itemsize = np.array([_agreed_itemsize(where, local[i], remote[j]) for i, j in pairs], np.int64)
    alike: dict[tuple[int, ...], list[int]] = {}
    pages = np.stack([ours.page[mine], theirs.page[other], itemsize], axis=1)
    shapes = np.concatenate([extent, ours.strides[mine], theirs.strides[other], pages], axis=1)
    for row, shape in enumerate(shapes.tolist()):
        alike.setdefault(tuple(shape), []).append(row)
    return tuple(
        _stack(shape, ours.region[mine[rows]], local_offset[rows], theirs.region[other[rows]], remote_offset[rows])
        for shape, rows in alike.items()
    )


def _skipped(steps: Ints, strides: Ints) -> Ints:
    return (steps * strides[:, _FOUR]).sum(axis=1)


def _stack(
    shape: tuple[int, ...], local_region: Ints, local_offset: Ints, remote_region: Ints, remote_offset: Ints
) -> Stack:
    extent, local, remote, (local_page, remote_page, itemsize) = shape[:4], shape[4:9], shape[9:14], shape[14:]
    return Stack(
        local_region=local_region,
        local_offset=local_offset,
        remote_region=remote_region,
        remote_offset=remote_offset,
        itemsize=itemsize,
        axes=tuple((n, local[axis], remote[axis]) for n, axis in zip(extent, _FOUR, strict=True) if n > 1),
        token=(local[TOKEN], remote[TOKEN]),
        local_page=local_page,
        remote_page=remote_page,
    )


def _agreed_itemsize(where: str, local: Box, remote: Box) -> int:
    if (local.dtype, local.itemsize) != (remote.dtype, remote.itemsize):
        raise MetadataError(
            f"{where}, {local.kind!r}: elements of {local.dtype} ({local.itemsize} bytes) here, of {remote.dtype} "
            f"({remote.itemsize} bytes) there"
        )
    return local.itemsize
