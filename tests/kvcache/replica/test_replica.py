"""Tests rules of one replica that no result of the manager shows, or that only a full pool shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache import TextContext
from tests.kvcache.build import run_once


def test_the_fast_path_leaves_requests_beyond_max_seq_len_to_the_slow_path(make: Any) -> None:
    """If the sequence is longer than `max_seq_len`, the fast path takes no page and reports no success. The slow path
    of `reserve` can then raise the right error.
    """
    manager = make(16, page_size=4, max_seq_len=6)
    context = TextContext(range(4), 6)
    with manager.claim(context):
        assert manager.maybe_reserve(context)
        replica = manager._replicas.each[0]
        for length, wanted in ((4, True), (7, False), (8, False), (6, True)):
            before = int(replica.rows.num_pages[0])
            assert replica.reserve_decoding(np.array([0]), np.array([length])) == wanted
            assert replica.rows.num_pages[0] == before + (length == 6)


def test_the_fast_path_leaves_requests_without_a_reservation_to_the_slow_path(make: Any) -> None:
    """The first reservation of a request looks up its prompt in the cache and counts its tokens. The fast path does
    neither, so it must leave the request to the slow path.
    """
    manager = make(16, page_size=4)
    for tokens in (1, 3, 4):
        context = TextContext(range(tokens), 64)
        with manager.claim(context):
            replica = manager._replicas.each[0]
            row = replica.rows.row_of[context.request_id]
            assert not replica.reserve_decoding(np.array([row]), np.array([tokens]))
            assert replica.rows.num_pages[row] == 0
            assert manager.num_free_blocks == 16


def test_pages_that_hits_replace_count_as_free(make: Any) -> None:
    manager = make(8, page_size=4)
    first, second = TextContext(range(13), 64), TextContext(range(13), 64)
    for context in (first, second):
        manager.external_claim(context.request_id)
        assert manager.maybe_reserve(context)
    assert manager.num_free_blocks == 0
    manager.fetch([second])
    second.update(1)
    manager.step([second])
    # The request takes one new page. It shares three published pages and gives back its own three pages.
    assert manager.maybe_reserve(first, 5)
    assert first.start_idx == 12
    assert manager.num_free_blocks == 2


def test_a_match_is_made_again_after_a_decode_step_evicted_its_page(make: Any) -> None:
    """A waiting request remembers the pages that its prompt has matched. Then a growing request evicts one of these
    pages.
    """
    manager = make(6, page_size=4, rows=3)
    run_once(manager, range(9))
    grows, waits = TextContext(range(50, 65), 64), TextContext([*range(9), 7], 64)
    manager.external_claim(grows.request_id)
    manager.external_claim(waits.request_id)
    assert manager.maybe_reserve(grows)  # The request takes the four fresh pages.
    assert not manager.maybe_reserve(waits)  # No page is free for the third page of the request.
    grows.update(1)
    manager.step([grows])
    # The waiting request still finds its pages, because none of them was evicted yet.
    assert not manager.maybe_reserve(waits)
    grows.update(1)
    assert manager.maybe_reserve(grows)  # The reservation takes one more page: the last page that `waits` has found.
    manager.check()
    manager.fetch([grows])
    assert not manager.maybe_reserve(waits)
    manager.release(grows.request_id)
    assert manager.maybe_reserve(waits)
    assert waits.start_idx == 4
    manager.check()


def test_a_request_with_one_token_to_run_stays_where_it_was_set_back_to(make: Any) -> None:
    """A request is set back to an earlier token. It looks up no prefix, so its own published pages after this token do
    not move its start forward.
    """
    manager = make(20, page_size=4)
    context = TextContext(range(14), 64)
    with manager.claim(context):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(1)
        manager.step([context])
        context.set_token_indices(start_idx=6, active_idx=7)
        assert manager.maybe_reserve(context, 9)
        assert (context.start_idx, context.active_idx) == (6, 7)


def test_a_request_that_is_released_within_its_prompt_leaves_nothing_to_count(make: Any) -> None:
    manager = make(8, page_size=4)
    context = TextContext(range(9), 64, "r")
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    counter = manager._replicas.each[0].counter
    assert counter.open == {manager._replicas.each[0].rows.row_of["r"]}
    manager.release("r")
    assert counter.open == set(), "otherwise each later step would look for prompts to count"
