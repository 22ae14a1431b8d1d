"""A manager does not read the contexts of a list again while they only decode. Every other change of a context, of its
row, or of the list must be noticed.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import (
    InvalidRequestError,
    InvariantError,
    KVEvents,
    LayerGroup,
    PagedKVCacheManager,
    RaggedKVCacheInputs,
    TextContext,
)
from kvcache.params import StateShape
from tests.kvcache.build import as_long_as
from tests.kvcache.random_model.moves import OwnContext

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "host tier": {"host_slots": 8},
    "window": {"layers": 2, "params": {"groups": (LayerGroup("full", (0,)), LayerGroup("window", (1,), 6))}},
    "KV events": {"params": {"kv_events": KVEvents("tcp://127.0.0.1:0")}},
    "two replicas": {"dp": 2},
    "states": {"params": {"states": StateShape(1, 8, 1, 1, 1, 2, torch.uint8, torch.uint8, "short_conv")}},
}


def decoding(manager: PagedKVCacheManager, lengths: Sequence[int], first: str = "a") -> list[TextContext]:
    """Returns requests on the first replica whose contexts count along."""
    contexts = [TextContext(np.arange(n) + 100 * at, 200, chr(ord(first) + at)) for at, n in enumerate(lengths)]
    for context in contexts:
        if not manager.contains(context.request_id):
            manager.external_claim(context.request_id, 0)
    for _ in as_long_as(lambda: not all(counts(manager, context) for context in contexts)):
        one_step(manager, contexts)
    return contexts


def counts(manager: PagedKVCacheManager, context: TextContext) -> bool:
    return manager._replicas.rows.start_of[manager._claims.places[context.request_id]] == context.start_idx


def one_step(manager: PagedKVCacheManager, contexts: list[TextContext], added: int = 1) -> None:
    """Runs a step. `fetch` must return the same for contexts that count along and for contexts that it reads."""
    for context in contexts:
        assert manager.maybe_reserve(context, 2)
        for states in manager.states[:1]:
            pages = states.pages_at([context.request_id], [context.start_idx])
            states.advance(pages, [context.active_idx])
    fetched = [copied(manager.fetch(contexts))]
    for context in contexts:
        context.stop_counting()
    fetched.append(copied(manager.fetch(contexts)))
    assert fetched[0] == fetched[1]
    assert fetched[0][0][0] == [context.start_idx for context in contexts]
    for context in contexts:
        for _ in range(added):
            context.update(7)
    manager.step(contexts)
    rows = manager._replicas.rows
    assert [rows.cached[manager._claims.places[one.request_id]] for one in contexts] == [
        one.start_idx for one in contexts
    ]


def copied(inputs: list[RaggedKVCacheInputs]) -> list[list[Any]]:
    return [[one.cache_lengths.tolist(), one.lookup_table.tolist(), one.max_lengths.tolist()] for one in inputs]


def drop(context: TextContext) -> None:
    context.set_token_indices(start_idx=9, active_idx=10, end_idx=10)


def draft(context: TextContext) -> None:
    context.update(5)
    context.set_token_indices(start_idx=context.start_idx - 1)


CHANGES: dict[str, Callable[[PagedKVCacheManager, TextContext], None]] = {
    "updated": lambda _, context: context.update(5),
    "dropped tokens": lambda _, context: drop(context),
    "dropped and updated": lambda _, context: (drop(context), context.update(5))[1],
    "two tokens to run": lambda _, context: draft(context),
    "set back": lambda _, context: context.set_token_indices(start_idx=3),
    "updated by a batch": lambda manager, context: manager.batch([context]).update([5]),
    "left a batch": lambda manager, context: (manager.batch([context]).update([5]), context.leave())[1],
    "updated by a copy of it": lambda _, context: copy.copy(context).update(5),
    "updated by a fork of it": lambda _, context: context.fork("fork").update(5),
}


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_context_that_counts_along_is_noticed(make: Any, change: str, others: int) -> None:
    manager = make(64, page_size=4)
    contexts = decoding(manager, [12, 13, 14][: others + 1])
    for _ in range(3):
        CHANGES[change](manager, contexts[-1])
        for _ in range(2):
            one_step(manager, contexts)
    manager.check()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_list_gives_the_inputs_of_its_contexts_in_every_setting(make: Any, setting: str) -> None:
    manager = make(64, page_size=4, **SETTINGS[setting])
    contexts = decoding(manager, [9, 12, 14])
    for at in range(12):
        if at == 5:
            contexts.insert(1, TextContext(np.arange(7) + 900, 200, "new"))
            manager.external_claim("new", 0)
        if at == 8:
            manager.release(contexts.pop(0).request_id)
        one_step(manager, contexts[:])


def test_a_request_with_a_future_token_is_read(make: Any) -> None:
    manager = make(64, page_size=4)
    (context,) = decoding(manager, [14])
    step = manager.fetch_ahead([context])
    context.update_with_future_token()
    manager.step([context])
    assert manager._replicas.each[0].rows.cached[0] == context.end_idx - 2  # the step in flight has computed nothing
    context.realize_future_token(5)
    manager.end_step(step)
    manager.step([context])
    assert manager._replicas.each[0].rows.cached[0] == context.end_idx - 1
    one_step(manager, [context])


def test_a_prompt_that_was_cut_after_its_reservation_is_counted_token_by_token(make: Any) -> None:
    manager = make(64, page_size=4)
    context = TextContext(np.arange(10), 200, "a")
    manager.external_claim("a")
    assert manager.maybe_reserve(context)
    context.set_token_indices(start_idx=0, active_idx=1, end_idx=1)
    counter, ran = manager._replicas.each[0].counter, list[int]()
    for _ in range(12):
        manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(1)
        manager.step([context])
        ran.append(counter.ran)
    assert ran == [*range(1, 11), 10, 10]
    assert not counter.open


@pytest.mark.parametrize("others", [0, 1])
def test_a_leased_request_that_was_set_back_is_refused_although_it_decodes(make: Any, others: int) -> None:
    manager = make(64, page_size=4)
    contexts = decoding(manager, [12, 13][: others + 1])
    manager.lease("a")
    one_step(manager, contexts)
    drop(contexts[0])
    for _ in range(2):  # an update after the refusal does not make it right
        with pytest.raises(InvalidRequestError, match="'a': would recompute from token"):
            manager.fetch(contexts)
        contexts[0].update(1)


def test_a_list_that_was_changed_in_place_is_looked_up_again(make: Any) -> None:
    manager = make(64, page_size=4)
    contexts = decoding(manager, [12, 13, 14])
    listed = contexts[:2]
    one_step(manager, listed)
    listed[1] = contexts[2]
    one_step(manager, listed)


def test_an_object_that_calls_itself_equal_to_a_context_does_not_take_its_place(make: Any) -> None:
    class Equal(OwnContext):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    manager = make(64, page_size=4)
    contexts = decoding(manager, [12])
    one_step(manager, contexts)
    with pytest.raises(InvalidRequestError, match="another context object"):
        manager.fetch([Equal(TextContext(np.arange(12), 200, "a"))])


def test_a_subclass_that_calls_every_object_equal_gets_its_own_table(make: Any) -> None:
    class Equal(TextContext):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = TextContext.__hash__

    manager = make(64, page_size=4)
    contexts = decoding(manager, [12])
    one_step(manager, contexts)
    equal = Equal(np.arange(50, 62), 200, "equal")
    manager.external_claim("equal")
    assert manager.maybe_reserve(equal)
    manager.maybe_reserve(contexts[0])
    tables = [manager.fetch([one])[0].lookup_table[0, :3].tolist() for one in (contexts[0], equal, contexts[0])]
    assert tables[0] == tables[2]
    assert set(tables[0]).isdisjoint(tables[1])


@pytest.mark.parametrize("end", ["release", "claim anew"])  # the second as for an import that begins anew
def test_a_context_without_its_row_counts_no_longer_for_the_next_request_there(make: Any, end: str) -> None:
    manager = make(64, page_size=4, rows=1)
    (first,) = decoding(manager, [12])
    if end == "release":
        manager.release("a")
    else:
        manager._claims.claim_anew("a", 0)
    second = decoding(manager, [13], "b" if end == "release" else "a")
    for _ in range(3):
        first.update(1)
        one_step(manager, second)
    manager.check()


def test_two_managers_may_share_a_context(make: Any) -> None:
    managers = [make(64, page_size=4) for _ in range(2)]
    (context,) = decoding(managers[0], [12])
    context.set_token_indices(start_idx=0)
    managers[1].external_claim("a")
    for _ in range(6):
        for manager in managers:
            assert manager.maybe_reserve(context)
        lengths = [manager.fetch([context])[0].cache_lengths.tolist() for manager in managers]
        assert lengths == [[context.start_idx]] * 2
        context.update(3)
        for manager in managers:
            manager.step([context])
            manager.check()
    managers[0].release("a")
    context.update(3)
    managers[1].check()


def test_a_count_that_differs_from_its_context_is_found(make: Any) -> None:
    manager = make(64, page_size=4, checks=False)
    decoding(manager, [12])
    manager._replicas.rows.start_of[0] += 1
    with pytest.raises(InvariantError, match="place 0: start 13 is counted for TextContext"):
        manager.check()
    manager._replicas.rows.start_of[0] -= 1


def test_a_list_of_one_looks_for_pages_before_each_chunk_although_it_has_pages_for_all(make: Any) -> None:
    manager = make(64, page_size=4, rows=4)
    prompt, other = (TextContext(range(40), 200, name) for name in ("a", "b"))
    for context in (prompt, other):
        manager.external_claim(context.request_id, 0)
        assert manager.maybe_reserve(context)
    prompt.set_token_indices(active_idx=8)
    for context in (prompt, other):
        manager.fetch([context])
        context.update(7)
        manager.step([context])
    assert manager.reserve_batch([prompt]).all()
    assert prompt.start_idx == 36


def test_the_table_of_rows_that_are_not_consecutive_is_read_at_each_fetch(make: Any) -> None:
    manager = make(64, page_size=4, rows=4, checks=False)
    contexts = decoding(manager, [5, 5, 5])
    apart = [contexts[0], contexts[2]]
    one_step(manager, apart)
    (before,) = manager.fetch(apart)
    rows = manager._replicas.each[0].rows
    row = rows.row_of[contexts[2].request_id]
    rows.table[0, row, 0], kept = 9, int(rows.table[0, row, 0])
    (after,) = manager.fetch(apart)
    rows.table[0, row, 0] = kept
    assert before.lookup_table[1, 0] == kept != 9
    assert after.lookup_table[1, 0] == 9


def test_a_released_context_is_not_kept(make: Any) -> None:
    manager = make(64, page_size=4, rows=4)
    (context,) = decoding(manager, [5])
    one_step(manager, [context])
    manager.release(context.request_id)
    kept = weakref.ref(context)
    del context
    assert kept() is None


def calls_of(step: Callable[[], object]) -> int:
    """Returns how many functions of the manager's package `step` calls."""
    count = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and "kvcache" in frame.f_code.co_filename and "tests" not in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_step_within_a_page_makes_few_calls_in_every_setting_however_many_requests(make: Any, setting: str) -> None:
    counts: list[int] = []
    for requests in (2, 5):
        manager = make(128, page_size=16, checks=False, rows=8, **SETTINGS[setting])
        contexts = decoding(manager, [18] * requests)
        one_step(manager, contexts)

        def step(manager: PagedKVCacheManager = manager, contexts: list[TextContext] = contexts) -> None:
            manager.reserve_batch(contexts)
            manager.fetch(contexts)
            manager.step(contexts)

        counts.append(calls_of(step))
    assert max(counts) < 50
    assert abs(counts[0] - counts[1]) < 10  # not all of the tables below are busy in each step
