"""Intersects two sets of boxes. The result is pairs of strided boxes.

Pairs that differ only in where they start are combined into one `Stack`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from transfer.errors import MetadataError
from transfer.plan.boxes import DIM, TOKEN, Box

Ints: TypeAlias = NDArray[np.int64]
Axis: TypeAlias = tuple[int, int, int]
"""A number of elements, and the bytes between neighbours on the local and on the remote side."""

_FOUR = [0, 1, 2, DIM]
"""All axes except the token axis, whose range comes with each pull."""
# Columns of a table of boxes. `_FIRST` and `_END` have one column for each of four axes, and `_STRIDES` for each of
# five axes.
_KIND, _REGION, _OFFSET, _PAGE, _FIRST, _END, _STRIDES = 0, 1, 2, 3, slice(4, 8), slice(8, 12), slice(12, 17)


@dataclass(frozen=True, slots=True)
class Stack:
    """Pairs of boxes that differ only in where they start. Each box is cut to the elements that both sides hold.

    Attributes:
        local_region: for each pair, the index of the local region, int64 `[pairs]`. The next three fields have the same
            shape.
        local_offset: for each pair, the bytes from the region's start to the first common element of page 0.
        axes: those axes among layer, side, head and dim that have more than one common element.
        token: bytes between neighbouring tokens, local and remote; 0 if each element belongs to all tokens of a page.
        local_page: bytes from one local page to the next. `remote_page` has the bytes from one remote page to the next.
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

    def tokens(self, num_tokens: int) -> tuple[Axis, ...]:
        """Returns the token axis for `num_tokens` tokens of a page.

        Returns an empty tuple for one token, or if each element belongs to all tokens of a page.
        """
        return ((num_tokens, *self.token),) if num_tokens > 1 and any(self.token) else ()

    def flows(self, local_page_size: int, remote_page_size: int) -> bool:
        """Whether a run can continue from one piece of a pull into the next.

        There are three conditions. The common bytes of a token are contiguous. On both sides, the next token follows
        directly. On at least one side, the next page follows directly.
        """
        run, _ = merged(self.itemsize, self.axes)
        local_token, remote_token = self.token
        return run == local_token == remote_token and (
            self.local_page == local_token * local_page_size or self.remote_page == remote_token * remote_page_size
        )


def merged(itemsize: int, axes: Iterable[Axis]) -> tuple[int, list[Axis]]:
    """Returns the bytes that are contiguous on both sides, and the remaining axes, largest local stride first."""
    run, left = itemsize, sorted(axes, key=lambda axis: (axis[1], axis[2]))
    while True:
        found = next((axis for axis in left if axis[1] == run and axis[2] == run), None)
        if found is None:
            return run, left[::-1]
        left.remove(found)
        run *= found[0]


def common(where: str, local: Sequence[Box], remote: Sequence[Box]) -> tuple[Stack, ...]:
    """Returns everything that a local and a remote box of one kind have in common, for any range of tokens.

    Raises:
        MetadataError: two boxes overlap, and their elements have different types.
    """
    if not local or not remote:
        return ()
    kinds: dict[str, int] = {}
    ours, theirs = _table(local, kinds), _table(remote, kinds)
    meet = ours[:, None, _KIND] == theirs[None, :, _KIND]
    for axis in range(len(_FOUR)):
        first, end = _FIRST.start + axis, _END.start + axis
        meet &= (ours[:, None, first] < theirs[None, :, end]) & (theirs[None, :, first] < ours[:, None, end])
    mine, other = np.nonzero(meet)
    ours, theirs = ours[mine], theirs[other]
    first = np.maximum(ours[:, _FIRST], theirs[:, _FIRST])
    extent = np.minimum(ours[:, _END], theirs[:, _END]) - first
    local_offset, remote_offset = (
        side[:, _OFFSET] + ((first - side[:, _FIRST]) * side[:, _STRIDES][:, _FOUR]).sum(axis=1)
        for side in (ours, theirs)
    )
    pairs = zip(mine.tolist(), other.tolist(), strict=True)
    itemsize = np.array([_agreed_itemsize(where, local[i], remote[j]) for i, j in pairs], np.int64)
    alike: dict[tuple[int, ...], list[int]] = {}
    pages = np.stack([ours[:, _PAGE], theirs[:, _PAGE], itemsize], axis=1)
    shapes = np.concatenate([extent, ours[:, _STRIDES], theirs[:, _STRIDES], pages], axis=1)
    for row, shape in enumerate(shapes.tolist()):
        alike.setdefault(tuple(shape), []).append(row)
    found: list[Stack] = []
    for shape, rows in alike.items():
        extent, here, there, (local_page, remote_page, item) = shape[:4], shape[4:9], shape[9:14], shape[14:]
        axes = tuple((n, here[axis], there[axis]) for n, axis in zip(extent, _FOUR, strict=True) if n > 1)
        starts = ours[rows, _REGION], local_offset[rows], theirs[rows, _REGION], remote_offset[rows]
        found.append(Stack(*starts, item, axes, (here[TOKEN], there[TOKEN]), local_page, remote_page))
    return tuple(found)


def _table(boxes: Sequence[Box], kinds: dict[str, int]) -> Ints:
    """Returns int64 `[boxes, 17]`, with one row for each box."""
    rows = ((kinds.setdefault(box.kind, len(kinds)), box) for box in boxes)
    columns = [
        (kind, box.region, box.offset, box.page_stride, *box.first, *box.end, *box.strides) for kind, box in rows
    ]
    table = np.array(columns, np.int64)
    table[[box.of_page for box in boxes], _STRIDES.start + TOKEN] = 0
    # If a page holds only one token, the next token lies in the next page. The token stride is then the page stride.
    one_token = np.array([box.extent[TOKEN] == 1 and not box.of_page for box in boxes])
    table[one_token, _STRIDES.start + TOKEN] = table[one_token, _PAGE]
    return table


def _agreed_itemsize(where: str, local: Box, remote: Box) -> int:
    if (local.dtype, local.itemsize) != (remote.dtype, remote.itemsize):
        raise MetadataError(
            f"{where}, {local.kind!r}: the elements are {local.dtype} ({local.itemsize} bytes) here and {remote.dtype} "
            f"({remote.itemsize} bytes) at the source"
        )
    return local.itemsize
