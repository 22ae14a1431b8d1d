"""Describes where the KV of one shard lies in memory, in the form that peers exchange. Pure arithmetic.

A model's KV is a logical tensor `[layer, side, head, token, dim]`, in which the sides are keys and values. A shard
holds a set of *boxes* of this tensor. A box is a range of each axis, with one stride for each axis. Recurrent state
uses the same axes: channels (or SSM heads) lie on the head axis, and a page holds the one state of a request.
`transfer.plan.shapes` builds the layouts of common engines.
"""

from __future__ import annotations

from typing import NoReturn, TypeAlias

import msgspec
import numpy as np

from transfer.errors import MetadataError

Index: TypeAlias = tuple[int, int, int, int]
"""A position in the logical tensor: layer, side, head, dim. The token is left out, because the page determines it."""

Sizes: TypeAlias = tuple[int, int, int, int, int]
"""One number for each of layer, side, head, token, dim."""

LAYER, SIDE, HEAD, TOKEN, DIM = range(5)
AXES = ("layer", "side", "head", "token", "dim")
KV = "kv"
SCALES = "scales"

# These limits are far above any real model, and low enough that sums and products of a few of them fit into 63 bits.
MAX_REGIONS = 1 << 14
MAX_GROUPS = 1 << 8
MAX_BOXES = 1 << 12
MAX_INDEX = 1 << 24
MAX_ITEMSIZE = 16
MAX_NAME = 64
MAX_PAGES = (1 << 31) - 1  # NIXL and block tables use int32 indices
ADDRESS_LIMIT = 1 << 63


