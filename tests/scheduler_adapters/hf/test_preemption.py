"""Loops with preemption give the same answers as the model's own `generate`. One of the loops is as short as a user's
first loop would be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcache import PagedKVCacheManager, TextContext
from scheduler_adapters.hf.runner import HFRunner
from scheduler_adapters.hf.tiny import ByteTokenizer
from tests.scheduler_adapters.serving import (
    assert_nothing_held,
    new_loop,
    new_manager,
    requests_of,
    serve,
    tokens_of,
)

NEW, PAGE = 20, 8
SYSTEM = "What all of these begin with. "
TEXTS = [SYSTEM + text for text in ("Who?", "And where, and since when?", "x" * 30, "Why is that so?", "y" * 11)] * 2
PROMPTS = [ByteTokenizer().encode(text) for text in TEXTS]


@pytest.fixture(scope="module", params=["llama", "bamba"])
def model(request: pytest.FixtureRequest, make_model: Callable[..., Any]) -> Any:
    return make_model(request.param)


def served(manager: PagedKVCacheManager, runner: HFRunner, chunk: int) -> tuple[list[list[int]], int]:
    """Serves the prompts. Returns the answers and the number of preemptions. A request is preempted if there are too
    few pages for it. Sometimes the newest request is preempted without need. A preempted request starts again later.
    The manager does not learn of a preemption.
    """
    waiting = [TextContext(prompt, len(prompt) + NEW, f"r{at}") for at, prompt in enumerate(PROMPTS)]
    every, running, preempted, turn = [*waiting], list[TextContext](), 0, 0
    while waiting or running:
        turn += 1
        while waiting and len(running) < 4:
            manager.external_claim(waiting[0].request_id)
            if not manager.maybe_reserve(waiting[0]):
                manager.release(waiting[0].request_id)
                break
            running.append(waiting.pop(0))
        for context in running[::-1]:
            if not manager.maybe_reserve(context) or (turn % 6 == 0 and context is running[-1] is not running[0]):
                running.remove(context)
                manager.release(context.request_id)
                waiting.append(context)
                preempted += 1
        for context in running:
            if context.active_length > chunk:
                context.set_token_indices(active_idx=context.start_idx + chunk)
        for context, token in zip(running, runner.run(running, manager.fetch(running)), strict=True):
            context.update(token)
        manager.step(running)
        for context in [one for one in running if one.end_idx == one.max_length]:
            running.remove(context)
            manager.release(context.request_id)
    return [context.tokens[len(prompt) :].tolist() for context, prompt in zip(every, PROMPTS, strict=True)], preempted


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [12, 1000])
def test_a_loop_that_preempts_answers_as_generate_does(
    model: Any, expected: list[list[int]], caching: bool, chunk: int
) -> None:
    copies = {"state_copies": 4} if caching else None
    manager = new_manager(model, 18, PAGE, 4, states=copies, enable_prefix_caching=caching)
    answers, preempted = served(manager, HFRunner(model, manager.states), chunk)
    assert answers == expected
    assert preempted >= 10
    assert_nothing_held(manager)


@pytest.mark.parametrize("budget", [12, 1000])
def test_our_own_loop_preempts_and_answers_as_generate_does(model: Any, expected: list[list[int]], budget: int) -> None:
    loop = new_loop(model, 18, budget, page_size=PAGE, states={"state_copies": 4}, enable_prefix_caching=True)
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
    assert loop.preemptions >= 5
    assert_nothing_held(loop.manager)
