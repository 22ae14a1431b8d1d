"""The definition of a pull. It fills and checks each element of a pool, in loops without runs. Elements have four
bytes. A pool is one array over all regions of a shard. The value of an element identifies the element in the logical
tensor. `UNTOUCHED` marks elements that no pull may write.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from benchmarks.pulls.layouts import per_layer
from kvcache.layout import PageLayout
from transfer.plan.boxes import Box, ShardLayout, check
from transfer.plan.runs import Runs
from transfer.plan.shapes import (
    BLOCKS_FIRST_HND,
    BLOCKS_FIRST_NHD,
    PACKED_HND,
    PACKED_NHD,
    SPLIT_HND,
    SPLIT_NHD,
    dense,
)

Pool = NDArray[np.int32]
ITEMSIZE = 4
UNTOUCHED = -1
ORDERS = (
    "head,layer,side,token,dim",  # The order of pagewire. Any range of heads is one run.
    "layer,side,head,token,dim",  # HND, with all layers in one tensor
    "layer,side,token,head,dim",  # NHD
    "layer,head,token,side,dim",  # K and V of a token side by side, heads first
    "layer,token,head,side,dim",  # packed, tokens first
    "side,layer,token,head,dim",  # The documented order of `blocks`, without gaps.
)

PER_LAYER = (SPLIT_NHD, SPLIT_HND, BLOCKS_FIRST_NHD, BLOCKS_FIRST_HND, PACKED_NHD, PACKED_HND)


def page_layout(
    heads: range,
    *,
    layers: int = 2,
    sides: int = 2,
    page_size: int = 4,
    dims: int = 2,
    order: str = ORDERS[0],
) -> PageLayout:
    return PageLayout("float32", ITEMSIZE, layers, sides, heads.start, len(heads), page_size, dims, order)


def share(total: int, ranks: int, rank: int) -> range:
    """Returns the heads or layers of rank `rank` of `ranks`: an even part of `total`, or one replicated head."""
    if ranks >= total:
        at = rank * total // ranks
        return range(at, at + 1)
    return range(rank * total // ranks, (rank + 1) * total // ranks)


def region_starts(layout: ShardLayout, gap: int = 64) -> list[int]:
    """Returns the offset of each region in the pool's array, in bytes. Gaps between the regions make an overrun
    visible.
    """
    starts, at = list[int](), gap
    for num_bytes in layout.region_bytes:
        starts.append(at)
        at += num_bytes + gap
    return starts


def empty_pool(layout: ShardLayout, gap: int = 64) -> Pool:
    return np.full((sum(layout.region_bytes) + gap * (len(layout.region_bytes) + 1)) // ITEMSIZE, UNTOUCHED, np.int32)


def elements(box: Box, start: int, page: int, tokens: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, ...], int]]:
    """Yields the logical index and the pool index of each element of one page. `tokens` has pairs: the place in the
    page, and the token.
    """
    found: list[tuple[tuple[int, ...], int]] = []
    layers, sides, heads, _, dims = (range(extent) for extent in box.extent)
    for layer, side, head, dim in product(layers, sides, heads, dims):
        for place, token in tokens:
            inside = (layer, side, head, place, dim)
            address = start + box.offset + page * box.page_stride
            address += sum(i * step for i, step in zip(inside, box.strides, strict=True))
            logical = (
                box.first[0] + layer,
                box.first[1] + side,
                box.first[2] + head,
                token,
                box.first[3] + dim,
            )
            assert address % ITEMSIZE == 0
            found.append((logical, address // ITEMSIZE))
    return found


KINDS = ("kv", "conv.x", "conv.B", "conv.C", "ssm")


_SIZES = (8, 2, 32, 160, 16)  # The largest numbers of layers, sides, heads, tokens and dims in tests.


def value(group: int, kind: str, logical: tuple[int, ...]) -> int:
    """Returns a distinct value for each element, far below the int32 limit."""
    found = group * len(KINDS) + KINDS.index(kind)
    for index, size in zip(logical, _SIZES, strict=True):
        assert 0 <= index < size
        found = found * size + index
    return found


def logical_of(values: Pool) -> list[Pool]:
    """Returns the layer, side, head, token and dim of each value. The result is meaningless for `UNTOUCHED`."""
    found: list[Pool] = []
    for size in reversed(_SIZES):
        values, index = np.divmod(values, size)
        found.append(index)
    return found[::-1]


def fill(layout: ShardLayout, pages: Sequence[Sequence[int]], tokens: tuple[int, int], first_page: int = 0) -> Pool:
    """Returns a pool that holds only the `tokens` of one request. The `pages` of each group begin at page
    `first_page`.
    """
    pool, starts = empty_pool(layout), region_starts(layout)
    for number, group in enumerate(layout.groups):
        for index, page in enumerate(pages[number]):
            first = (first_page + index) * group.page_size
            held = [(t - first, t) for t in range(first, first + group.page_size) if tokens[0] <= t < tokens[1]]
            for box in group.boxes:
                for logical, place in elements(box, starts[box.region], page, held):
                    pool[place] = value(number, box.kind, logical)
    return pool


def copied(runs: Runs, source: Pool, destination: Pool) -> None:
    """Carries out the runs. Each run must be within both pools, and no two runs may write the same byte."""
    local, remote, length = (np.asarray(part) for part in (runs.local, runs.remote, runs.length))
    assert not (np.concatenate((local, remote, length)) % ITEMSIZE).any()
    counts = length // ITEMSIZE
    assert (counts > 0).all()
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    to, of = np.repeat(local // ITEMSIZE, counts) + within, np.repeat(remote // ITEMSIZE, counts) + within
    assert not len(to) or (to.min() >= 0 and of.min() >= 0 and to.max() < len(destination) and of.max() < len(source))
    assert np.bincount(to, minlength=1).max() <= 1
    destination[to] = source[of]


def fewest(runs: Runs) -> int:
    """Returns the number of runs after all possible joins."""
    order = np.argsort(runs.local)
    local, remote, length = runs.local[order], runs.remote[order], runs.length[order]
    meets = (local[:-1] + length[:-1] == local[1:]) & (remote[:-1] + length[:-1] == remote[1:])
    return len(runs) - int(meets.sum())


def shard(
    heads: range, *, order: str = ORDERS[0], layers: range = range(2), page_size: int = 4, pages: int = 12
) -> ShardLayout:
    axes = order if order.find("page") >= 0 else None
    layout = page_layout(heads, layers=len(layers), page_size=page_size, order=ORDERS[0] if axes else order)
    made = per_layer(layout, pages, axes, layers.start) if axes else dense(layout, pages, layers.start)
    return check(made)


def pages_for(layout: ShardLayout, tokens: tuple[int, int], seed: int = 0) -> list[int]:
    """Returns shuffled pages, some of which are consecutive."""
    size, pool = layout.groups[0].page_size, layout.groups[0].num_pages
    needed = -(-tokens[1] // size) - tokens[0] // size
    rng = np.random.default_rng(seed)
    found = rng.permutation(pool)[:needed].tolist()
    half = needed // 2
    found[:half] = sorted(found[:half])
    return found


def reach(local: ShardLayout, remote: ShardLayout, tokens: tuple[int, int]) -> int:
    """Returns the token up to which a pull copies. It is the end of a page on one of the two sides, whichever end comes
    first.
    """
    return min(-(-tokens[1] // side.groups[0].page_size) * side.groups[0].page_size for side in (local, remote))


def mamba_boxes(
    *,
    layer: int,
    x: range,
    b: range,
    c: range,
    conv_length: int,
    ssm_heads: range,
    ssm_dims: int,
    page_stride: int,
    dtype: tuple[str, int] = ("float32", ITEMSIZE),
    region: int = 0,
) -> tuple[Box, ...]:
    """Returns the boxes of one Mamba layer's state. A page holds the convolution's state `[channels of x, B and C,
    conv_length]`, and then the SSM's state. A rank holds a range of x, B, C and the heads, so shards with different TP
    simply intersect. B and C may be replicated while x is split.
    """
    boxes: list[Box] = []
    offset, (name, itemsize) = 0, dtype
    parts = (
        ("conv.x", x, conv_length),
        ("conv.B", b, conv_length),
        ("conv.C", c, conv_length),
        ("ssm", ssm_heads, ssm_dims),
    )
    for kind, held, dims in parts:
        box = Box(
            kind=kind,
            dtype=name,
            itemsize=itemsize,
            region=region,
            offset=offset,
            page_stride=page_stride,
            first=(layer, 0, held.start, 0),
            extent=(1, 1, len(held), 1, dims),
            strides=(0, 0, dims * itemsize, 0, itemsize),
        )
        boxes.append(box)
        offset += len(held) * dims * itemsize
    return tuple(boxes)