class Box(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a shard's pages. Along each axis, its elements lie one fixed stride apart.

    Attributes:
        kind: the logical tensor that the box belongs to: "kv", its "scales", or "conv.x", "conv.B", "conv.C", "ssm" for
            recurrent state. Only boxes of one kind are intersected.
        dtype: name of the element type, such as "bfloat16".
        itemsize: bytes of one element.
        region: index of the registered region that the box lies in.
        offset: bytes from the start of the region to the first element of page 0.
        page_stride: bytes from one page to the next.
        first: the first layer, side, head and dim in the box, as indices in the model.
        extent: how many layers, sides, heads, tokens and dims the box has.
        strides: bytes between neighbours along layer, side, head, token and dim. Ignored along an axis whose extent is
            1.
        of_page: True if each element belongs to all tokens of a page, for example one scale for a whole page. `extent`
            then counts one token, and the page sizes of both sides must be equal.
    """

    kind: str
    dtype: str
    itemsize: int
    region: int
    offset: int
    page_stride: int
    first: Index
    extent: Sizes
    strides: Sizes
    of_page: bool = False

    @property
    def end(self) -> Index:
        """The index after the last one in the box, for each of layer, side, head and dim."""
        layer, side, head, dim = self.first
        layers, sides, heads, _, dims = self.extent
        return (layer + layers, side + sides, head + heads, dim + dims)

    @property
    def span(self) -> int:
        """Bytes from the first element of a page to the end of its last one."""
        return sum((n - 1) * step for n, step in zip(self.extent, self.strides, strict=True)) + self.itemsize


class Group(msgspec.Struct, frozen=True, omit_defaults=True):
    """The layers that share a block table: one list of a request's page ids addresses all of them.

    Attributes:
        page_size: tokens per page in memory; 1 for recurrent state.
        num_pages: pages in the pool.
        boxes: the contents of a page; empty if this shard has no layer of the group. Boxes of several groups may lie in
            the same memory, because only one group uses a page at a time.
        window: tokens that a sliding window looks back; 0 for full attention.
        state: True for recurrent state. A request then has one page, however many tokens it has.
        block_pages: how many pages form one block of this shard's scheduler. Block b consists of pages b * block_pages
            to (b + 1) * block_pages - 1. It is above 1 if the kernel's page holds fewer tokens than the scheduler's
            block.
    """

    page_size: int
    num_pages: int
    boxes: tuple[Box, ...]
    window: int = 0
    state: bool = False
    block_pages: int = 1


class ShardLayout(msgspec.Struct, frozen=True, omit_defaults=True, tag="shard_layout/1"):
    """The layout of everything that a shard holds.

    Attributes:
        groups: the groups, in the order of a request's page lists. All shards of all peers have the same groups.
        region_bytes: bytes of each registered region.
    """

    groups: tuple[Group, ...]
    region_bytes: tuple[int, ...]


def sub_box(box: Box, first: Index, end: Index) -> Box:
    """Returns the part of `box` from `first` up to, but not including, `end`.

    The part must lie within the box and be non-empty.
    """
    (layer, side, head, dim), (layer_end, side_end, head_end, dim_end) = first, end
    first_layer, first_side, first_head, first_dim = box.first
    by_layer, by_side, by_head, _, by_dim = box.strides
    # Written without loops for speed, because this function runs for each layer of each rank at first contact.
    skipped = (layer - first_layer) * by_layer + (side - first_side) * by_side
    skipped += (head - first_head) * by_head + (dim - first_dim) * by_dim
    extent = (layer_end - layer, side_end - side, head_end - head, box.extent[TOKEN], dim_end - dim)
    return msgspec.structs.replace(box, offset=box.offset + skipped, first=first, extent=extent)


def check(layout: ShardLayout) -> ShardLayout:
    """Returns `layout` if all of its values are in range and all elements lie within their regions.

    A group must not hold an element twice, and no two elements of a box may share an address. A layout that passes is
    safe to plan with: no sum of its numbers overflows, and no address lies outside of a region.

    Raises:
        MetadataError: a value is out of range; the message names the group, the box, the value and the limit.
    """
    _limit("a shard", "regions", len(layout.region_bytes), 1, MAX_REGIONS)
    _limit("a shard", "groups", len(layout.groups), 1, MAX_GROUPS)
    _limit("a shard", "boxes", sum(len(group.boxes) for group in layout.groups), 0, MAX_BOXES)
    for region, num_bytes in enumerate(layout.region_bytes):
        _limit(f"region {region}", "bytes", num_bytes, 1, ADDRESS_LIMIT - 1)
    for number, group in enumerate(layout.groups):
        where = f"group {number}"
        _limit(where, "pages", group.num_pages, 1, MAX_PAGES)
        _limit(where, "tokens of a page", group.page_size, 1, 1 if group.state else MAX_INDEX)
        _limit(where, "tokens of the window", group.window, 0, ADDRESS_LIMIT - 1)
        _limit(where, "pages of a block", group.block_pages, 1, 1 if group.state else MAX_INDEX // group.page_size)
        for index, box in enumerate(group.boxes):
            _check_box(f"group {number}, box {index} ({box.kind!r})", box, group, layout.region_bytes)
        _check_disjoint(where, group.boxes)
    return layout


def _check_box(where: str, box: Box, group: Group, region_bytes: tuple[int, ...]) -> None:
    _limit(where, "characters of the kind", len(box.kind), 1, MAX_NAME)
    _limit(where, "characters of the dtype", len(box.dtype), 1, MAX_NAME)
    _limit(where, "bytes of an element", box.itemsize, 1, MAX_ITEMSIZE)
    _limit(where, "the region", box.region, 0, len(region_bytes) - 1)
    for axis, first in zip((*AXES[:TOKEN], AXES[DIM]), box.first, strict=True):
        _limit(where, f"the first {axis}", first, 0, MAX_INDEX)
    for axis, extent in zip(AXES, box.extent, strict=True):
        _limit(where, f"the extent of axis {axis}", extent, 1, MAX_INDEX)
    if box.extent[TOKEN] != (tokens := 1 if box.of_page else group.page_size):
        _refuse(f"{where}: has {box.extent[TOKEN]} tokens, but a page of its group has {tokens}")
    limit = region_bytes[box.region]
    _limit(where, "the offset", box.offset, 0, limit - 1)
    axes = [*zip(box.extent, box.strides, AXES, strict=True), (group.num_pages, box.page_stride, "page")]
    for n, step, axis in axes:
        low, high = (box.itemsize, limit) if n > 1 else (0, ADDRESS_LIMIT - 1)
        _limit(where, f"the stride of axis {axis}", step, low, high)
    end = box.offset + (group.num_pages - 1) * box.page_stride + box.span
    if end > limit:
        _refuse(f"{where}: reaches byte {end} of region {box.region}, which has {limit} bytes")
    # The axes are sorted by stride. If each one steps over the full span of the smaller ones, no two elements share an
    # address.
    covered = box.itemsize
    for n, step, axis in sorted(axes, key=lambda item: item[1]):
        if step < covered and n > 1:
            _refuse(f"{where}: the stride of axis {axis} is {step}: {covered} bytes or more are needed")
        covered += (n - 1) * step


def _check_disjoint(where: str, boxes: tuple[Box, ...]) -> None:
    """Refuses boxes that hold the same element, because a pull would write that element twice, from two places."""
    if len(boxes) < 2:
        return
    kinds = {box.kind: number for number, box in enumerate(boxes)}
    kind = np.array([kinds[box.kind] for box in boxes], np.int64)
    first, end = np.array([box.first for box in boxes]), np.array([box.end for box in boxes])
    meet = np.triu(kind[:, None] == kind[None], 1)
    for axis in range(first.shape[1]):
        starts_before = first[:, None, axis] < end[None, :, axis]
        meet &= starts_before & starts_before.T
    if meet.any():
        one, other = (int(index) for index in np.argwhere(meet)[0])
        _refuse(f"{where}: boxes {one} and {other} ({boxes[one].kind!r}) hold the same elements")


def _limit(where: str, what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        _refuse(f"{where}: {what}: {value} is not within {low} to {high}")


def _refuse(message: str) -> NoReturn:
    raise MetadataError(f"shard layout: {message}")
