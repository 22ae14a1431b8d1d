"""Chooses the remote shards that a shard reads from: each element is read once, from as few shards as possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer.errors import MetadataError
from transfer.plan.boxes import Box, Group, Index, ShardLayout, sub_box

_NOBODY = -1
# 128 layers of 64 heads on 64 ranks, with separate K and V, are a million cells; only a malicious peer has more
_MAX_CELLS = 1 << 24


def sources(local: ShardLayout, remotes: Sequence[ShardLayout], local_rank: int) -> list[tuple[int, ShardLayout]]:
    """Returns the remote shards to read from, and the part of `local` that each of them fills.

    Data that only one remote shard holds is read from that shard. Data that several shards hold (replicated heads,
    latents) is read from a shard that is needed anyway, if possible; otherwise from any of these shards. The choice
    depends on the reader's rank, so that readers spread over the shards. `remotes` are the checked layouts of all ranks
    of the peer, over all its pipeline stages.

    The result is pairs: an index into `remotes`, ascending, and a copy of `local` whose boxes are cut to the part that
    this shard fills. The parts are disjoint, and together they cover `local`.

    Raises:
        MetadataError: no remote shard holds an element (the message names its group, kind, layer and head), or a remote
            shard has another number of groups.
    """
    for number, remote in enumerate(remotes):
        if len(remote.groups) != len(local.groups):
            raise MetadataError(
                f"remote shard {number} has {len(remote.groups)} groups, this shard has {len(local.groups)}"
            )
    grids = {
        (number, kind): _Grid(f"group {number}", kind, group, [remote.groups[number] for remote in remotes])
        for number, group in enumerate(local.groups)
        for kind in {box.kind: None for box in group.boxes}
    }
    used = np.zeros(len(remotes), np.bool_)
    for forced in (True, False):
        for grid in grids.values():
            grid.choose(used, local_rank, forced=forced)
    parts: dict[int, list[list[Box]]] = {}
    for (number, kind), grid in grids.items():
        ours = (box for box in local.groups[number].boxes if box.kind == kind)
        for box, cut in zip(ours, grid.parts(), strict=True):
            for owner, first, end in cut:
                parts.setdefault(owner, [[] for _ in local.groups])[number].append(sub_box(box, first, end))
    return [(owner, _with_boxes(local, parts[owner])) for owner in sorted(parts)]


def _with_boxes(layout: ShardLayout, boxes: list[list[Box]]) -> ShardLayout:
    groups = [msgspec.structs.replace(group, boxes=(*of,)) for group, of in zip(layout.groups, boxes, strict=True)]
    return msgspec.structs.replace(layout, groups=tuple(groups))


class _Grid:
    """The elements of one kind of one group, divided into cells.

    Every box of every shard begins and ends at the edge of a cell.
    """

    def __init__(self, where: str, kind: str, local: Group, remotes: Sequence[Group]) -> None:
        held = [[box for box in group.boxes if box.kind == kind] for group in (local, *remotes)]
        boxes = [box for shard in held for box in shard]
        shard = np.repeat(np.arange(len(held)), [len(boxes) for boxes in held]).tolist()
        first = np.array([box.first for box in boxes], np.int64)
        end = np.array([box.end for box in boxes], np.int64)
        self.cuts = [np.unique(np.concatenate([first[:, axis], end[:, axis]])) for axis in range(4)]
        self._ends: list[list[int]] = [cuts.tolist() for cuts in self.cuts]
        start = np.stack([np.searchsorted(cuts, first[:, axis]) for axis, cuts in enumerate(self.cuts)], axis=1)
        stop = np.stack([np.searchsorted(cuts, end[:, axis]) for axis, cuts in enumerate(self.cuts)], axis=1)
        shape = (len(held), *(len(cuts) - 1 for cuts in self.cuts))
        if math.prod(shape) > _MAX_CELLS:
            raise MetadataError(
                f"{where}, {kind!r}: {len(boxes)} boxes of {len(held)} shards cut each other into {math.prod(shape)} "
                f"cells; at most {_MAX_CELLS} are allowed"
            )
        holders = np.zeros(shape, np.bool_)
        self.cells: list[tuple[slice, ...]] = []
        """The cells of each box of the local shard."""
        for number, begins, ends in zip(shard, start.tolist(), stop.tolist(), strict=True):
            cells = tuple(map(slice, begins, ends))
            holders[(number, *cells)] = True
            if number == 0:
                self.cells.append(cells)
        self.needed, self.holders = holders[0], np.moveaxis(holders[1:], 0, -1)
        missing = np.argwhere(self.needed & ~self.holders.any(axis=-1))
        if len(missing):
            layer, side, head, dim = (int(cuts[at]) for cuts, at in zip(self.cuts, missing[0], strict=True))
            raise MetadataError(
                f"{where}, {kind!r}: no remote shard holds layer {layer}, head {head} (side {side}, dim {dim})"
            )
        self.owner = np.full(self.needed.shape, _NOBODY, np.int64)

    def choose(self, used: NDArray[np.bool_], local_rank: int, *, forced: bool) -> None:
        """Chooses the shard that each cell is read from, and marks this shard in `used`.

        With `forced`, chooses only for the cells that exactly one shard holds. Without `forced`, chooses only for the
        cells that several shards hold.
        """
        count = self.holders.sum(axis=-1)
        todo = self.needed & ((count == 1) if forced else (count > 1))
        # There are few distinct sets of holders: at most one for each replicated head.
        rows = self.holders[todo]
        owners = np.empty(len(rows), np.int64)
        sets, inverse = np.unique(rows, axis=0, return_inverse=True)
        for number, held in enumerate(sets):
            among = np.flatnonzero(held & used) if (held & used).any() else np.flatnonzero(held)
            chosen = int(among[local_rank % len(among)])
            used[chosen] = True
            owners[inverse.reshape(-1) == number] = chosen
        self.owner[todo] = owners

    def parts(self) -> Iterator[list[tuple[int, Index, Index]]]:
        """Yields a list for each local box: the parts of the box, each as (owner, first position, end).

        The cuts through a box are straight, so that it has few parts.
        """
        known: dict[tuple[bytes, tuple[int, ...]], list[tuple[Index, Index]]] = {}
        for cells in self.cells:
            inside = self.owner[cells]
            key = (inside.tobytes(), inside.shape)  # most layers are alike, so the result is cached
            if key not in known:
                known[key] = list(_uniform(inside, (0, 0, 0, 0)))
            yield [
                (int(inside[first]), self._corner(cells, first), self._corner(cells, end)) for first, end in known[key]
            ]

    def _corner(self, cells: tuple[slice, ...], at: Index) -> Index:
        layers, sides, heads, dims = self._ends
        layer, side, head, dim = cells
        return (
            layers[int(layer.start) + at[0]],
            sides[int(side.start) + at[1]],
            heads[int(head.start) + at[2]],
            dims[int(dim.start) + at[3]],
        )


def _uniform(owner: NDArray[np.int64], at: Index) -> Iterator[tuple[Index, Index]]:
    """Cuts an array of owners into boxes that have one owner each.

    Yields the corners of each box: its first cell, and the cell after its last one on each axis. `at` is the index of
    the array's first cell.
    """
    for axis in range(owner.ndim):
        along = np.moveaxis(owner, axis, 0).reshape(owner.shape[axis], -1)
        changes = (np.flatnonzero((along[1:] != along[:-1]).any(axis=1)) + 1).tolist()
        if changes:
            for first, end in pairwise([0, *changes, owner.shape[axis]]):
                inner = owner[(slice(None),) * axis + (slice(first, end),)]
                yield from _uniform(inner, _moved(at, axis, first))
            return
    layers, sides, heads, dims = owner.shape
    yield at, (at[0] + layers, at[1] + sides, at[2] + heads, at[3] + dims)


def _moved(at: Index, axis: int, by: int) -> Index:
    layer, side, head, dim = (index + (by if number == axis else 0) for number, index in enumerate(at))
    return (layer, side, head, dim)
