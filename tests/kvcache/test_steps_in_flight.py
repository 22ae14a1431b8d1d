"""Steps in flight: until a step ends, its tables stay valid, and no other request gets its pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from kvcache import (
    InvalidRequestError,
    InvariantError,
    LayerGroup,
    PagedKVCacheManager,
    RaggedKVCacheInputs,
    TextContext,
)
from kvcache.params import StateShape
from kvcache.steps_in_flight import StepInFlight
from tests.kvcache.random_model.interrupts import interrupted

Make = Any


def begun(manager: PagedKVCacheManager, tokens: Any, name: str = "r", replica: int = 0) -> TextContext:
    """Returns a claimed request that has pages for its prompt."""
    context = TextContext(tokens, 64, name)
    manager.external_claim(name, replica)
    assert manager.maybe_reserve(context)
    return context


def ran(manager: PagedKVCacheManager, tokens: Any, name: str = "r", replica: int = 0) -> TextContext:
    """Returns a request that has run its prompt."""
    context = begun(manager, tokens, name, replica)
    manager.fetch([context])
    context.update(7)
    manager.step([context])
    return context


def as_lists(inputs: list[RaggedKVCacheInputs]) -> list[list[Any]]:
    return [[entry.cache_lengths.tolist(), entry.lookup_table.tolist(), entry.max_lengths.tolist()] for entry in inputs]


def named(step: StepInFlight) -> set[int]:
    """Returns the pages that the tables of a step name."""
    return {page for entry in step.inputs for page in entry.lookup_table.flatten().tolist() if page}


@pytest.mark.parametrize("shape", [{}, {"dp": 2, "tp": 2, "heads": 2}])
def test_tables_are_those_of_fetch_and_stay_while_the_next_step_is_planned(make: Make, shape: dict[str, int]) -> None:
    manager = make(32, page_size=4, **shape)
    contexts = [ran(manager, range(at, at + 6), f"r{at}", at % shape.get("dp", 1)) for at in range(3)]
    batch = sorted(contexts, key=manager.get_replica)
    wanted = as_lists(manager.fetch(batch))
    step = manager.fetch_ahead(batch)
    assert as_lists(step.inputs) == wanted
    for context in batch:
        context.update(8)
        assert manager.maybe_reserve(context, 4)
    later = manager.fetch_ahead(batch, 2)
    assert as_lists(later.inputs) == as_lists(manager.fetch(batch, 2))
    manager.step(batch)
    for context in contexts:
        manager.release(context.request_id)
    assert as_lists(step.inputs) == wanted
    assert manager.steps_in_flight == (step, later)


def test_two_sets_of_tables_are_used_in_turn_at_fixed_addresses(make: Make) -> None:
    manager = make(64, page_size=4)
    contexts = [ran(manager, range(at, at + 6), f"r{at}") for at in (0, 10, 20)]
    found: list[tuple[int, int, tuple[int, ...]]] = []
    running: StepInFlight | None = None
    for at in range(12):
        batch = contexts[: 1 + at % 3]
        assert manager.reserve_batch(batch).all()
        step = manager.fetch_ahead(batch)
        (entry,) = step.inputs
        found.append((entry.lookup_table.data_ptr(), entry.cache_lengths.data_ptr(), entry.lookup_table.stride()))
        if running is not None:
            manager.end_step(running)
        running = step
    assert len({*found}) == 2
    assert found[::2] == found[:1] * 6


def test_rows_and_columns_behind_a_batch_name_the_null_page(make: Make) -> None:
    manager = make(64, page_size=4, rows=8, max_seq_len=64)
    contexts = [ran(manager, range(at, at + 14), f"r{at}") for at in (0, 20, 40)]
    manager.end_step(manager.fetch_ahead(contexts))
    short = begun(manager, range(60, 62), "short")
    step = manager.fetch_ahead([short])
    (entry,) = step.padded(4)
    assert entry.cache_lengths.tolist() == [0] * 4
    assert entry.lookup_table.shape == (4, 16)
    assert entry.lookup_table[0].tolist() == [*manager.get_req_blocks("short"), *[0] * 15]
    assert not entry.lookup_table[1:].any()
    assert entry.lookup_table.data_ptr() == step.inputs[0].lookup_table.data_ptr()
    for rows in (0, 9):
        with pytest.raises(InvalidRequestError, match=f"batch of {rows}: the step of 1 requests needs a batch of 1 "):
            step.padded(rows)
    manager.end_step(step)
    with pytest.raises(InvalidRequestError, match="the step of 1 requests is over"):
        step.padded(4)


def test_a_batch_is_padded_to_the_requests_of_the_fullest_replica_or_to_all_rows(make: Make) -> None:
    manager = make(64, page_size=4, rows=8, max_seq_len=64, dp=2)
    step = manager.fetch_ahead([ran(manager, range(at, at + 6), f"r{at}", int(at > 0)) for at in range(4)])
    for rows in (3, 8):
        assert [len(entry.cache_lengths) for entry in step.padded(rows)] == [rows, rows]
    with pytest.raises(InvalidRequestError, match="batch of 2: the step of 4 requests needs a batch of 3 .* to 8"):
        step.padded(2)


def test_released_pages_are_not_allocated_until_the_step_has_ended(make: Make) -> None:
    manager = make(4, page_size=4)
    context = ran(manager, range(6))
    step = manager.fetch_ahead([context])
    pages = named(step)
    manager.release("r")
    assert manager.num_free_blocks == 2
    assert manager.num_held_blocks == 2
    other = TextContext(range(100, 112), 64, "other")
    manager.external_claim("other")
    assert not manager.maybe_reserve(other)
    manager.end_step(step)
    assert step.is_over
    manager.end_step(step)
    assert manager.num_free_blocks == 4
    assert manager.maybe_reserve(other)
    assert {*manager.get_req_blocks("other")} & pages


def test_a_parked_page_is_found_by_its_prefix(make: Make) -> None:
    manager = make(8, page_size=4)
    step = manager.fetch_ahead([ran(manager, range(6))])
    first = manager.get_req_blocks("r")[0]
    manager.release("r")
    again = begun(manager, range(6), "again")
    assert manager.get_req_blocks("again")[0] == first
    assert again.start_idx == 4
    manager.end_step(step)
    manager.release("again")
    assert manager.num_free_blocks == 8


def test_a_page_that_a_second_step_found_stays_until_that_has_ended(make: Make) -> None:
    manager = make(8, page_size=4)
    first = manager.fetch_ahead([ran(manager, range(6))])
    page = manager.get_req_blocks("r")[0]
    manager.release("r")
    again = begun(manager, range(6), "again")
    second = manager.fetch_ahead([again])
    assert page in named(second)
    manager.release("again")
    manager.end_step(first)
    manager.check()
    assert manager.num_free_blocks == 8 - len(named(second))
    manager.end_step(second)
    assert manager.num_free_blocks == 8


def test_steps_may_end_in_another_order(make: Make) -> None:
    manager = make(8, page_size=4)
    context = ran(manager, range(6))
    older, newer = manager.fetch_ahead([context]), manager.fetch_ahead([context])
    manager.release("r")
    manager.end_step(newer)
    assert manager.num_free_blocks == 6
    manager.end_step(older)
    assert manager.num_free_blocks == 8


def test_a_page_released_before_the_next_step_is_fetched_waits_only_for_its_own_step(make: Make) -> None:
    manager = make(8, page_size=4)
    context = ran(manager, range(6))
    older = manager.fetch_ahead([context])
    manager.release("r")
    newer = manager.fetch_ahead([begun(manager, range(50, 53), "other")])
    manager.end_step(older)
    assert manager.num_free_blocks == 7
    manager.end_step(newer)


def test_a_third_step_is_refused_by_name_and_changes_nothing(make: Make) -> None:
    manager = make(8, page_size=4)
    context = ran(manager, range(6))
    steps = [manager.fetch_ahead([context]) for _ in range(2)]
    with pytest.raises(InvalidRequestError, match="fetch_ahead of 1 requests: 2 steps are in flight"):
        manager.fetch_ahead([context])
    assert manager.steps_in_flight == (*steps,)
    manager.end_step(steps[0])
    manager.fetch_ahead([context])


def test_objects_that_are_no_steps_and_steps_of_another_manager_are_refused(make: Make) -> None:
    manager, other = make(8, page_size=4), make(8, page_size=4)
    step = other.fetch_ahead([ran(other, range(6))])
    with pytest.raises(InvalidRequestError, match="another manager"):
        manager.end_step(step)
    with pytest.raises(InvalidRequestError, match="end_step: step is 3: a step that fetch_ahead returned is needed"):
        manager.end_step(3)
    assert not step.is_over


def test_a_request_without_pages_is_refused_and_no_step_is_in_flight(make: Make) -> None:
    manager = make(8, page_size=4)
    manager.external_claim("r")
    with pytest.raises(Exception, match="call maybe_reserve first"):
        manager.fetch_ahead([TextContext(range(6), 64, "r")])
    assert manager.steps_in_flight == ()


def test_recurrent_states_are_refused_with_the_reason(make: Make) -> None:
    shape = StateShape(2, 2, 1, 1, 1, 2, torch.float32, torch.float32)
    manager = make(60, page_size=4, params={"states": shape})
    context = begun(manager, range(6))
    with pytest.raises(InvalidRequestError, match="fetch_ahead of 1 requests: a step overwrites the recurrent states"):
        manager.fetch_ahead([context])


def test_pages_that_leave_a_window_stay_until_the_step_that_reads_them_has_ended(make: Make) -> None:
    groups = (LayerGroup("full", (0,)), LayerGroup("window", (1,), 4))
    manager = make(24, page_size=4, layers=2, params={"groups": groups})
    context = ran(manager, range(11))
    assert manager.maybe_reserve(context)
    step = manager.fetch_ahead([context])
    window = {page for page in step.inputs[0].lookup_table[1, 0].tolist() if page}
    for token in range(4):
        context.update(token)
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        manager.step([context])
    now = {page for page in manager.fetch([context])[0].lookup_table[1, 0].tolist() if page}
    gone = window - now
    assert gone
    manager.check()
    free = manager.num_free_blocks
    manager.end_step(step)
    assert manager.num_free_blocks == free + len(gone)


def test_a_duplicate_that_a_step_gives_up_stays_until_the_step_that_reads_it_has_ended(make: Make) -> None:
    manager = make(16, page_size=4)
    one, two = (begun(manager, range(7), name) for name in ("one", "two"))
    manager.fetch([one, two])
    one.update(7)
    two.update(7)
    assert manager.reserve_batch([one, two]).all()
    step = manager.fetch_ahead([one, two])
    # `step` records the tokens that ran earlier. From now on, both requests share their first page.
    manager.step([one, two])
    assert manager.get_req_blocks("one")[0] == manager.get_req_blocks("two")[0]
    assert manager.num_free_blocks == 16 - 4
    manager.end_step(step)
    assert manager.num_free_blocks == 16 - 3


def test_a_cancelled_import_and_an_ended_lease_free_no_page_while_a_step_is_in_flight(make: Make) -> None:
    source, manager = make(16, page_size=4), make(16, page_size=4)
    ran(source, range(9), "source")
    leased = ran(manager, range(50, 59), "leased")
    lease = manager.lease("leased")
    step = manager.fetch_ahead([leased])
    reader = TextContext(range(10), 64, "reader")
    manager.external_claim("reader")
    pending = manager.import_block_table(reader, source.block_table("source"))
    manager.release("reader")
    manager.cancel_import(pending)
    manager.release("leased")
    manager.end_lease(lease)
    assert manager.num_free_blocks == 16 - 6
    manager.end_step(step)
    assert manager.num_free_blocks == 16


def test_a_reset_keeps_what_a_step_in_flight_reads(make: Make) -> None:
    manager = make(8, page_size=4)
    step = manager.fetch_ahead([ran(manager, range(6))])
    manager.release("r")
    manager.reset_prefix_cache()
    assert manager.num_free_blocks == 6
    manager.end_step(step)
    assert manager.num_free_blocks == 8


def test_recover_keeps_the_pages_of_steps_in_flight_and_ends_the_one_that_was_interrupted(make: Make) -> None:
    kept = 0
    for at in range(1, 4000, 7):
        manager = make(12, page_size=4, checks=False)
        context, other = ran(manager, range(6)), ran(manager, range(50, 59), "other")
        step = manager.fetch_ahead([context, other])
        pages = named(step)
        calls = [partial(manager.release, "other"), partial(manager.fetch_ahead, [context])]
        _, _, done = interrupted(calls[at % 2], at // 2, KeyboardInterrupt)
        report = manager.recover()
        assert step in report.steps
        for name in report.claimed:
            manager.release(name)
        manager.check()
        taken = begun(manager, range(100, 100 + 4 * (12 - len(pages))), "new")
        assert not {*manager.get_req_blocks("new")} & pages
        manager.release(taken.request_id)
        for one in manager.steps_in_flight:
            manager.end_step(one)
        assert manager.num_free_blocks == 12
        kept += done
        if not done and at > 400:
            break
    assert kept > 20


def test_recover_ends_a_step_whose_end_was_interrupted(make: Make) -> None:
    for at in range(1, 1200):
        manager = make(8, page_size=4, checks=False)
        step = manager.fetch_ahead([ran(manager, range(6))])
        manager.release("r")
        _, _, done = interrupted(partial(manager.end_step, step), at, KeyboardInterrupt)
        report = manager.recover()
        assert step.is_over or report.call is None, "the call was interrupted before it did anything"
        assert step.is_over == (step not in report.steps)
        manager.end_step(step)
        assert manager.num_free_blocks == 8
        if not done:
            return
    raise AssertionError("the call has no end")


def test_check_finds_a_step_for_which_no_page_can_be_parked(make: Make) -> None:
    manager = make(8, page_size=4, checks=False)
    step = manager.fetch_ahead([ran(manager, range(6))])
    pool = manager._replicas.each[0].pool
    parked, pool.parked = pool.parked, []
    with pytest.raises(InvariantError, match="1 steps are in flight, but pages are parked for 0"):
        manager.check()
    pool.parked = parked
    manager.end_step(step)


def test_check_finds_a_free_page_that_a_step_in_flight_may_write(make: Make) -> None:
    manager = make(8, page_size=4, checks=False)
    step = manager.fetch_ahead([ran(manager, range(6))])
    pool = manager._replicas.each[0].pool
    parked, pool.parked = pool.parked, []
    manager.release("r")
    pool.parked = parked
    with pytest.raises(InvariantError, match=r"is free, but StepInFlight\(num_requests=1, is_over=False\) may still"):
        manager.check()
    manager.end_step(step)


def test_a_reservation_does_not_count_pages_that_a_step_in_flight_reads_as_free(make: Make) -> None:
    groups = (LayerGroup("full", (0,)), LayerGroup("window", (1,), 4))
    manager = make(7, page_size=4, layers=2, params={"groups": groups})
    context = ran(manager, range(11))
    for token in range(4):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(token)
        manager.step([context])
    assert manager.maybe_reserve(context)
    step = manager.fetch_ahead([context])
    context.update(4)
    manager.step([context])
    assert context.current_length == 17  # Each table gets one more page. One page leaves the window.
    assert manager.num_free_blocks == 1
    assert not manager.maybe_reserve(context)
    manager.end_step(step)
    assert manager.maybe_reserve(context)


def test_a_token_planned_after_the_end_of_a_request_is_dropped_with_it(make: Make) -> None:
    manager = make(8, page_size=4)
    context = ran(manager, range(7))
    assert manager.maybe_reserve(context)
    first = manager.fetch_ahead([context])
    context.update_with_future_token()
    assert manager.maybe_reserve(context)
    # The caller plans this step before it knows that the request ends with this token.
    second = manager.fetch_ahead([context])
    context.realize_future_token(2)
    manager.step([context])
    manager.end_step(first)
    manager.release("r")
    assert manager.num_free_blocks == 8 - len(named(second))
    manager.end_step(second)
    assert manager.num_free_blocks == 8
    again = begun(manager, [*range(7), 7, 9], "again")
    assert again.start_idx == 8


def test_a_preempted_request_comes_back_before_its_token_is_known(make: Make) -> None:
    manager = make(16, page_size=4)
    context = ran(manager, range(8))
    assert manager.maybe_reserve(context)
    step = manager.fetch_ahead([context])
    context.update_with_future_token()
    manager.release("r")
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    assert (context.start_idx, context.computed_idx, context.end_idx) == (8, 8, 10)
    assert not {*manager.get_req_blocks("r")[2:]} & named(step)
    context.realize_future_token(3)
    manager.end_step(step)
    manager.fetch([context])
    context.update(4)
    manager.step([context])
    assert context.tokens.tolist() == [*range(8), 7, 3, 4]


def test_a_fork_goes_on_from_what_is_computed_while_its_parents_step_is_in_flight(make: Make) -> None:
    manager = make(16, page_size=4)
    parent = ran(manager, range(6))
    step = manager.fetch_ahead([parent])
    parent.update_with_future_token()
    child = parent.fork("child")
    assert manager.fork(parent, child)
    assert (child.start_idx, child.end_idx) == (6, 7)
    assert manager.get_req_blocks("child")[0] == manager.get_req_blocks("r")[0]
    assert manager.get_req_blocks("child")[1] not in named(step)
    parent.realize_future_token(3)
    manager.step([parent])
    manager.end_step(step)
