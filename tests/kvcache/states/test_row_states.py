"""Tests the states of a replica's rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvcache import InvalidRequestError, PagedKVCacheManager, TextContext
from kvcache.errors import StatePageError
from kvcache.replica.batch import Gathered
from kvcache.replica.row_states import step_drafted
from kvcache.states.state_pages import StatePages
from tests.kvcache.build import as_long_as, manager_of
from tests.kvcache.states.served_states import SHAPE


def drafted() -> tuple[PagedKVCacheManager, StatePages, TextContext]:
    """Returns a request that has run two guessed tokens. The first guess was right, and the second guess was wrong."""
    manager = manager_of(100, page_size=4, dtype=torch.int64, params={"states": SHAPE, "state_copies": 4})
    states, context = manager.states[0], TextContext(range(6), 64, "r")
    manager.external_claim("r", 0)
    for _ in as_long_as(lambda: context.end_idx == 6):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        pages = states.pages_at(["r"], [context.start_idx])
        states.advance(pages, [context.active_idx])
        context.update(1)
        manager.step([context])
    assert states.draft("r")
    for guess in (2, 3):
        context.update(guess)
    context.set_token_indices(start_idx=6)
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    pages = states.written(["r"], states.pages_at(["r"], [6]))
    states.advance(pages, [9])
    context.set_token_indices(active_idx=8, end_idx=8)
    context.update(4)
    assert context.start_idx == 8
    return manager, states, context


def test_a_step_that_is_refused_leaves_requests_with_drafted_tokens_where_they_were() -> None:
    manager, states, context = drafted()
    seen: list[int] = []

    def refuses(gathered: Gathered, settle: Callable[[], None] | None) -> None:
        assert settle is not None
        seen.extend(gathered.starts.tolist())
        raise InvalidRequestError("refused")

    with pytest.raises(InvalidRequestError, match="refused"):
        step_drafted(manager._replicas._kept, manager._claims.gather([context], "step"), refuses)
    assert seen == [6], "the state of the remaining tokens is gone, so they have to run again"
    assert (context.start_idx, context.end_idx) == (8, 9)
    assert set(states.drafted) == {"r"}
    manager.step([context])
    assert (context.start_idx, states.tokens_of("r")) == (6, 6)
    assert not states.drafted


def test_a_chunk_ends_at_the_last_full_page_of_its_own_prompt_not_of_the_prompt_that_had_the_row_before() -> None:
    manager = manager_of(100, page_size=4, dtype=torch.int64, params={"states": SHAPE, "state_copies": 4})
    for length, end in ((13, 12), (22, 20), (9, 8)):
        context = TextContext(range(100 * length, 101 * length), 64, "r")
        manager.external_claim("r", 0)
        assert manager._replicas.each[0].rows.row_of == {"r": 0}
        assert manager.maybe_reserve(context)
        assert (context.start_idx, context.active_idx) == (0, end)
        manager.release("r")
    manager.check()


def test_nobody_shares_a_state_before_a_step_has_said_which_drafted_tokens_stay() -> None:
    manager, _, context = drafted()
    for call in (
        lambda: manager.fork(context, context.fork("child")),
        lambda: manager.lease("r"),
        lambda: manager.block_table("r"),
    ):
        with pytest.raises(StatePageError, match="'r': its drafted tokens ran, but step was not called for them"):
            call()
    manager.step([context])
    assert manager.fork(context, context.fork("child"))
    manager.end_lease(manager.lease("r"))
    manager.release("child")
    manager.check()


def test_a_request_whose_state_is_ahead_of_its_computed_tokens_is_forked_and_exported_only_after_step() -> None:
    manager, states, context = drafted()
    manager.step([context])
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    states.advance(states.pages_at(["r"], [context.start_idx]), [context.active_idx])
    with pytest.raises(StatePageError, match="'r': 6 tokens are computed, but its state covers 9: fork it after step"):
        manager.fork(context, context.fork("child"))
    with pytest.raises(StatePageError, match="'r': its pages hold 6 tokens, but its state covers 9"):
        manager.block_table("r")
    assert not manager.contains("child")
    context.update(5)
    manager.step([context])
    child = context.fork("child")
    assert manager.fork(context, child)
    assert states.tokens_of("child") == states.tokens_of("r") == 9
    manager.check()


def test_a_new_state_makes_waiting_requests_look_up_their_prefix_again() -> None:
    manager, states, context = drafted()
    manager.step([context])
    replica = manager._replicas.each[0]
    before, of_pages = replica.generation, replica.pool.index.generation
    states.keep("r", np.full((1, 4), 9, np.uint64), 6, passing=False)
    assert replica.pool.index.generation == of_pages
    assert replica.generation > before
