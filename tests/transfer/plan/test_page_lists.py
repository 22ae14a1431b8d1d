"""Tests the conversion of blocks that a source's scheduler names to pages."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache.replica.block_table import PageCopy
from tests.transfer.plan_oracle import page_layout, shard
from transfer.errors import InvalidTransferError, MetadataError
from transfer.plan.boxes import Group, ShardLayout, check
from transfer.plan.page_lists import BlocksOfGroup, first_read, kernel_pages, pages_of, with_blocks
from transfer.plan.plan import plan
from transfer.plan.shapes import dense


def group(page_size: int = 4, block_pages: int = 1, state: bool = False) -> Group:
    return Group(1 if state else page_size, 100, (), state=state, block_pages=block_pages)


def pages(local: list[int], blocks: list[int], end: int, tokens: tuple[int, int], needed: int = -1) -> BlocksOfGroup:
    return BlocksOfGroup(local, tokens, tokens[0] if needed < 0 else needed, blocks, end)


def lists(found: PageCopy) -> tuple[list[int], list[int], tuple[int, int]]:
    local, remote, tokens = found
    return np.asarray(local).tolist(), np.asarray(remote).tolist(), tokens


def test_pages_that_are_named_already_stay_as_they_are() -> None:
    named = PageCopy([1], [2], (0, 4))
    assert pages_of("group 0", named, group(), group()) is named


def test_an_empty_rest_needs_no_blocks() -> None:
    assert lists(pages_of("group 0", pages([], [5, 6], 8, (8, 8)), group(), group())) == ([], [], (0, 0))
    assert first_read(pages([], [6], 8, (0, 0)), group()) == 0


def test_pages_that_no_window_reaches_may_be_missing() -> None:
    # The reader has pages of 8 tokens, and the source has pages of 4 tokens. The window needs token 13, so the source
    # has kept tokens 12 to 24. The reader's page begins at token 8.
    named = pages([1, 2], [5, 6, 7], 24, (8, 24), needed=13)
    assert lists(pages_of("group 0", named, group(8), group(4))) == ([1, 2], [5, 6, 7], (12, 24))
    assert first_read(named, group(4)) == 12
    named = pages([1, 2, 3], [6, 7], 24, (8, 24), needed=17)
    assert lists(pages_of("group 0", named, group(8), group(4))) == ([2, 3], [6, 7], (16, 24))
    assert first_read(named, group(4)) == 16
    with pytest.raises(
        InvalidTransferError, match="2 blocks of 4 tokens begin with token 16, but token 13 is the first"
    ):
        pages_of("group 0", pages([1, 2], [6, 7], 24, (8, 24), needed=13), group(8), group(4))


def test_a_state_is_in_the_last_block() -> None:
    state = group(state=True)
    assert lists(pages_of("group 0", pages([4], [8, 9], 24, (0, 24)), state, state)) == ([4], [9], (0, 24))
    assert first_read(pages([4], [8, 9], 24, (0, 24)), state) == 0
    with pytest.raises(InvalidTransferError, match="0 blocks for a state; 1 is needed"):
        pages_of("group 0", pages([4], [], 24, (0, 24)), state, state)


def test_tokens_that_the_source_has_not_computed_are_not_read() -> None:
    with pytest.raises(InvalidTransferError, match="tokens up to 13 are needed, but the source has computed 12"):
        pages_of("group 0", pages([1, 2, 3, 4], [7, 8, 9], 12, (0, 13)), group(), group())


def test_more_blocks_than_tokens_are_refused() -> None:
    with pytest.raises(InvalidTransferError, match="names 4 blocks of 4 tokens, but its 12 tokens fill 3"):
        pages_of("group 0", pages([1, 2, 3], [6, 7, 8, 9], 12, (0, 12)), group(), group())


def test_a_block_has_pages_and_a_state_has_one() -> None:
    layout = dense(page_layout(range(2)), 8)
    for block_pages, limit in ((0, "0 is not within 1"), (1 << 24, f"{1 << 24} is not within 1 to {(1 << 24) // 4}")):
        bad = ShardLayout((Group(4, 8, layout.groups[0].boxes, block_pages=block_pages),), layout.region_bytes)
        with pytest.raises(MetadataError, match=f"group 0: pages of a block: {limit}"):
            check(bad)
    with pytest.raises(MetadataError, match="pages of a block: 2 is not within 1 to 1"):
        check(ShardLayout((Group(1, 8, (), state=True, block_pages=2),), (8,)))


def test_logical_pages_become_the_kernels() -> None:
    assert kernel_pages([5, 0], 3).tolist() == [15, 16, 17, 0, 1, 2]
    local, remote = shard(range(2), page_size=4, pages=12), shard(range(2), page_size=4, pages=12)
    runs = plan(local, remote).runs(0, kernel_pages([2, 0], 4), kernel_pages([1, 2], 4), (0, 32))
    assert len(runs) == 2


@pytest.mark.parametrize("seed", range(20))
def test_each_token_is_copied_from_its_place_at_the_source_to_its_place_at_the_reader(seed: int) -> None:
    """Checks the place of each token. The page sizes of both sides are random. A block may have several pages, and a
    list may lack its first blocks.
    """
    rng = random.Random(seed)
    for _ in range(200):
        ours, theirs, pages_of_a_block = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 3])
        size = theirs * pages_of_a_block
        end = rng.randint(1, 60)
        blocks = rng.sample(range(100), -(-end // size))
        start = rng.randint(0, end - 1)
        stop = rng.randint(start + 1, end)
        lost = rng.randint(0, (stop - 1) // size)  # The number of blocks that the source has left out at the beginning.
        needed = rng.randint(max(start, lost * size), stop)
        local = rng.sample(range(100), -(-stop // ours) - start // ours)
        named = pages(local, blocks[lost:], end, (start, stop), needed)
        here, there, (first, last) = lists(
            pages_of("group 0", named, group(ours), group(theirs, block_pages=pages_of_a_block))
        )
        assert (first, last) == (max(start, lost * size), stop)
        for token in range(first, last):
            page = there[token // theirs - first // theirs]
            assert page == blocks[token // size] * pages_of_a_block + token % size // theirs
            assert here[token // ours - first // ours] == local[token // ours - start // ours]
        if lost:
            early = named._replace(needed=lost * size - 1)
            with pytest.raises(InvalidTransferError, match=f"token {lost * size - 1} is the first that is needed"):
                pages_of("group 0", early, group(ours), group(theirs, block_pages=pages_of_a_block))


def test_a_state_is_that_after_all_tokens_of_the_source_and_its_newest() -> None:
    named = BlocksOfGroup([7], (0, 9), 0, [3, 4, 5], 9)
    assert lists(pages_of("group 1", named, group(state=True), group(state=True))) == ([7], [5], (0, 9))
    early = named._replace(tokens=(0, 8))
    with pytest.raises(InvalidTransferError, match="the source's state covers 9 tokens, but 8 are needed"):
        pages_of("group 1", early, group(state=True), group(state=True))
    with pytest.raises(InvalidTransferError, match="the source names 0 blocks for a state; 1 is needed"):
        pages_of("group 1", named._replace(blocks=()), group(state=True), group(state=True))


def test_blocks_that_the_source_has_named_are_those_of_each_group() -> None:
    blocks, fixed = BlocksOfGroup([1, 2], (0, 8), 0), PageCopy([3], [4], (0, 4))
    assert blocks.end == 0  # The source has not stated its number of tokens yet.
    there = [[5, 6], [7]], 8
    found = with_blocks("request 'r'", [blocks, fixed], *there)
    assert found == [BlocksOfGroup([1, 2], (0, 8), 0, [5, 6], 8), fixed]
    with pytest.raises(InvalidTransferError, match="request 'r': the source has 2 groups, this engine has 1"):
        with_blocks("request 'r'", [blocks], *there)
