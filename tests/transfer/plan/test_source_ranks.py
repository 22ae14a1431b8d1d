"""Tests the choice of source ranks. Each element is read once, the readers are spread over replicas, and no shard is
read without need.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import msgspec
import numpy as np
import pytest

from benchmarks.pulls.layouts import per_layer
from tests.transfer.plan_oracle import (
    ORDERS,
    PER_LAYER,
    copied,
    empty_pool,
    fill,
    mamba_boxes,
    page_layout,
    region_starts,
    shard,
    share,
)
from transfer.errors import MetadataError
from transfer.plan.boxes import Group, ShardLayout, check
from transfer.plan.plan import plan
from transfer.plan.shapes import LATENT, SPLIT_NHD
from transfer.plan.source_ranks import sources


def cells(layout: ShardLayout) -> list[tuple[int, str, int, int, int, int]]:
    """Returns each element of a layout, without the token axis."""
    found: list[tuple[int, str, int, int, int, int]] = []
    for number, group in enumerate(layout.groups):
        for box in group.boxes:
            ranges = (range(first, end) for first, end in zip(box.first, box.end, strict=True))
            found += [(number, box.kind, *place) for place in product(*ranges)]
    return found


def chosen(local: ShardLayout, remotes: list[ShardLayout], rank: int) -> list[int]:
    """Returns the remote shards to read from.

    Checks that each element of `local` comes from exactly one shard that holds it.
    """
    found = sources(local, remotes, rank)
    counts = Counter(cell for _, part in found for cell in cells(check(part)))
    assert counts == Counter(cells(local))
    for index, part in found:
        assert set(cells(part)) <= set(cells(remotes[index]))
        assert part.region_bytes == local.region_bytes
    return [index for index, _ in found]


def ranks(heads: int, number: int, order: str = ORDERS[0]) -> list[ShardLayout]:
    return [shard(share(heads, number, rank), order=order) for rank in range(number)]


@pytest.mark.parametrize(
    ("heads", "theirs", "ours", "expected"),
    [
        (4, 1, 1, [[0]]),
        (4, 1, 2, [[0], [0]]),
        (4, 2, 4, [[0], [0], [1], [1]]),
        (4, 2, 1, [[0, 1]]),
        (4, 4, 2, [[0, 1], [2, 3]]),
        (2, 2, 4, [[0], [0], [1], [1]]),  # Two readers share each head.
        (2, 4, 2, [[0], [3]]),  # Two source ranks share each head. Each reader reads from one of the two.
        (2, 4, 1, [[0, 2]]),
        (2, 4, 4, [[0], [1], [2], [3]]),  # on both
        (2, 4, 8, [[0], [1], [0], [1], [2], [3], [2], [3]]),
        (6, 2, 3, [[0], [0, 1], [1]]),  # the two numbers of ranks have no integer ratio
        (6, 3, 2, [[0, 1], [1, 2]]),
    ],
)
def test_heads_come_from_the_shards_that_hold_them(
    heads: int, theirs: int, ours: int, expected: list[list[int]]
) -> None:
    remotes = ranks(heads, theirs)
    assert [chosen(local, remotes, rank) for rank, local in enumerate(ranks(heads, ours))] == expected


def latent(layers: range) -> ShardLayout:
    return check(per_layer(page_layout(range(1), layers=len(layers), sides=1), 8, LATENT, layers.start))


def test_latents_are_read_from_one_rank_and_the_readers_spread() -> None:
    remotes = [latent(range(2))] * 4
    assert [chosen(latent(range(2)), remotes, rank) for rank in range(6)] == [[0], [1], [2], [3], [0], [1]]


def test_stages_that_differ_are_read_where_their_layers_are() -> None:
    theirs = [latent(layers) for layers in (range(2), range(2, 3), range(3, 6))]
    ours = [latent(layers) for layers in (range(3), range(3, 6))]
    assert [chosen(local, theirs, 0) for local in ours] == [[0, 1], [2]]
    stages = (range(1), range(1, 4))
    grid = [shard(share(4, 2, rank), layers=layers, order=SPLIT_NHD) for layers in stages for rank in (0, 1)]
    assert chosen(shard(range(1, 3), layers=range(4)), grid, 0) == [0, 1, 2, 3]


def mamba(rank: int, number: int, groups: int) -> ShardLayout:
    """Returns a hybrid model with attention and states. If there are more ranks than groups, B and C of the states are
    replicated.
    """
    x, ssm, b = share(24, number, rank), share(8, number, rank), share(groups * 2, number, rank)
    if number > groups:
        group = rank * groups // number
        b = range(2 * group, 2 * group + 2)
    dtype = ("float32", 4)
    sizes = {"conv_length": 3, "ssm_dims": 10, "page_stride": 2048}
    boxes = mamba_boxes(layer=1, x=x, b=b, c=b, ssm_heads=ssm, dtype=dtype, region=2, **sizes)
    kv = shard(share(2, number, rank), order=PER_LAYER[5])
    return check(ShardLayout((*kv.groups, Group(1, 4, boxes, state=True)), (*kv.region_bytes, 4 * 2048)))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (2, 4), (4, 2), (4, 4), (4, 1), (3, 2)])
def test_states_of_hybrids_arrive_element_by_element(theirs: int, ours: int, groups: int) -> None:
    remotes = [mamba(rank, theirs, groups) for rank in range(theirs)]
    for rank in range(ours):
        local = mamba(rank, ours, groups)
        pool, starts = empty_pool(local), region_starts(local)
        read = chosen(local, remotes, rank)
        assert len(read) == len(set(read)) <= max(1, -(-theirs // ours) + (theirs % ours > 0 or ours % theirs > 0))
        for index, part in sources(local, remotes, rank):
            source = fill(remotes[index], [[3, 5], [2]], (0, 160))
            made = plan(part, remotes[index], (starts, region_starts(remotes[index])))
            for group, pages in ((0, [[1, 7], [3, 5]]), (1, [[1], [2]])):
                runs = made.runs(group, *pages, (0, 8))
                copied(runs, source, pool)
        assert np.array_equal(pool, fill(local, [[1, 7], [1]], (0, 160)))


def test_elements_that_several_shards_hold_come_from_a_shard_that_is_read_anyway() -> None:
    remotes = [mamba(rank, 4, 1) for rank in range(4)]
    # Only shard 3 has these channels of x. Shards 2 and 3 have this head. All shards have B and C.
    assert chosen(mamba(3, 4, 1), remotes, 0) == [3]
    assert chosen(mamba(1, 2, 1), remotes, 0) == [2, 3]


def test_elements_that_no_shard_holds_are_named() -> None:
    remotes = ranks(4, 2)
    with pytest.raises(MetadataError, match="group 0, 'kv': no remote shard holds layer 0, head 2 .side 0, dim 0."):
        sources(shard(range(1, 3)), remotes[:1], 0)
    with pytest.raises(MetadataError, match="no remote shard holds layer 2, head 0"):
        sources(shard(range(4), layers=range(4)), remotes, 0)
    with pytest.raises(MetadataError, match="holds layer 0, head 0 .side 1"):
        sources(shard(range(1)), [check(per_layer(page_layout(range(1), sides=1), 8, "page,token,head,dim"))], 0)
    with pytest.raises(MetadataError, match="no remote shard holds layer 0"):
        sources(shard(range(1)), [], 0)
    two = msgspec.structs.replace(remotes[0], groups=remotes[0].groups * 2)
    with pytest.raises(MetadataError, match="remote shard 1 has 2 groups, this shard has 1"):
        sources(shard(range(2)), [remotes[0], two], 0)


def test_a_shard_without_anything_of_its_own_reads_nothing() -> None:
    empty = ShardLayout((Group(4, 8, ()),), (64,))
    assert sources(empty, ranks(4, 2), 0) == []
