"""Tests the second state page of a request: when a request has such a page, what readers learn about it, and what
remains after a failed step or run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.errors import InvariantError, StatePageError
from kvcache.replica.context import TextContext
from tests.scheduler_adapters.hf.speculating import PAGE, PROMPTS, Engine, assert_equal
from tests.scheduler_adapters.serving import assert_nothing_held

MODEL = "bamba"


def ready(model: Any, wrong: bool = True, **engine: Any) -> tuple[Engine, TextContext, int]:
    """Returns a request whose drafted tokens have run but were not recorded yet. The first draft is right. With
    `wrong`, a later draft is wrong.
    """
    made = Engine(model, 1.0, 0, **engine)
    made.knows(PROMPTS[:1])
    made.add("r", PROMPTS[0])
    while "r" not in made.running or made.running["r"].active_length > 1 or made.running["r"].end_idx % PAGE != 2:
        made.step()
    context, made.most = made.running["r"], 3
    count = verified(made, context, wrong=wrong)
    return made, context, count


def verified(engine: Engine, context: TextContext, *, wrong: bool) -> int:
    """Runs three guesses. With `wrong`, the last guess is wrong. Returns the number of guesses."""
    start, end, (answer,) = context.start_idx, context.end_idx, engine.answers
    assert engine.manager.maybe_reserve(context, 4)
    assert engine.runner.draft(context.request_id)
    for at in range(3):
        context.update((answer[end + at] + (wrong and at == 2)) % 259)
    context.set_token_indices(start_idx=start)
    (found,) = engine.runner.verify([context], engine.manager.fetch([context]), [3])
    assert found == [answer[end + at] for at in range(4 - wrong)] + found[4 - wrong :]
    engine.take_up(context, 3, found)
    return start


def finish(engine: Engine) -> None:
    while engine.running:
        engine.step()
    assert_equal(engine.model, engine.answers, [context.tokens.tolist() for context in engine.done.values()])
    assert_nothing_held(engine.manager)


def test_the_state_of_unrecorded_drafts_is_not_told_to_readers(model: Any) -> None:
    engine, context, start = ready(model)
    manager = engine.manager
    for call in (
        lambda: manager.lease("r"),
        lambda: manager.block_table("r"),
        lambda: manager.fork(context, context.fork("child")),
        lambda: engine.runner.run([context], manager.fetch([context])),
    ):
        with pytest.raises(StatePageError, match="'r': its drafted tokens ran, but step was not called for them"):
            call()
        manager.check()
    assert manager.num_leased_blocks == 0
    assert context.start_idx == start + 3
    manager.step([context])
    assert context.start_idx == start == manager.states[0].tokens_of("r")
    lease = manager.lease("r")
    assert manager.block_table("r").num_tokens == start
    manager.end_lease(lease)
    finish(engine)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_request_keeps_its_leased_state_page(model: Any, wrong: bool) -> None:
    """A block table may name the leased page until the lease ends. The drafted state is therefore copied into the
    leased page.
    """
    engine, context, _ = ready(model, wrong)
    manager = engine.manager
    manager.step([context])
    page = manager.states[0].page_of("r")
    lease = manager.lease("r")
    start = verified(engine, context, wrong=wrong)
    manager.step([context])
    assert context.start_idx == (start if wrong else start + 4)
    assert manager.states[0].page_of("r") == page
    manager.check()
    manager.end_lease(lease)
    finish(engine)


def test_a_request_may_be_released_before_its_drafted_tokens_are_booked(model: Any) -> None:
    engine, context, _ = ready(model)
    held = engine.manager.states[0].num_held
    engine.give_way(context)
    assert (held, engine.manager.states[0].num_held) == (2, 0)
    engine.step()
    finish(engine)


def test_a_refused_step_sets_no_request_back(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, context, start = ready(model)
    manager, before = engine.manager, (context.start_idx, context.active_idx, context.end_idx)

    def refuse(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(manager._replicas, "step", refuse)
        with pytest.raises(KeyboardInterrupt):
            manager.step([context])
    assert (context.start_idx, context.active_idx, context.end_idx) == before
    for odd in (start - 1, start + 5):
        with pytest.raises(StatePageError, match=rf"'r': {odd} tokens are computed, .* after {start} and {start + 4}"):
            manager.states[0].goes_on_from("r", odd)
    manager.step([context])
    finish(engine)


def test_a_run_that_fails_leaves_the_state_as_it_was(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, context, _ = ready(model)
    manager = engine.manager
    manager.step([context])
    before = (context.start_idx, context.active_idx, context.end_idx)

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    assert manager.maybe_reserve(context)
    assert engine.runner.draft("r")
    with monkeypatch.context() as patched:
        patched.setattr(model.lm_head, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            engine.runner.verify([context], manager.fetch([context]), [0])
    assert (context.start_idx, context.active_idx, context.end_idx) == before
    finish(engine)


def test_a_second_page_that_is_not_run_goes_with_the_next_step(model: Any) -> None:
    engine, context, _ = ready(model)
    manager = engine.manager
    manager.step([context])
    assert manager.states[0].num_held == 1
    assert engine.runner.draft("r")
    assert engine.runner.draft("r")  # the same one
    assert manager.states[0].num_held == 2
    manager.step([context])
    assert manager.states[0].num_held == 1
    finish(engine)


def test_a_batch_object_is_set_back_like_its_requests(model: Any) -> None:
    engine, context, start = ready(model)
    batch = engine.manager.batch([context])
    engine.manager.step(batch)
    assert context.start_idx == start
    assert batch.starts.tolist() == [start]
    engine.manager.check()
    finish(engine)


def test_a_request_continues_from_a_state_that_a_hit_has_loaded(model: Any) -> None:
    """A hit loads another state into the request's state page. The request then continues from the loaded state. The
    tokens that have run into its second state page do not count.
    """
    engine, context, start = ready(model)
    states = engine.manager.states[0]
    other = PAGE * (start // PAGE)
    digest = engine.manager._replicas.each[0].kept.digest_at(0, context, other)
    states.resume("r", digest, other)
    states.check_booked("r")
    assert (states.tokens_of("r"), states.num_held) == (other, 2)
    assert states.goes_on_from("r", other) == other
    context.set_token_indices(start_idx=other)
    engine.manager.step([context])
    finish(engine)


def test_an_import_takes_the_second_page_away(model: Any) -> None:
    engine, _, _ = ready(model)
    states = engine.manager.states[0]
    page = states.begin_import("r")
    assert not states.drafted
    with pytest.raises(StatePageError, match="being written by a transfer"):
        states.draft("r")
    states.cancel_import(page)


def test_check_names_a_second_page_without_a_first(model: Any) -> None:
    engine, _, _ = ready(model)
    states = engine.manager.states[0]
    states.drafted["gone"] = states.pool.allocate_one()
    with pytest.raises(InvariantError, match=r"\['gone'\] have a second state page"):
        engine.manager.check()
    words = states.pool.index.digests_of(np.array([1])).shape[1]
    states.pool.index.publish(np.array([states.drafted["r"]], np.int32), np.ones((1, words), np.uint64))
    del states.drafted["gone"]
    states.pool.check = lambda *_: None
    with pytest.raises(InvariantError, match="can be found by other requests, but a request writes to it"):
        engine.manager.check()
