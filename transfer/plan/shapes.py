"""Builds boxes for the layouts in use: our pools, per-layer tensors of any axis order, latents, and recurrent state."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvcache.layer_groups import LayerTables
from kvcache.layout import KindPages, PageLayout
from transfer.errors import InvalidEngineError
from transfer.plan.boxes import AXES, KV, SCALES, Box, Group, Index, ShardLayout, Sizes

# The axes of one layer's tensor, in the orders that serving engines use. T tokens, H heads, D dims, N pages.
SPLIT_NHD = "side,page,token,head,dim"
"""`[2, N, T, H, D]`: all pages of K, then all of V (FlashAttention)."""
SPLIT_HND = "side,page,head,token,dim"
"""`[2, N, H, T, D]`."""
BLOCKS_FIRST_NHD = "page,side,token,head,dim"
"""`[N, 2, T, H, D]`: K and V of a page side by side (FlashInfer)."""
BLOCKS_FIRST_HND = "page,side,head,token,dim"
"""`[N, 2, H, T, D]`."""
PACKED_NHD = "page,token,head,side,dim"
"""`[N, T, H, 2 * D]`: K and V of a head and token side by side."""
PACKED_HND = "page,head,token,side,dim"
"""`[N, H, T, 2 * D]` (vLLM 0.33)."""
LATENT = "page,token,dim"
"""`[N, T, D]`: multi-head latent attention. It has one side and one head, and every rank holds all of it."""


def from_tensor(
    shape: Sequence[int],
    strides: Sequence[int],
    axes: str,
    *,
    dtype: str,
    itemsize: int,
    region: int = 0,
    offset: int = 0,
    kind: str = KV,
    first: Index = (0, 0, 0, 0),
) -> Box:
    """Returns the box of a tensor whose dimensions are named.

    Args:
        shape: number of elements along each dimension.
        strides: bytes (not elements) between neighbours along each dimension.
        axes: comma-separated names of the dimensions: page, layer, side, head, token or dim. An axis that is not named
            has one element. If a dimension packs two axes (K and V), `shape` has both.
        dtype: name of the element type.
        itemsize: bytes per element.
        region: index of the region that the tensor lies in.
        offset: bytes from the start of the region to the tensor.
        kind: as in `Box`.
        first: as in `Box`.

    Raises:
        InvalidEngineError: the number of axes differs from the shape, or a name is unknown or repeated.
    """
    names = axes.split(",")
    if len(set(names)) != len(names) or not set(names) <= {"page", *AXES}:
        raise InvalidEngineError(f"axes {axes!r}: only page, {', '.join(AXES)} are allowed, each at most once")
    if not len(names) == len(shape) == len(strides):
        raise InvalidEngineError(
            f"axes {axes!r} name {len(names)} axes, but there are {len(shape)} sizes and {len(strides)} strides"
        )
    sizes, steps = dict(zip(names, shape, strict=True)), dict(zip(names, strides, strict=True))
    return Box(
        kind=kind,
        dtype=dtype,
        itemsize=itemsize,
        region=region,
        offset=offset,
        page_stride=steps.get("page", 0),
        first=first,
        extent=_five(sizes, 1),
        strides=_five(steps, 0),
    )


def _five(found: dict[str, int], default: int) -> Sizes:
    layer, side, head, token, dim = (found.get(axis, default) for axis in AXES)
    return (layer, side, head, token, dim)


def dense(layout: PageLayout, num_pages: int, first_layer: int = 0) -> ShardLayout:
    """Returns the layout of a `kvcache` pool: one region over all layers, dense pages in `layout`'s order.

    `num_pages` includes the null page. `first_layer` is the first model layer that this pipeline stage holds.
    """
    boxes = [_box_of(layout, layout.page_bytes, first_layer)]
    if layout.scales is not None:
        of_page = layout.scales.page_size != layout.page_size
        box = _box_of(layout.scales, layout.page_bytes, first_layer)
        boxes.append(msgspec.structs.replace(box, kind=SCALES, offset=layout.scales_offset, of_page=of_page))
    return ShardLayout((Group(layout.page_size, num_pages, (*boxes,)),), (num_pages * layout.page_bytes,))


def _box_of(layout: PageLayout, page_bytes: int, first_layer: int) -> Box:
    """Returns the box of a layout whose pages are `page_bytes` apart."""
    axes = layout.order.split(",")
    return from_tensor(
        [1, *(layout.extents[axis] for axis in axes)],
        [page_bytes, *(layout.strides[axis] * layout.itemsize for axis in axes)],
        ",".join(["page", *axes]),
        dtype=layout.dtype,
        itemsize=layout.itemsize,
        first=(first_layer, 0, layout.first_head, 0),
    )


def with_states(layout: ShardLayout, kinds: Sequence[KindPages], num_pages: int) -> ShardLayout:
    """Returns the layout with one more group: the recurrent states of requests, `num_pages` pages of each kind.

    `num_pages` includes page 0. State tensors in separate memory become regions after the existing ones.
    """
    boxes, sizes = list[Box](), list(layout.region_bytes)
    for one in kinds:
        box = _box_of(one.layout, one.stride, 0)
        region = 0 if one.region is None else len(layout.region_bytes) + one.region
        boxes.append(msgspec.structs.replace(box, kind=one.kind, region=region, offset=one.offset))
        if region == len(sizes):
            sizes.append(num_pages * one.stride)
    group = Group(page_size=1, num_pages=num_pages, boxes=tuple(boxes), state=True)
    return ShardLayout((*layout.groups, group), tuple(sizes))


def of_tables(layout: ShardLayout, tables: LayerTables) -> ShardLayout:
    """Returns the layout of a `dense` pool that block tables share: a group for each table, over the same pages.

    In these groups, a layer's index is its position in the page, not its index in the model. The position suffices,
    because both sides have the same block tables. A table may have fewer layers than a page has positions. The unused
    positions are copied too, so that a page stays one run of bytes.
    """
    windows = [table.group.window if table.group.kind == "window" else 0 for table in tables.tables]
    groups = tuple(msgspec.structs.replace(layout.groups[0], window=window) for window in windows)
    return ShardLayout(groups, layout.region_bytes)
