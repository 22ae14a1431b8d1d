"""A staged pull must write the same bytes as a direct pull. It must be chosen if it is cheaper."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.pulls.layouts import per_layer
from tests.transfer.plan_oracle import (
    ITEMSIZE,
    ORDERS,
    PER_LAYER,
    Pool,
    copied,
    empty_pool,
    fill,
    mamba_boxes,
    page_layout,
    pages_for,
    reach,
    region_starts,
    shard,
    share,
)
from transfer.errors import InvalidTransferError
from transfer.plan.boxes import Group, ShardLayout, check
from transfer.plan.plan import Plan, plan
from transfer.plan.runs import Runs
from transfer.plan.shapes import dense
from transfer.plan.source_ranks import sources


def views(layout: ShardLayout, pool: Pool) -> list[NDArray[np.uint8]]:
    starts, memory = region_starts(layout), pool.view(np.uint8)
    return [memory[start : start + size] for start, size in zip(starts, layout.region_bytes, strict=True)]


def check_staged_pull(local: ShardLayout, remotes: list[ShardLayout], tokens: tuple[int, int], rank: int = 0) -> None:
    local_pages, pool, stop = pages_for(local, tokens, 1), empty_pool(local), tokens[1]
    for index, part in sources(local, remotes, rank):
        remote = remotes[index]
        remote_pages = pages_for(remote, tokens, 2 + index)
        staging = plan(part, remote).staging(0)
        # The area has exactly the required size, so `copied` notices a run beyond the end of the area.
        area = np.full(staging.num_bytes(tokens) // ITEMSIZE, -1, np.int32)
        runs = staging.runs(remote_pages, tokens, 0, region_starts(remote))
        copied(runs, fill(remote, [remote_pages], (0, 10**6), tokens[0] // remote.groups[0].page_size), area)
        staging.permute(local_pages, tokens, area.view(np.uint8), views(local, pool))
        stop = reach(local, remote, tokens)
    expected = fill(local, [local_pages], (tokens[0], stop), tokens[0] // local.groups[0].page_size)
    assert np.array_equal(pool, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("remote_order", [*ORDERS, *PER_LAYER])
@pytest.mark.parametrize("local_order", [*ORDERS, *PER_LAYER])
def test_every_element_arrives_whatever_the_two_orders(local_order: str, remote_order: str) -> None:
    local, remote = shard(range(3), order=local_order), shard(range(1, 4), order=remote_order, pages=9)
    everything = shard(range(4), order=remote_order, pages=9)
    check_staged_pull(shard(range(1, 3), order=local_order), [remote], (0, 32))
    check_staged_pull(local, [everything], (6, 29))


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (4, 16), (16, 4), (4, 6), (6, 4), (1, 4), (4, 1), (12, 8)])
@pytest.mark.parametrize("orders", [(ORDERS[0], ORDERS[2]), (PER_LAYER[0], PER_LAYER[5]), (PER_LAYER[1], ORDERS[0])])
def test_pages_of_any_sizes(sizes: tuple[int, int], orders: tuple[str, str]) -> None:
    local = shard(range(2), order=orders[0], page_size=sizes[0], pages=50)
    remote = shard(range(2), order=orders[1], page_size=sizes[1], pages=60)
    for tokens in ((0, 48), (0, 1), (5, 41), (7, 8), (16, 47)):
        check_staged_pull(local, [remote], tokens)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (4, 2), (2, 3)])
def test_any_tensor_parallelism_and_stages_that_differ(ranks: tuple[int, int]) -> None:
    ours, theirs = ranks
    stages = (range(1), range(1, 4))
    remotes = [
        shard(share(4, theirs, rank), order=PER_LAYER[0], layers=stage) for stage in stages for rank in range(theirs)
    ]
    for rank in range(ours):
        check_staged_pull(shard(share(4, ours, rank), layers=range(4)), remotes, (4, 17), rank)


def test_states_of_odd_sizes_arrive() -> None:
    def state(pages: int, page_stride: int, x: range) -> ShardLayout:
        parts = [
            mamba_boxes(
                layer=layer,
                x=x,
                b=range(3),
                c=range(3),
                conv_length=3,
                ssm_heads=x,
                ssm_dims=5,
                dtype=("float32", 4),
                page_stride=page_stride,
                region=layer,
            )
            for layer in range(2)
        ]
        group = Group(1, pages, tuple(box for boxes in parts for box in boxes), state=True)
        return check(ShardLayout((group,), (pages * page_stride,) * 2))

    local, remote = state(3, 176, range(2, 4)), state(1, 400, range(6))
    staging = plan(local, remote).staging(0)
    area = np.full(staging.num_bytes((0, 7)) // ITEMSIZE, -1, np.int32)
    copied(staging.runs([0], (0, 7), 0, region_starts(remote)), fill(remote, [[0]], (0, 1)), area)
    pool = empty_pool(local)
    staging.permute([2], (0, 7), area.view(np.uint8), views(local, pool))
    assert np.array_equal(pool, fill(local, [[2]], (0, 1)))


def real(order: str, page_size: int = 16, heads: range = range(8)) -> ShardLayout:
    layout = page_layout(heads, layers=32, page_size=page_size, dims=128, order=ORDERS[0])
    layout = msgspec.structs.replace(layout, dtype="bfloat16", itemsize=2)
    if "page" in order:
        return per_layer(layout, 4096, order)
    return dense(msgspec.structs.replace(layout, order=order), 4096)


@pytest.mark.parametrize(
    ("local", "remote", "staged"),
    [
        (real(ORDERS[0]), real(ORDERS[0]), False),
        # Without staging there is one run for each token and head. With staging there is one run for each page.
        (real(ORDERS[0]), real(ORDERS[2]), True),
        (real(PER_LAYER[1]), real(PER_LAYER[0]), True),  # HND against NHD
        (real(PER_LAYER[0]), real(PER_LAYER[0]), False),
        (real(ORDERS[0], heads=range(4)), real(ORDERS[0]), False),  # a range of heads is one run
        (real(ORDERS[0], heads=range(1)), real(ORDERS[2]), True),
        (real(ORDERS[0], 64), real(ORDERS[0], 16), True),  # There is one run for each head, layer and side.
    ],
)
def test_the_cheaper_way_is_chosen(local: ShardLayout, remote: ShardLayout, staged: bool) -> None:
    made = plan(local, remote)
    assert made.prefers_staging(0, (0, 1000)) is staged
    assert not made.prefers_staging(0, (1000, 1000))


def small() -> tuple[Plan, ShardLayout, ShardLayout]:
    local, remote = shard(range(2), order=ORDERS[0]), shard(range(2), order=ORDERS[2])
    return plan(local, remote), local, remote


def test_neighbouring_remote_pages_are_staged_as_one_run() -> None:
    made, _, remote = small()
    page = remote.region_bytes[0] // 12
    runs: Runs = made.staging(0).runs([3, 4, 5, 9], (0, 16), 1000, [5000])
    assert runs.local.tolist() == [1000, 1000 + 3 * page]
    assert runs.remote.tolist() == [5000 + 3 * page, 5000 + 9 * page]
    assert runs.length.tolist() == [3 * page, page]


def test_runs_that_lie_a_page_apart_are_not_staged_together() -> None:
    local, remote = shard(range(2)), shard(range(2), order=PER_LAYER[0])
    staging = plan(local, remote).staging(0)
    # The bytes of K or V in one page and one layer. Between K and V there are bytes of other pages.
    page = 4 * 2 * 2 * ITEMSIZE
    assert staging.num_bytes((0, 8)) == 2 * 2 * 2 * page
    assert staging.runs([1, 5], (0, 8), 0, [0, 0]).num_bytes == 2 * 2 * 2 * page


def test_a_pull_of_nothing_stages_nothing() -> None:
    made, local, _ = small()
    staging, pool = made.staging(0), empty_pool(local)
    assert staging.num_bytes((4, 4)) == 0
    assert len(staging.runs([1], (4, 4), 0, [0])) == 0
    staging.permute([1], (4, 4), np.empty(0, np.uint8), views(local, pool))
    assert (pool == -1).all()


def test_a_peer_whose_heads_and_dims_lie_outside_its_pages_is_never_staged() -> None:
    local = real(ORDERS[0])
    (box,) = local.groups[0].boxes
    step = 4096 * 2
    strides = (step * 128 * 16 * 8 * 2, step * 128 * 16 * 8, step * 128 * 16, step * 128, step)
    scattered = msgspec.structs.replace(box, page_stride=2, strides=strides)
    remote = check(ShardLayout((msgspec.structs.replace(local.groups[0], boxes=(scattered,)),), local.region_bytes))
    made = plan(local, remote)
    assert not made.prefers_staging(0, (0, 16))
    with pytest.raises(InvalidTransferError, match="group 0: staging takes 65536 copies; at most 16384 are allowed"):
        made.staging(0)


def test_a_group_with_nothing_in_common_stages_nothing() -> None:
    staging = plan(shard(range(2)), shard(range(2, 4))).staging(0)
    assert staging.num_bytes((0, 8)) == 0
    assert len(staging.runs([0, 1], (0, 8), 0, [0])) == 0


def test_memory_that_is_too_small_is_refused_and_not_written() -> None:
    made, local, _ = small()
    staging, pool = made.staging(0), empty_pool(local)
    regions: list[Any] = views(local, pool)
    area = np.zeros(staging.num_bytes((0, 8)), np.uint8)
    with pytest.raises(InvalidTransferError, match="group 0: the staging area has 511 bytes, but 512 are needed"):
        staging.permute([1, 2], (0, 8), area[:-1], regions)
    with pytest.raises(InvalidTransferError, match="group 0: local region 0 does not match its layout"):
        staging.permute([1, 2], (0, 8), area, [regions[0][:-4]])
    with pytest.raises(InvalidTransferError, match="group 0: local region 0 does not match its layout"):
        staging.permute([1, 2], (0, 8), area, [])
    with pytest.raises(InvalidTransferError, match="group 0: local pages: got 1, but tokens 0 to 8 take 2 pages of 4"):
        staging.permute([1], (0, 8), area, regions)
    with pytest.raises(InvalidTransferError, match="group 0: local page 5 is named twice"):
        staging.permute([5, 5], (0, 8), area, regions)
    with pytest.raises(InvalidTransferError, match="group 0: remote page 12 does not exist: the pages are 0 to 11"):
        staging.runs([1, 12], (0, 8), 0, [0])
    assert (pool == -1).all()
