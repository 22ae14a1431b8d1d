"""A plan must give the same result as copying element by element, and must refuse invalid pulls."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.transfer.plan_oracle import (
    ORDERS,
    PER_LAYER,
    copied,
    empty_pool,
    fewest,
    fill,
    page_layout,
    pages_for,
    reach,
    region_starts,
    shard,
    share,
)
from transfer.errors import InvalidTransferError, MetadataError
from transfer.plan.boxes import Group, ShardLayout, check
from transfer.plan.plan import Plan, plan
from transfer.plan.shapes import BLOCKS_FIRST_HND, BLOCKS_FIRST_NHD, PACKED_HND, PACKED_NHD, SPLIT_NHD, dense
from transfer.plan.source_ranks import sources

ROOT = Path(__file__).resolve().parents[3]


def check_pull(local: ShardLayout, remotes: list[ShardLayout], tokens: tuple[int, int], rank: int = 0) -> int:
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
        runs = plan(part, remote, starts).runs(0, local_pages, remote_pages, tokens)
        missed, pairs = len(runs) - fewest(runs), max(len(local_pages), len(remote_pages))
        tensors = 2 * max(len(local.region_bytes), len(remote.region_bytes))  # K and V may have separate tensors.
        assert missed < pairs * tensors if len(runs) > pairs * tensors else missed == 0
        copied(runs, source, pool)
        total += len(runs)
    assert np.array_equal(pool, fill(local, [local_pages], (tokens[0], stop), tokens[0] // size))
    return total


@pytest.mark.each_value
@pytest.mark.parametrize("remote_order", [*ORDERS, *PER_LAYER])
@pytest.mark.parametrize("local_order", [*ORDERS, *PER_LAYER])
def test_every_element_arrives_whatever_the_two_orders(local_order: str, remote_order: str) -> None:
    local, remote = shard(range(4), order=local_order), shard(range(4), order=remote_order, pages=9)
    check_pull(local, [remote], (0, 32))
    check_pull(local, [remote], (8, 29))
    check_pull(local, [remote], (6, 29))


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4), (4, 16), (16, 4), (4, 6), (6, 4), (1, 4), (4, 1), (12, 8)])
@pytest.mark.parametrize("orders", [(ORDERS[0], ORDERS[0]), (SPLIT_NHD, SPLIT_NHD), (ORDERS[0], PACKED_NHD)])
def test_pages_of_any_sizes(sizes: tuple[int, int], orders: tuple[str, str]) -> None:
    local = shard(range(2), order=orders[0], page_size=sizes[0], pages=50)
    remote = shard(range(2), order=orders[1], page_size=sizes[1], pages=60)
    for tokens in ((0, 48), (0, 1), (5, 41), (7, 8), (16, 47)):
        check_pull(local, [remote], tokens)


@pytest.mark.each_value
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (4, 2), (2, 4), (3, 2), (2, 3), (4, 1)])
def test_any_tensor_parallelism_either_way(order: str, heads: int, ranks: tuple[int, int]) -> None:
    ours, theirs = ranks
    remotes = [shard(share(heads, theirs, rank), order=order) for rank in range(theirs)]
    for rank in range(ours):
        check_pull(shard(share(heads, ours, rank), order=order), remotes, (0, 16), rank)


def test_equal_layouts_take_one_run_for_a_page_and_one_for_neighbours() -> None:
    local, remote = shard(range(2)), shard(range(2))
    made = plan(local, remote, ([1000], [5000]))
    num_bytes = local.region_bytes[0] // 12
    runs = made.runs(0, [7, 3, 4, 5, 0], [1, 8, 9, 10, 2], (0, 20))
    assert runs.local.tolist() == [1000, 1000 + 3 * num_bytes, 1000 + 7 * num_bytes]
    assert runs.remote.tolist() == [5000 + 2 * num_bytes, 5000 + 8 * num_bytes, 5000 + num_bytes]
    assert runs.length.tolist() == [num_bytes, 3 * num_bytes, num_bytes]
    assert runs.num_bytes == 5 * num_bytes
    assert len(runs) == 3
    ours, theirs = runs.descriptors(0, 3)
    assert ours.dtype == theirs.dtype == np.uint64
    assert ours[1].tolist() == [1000 + 3 * num_bytes, 3 * num_bytes, 0]
    assert theirs[1].tolist() == [5000 + 8 * num_bytes, 3 * num_bytes, 3]


def test_neighbours_join_in_each_tensor_of_its_own() -> None:
    local, remote = shard(range(2), order=SPLIT_NHD, pages=8), shard(range(2), order=SPLIT_NHD, pages=9)
    size = 4 * 2 * 2 * 4
    runs = plan(local, remote, ([0, 10_000], [0, 20_000])).runs(0, [2, 1, 6], [5, 4, 0], (0, 12))
    places = [(region + side * 8 * size, side) for region in (0, 10_000) for side in (0, 1)]
    assert runs.local.tolist() == [at + page * size for at, _ in places for page in (1, 6)]
    assert runs.length.tolist() == [2 * size, size] * 4
    assert runs.remote.tolist()[:4] == [4 * size, 0, (9 + 4) * size, 9 * size]


def test_tokens_continue_over_pages_of_another_size() -> None:
    local = shard(range(2), order=SPLIT_NHD, pages=16, layers=range(1))
    remote = shard(range(2), order=SPLIT_NHD, page_size=16, pages=4, layers=range(1))
    token = 2 * 2 * 4
    # Tokens 2 to 32 are in local pages of 4 tokens and remote pages of 16 tokens. Four local pages and half of a remote
    # page are one contiguous run. After the run there is a gap.
    runs = plan(local, remote).runs(0, [4, 5, 6, 7, 0, 1, 2, 3], [1, 3], (2, 32))
    assert runs.local.tolist()[:2] == [0, (4 * 4 + 2) * token]
    assert runs.remote.tolist()[:2] == [3 * 16 * token, (16 + 2) * token]
    assert runs.length.tolist() == [16 * token, 14 * token] * 2


def test_tokens_continue_over_pages_of_one_token() -> None:
    replace = msgspec.structs.replace
    local = shard(range(2), order=SPLIT_NHD, page_size=1, pages=40, layers=range(1))
    (box,) = local.groups[0].boxes
    box = replace(box, strides=(*box.strides[:3], 0, box.strides[4]))  # a stride without effect may have any value
    local = check(replace(local, groups=(replace(local.groups[0], boxes=(box,)),)))
    remote = shard(range(2), order=SPLIT_NHD, pages=12, layers=range(1))
    runs = plan(local, remote).runs(0, [*range(8, 16), 3, 4, 5, 6], [3, 4, 7], (0, 12))
    token = 2 * 2 * 4
    assert runs.length.tolist() == [4 * token, 8 * token] * 2


def test_a_pull_takes_one_run_a_page_whatever_its_last_token() -> None:
    made = plan(shard(range(2)), shard(range(2)))
    for stop in (17, 18, 20):
        runs = made.runs(0, [0, 2, 4, 6, 8], [1, 3, 5, 7, 9], (0, stop))
        assert len(runs) == 5


# ---- cases in which the pulls of other systems gave wrong results


@pytest.mark.parametrize(("ours", "theirs"), [(8, 2), (2, 8), (8, 4), (4, 8), (8, 1), (1, 8), (3, 8), (8, 3)])
def test_more_ranks_than_heads_need_no_rule_for_block_lengths(ours: int, theirs: int) -> None:
    remotes = [shard(share(2, theirs, rank), order=PACKED_HND) for rank in range(theirs)]
    for rank in range(ours):
        check_pull(shard(share(2, ours, rank), order=PACKED_HND), remotes, (0, 16), rank)


def test_a_group_with_nothing_to_load_reads_nothing() -> None:
    made: Plan = plan(shard(range(2)), shard(range(2)))
    for tokens in ((0, 0), (8, 8), (9, 4)):
        assert len(made.runs(0, [], [5, 6], tokens)) == 0
        assert len(made.runs(0, [3], [5, 6], tokens)) == 0


def test_a_reader_with_one_page_more_than_the_source_fails_only_that_pull() -> None:
    made = plan(shard(range(2)), shard(range(2)))
    with pytest.raises(InvalidTransferError, match="remote pages: got 2, but tokens 0 to 12 take 3 pages of 4 tokens"):
        made.runs(0, [0, 1, 2], [5, 6], (0, 12))
    assert len(made.runs(0, [0, 1, 2], [5, 6], (0, 8))) == 1


@pytest.mark.parametrize("order", [BLOCKS_FIRST_NHD, BLOCKS_FIRST_HND])
@pytest.mark.parametrize("sizes", [(8, 4), (16, 4), (4, 8), (12, 4)])
def test_blocks_first_pages_of_several_remote_ones_keep_keys_and_values_apart(
    order: str, sizes: tuple[int, int]
) -> None:
    local, remote = (shard(range(2), order=order, page_size=size, pages=24) for size in sizes)
    check_pull(local, [remote], (0, 48))
    check_pull(local, [remote], (24, 47))


# What is refused.


def test_lists_that_do_not_fit_name_the_value_and_the_limit() -> None:
    made = plan(shard(range(2), pages=12), shard(range(2), page_size=8, pages=6))
    good: dict[str, Any] = {"local_pages": [0, 1, 2], "remote_pages": [0, 1], "tokens": (0, 12)}
    assert len(made.runs(0, **good)) > 0
    for changes, message in (
        ({"local_pages": [0, 1]}, "group 0: local pages: got 2, but tokens 0 to 12 take 3 pages of 4 tokens"),
        ({"remote_pages": [0]}, "group 0: remote pages: got 1, but tokens 0 to 12 take 2 pages of 8 tokens"),
        ({"remote_pages": []}, "group 0: remote pages: got 0, but tokens 0 to 12"),
        ({"local_pages": [0, 1, 12]}, "group 0: local page 12 does not exist: the pages are 0 to 11"),
        ({"remote_pages": [6, 0]}, "group 0: remote page 6 does not exist: the pages are 0 to 5"),
        ({"tokens": (3, 49)}, "group 0: tokens 3 to 49 do not fit the 12 local pages, which hold 48"),
        ({"local_pages": [0, -1, 2]}, "group 0: local page -1 does not exist: the pages are 0 to 11"),
        ({"local_pages": [0, 1, 0]}, "group 0: local page 0 is named twice"),
        # Two halves of one remote page would fill the same local page.
        ({"local_pages": [1, 1, 0]}, "group 0: local page 1 is named twice"),
        ({"remote_pages": [0, 1 << 63]}, "group 0: remote pages are not 64-bit integers"),
        ({"remote_pages": [0, None]}, "group 0: remote pages are not 64-bit integers"),
        ({"tokens": (0, 49)}, "group 0: tokens 0 to 49 do not fit the 12 local pages, which hold 48"),
        ({"tokens": (0, 1 << 70)}, "group 0: tokens 0 to 1180591620717411303424 are not within 0 to"),
        ({"local_pages": [[0], [1], [2]]}, "group 0: local pages: got 3, but tokens"),
        ({"tokens": (-1, 4)}, "group 0: tokens -1 to 4 are not within 0 to"),
    ):
        with pytest.raises(InvalidTransferError, match=re.escape(message)):
            made.runs(0, **(good | changes))  # pyright: ignore[reportArgumentType]


def test_a_page_named_twice_is_found_among_equal_pages_too() -> None:
    made = plan(shard(range(2)), shard(range(2)))
    for pages in ([3, 3], [7, 1, 7], [1, 7, 7]):
        with pytest.raises(InvalidTransferError, match=f"group 0: local page {pages[-1]} is named twice"):
            made.runs(0, pages, [3, 4, 5], (0, 4 * len(pages)))
    assert len(made.runs(0, [3, 4, 5], [7, 7, 1], (0, 12))) == 3  # reading a page twice is harmless


def test_pages_beyond_the_last_token_are_not_written() -> None:
    made = plan(shard(range(2)), shard(range(2)))
    runs = made.runs(0, np.array([3, 3, 99], np.int32), np.array([5, -4], np.int32), (4, 8))
    assert len(runs) == 1


def test_a_peer_whose_layout_scatters_every_element_takes_no_memory() -> None:
    layout = msgspec.structs.replace(page_layout(range(8), layers=32, page_size=16, dims=128), order=ORDERS[0])
    ours = check(dense(layout, 4096))
    (box,) = ours.groups[0].boxes
    scattered = msgspec.structs.replace(box, itemsize=4, strides=tuple(2 * step for step in box.strides))
    scattered = msgspec.structs.replace(scattered, page_stride=2 * box.page_stride)
    group = msgspec.structs.replace(ours.groups[0], boxes=(scattered,))
    made = plan(ours, check(ShardLayout((group,), (2 * ours.region_bytes[0],))))
    assert len(made.runs(0, [1], [1], (0, 16))) == 32 * 2 * 8 * 16 * 128
    with pytest.raises(InvalidTransferError, match="group 0: tokens 0 to 1024 take 67108864 runs; at most 33554432"):
        made.runs(0, range(64), range(64), (0, 1024))


def test_shards_of_two_models_are_refused() -> None:
    local = shard(range(2))
    replace = msgspec.structs.replace
    (group,) = local.groups
    (box,) = group.boxes
    state = Group(1, 12, (replace(box, extent=(2, 2, 2, 1, 2)),), state=True)
    for remote, message in (
        (replace(local, groups=(group, group)), "this engine has 1 groups, the source has 2"),
        (replace(local, groups=(state,)), "group 0: one side keeps a recurrent state, the other keeps tokens"),
        (
            replace(local, groups=(replace(group, boxes=(replace(box, dtype="int32"),)),)),
            "float32 .* here and int",
        ),
        (
            replace(local, groups=(replace(group, boxes=(replace(box, itemsize=2),)),)),
            ".4 bytes. here .* .2 b",
        ),
    ):
        with pytest.raises(MetadataError, match=message):
            plan(local, remote)
    other = plan(local, replace(local, groups=(replace(group, boxes=(replace(box, kind="ssm"),)),)))
    assert len(other.runs(0, [0], [0], (0, 4))) == 0  # The ranks have no common kind of state, so no state is copied.


FAULTS = """
import resource
import numpy as np
from tests.transfer.plan_oracle import page_layout
from transfer.plan.plan import plan
from benchmarks.pulls.layouts import per_layer
from transfer.plan.shapes import PACKED_HND

layout = per_layer(page_layout(range(8), layers=64), 5000, PACKED_HND)
pages, bases = np.arange(0, 4096, 2), np.arange(64) << 32
made = plan(layout, layout, (bases, bases))
def pull():
    return len(made.runs(0, pages, pages, (0, 8192)).descriptors()[0])
pull(), pull()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
assert pull() == 131_072
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_large_pulls_find_the_memory_of_the_last_one() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True, cwd=ROOT)
    assert int(done.stdout) < 100  # Mapping new memory for each pull would cost 2,300 page faults.


def test_a_window_is_pulled_from_its_first_page_on() -> None:
    local, remote = shard(range(2), page_size=4), shard(range(2), page_size=16)
    check_pull(local, [remote], (36, 45))  # Token 45 with a window of 9 tokens sees tokens 37 to 45.
