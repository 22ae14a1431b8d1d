"""Pulls of few runs are planned in plain Python. They must copy the same bytes as `Plan.runs`, which plans all other
pulls.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.pulls.layouts import per_layer
from kvcache.layout import PageLayout
from kvcache.replica.block_table import PageCopy
from tests.transfer.plan_oracle import mamba_boxes
from transfer.errors import InvalidTransferError
from transfer.plan.boxes import ShardLayout
from transfer.plan.page_lists import NOTHING, BlocksOfGroup
from transfer.plan.plan import MOST_FEW, Plan, RunRows, plan
from transfer.plan.shapes import PACKED_HND, dense

HEAD_MAJOR = "head,layer,side,token,dim"
BASES = ([1 << 20, 1 << 30], [1 << 40, 1 << 44])


def shard(heads: range = range(4), order: str = HEAD_MAJOR, page_size: int = 16, pages: int = 80) -> ShardLayout:
    order, axes = (HEAD_MAJOR, order) if "page" in order else (order, "")
    layout = PageLayout("bfloat16", 2, 2, 2, heads.start, len(heads), page_size, 8, order)
    return per_layer(layout, pages, axes) if axes else dense(layout, pages)


def made_of(local: ShardLayout, remote: ShardLayout) -> Plan:
    bases = BASES[0][: len(local.region_bytes)], BASES[1][: len(remote.region_bytes)]
    return plan(local, remote, bases, (1, 2), rank=3)


def rows(found: tuple[RunRows, RunRows, int]) -> set[tuple[int, int, int]]:
    local, remote = np.asarray(found[0]), np.asarray(found[1])
    assert (local[:, 1] == remote[:, 1]).all()
    assert {*local[:, 2].tolist()} == {1}
    assert {*remote[:, 2].tolist()} == {2}
    return {*zip(local[:, 0].tolist(), remote[:, 0].tolist(), local[:, 1].tolist(), strict=True)}


@pytest.mark.parametrize("remote", [shard(), shard(range(2)), shard(range(2, 4)), shard(order=PACKED_HND, pages=64)])
@pytest.mark.parametrize("local", [shard(), shard(range(1, 3)), shard(order=PACKED_HND)])
def test_the_runs_are_those_of_the_plan(local: ShardLayout, remote: ShardLayout) -> None:
    planned = made_of(local, remote)
    made = 0
    for here, there, tokens in (
        ([7], [31], (0, 16)),
        (np.array([9], np.int32), np.array([0], np.int32), (32, 41)),
        ((4, 9, 2), (1, 5, 30), (16, 64)),
        ([1, 3, 5, 7], [2, 4, 6, 8], (0, 50)),
        ([3, 4, 5, 9], [6, 7, 8, 9], (0, 64)),
        ([3, 4, 5, 6], [6, 7, 9, 10], (0, 50)),
    ):
        found = planned.few([PageCopy(here, there, tokens)])
        runs = planned.runs(0, here, there, tokens)
        if found is None:
            assert len(runs) > MOST_FEW
            continue
        made += 1
        assert found[2] == runs.num_bytes
        expected = {*zip(runs.local.tolist(), runs.remote.tolist(), runs.length.tolist(), strict=True)}
        assert rows(found) == expected
        assert planned.few([(here, there, tokens)]) == found, "a plain tuple of this shape must give the same runs"
    assert made or len(planned.runs(0, [7], [31], (0, 16))) > MOST_FEW


@pytest.mark.parametrize(
    ("local", "remote", "tokens"),
    [
        ([1], [80], (0, 16)),  # The pool does not have page 80.
        ([-1], [1], (0, 16)),
        ([1, -1], [1, 2], (0, 32)),
        (np.array([1.0]), [1], (0, 16)),  # ids must be integers
        (np.array([[1]]), [1], (0, 16)),
        (1, [1], (0, 16)),
        ([2, 2], [1, 3], (0, 32)),  # a local page is named twice
        ([1], [1, 2], (0, 32)),  # there are too few local pages
        ([1], [1], (4, 16)),  # The reader does not write the first tokens of the page.
        ([1], [1], (16, 16)),  # there are no tokens
        ([1], [1], (-16, 0)),
        ([[1]], [["a"]], (0, 16)),
        (range(65), range(65), (0, 1040)),  # 65 pages are too many for a plan of few runs
    ],
)
def test_unusual_and_wrong_pulls_are_left_to_the_plan(local: object, remote: object, tokens: tuple[int, int]) -> None:
    named: Any = [PageCopy(local, remote, tokens)]  # pyright: ignore[reportArgumentType]
    assert made_of(shard(), shard()).few(named) is None


def test_other_page_sizes_states_and_a_sources_blocks_are_left_to_the_plan() -> None:
    page = [PageCopy([1], [1], (0, 16))]
    assert made_of(shard(), shard(page_size=32)).few(page) is None
    sizes = {"x": range(4), "b": range(2), "c": range(2), "conv_length": 3, "ssm_heads": range(2), "ssm_dims": 8}
    boxes = mamba_boxes(layer=0, page_stride=4096, **sizes)
    state = shard()
    state = ShardLayout((type(state.groups[0])(1, 8, boxes, state=True),), (8 * 4096,))
    assert made_of(state, state).few([PageCopy([1], [1], (0, 1))]) is None
    blocks = BlocksOfGroup([1], (0, 16), 0, [1], 16)
    assert made_of(shard(), shard()).few([blocks]) is None
    assert made_of(shard(), shard()).few(page) is not None


def test_blocks_become_pages_and_a_group_with_nothing_in_common_needs_none() -> None:
    named: PageCopy = PageCopy([1], [2], (0, 16))
    assert made_of(shard(), shard()).pages([named])[0] is named
    blocks = BlocksOfGroup([1], (0, 16), 0, [1], 8)  # The source has computed only 8 tokens. The pull needs 16 tokens.
    assert made_of(shard(range(2)), shard(range(2, 4))).pages([blocks]) == [NOTHING]
    with pytest.raises(
        InvalidTransferError, match="group 0: tokens up to 16 are needed, but the source has computed 8"
    ):
        made_of(shard(), shard()).pages([blocks])


def with_window(layout: ShardLayout, pages: int, block_pages: int = 1) -> ShardLayout:
    """Returns two groups over the same pool. The second group keeps a window. A source names the blocks of both
    groups.
    """
    (group,) = layout.groups
    groups = tuple(
        msgspec.structs.replace(group, num_pages=pages, window=window, block_pages=block_pages) for window in (0, 32)
    )
    return ShardLayout(groups, layout.region_bytes)


def test_blocks_of_the_source_are_converted_to_its_own_pages() -> None:
    """A block of the source has 64 tokens, and a page of the reader has 16 tokens. The source has given back the
    window's first two blocks.
    """
    ours, theirs = with_window(shard(), 80), with_window(shard(page_size=32, pages=40), 40, block_pages=2)
    planned = made_of(ours, theirs)
    assert planned.rank == 3
    local = np.arange(1, 17)
    whole = BlocksOfGroup(local, (0, 256), 0, [3, 4, 5, 6], 256)
    window = BlocksOfGroup(local[6:], (96, 256), 224, [7, 8], 256)
    first, second = planned.pages([whole, window])
    assert np.asarray(first[0]).tolist() == local.tolist()
    assert np.asarray(first[1]).tolist() == [6, 7, 8, 9, 10, 11, 12, 13]
    assert first[2] == (0, 256)
    assert np.asarray(second[0]).tolist() == local[8:].tolist(), "from token 128 on, where the source's blocks begin"
    assert np.asarray(second[1]).tolist() == [14, 15, 16, 17]
    assert second[2] == (128, 256)
    assert planned.begins([whole, window]) == [0, 128]
    page = PageCopy([1], [1], (16, 32))
    assert planned.begins([page, window]) == [0, 128], "for pages that the reader has named, the first token is known"
    assert planned.pages([page, window])[0] is page


def test_a_group_with_nothing_in_common_reads_nothing_and_begins_at_token_0() -> None:
    planned = made_of(with_window(shard(range(2)), 80), with_window(shard(range(2, 4)), 80))
    blocks, page = BlocksOfGroup([1], (16, 32), 16, [1], 32), PageCopy([1], [1], (16, 32))
    assert planned.pages([blocks, page]) == [NOTHING, page]
    assert planned.begins([blocks, page]) == [0, 0]
    assert len(planned.runs(1, *page)) == 0


def test_the_rank_is_that_of_the_other_shard() -> None:
    layout = shard()
    assert plan(layout, layout, rank=7).rank == 7
    assert plan(layout, layout).rank == 0
    assert [bases.tolist() for bases in plan(layout, layout).bases] == [[0], [0]]
    assert plan(layout, layout).devices == (0, 0)
