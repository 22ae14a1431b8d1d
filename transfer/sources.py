"""From which shards of a peer a shard reads what: each element once, and no more shards than are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer.boxes import Box, Group, Index, ShardLayout, sub_box
from transfer.errors import MetadataError

_NOBODY = -1
Cells: TypeAlias = tuple[slice, ...]
"""A box of cells: a slice of each axis."""


def sources(local: ShardLayout, remotes: Sequence[ShardLayout], local_rank: int) -> list[tuple[int, ShardLayout]]:
    """The remote shards to read from, and the part of `local` that each of them fills.

    What one remote shard alone holds is read from it. What several hold (replicated heads, latents) is read from one of
    those that are read from anyway, else from any of them; the reader's rank picks, so that the readers spread.

    Args:
        local: the reader's layout.
        remotes: the layout of every rank of the peer, over all its pipeline stages. All must have passed
            `transfer.boxes.check`.
        local_rank: the reader's rank.

    Returns:
        Pairs of an index into `remotes`, ascending, and `local` with its boxes cut to what that shard fills: the
        parts are disjoint, and together they are `local`.

    Raises:
        MetadataError: an element that no remote shard holds, naming its group, kind, layer and head; or a remote shard
            with another number of groups.
    """
    for number, remote in enumerate(remotes):
        if len(remote.groups) != len(local.groups):
            raise MetadataError(
                f"remote shard {number} has {len(remote.groups)} groups, the local one has {len(local.groups)}"
            )
    grids = {
        (place, kind): _Grid(f"group {place}", kind, group, [remote.groups[place] for remote in remotes])
        for place, group in enumerate(local.groups)
        for kind in {box.kind: None for box in group.boxes}
    }
    used = np.zeros(len(remotes), np.bool_)
    for forced in (True, False):
        for grid in grids.values():
            grid.choose(used, local_rank, forced=forced)
    parts: dict[int, list[list[Box]]] = {}
    for place, group in enumerate(local.groups):
        for box in group.boxes:
            for owner, part in grids[place, box.kind].parts(box):
                parts.setdefault(owner, [[] for _ in local.groups])[place].append(part)
    return [(owner, _with_boxes(local, parts[owner])) for owner in sorted(parts)]


def _with_boxes(layout: ShardLayout, boxes: list[list[Box]]) -> ShardLayout:
    groups = tuple(
        msgspec.structs.replace(group, boxes=tuple(kept)) for group, kept in zip(layout.groups, boxes, strict=True)
    )
    return msgspec.structs.replace(layout, groups=groups)


class _Grid:
    """The elements of one kind of one group, in cells: no box of any shard ends within a cell."""

    def __init__(self, where: str, kind: str, local: Group, remotes: Sequence[Group]) -> None:
        ours = [box for box in local.boxes if box.kind == kind]
        theirs = [[box for box in remote.boxes if box.kind == kind] for remote in remotes]
        ends = np.array([end for boxes in (ours, *theirs) for box in boxes for end in (box.first, box.end)])
        self.cuts = [np.unique(ends[:, axis]) for axis in range(4)]
        shape = tuple(len(cuts) - 1 for cuts in self.cuts)
        needed = np.zeros(shape, np.bool_)
        for box in ours:
            needed[self.cells(box)] = True
        holders = np.zeros((*shape, len(remotes)), np.bool_)
        for number, boxes in enumerate(theirs):
            for box in boxes:
                holders[(*self.cells(box), number)] = True
        missing = np.argwhere(needed & ~holders.any(axis=-1))
        if len(missing):
            layer, side, head, dim = (int(cuts[at]) for cuts, at in zip(self.cuts, missing[0], strict=True))
            raise MetadataError(
                f"{where}, {kind!r}: no remote shard holds layer {layer}, head {head} (side {side}, dim {dim})"
            )
        self.needed = needed
        self.holders = holders
        self.owner = np.full(shape, _NOBODY, np.int64)

    def cells(self, box: Box) -> Cells:
        """The cells of a box."""
        found = [np.searchsorted(cuts, ends) for cuts, *ends in zip(self.cuts, box.first, box.end, strict=True)]
        return tuple(slice(int(first), int(end)) for first, end in found)

    def choose(self, used: NDArray[np.bool_], local_rank: int, *, forced: bool) -> None:
        """Gives an owner to the cells that only one shard holds (`forced`), or to the others; marks it in `used`."""
        count = self.holders.sum(axis=-1)
        todo = self.needed & ((count == 1) if forced else (count > 1))
        # Few sets of holders occur: one for each replicated head at the most.
        rows = self.holders[todo]
        owners = np.empty(len(rows), np.int64)
        sets, inverse = np.unique(rows, axis=0, return_inverse=True)
        for number, held in enumerate(sets):
            among = np.flatnonzero(held & used) if (held & used).any() else np.flatnonzero(held)
            chosen = int(among[local_rank % len(among)])
            used[chosen] = True
            owners[inverse.reshape(-1) == number] = chosen
        self.owner[todo] = owners

    def parts(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The parts of a local box, each with its owner; as few as straight cuts allow."""
        for cells in _uniform(self.owner, self.cells(box)):
            first = [int(cuts[axis.start]) for cuts, axis in zip(self.cuts, cells, strict=True)]
            end = [int(cuts[axis.stop]) for cuts, axis in zip(self.cuts, cells, strict=True)]
            owner = int(self.owner[tuple(axis.start for axis in cells)])
            yield owner, sub_box(box, _index(first), _index(end))


def _index(values: Sequence[int]) -> Index:
    layer, side, head, dim = values
    return (layer, side, head, dim)


def _uniform(owner: NDArray[np.int64], cells: Cells) -> Iterator[Cells]:
    """Cuts `cells` into boxes of one owner each."""
    inside = owner[cells]
    for axis in range(inside.ndim):
        along = np.moveaxis(inside, axis, 0).reshape(inside.shape[axis], -1)
        changes = np.flatnonzero((along[1:] != along[:-1]).any(axis=1)) + 1
        if len(changes):
            start = cells[axis].start
            ends = [start, *(start + changes).tolist(), cells[axis].stop]
            for first, end in pairwise(ends):
                yield from _uniform(owner, (*cells[:axis], slice(first, end), *cells[axis + 1 :]))
            return
    yield cells
