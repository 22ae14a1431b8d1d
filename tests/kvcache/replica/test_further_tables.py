"""Block tables of windows and of chunks: the pages that a request holds and gives back, and the number of a prompt's
tokens that are found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcache import (
    InvalidRequestError,
    InvariantError,
    LayerGroup,
    NotReservedError,
    PagedKVCacheManager,
    PromptTooLongError,
    TextContext,
)
from tests.kvcache.build import as_long_as, manager_of

SIZE = 4
# A window of 6 tokens takes 2 pages in addition to the pages that are written.
WINDOW = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6)
CHUNKED = LayerGroup("full", (0,)), LayerGroup("chunked", (1,), 8)


def make(
    groups: tuple[LayerGroup, ...] = WINDOW, pages: int = 64, layers: int = 2, **options: Any
) -> PagedKVCacheManager:
    return manager_of(pages, page_size=SIZE, layers=layers, params={"groups": groups}, **options)


def columns(manager: PagedKVCacheManager, context: TextContext, table: int = 0) -> list[int]:
    """Returns the blocks of a further table for which the request has a page."""
    replica = manager._replicas.each[manager.get_replica(context)]
    return replica.rows.table[1 + table, replica.rows.row_of[context.request_id]].nonzero()[0].tolist()


def start(manager: PagedKVCacheManager, tokens: Any, name: str, chunk: int | None = None) -> TextContext:
    context = TextContext(list(tokens), 256, name)
    if chunk:
        context.set_token_indices(active_idx=chunk)
    manager.external_claim(name, 0)
    assert manager.maybe_reserve(context)
    return context


def run(manager: PagedKVCacheManager, context: TextContext, token: int = 1) -> None:
    manager.fetch([context])
    context.update(token)
    manager.step([context])


def decode(manager: PagedKVCacheManager, context: TextContext, steps: int) -> None:
    for _ in range(steps):
        assert manager.maybe_reserve(context)
        run(manager, context)


def served(manager: PagedKVCacheManager, tokens: Any, name: str) -> None:
    context = start(manager, tokens, name)
    run(manager, context)
    manager.release(name)


def gone(manager: PagedKVCacheManager, tokens: Any, table: int, column: int) -> None:
    """Removes the page of a block of a further table, as an eviction would."""
    replica = manager._replicas.each[0]
    context = TextContext([*tokens], 999)
    digests = replica.hasher(None, context).digests(context.tokens, column, column + 1)
    page = replica.tables.pages_of(digests)[1 + table]
    replica.pool.hold(page)
    replica.pool.index.withdraw(page)
    replica.pool.release(page)


def test_a_request_gives_back_pages_that_left_its_window() -> None:
    manager = make()
    context = start(manager, range(40), "r")
    assert columns(manager, context) == list(range(10))
    run(manager, context)
    decode(manager, context, 1)
    assert columns(manager, context) == [8, 9, 10]  # Token 40 sees tokens 35 to 40.
    decode(manager, context, 4)
    assert columns(manager, context) == [9, 10, 11]
    assert len(manager.get_req_blocks("r")) == 12
    assert manager.num_held_blocks == 15


def test_a_chunked_layer_gives_back_the_chunk_before() -> None:
    manager = make(CHUNKED)
    context = start(manager, range(15), "r")
    run(manager, context)
    decode(manager, context, 1)  # Token 15 is in the chunk that begins with token 8.
    assert columns(manager, context) == [0, 1, 2, 3]  # Token 15 is in a page that the request already had.
    decode(manager, context, 1)
    assert columns(manager, context) == [4]


def test_a_prompt_in_chunks_takes_a_window_and_a_chunk() -> None:
    manager = make(pages=25)
    context = start(manager, range(60), "r", chunk=8)
    assert columns(manager, context) == [0, 1]
    context.set_token_indices(active_idx=60)
    with pytest.raises(NotReservedError, match="60 tokens, but its reserved pages hold 8"):
        manager.fetch([context])
    context.set_token_indices(active_idx=8)
    seen = 0
    for _ in as_long_as(lambda: context.start_idx < 59):
        run(manager, context)
        context.set_token_indices(active_idx=min(context.end_idx, context.start_idx + 8))
        assert manager.maybe_reserve(context)
        seen = max(seen, len(columns(manager, context)))
    assert seen == 4
    decode(manager, context, 5)
    # The request has reserved its last page, which begins at token 64.
    assert columns(manager, context) == [14, 15, 16]


def test_a_prompt_that_cannot_run_whole_is_refused_and_may_run_in_chunks() -> None:
    manager = make(pages=25)
    context = TextContext(list(range(60)), 256, "r")
    manager.external_claim("r")
    with pytest.raises(PromptTooLongError, match="60 tokens need 30 pages, but the pool has 25"):
        manager.maybe_reserve(context)
    context.set_token_indices(active_idx=8)
    assert manager.admission(context).missing_pages == 17
    assert manager.maybe_reserve(context)


def test_a_request_fits_where_all_its_tables_do() -> None:
    manager = make(pages=20, max_seq_len=64)
    waiting = TextContext(list(range(40)), 64)
    assert manager.admission(waiting) == (0, 0, 20, True)
    start(manager, range(50, 54), "other")
    assert manager.admission(waiting) == (0, 0, 20, False)


def test_a_hit_needs_the_last_window_and_nothing_before() -> None:
    manager = make()
    served(manager, range(40), "first")
    context = start(manager, range(100, 104), "other")
    manager.release("other")
    assert manager.admission(TextContext([*range(40), 7, 8], 99)) == (0, 10, 2, True)
    context = start(manager, [*range(40), 7, 8], "again")
    assert context.start_idx == 40
    assert columns(manager, context) == [8, 9, 10]
    run(manager, context)
    decode(manager, context, 8)


def test_a_hit_ends_at_the_last_page_end_with_a_complete_window() -> None:
    """The window has lost pages. The hit ends at the last end of a page whose window is complete."""
    manager = make(pages=24, max_seq_len=64)
    served(manager, range(40), "first")
    gone(manager, range(40), 0, 9)
    assert manager.admission(TextContext([*range(40), 1], 99)).cached_pages == 9
    gone(manager, range(40), 0, 5)
    # The query after page 9 sees only pages 7 and 8 of the window.
    assert manager.admission(TextContext([*range(40), 1], 99)).cached_pages == 9
    assert manager.admission(TextContext([*range(28), 1], 99)).cached_pages == 5
    context = start(manager, [*range(28), 1], "short")
    assert context.start_idx == 20
    manager.check()


@pytest.mark.parametrize("groups", [WINDOW, (LayerGroup("full", (0, 1)), LayerGroup("window", (2,), 6))])
def test_pages_that_two_requests_compute_at_a_time_are_shared_in_all_tables(
    groups: tuple[LayerGroup, ...],
) -> None:
    manager = make(groups, layers=sum(len(group.layers) for group in groups))
    both = [start(manager, range(2 * SIZE + 1), name) for name in ("first", "second")]
    manager.fetch(both)
    for context in both:
        context.update(1)
    manager.step(both)
    replica = manager._replicas.each[0]
    rows = [replica.rows.row_of[context.request_id] for context in both]
    assert (replica.rows.table[:, rows[0], :2] == replica.rows.table[:, rows[1], :2]).all()
    assert [replica.hints._found[row] for row in rows] == [0, 2]


def test_a_table_finds_no_other_tables_pages() -> None:
    groups = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6), LayerGroup("window", (2,), 100)
    manager = make(groups, layers=3)
    served(manager, range(40), "first")
    context = start(manager, [*range(40), 1], "again")
    tables = manager.fetch([context])[0].lookup_table[:, 0]
    assert len(set(tables.ravel().tolist()) - {0}) == tables.count_nonzero()
    assert tables.shape == (3, 11)


@pytest.mark.parametrize("indices", [(0, 9, 30), (0, 30, 30), (4, 12, 40), (0, 5, 7)])
@pytest.mark.parametrize("kind", ["window", "chunked"])
def test_the_most_pages_of_each_group_are_those_of_its_worst_start(indices: tuple[int, int, int], kind: Any) -> None:
    groups = LayerGroup("full", (0,)), LayerGroup(kind, (1,), 8)
    length, both = indices[2] + 3, make(groups)._replicas.each[0].tables
    most = -(-length // SIZE)
    alone = make((LayerGroup(kind, (0,), 8),), layers=1)._replicas.each[0].tables
    most += max(alone.least(indices, length, at) for at in range(0, indices[2], SIZE))
    assert both.most(indices, length) == most


def test_the_last_free_pages_are_appended() -> None:
    manager = make()
    run(manager, start(manager, range(8), "r"))
    replica = manager._replicas.each[0]
    replica.pool.allocate(replica.pool.free_count - 2)
    assert replica.tables.append(np.array([replica.rows.row_of["r"]]))
    assert replica.pool.free_count == 0


def test_a_fork_gets_pages_in_each_table_for_several_steps() -> None:
    manager = make()
    parent = start(manager, range(10), "parent")
    run(manager, parent)
    child = parent.fork("child")
    assert manager.fork(parent, child, 6)
    rows = manager._replicas.each[0].rows
    table = rows.table[:, rows.row_of["child"]]
    assert (table != 0).sum(axis=1).tolist() == [4, 4]
    manager.check()


def test_pages_needed_to_resume_are_those_of_the_window_before_each_end() -> None:
    manager = make()
    context = start(manager, range(44), "r", 8)
    for _ in as_long_as(lambda: context.end_idx == 44):
        run(manager, context)
        context.set_token_indices(active_idx=min(context.end_idx, context.start_idx + 8))
        assert manager.maybe_reserve(context)
    replica = manager._replicas.each[0]
    row = replica.rows.row_of["r"]
    digests = replica.hasher(row, context).digests(context.tokens, 0, 11)
    found, _ = replica.tables.needed(row, digests, [5])
    assert sorted(found.tolist()) == sorted([*range(11), 3, 4, 9, 10])


def test_check_finds_one_row_that_lacks_a_published_page() -> None:
    manager = make(checks=False)
    for name in ("a", "b"):
        start(manager, range(10), name)
    replica = manager._replicas.each[0]
    replica.tables.check()
    replica.rows.committed[replica.rows.row_of["b"]] = 4
    with pytest.raises(InvariantError, match="lacks published pages"):
        replica.tables.check()


def test_fetch_gives_a_table_a_group_and_one_without() -> None:
    manager = make()
    context = start(manager, range(9), "r")
    table = manager.fetch([context])[0].lookup_table
    assert table.shape == (2, 1, 3)
    assert table.dtype == torch.int32
    assert table[0, 0].tolist() == manager.get_req_blocks("r")
    assert manager.device_tensors[0][0].shape[2] == 1  # Each page has the KV of one layer.
    (symbols,) = manager.input_symbols()
    assert symbols.inputs.lookup_table.ndim == 3
    dimensions: Any = symbols.dynamic_shapes.lookup_table
    assert {axis: one.__name__ for axis, one in dimensions.items()} == {1: "batch_size", 2: "max_num_pages"}
    assert symbols.inputs.blocks.shape[2] == 1
    (symbols,) = manager_of(layers=2).input_symbols()
    assert symbols.inputs.lookup_table.ndim == 2


def test_a_request_that_is_set_back_beyond_its_window_is_refused() -> None:
    manager = make(caching=False)
    context = start(manager, range(40), "r")
    run(manager, context)
    decode(manager, context, 5)
    context.set_token_indices(start_idx=30, active_idx=46)
    assert manager.maybe_reserve(context)
    with pytest.raises(
        InvalidRequestError, match="'r': would run from token 30, .* kind window .6 tokens. before token 36"
    ):
        manager.fetch([context])
    context.set_token_indices(start_idx=45)
    manager.fetch([context])


def test_a_request_that_is_set_back_runs_from_its_last_published_page() -> None:
    manager = make()
    context = start(manager, range(38), "r")
    run(manager, context)
    decode(manager, context, 2)
    context.set_token_indices(start_idx=30, active_idx=36)
    assert manager.maybe_reserve(context)
    assert (context.start_idx, context.active_idx) == (40, 41)
    manager.fetch([context])


def test_a_fork_shares_the_window_and_copies_the_page_that_is_written() -> None:
    manager = make(dtype=torch.float32)
    parent = start(manager, range(42), "parent")
    run(manager, parent)
    decode(manager, parent, 3)
    child = parent.fork("child")
    assert manager.fork(parent, child)
    theirs, ours = (manager.fetch([one])[0].lookup_table[1, 0].tolist() for one in (parent, child))
    assert columns(manager, child) == columns(manager, parent) == [9, 10, 11]
    assert theirs[9:11] == ours[9:11]
    assert theirs[11] != ours[11]
    decode(manager, parent, 9)
    decode(manager, child, 9)
    manager.release("parent")
    manager.release("child")
    assert manager.num_held_blocks == 0


def test_without_caching_pages_that_left_a_window_are_given_back_too() -> None:
    manager = make(caching=False, pages=16)
    context = start(manager, range(20), "r")
    run(manager, context)
    decode(manager, context, 24)
    assert manager.num_held_blocks == 11 + 3


def test_a_batch_gives_back_pages_that_its_requests_share() -> None:
    manager = make(pages=40)
    served(manager, range(17), "first")
    both = [start(manager, range(17), name) for name in ("a", "b")]
    assert columns(manager, both[0]) == columns(manager, both[1])
    batch = manager.batch(both)
    for step in range(12):
        assert manager.reserve_batch(batch).all()
        manager.fetch(batch)
        batch.update([50 + step, 80 + step])
        manager.step(batch)
    assert columns(manager, both[0]) == columns(manager, both[1]) == [4, 5, 6]


@pytest.mark.parametrize(("free", "fits"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_decode_step_has_pages_in_all_tables_or_in_none(free: int, fits: bool) -> None:
    """At the end of a page, the request needs one page in each of two tables.

    If only one page is free, the request takes none.
    """
    manager = make(pages=4 + free)
    context = start(manager, range(4), "r")
    run(manager, context)
    rest = TextContext([100], 256, "rest")
    manager.external_claim("rest", 0)
    assert manager.maybe_reserve(rest)
    assert manager.num_free_blocks == free
    before = list(manager.get_req_blocks("r")), columns(manager, context)
    assert manager.reserve_batch(manager.batch([context])).tolist() == [fits]
    assert manager.num_free_blocks == free - 2 * fits
    if not fits:
        assert (list(manager.get_req_blocks("r")), columns(manager, context)) == before
    manager.check()
    for name in ("r", "rest"):
        manager.release(name)
    assert manager.num_free_blocks == 4 + free


def test_each_table_of_each_group_must_have_its_window() -> None:
    groups = LayerGroup("window", (0, 2), 5), LayerGroup("full", (1,)), LayerGroup("window", (3,), 13)
    # The full layer has the first table. The window of 13 tokens has the second table. The two layers with a window of
    # 5 tokens have the last two tables.
    for table, column, left in ((1, 9, 9), (2, 9, 9), (2, 7, 7), (0, 7, 7)):
        manager = make(groups, layers=4)
        assert [one.layers for one in manager.layer_tables.tables] == [(1,), (3,), (0,), (2,)]
        served(manager, range(40), "first")
        gone(manager, range(40), table, column)
        # After eight pages, the windows of 5 tokens still have all pages that the next query sees.
        if column == 7:
            gone(manager, range(40), 1, 9)
            gone(manager, range(40), 1, 8)
        assert manager.admission(TextContext([*range(40), 1], 99)).cached_pages == left


def test_pages_that_were_not_published_yet_stay_for_the_step() -> None:
    manager = make()
    context = start(manager, range(40), "r")
    manager.fetch([context])
    context.update(1)
    assert manager.maybe_reserve(context)
    manager.step([context])
    assert manager.admission(TextContext([*range(20), 1], 99)).cached_pages == 5


def test_a_request_without_pages_gets_pages_for_all_tokens_that_it_has_to_compute() -> None:
    """The context claims a start within the prompt. The claimed start does not count, because the request has no pages.
    The pages from the window of this start on would not be enough.
    """
    manager = make(caching=False)
    context = TextContext([*range(40)], 99, "r")
    context.set_token_indices(start_idx=30)
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    assert context.start_idx == 0
    assert columns(manager, context) == [*range(10)]


def test_a_batch_of_chunks_gets_pages_only_for_these_chunks() -> None:
    manager = make()
    context = start(manager, range(20), "r", chunk=8)
    run(manager, context)
    context.set_token_indices(active_idx=9)
    assert manager.reserve_batch([context], 2).all()
    assert columns(manager, context) == [0, 1, 2]
    context.set_token_indices(active_idx=20)
    with pytest.raises(NotReservedError, match="20 tokens, but its reserved pages hold 12"):
        manager.fetch([context])


def ages(*, together: bool) -> list[list[int]]:
    """Runs a batch of three requests, one of which is a fork of another. Pages are reserved for the whole batch at once
    (`together`), or for one request after another. Returns the digests of the idle pages, the oldest page first.
    """
    manager = make(pages=200)
    one, other = (start(manager, range(first, first + 42), f"{first}") for first in (0, 100))
    for context in (one, other):
        run(manager, context)
        decode(manager, context, 2)
    child = one.fork("child")
    assert manager.fork(one, child)
    contexts = [one, other, child]
    batch = manager.batch(contexts)
    for step in range(9):
        assert manager.reserve_batch(batch).all() if together else all(map(manager.maybe_reserve, contexts))
        manager.fetch(batch)
        batch.update([step, step, 9 + step])
        manager.step(batch)
    pool = manager._replicas.each[0].pool
    return pool.index.digests_of(pool.idle.pages()).tolist()


def test_pages_age_alike_whether_they_are_reserved_for_a_batch_or_one_by_one() -> None:
    assert len(ages(together=True)) > 20
    assert ages(together=True) == ages(together=False)


def test_sizing_calls_count_the_pages_of_windows() -> None:
    manager = make()
    params = manager.params
    page = 2 * 2 * SIZE * 4  # For one layer: sides × head_dim × tokens × bytes of float32.
    sizes: dict[str, Any] = {"params": params, "num_layers": 2}
    full = PagedKVCacheManager.max_supported_sequence_length(memory_available=100 * page, **sizes)
    assert full == 97 * SIZE  # 97 pages are for the full table, and 3 pages are for the window.
    more: dict[str, Any] = {"max_seq_len": 400, "available_cache_memory": 1030 * page, "devices": ["cpu"], **sizes}
    # Each request takes 100 pages for the full table and 3 pages for the window.
    assert PagedKVCacheManager.infer_optimal_batch_size(**more) == 10
    assert PagedKVCacheManager.estimated_memory_size(max_batch_size=2, **more) == 206 * page


def corrupt(manager: PagedKVCacheManager) -> list[tuple[str, Any]]:
    rows = manager._replicas.each[0].rows
    return [
        ("column 9 of the layers of kind", (rows.table[1], (0, 9), 0)),
        ("names a page twice", (rows.table[1], (0, 3), rows.table[1, 0, 9])),
        ("names a page twice", (rows.table[1], (0, 10), rows.table[1, 0, 9])),
        ("contradicts the recorded range of pages", (rows.firsts, (1, 0), 9)),
        ("contradicts the recorded range of pages", (rows.ends, (1, 0), 12)),
        (
            "not all of its 10 committed pages are published",
            (manager._replicas.each[0].pool.index.published, rows.table[1, 0, 8], False),
        ),
    ]


@pytest.mark.parametrize("number", range(6))
def test_check_finds_each_fault_in_further_tables(number: int) -> None:
    manager = make(checks=False)
    context = start(manager, range(40), "r")
    run(manager, context)
    decode(manager, context, 1)
    manager.check()
    said, (array, at, value) = corrupt(manager)[number]
    before = np.array(array[at])
    array[at] = value
    with pytest.raises(InvariantError, match=said):
        manager.check()
    array[at] = before
    manager.check()
