"""Layouts of other engines, for plans and pulls."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvcache.layout import PageLayout
from transfer.plan.boxes import Group, ShardLayout
from transfer.plan.shapes import from_tensor


def dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the bytes between neighbours along each dimension of a dense tensor."""
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))


def per_layer(layout: PageLayout, num_pages: int, axes: str, first_layer: int = 0) -> ShardLayout:
    """One dense tensor and region for each layer.

    Args:
        layout: contents of a page. Its `order` is ignored.
        num_pages: pages of each tensor.
        axes: order of a layer's tensor, as one of the names in `transfer.plan.shapes`.
        first_layer: the model's first layer that this pipeline stage holds.
    """
    names = axes.split(",")
    sizes = layout.extents | {"page": num_pages}
    shape = [sizes.get(axis, 1) for axis in names]
    boxes = tuple(
        from_tensor(
            shape,
            dense_strides(shape, layout.itemsize),
            axes,
            dtype=layout.dtype,
            itemsize=layout.itemsize,
            region=layer,
            first=(first_layer + layer, 0, layout.first_head, 0),
        )
        for layer in range(layout.num_layers)
    )
    num_bytes = math.prod(shape) * layout.itemsize
    return ShardLayout((Group(layout.page_size, num_pages, boxes),), (num_bytes,) * layout.num_layers)
