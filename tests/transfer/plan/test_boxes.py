"""Tests boxes: the place of each element in the named layouts and in parts of them, and every refused layout."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.pulls.layouts import dense_strides, per_layer
from kvcache.layout import as_blocks
from tests.transfer.plan_oracle import ORDERS, PER_LAYER, elements, page_layout, shard
from transfer.errors import InvalidEngineError, MetadataError
from transfer.plan.boxes import ADDRESS_LIMIT, MAX_INDEX, MAX_PAGES, Box, Group, ShardLayout, check, sub_box
from transfer.plan.shapes import LATENT, SPLIT_NHD, dense, from_tensor


@pytest.mark.parametrize("order", ORDERS)
def test_a_dense_pool_is_what_the_manager_allocates(order: str) -> None:
    layout, pages = page_layout(range(2, 5), order=order), 3
    (box,) = check(dense(layout, pages, first_layer=4)).groups[0].boxes
    blocks = as_blocks(torch.arange(pages * layout.page_elements, dtype=torch.float32), layout, pages)
    for page, token in product(range(pages), range(layout.page_size)):
        for (layer, side, head, _, dim), place in elements(box, 0, page, [(token, token)]):
            assert blocks[page, side, layer - 4, token, head - 2, dim] == place


@pytest.mark.parametrize("axes", [*PER_LAYER, LATENT])
def test_a_layers_tensor_lies_as_numpy_lays_it(axes: str) -> None:
    layout = page_layout(range(1) if axes == LATENT else range(3), sides=1 if axes == LATENT else 2)
    made = check(per_layer(layout, 5, axes, first_layer=1))
    names = axes.split(",")
    tensor = np.arange(made.region_bytes[0] // 4).reshape([(layout.extents | {"page": 5})[axis] for axis in names])
    for region, box in enumerate(made.groups[0].boxes):
        assert (box.region, box.first[0], box.extent[0]) == (region, 1 + region, 1)
        for page, token in product(range(5), range(layout.page_size)):
            for (_, side, head, _, dim), place in elements(box, 0, page, [(token, token)]):
                at = {"page": page, "side": side, "token": token, "head": head, "dim": dim}
                assert tensor[tuple(at[axis] for axis in names)] == place


def test_a_decoded_layout_equals_the_encoded_one() -> None:
    made = shard(range(3), order=SPLIT_NHD)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=ShardLayout) == made


@pytest.mark.parametrize("order", [*ORDERS, *PER_LAYER])
def test_a_part_of_a_box_keeps_its_place_in_memory(order: str) -> None:
    boxes = shard(range(1, 5), order=order, layers=range(2, 4)).groups[0].boxes
    whole = {logical: place for box in boxes for logical, place in elements(box, 0, 3, [(1, 1)])}
    inside = sub_box(boxes[0], (2, 1, 2, 1), (3, 2, 4, 2))
    assert dict(elements(inside, 0, 3, [(1, 1)])) == {at: whole[at] for at in ((2, 1, 2, 1, 1), (2, 1, 3, 1, 1))}


def test_a_part_of_a_box_is_like_the_box_in_all_but_its_place() -> None:
    (whole,) = shard(range(1, 5), order=SPLIT_NHD).groups[0].boxes[:1]
    for of_page in (True, False):
        box = msgspec.structs.replace(whole, of_page=of_page)
        assert sub_box(box, box.first, box.end) == box


def good(**changes: Any) -> ShardLayout:
    """Returns a valid layout of four pages of `[layer 2, side 2, head 3, token 4, dim 2]`, in which one field of the
    box is changed.
    """
    box = from_tensor(
        (4, 2, 2, 3, 4, 2),
        dense_strides((4, 2, 2, 3, 4, 2), 4),
        "page,layer,side,head,token,dim",
        dtype="float32",
        itemsize=4,
    )
    return ShardLayout((Group(4, 4, (msgspec.structs.replace(box, **changes),)),), (4 * 384,))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": ""}, "group 0, box 0 (''): characters of the kind: 0 is not within 1 to 64"),
    ({"kind": "k" * 65}, "characters of the kind: 65 is not within 1 to 64"),
    ({"dtype": ""}, "characters of the dtype: 0 is not within 1 to 64"),
    ({"itemsize": 0}, "bytes of an element: 0 is not within 1 to 16"),
    ({"itemsize": 17}, "bytes of an element: 17 is not within 1 to 16"),
    ({"region": -1}, "the region: -1 is not within 0 to 0"),
    ({"region": 1}, "the region: 1 is not within 0 to 0"),
    ({"offset": -4}, "the offset: -4 is not within 0 to 1535"),
    ({"offset": 1}, "reaches byte 1537 of region 0, which has 1536"),
    ({"offset": 4}, "reaches byte 1540 of region 0, which has 1536"),
    ({"page_stride": -384}, "the stride of axis page: -384 is not within 4 to 1536"),
    ({"page_stride": 0}, "the stride of axis page: 0 is not within 4 to 1536"),
    ({"page_stride": 192}, "the stride of axis page is 192: 384 bytes or more are needed"),
    ({"page_stride": 383}, "the stride of axis page is 383: 384 bytes or more are needed"),
    ({"page_stride": 385}, "reaches byte 1539 of region 0, which has 1536"),
    ({"page_stride": 1 << 80}, f"the stride of axis page: {1 << 80} is not within 4 to 1536"),
    ({"first": (-1, 0, 0, 0)}, "the first layer: -1 is not within"),
    ({"first": (0, 0, 0, MAX_INDEX + 1)}, f"the first dim: {MAX_INDEX + 1} is not within"),
    ({"extent": (0, 2, 3, 4, 2)}, "the extent of axis layer: 0 is not within"),
    ({"extent": (2, 2, MAX_INDEX + 1, 4, 2)}, "the extent of axis head: 16777217 is not within"),
    ({"extent": (2, 2, 3, 3, 2)}, "has 3 tokens, but a page of its group has 4"),
    ({"strides": (192, 96, 32, -8, 4)}, "the stride of axis token: -8 is not within 4 to 1536"),
    ({"strides": (192, 96, 32, 8, 0)}, "the stride of axis dim: 0 is not within 4 to 1536"),
    ({"strides": (192, 96, 32, 8, 8)}, "reaches byte 1540 of region 0, which has 1536"),
    ({"strides": (192, 96, 32, 4, 4)}, "the stride of axis dim is 4: 16 bytes or more are needed"),
    ({"extent": (1, 2, 3, 4, 2), "strides": (-1, 96, 32, 8, 4)}, "the stride of axis layer: -1 is not within 0 to"),
    ({"extent": (1, 2, 3, 4, 2), "strides": (1 << 63, 96, 32, 8, 4)}, "the stride of axis layer: 9223372036854775808"),
    ({"strides": (192, 96, 28, 8, 4)}, "the stride of axis head is 28: 32 bytes or more are needed"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_box_that_reaches_outside_of_its_page_or_region_is_refused(changes: dict[str, Any], message: str) -> None:
    check(good())
    with pytest.raises(MetadataError, match=re.escape(message)):
        check(good(**changes))


def test_groups_and_regions_out_of_range_are_refused() -> None:
    (group,) = good().groups
    replace = msgspec.structs.replace
    for layout, message in (
        (ShardLayout((group,), ()), "a shard: regions: 0 is not within"),
        (ShardLayout((), (64,)), "a shard: groups: 0 is not within"),
        (ShardLayout((group,), (0,)), "region 0: bytes: 0 is not within"),
        (ShardLayout((group,), (ADDRESS_LIMIT,)), "region 0: bytes: 9223372036854775808 is not within"),
        (ShardLayout((replace(group, num_pages=0),), (4 * 384,)), "group 0: pages: 0 is not within"),
        (ShardLayout((replace(group, num_pages=MAX_PAGES + 1),), (4 * 384,)), "group 0: pages: 2147483648"),
        (ShardLayout((replace(group, num_pages=5),), (4 * 384,)), "reaches byte 1920 of region 0, which has 1536"),
        (ShardLayout((replace(group, state=True),), (4 * 384,)), "group 0: tokens of a page: 4 is not within 1 to 1"),
        (ShardLayout((replace(group, window=-1),), (4 * 384,)), "group 0: tokens of the window: -1"),
        (ShardLayout((replace(group, window=ADDRESS_LIMIT),), (4 * 384,)), f"to {ADDRESS_LIMIT - 1}"),
        (ShardLayout((replace(group, block_pages=0),), (4 * 384,)), "group 0: pages of a block: 0 is not within 1 to"),
        (
            ShardLayout((replace(group, block_pages=MAX_INDEX // 4 + 1),), (4 * 384,)),
            f"group 0: pages of a block: {MAX_INDEX // 4 + 1} is not within 1 to {MAX_INDEX // 4}",
        ),
        (
            ShardLayout((Group(1, 4, (), state=True, block_pages=2),), (4 * 384,)),
            "group 0: pages of a block: 2 is not within 1 to 1",
        ),
        (ShardLayout((group,), (64,) * 16_385), "a shard: regions: 16385 is not within 1 to 16384"),
        (ShardLayout((group,) * 257, (4 * 384,)), "a shard: groups: 257 is not within 1 to 256"),
        (ShardLayout((replace(group, boxes=group.boxes * 5000),), (4 * 384,)), "a shard: boxes: 5000 is not within"),
        (ShardLayout((replace(group, boxes=group.boxes * 2),), (4 * 384,)), "group 0: boxes 0 and 1 ('kv') hold the"),
    ):
        with pytest.raises(MetadataError, match=re.escape(message)):
            check(layout)


def test_values_at_a_limit_are_accepted() -> None:
    (group,) = good().groups
    replace = msgspec.structs.replace
    for layout in (
        ShardLayout((replace(group, block_pages=MAX_INDEX // 4, window=ADDRESS_LIMIT - 1),), (4 * 384,)),
        ShardLayout((Group(1, 4, (), state=True),), (4 * 384,)),
        ShardLayout((group,), (4 * 384, ADDRESS_LIMIT - 1, *(1 for _ in range(16_382)))),
    ):
        assert check(layout) is layout


def test_boxes_of_two_groups_may_share_memory_and_a_shard_may_hold_nothing_of_a_group() -> None:
    (group,) = good().groups
    layout = ShardLayout((group, group, Group(4, 4, ())), (4 * 384,))
    assert check(layout) is layout


def test_layers_of_one_pool_do_not_hold_the_same() -> None:
    boxes = shard(range(2), order=SPLIT_NHD, layers=range(4)).groups[0].boxes
    overlapping = msgspec.structs.replace(boxes[3], first=(1, 0, 1, 0), extent=(1, 1, 1, 4, 1))
    layout = shard(range(2), order=SPLIT_NHD, layers=range(4))
    group = msgspec.structs.replace(layout.groups[0], boxes=(*boxes[:3], overlapping))
    with pytest.raises(MetadataError, match="group 0: boxes 1 and 3"):
        check(msgspec.structs.replace(layout, groups=(group,)))


def test_axes_that_do_not_fit_a_tensor_are_refused() -> None:
    def box(shape: tuple[int, ...], axes: str) -> Box:
        return from_tensor(shape, dense_strides(shape, 4), axes, dtype="float32", itemsize=4)

    with pytest.raises(InvalidEngineError, match="name 3 axes, but there are 2 sizes and 2 strides"):
        box((4, 2), "page,token,dim")
    with pytest.raises(InvalidEngineError, match="each at most once"):
        box((4, 2, 2), "page,token,token")
    with pytest.raises(InvalidEngineError, match="each at most once"):
        box((4, 2, 2), "page,token,channel")
