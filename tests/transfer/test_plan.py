"""The plan against copies by definition, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.transfer.plan_oracle import (
    ORDERS,
    PER_LAYER,
    copied,
    empty_pool,
    fewest,
    fill,
    pages_for,
    reach,
    region_starts,
    shard,
    share,
)
from transfer.boxes import ShardLayout
from transfer.errors import InvalidTransferError
from transfer.plan import Plan, plan
from transfer.shapes import PACKED_NHD, SPLIT_NHD
from transfer.sources import sources


def pull(local: ShardLayout, remotes: list[ShardLayout], tokens: tuple[int, int], rank: int = 0) -> int:
    """Pulls a request into `local` and compares every element of its pool. Returns the number of runs."""
    size = local.groups[0].page_size
    local_pages = pages_for(local, tokens, 1)
    pool, total = empty_pool(local), 0
    stop = tokens[1]
    for index, part in sources(local, remotes, rank):
        remote = remotes[index]
        remote_size = remote.groups[0].page_size
        remote_pages = pages_for(remote, tokens, 2 + index)
        stop = reach(local, remote, tokens)
        source = fill(remote, [remote_pages], (0, 10**6), tokens[0] // remote_size)
        starts = region_starts(local), region_starts(remote)
        runs = plan(part, remote).runs(0, local_pages, remote_pages, tokens, *starts)
        missed, pairs = len(runs) - fewest(runs), max(len(local_pages), len(remote_pages))
        tensors = 2 * max(len(local.region_bytes), len(remote.region_bytes))  # K and V may lie apart
        assert missed < pairs * tensors if len(runs) > pairs * tensors else missed == 0
        copied(runs, source, pool)
        total += len(runs)
    assert np.array_equal(pool, fill(local, [local_pages], (tokens[0], stop), tokens[0] // size))
    return total


@pytest.mark.parametrize("remote_order", [*ORDERS, *PER_LAYER])
@pytest.mark.parametrize("local_order", [*ORDERS, *PER_LAYER])
def test_every_element_arrives_whatever_the_two_orders(local_order: str, remote_order: str) -> None:
    local, remote = shard(range(4), order=local_order), shard(range(4), order=remote_order, pages=9)
    pull(local, [remote], (0, 32))
    pull(local, [remote], (8, 29))
    pull(local, [remote], (6, 29))


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4), (4, 16), (16, 4), (4, 6), (6, 4), (1, 4), (4, 1), (12, 8)])
@pytest.mark.parametrize("orders", [(ORDERS[0], ORDERS[0]), (SPLIT_NHD, SPLIT_NHD), (ORDERS[0], PACKED_NHD)])
def test_pages_of_any_sizes(sizes: tuple[int, int], orders: tuple[str, str]) -> None:
    local = shard(range(2), order=orders[0], page_size=sizes[0], pages=50)
    remote = shard(range(2), order=orders[1], page_size=sizes[1], pages=60)
    for tokens in ((0, 48), (0, 1), (5, 41), (7, 8), (16, 47)):
        pull(local, [remote], tokens)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (4, 2), (2, 4), (3, 2), (2, 3), (4, 1)])
def test_any_tensor_parallelism_either_way(order: str, heads: int, ranks: tuple[int, int]) -> None:
    ours, theirs = ranks
    remotes = [shard(share(heads, theirs, rank), order=order) for rank in range(theirs)]
    for rank in range(ours):
        pull(shard(share(heads, ours, rank), order=order), remotes, (0, 16), rank)


def test_equal_layouts_take_one_run_for_a_page_and_one_for_neighbours() -> None:
    local, remote = shard(range(2)), shard(range(2))
    made = plan(local, remote)
    num_bytes = local.region_bytes[0] // 12
    runs = made.runs(0, [7, 3, 4, 5, 0], [1, 8, 9, 10, 2], (0, 20), [1000], [5000])
    assert runs.local.tolist() == [1000, 1000 + 3 * num_bytes, 1000 + 7 * num_bytes]
    assert runs.remote.tolist() == [5000 + 2 * num_bytes, 5000 + 8 * num_bytes, 5000 + num_bytes]
    assert runs.length.tolist() == [num_bytes, 3 * num_bytes, num_bytes]
    assert runs.num_bytes == 5 * num_bytes
    assert len(runs) == 3
    ours, theirs = runs.descriptors(0, 3)
    assert ours.dtype == theirs.dtype == np.uint64
    assert ours[1].tolist() == [1000 + 3 * num_bytes, 3 * num_bytes, 0]
    assert theirs[1].tolist() == [5000 + 8 * num_bytes, 3 * num_bytes, 3]


def test_a_group_with_nothing_to_load_reads_nothing() -> None:
    made: Plan = plan(shard(range(2)), shard(range(2)))
    for tokens in ((0, 0), (8, 8), (9, 4)):
        assert len(made.runs(0, [], [5, 6], tokens, [0], [0])) == 0


def test_a_reader_with_more_pages_than_the_source_is_told_so() -> None:
    made = plan(shard(range(2)), shard(range(2)))
    with pytest.raises(
        InvalidTransferError, match="group 0: remote pages: 2 for tokens 0 to 12, which take 3 of 4 tokens"
    ):
        made.runs(0, [0, 1, 2], [5, 6], (0, 12), [0], [0])
    assert len(made.runs(0, [0, 1, 2], [5, 6], (0, 8), [0], [0])) == 1
