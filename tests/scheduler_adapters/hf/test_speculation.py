"""Speculative decoding. Whatever is guessed, the tokens are the model's own, and states continue from the last right
token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.scheduler_adapters.hf.speculating import NEW, PAGE, PROMPTS, Engine, assert_equal
from tests.scheduler_adapters.serving import assert_nothing_held

pytestmark = pytest.mark.slow

MODEL = "bamba"
HERE = ("bamba", "qwen3_next", "llama")
MODELS = ("granite", "jamba", "lfm2", "kimi_linear")


@pytest.fixture(scope="module", params=[*HERE, *[pytest.param(name, marks=pytest.mark.ci) for name in MODELS]])
def each_model(request: pytest.FixtureRequest, shared_model: Callable[..., Any]) -> Any:
    return shared_model(request.param)


@pytest.mark.parametrize(
    ("share", "most", "budget", "shards", "across"),
    [
        (0.7, 3, 64, 1, True),
        (0.7, 3, 64, 1, False),
        (0.5, 5, 7, 2, True),
        (1.0, 4, 64, 1, False),
        (0.0, 2, 16, 1, True),
    ],
)
def test_tokens_are_the_models_own_whatever_is_guessed(
    each_model: Any, share: float, most: int, budget: int, shards: int, across: bool
) -> None:
    engine = Engine(each_model, share, most, budget=budget, shards=shards, across=across)
    answers = engine.knows(PROMPTS)
    for _ in range(2):  # In the second round the prefixes are cached.
        assert_equal(each_model, answers, engine.serve(PROMPTS))
    assert engine.manager.metrics.cache_tokens >= len(PROMPTS) * 4 * PAGE
    assert engine.drafted > 40
    assert engine.accepted > 40 or share == 0.0
    assert bool(engine.set_back) == (engine.has_states and share < 1.0)
    assert_nothing_held(engine.manager)


def test_tokens_are_the_models_own_if_requests_are_preempted_while_they_guess(each_model: Any) -> None:
    engine = Engine(each_model, 0.6, budget=16, pages=24, copies=4)
    prompts = [[at, *prompt] for at, prompt in enumerate(PROMPTS)]
    answers = engine.knows(prompts)

    def give_way() -> None:
        if engine.running and engine.random.random() < 0.2:
            engine.give_way(engine.random.choice(list(engine.running.values())))

    assert_equal(each_model, answers, engine.serve(prompts, give_way))
    assert engine.gave_way > 2
    assert engine.accepted
    assert_nothing_held(engine.manager)


def test_a_fork_continues_from_the_last_right_guess(each_model: Any) -> None:
    """Some guesses of the parent were wrong. The parent and its fork both run the accepted guesses again."""
    engine = Engine(each_model, 0.6, 4)
    (answer,) = engine.knows(PROMPTS[:1])

    def fork() -> None:
        parent = engine.running.get("r0")
        if parent is None or "r1" in engine.running or parent.end_idx < len(PROMPTS[0]) + 6:
            return
        child = parent.fork("r1")
        if child.active_length > 1 or not engine.has_states:
            assert engine.manager.fork(parent, child)
            engine.running["r1"] = child

    assert_equal(each_model, [answer] * 2, engine.serve(PROMPTS[:1], fork))
    assert_nothing_held(engine.manager)


def test_right_guesses_save_steps_and_copies_are_made_of_the_pages_they_fill(model: Any) -> None:
    engine = Engine(model, 1.0)
    (answer,) = engine.knows(PROMPTS[:1])
    steps: list[int] = []
    engine.serve(PROMPTS[:1], lambda: steps.append(1))
    assert engine.accepted == engine.drafted
    assert engine.accepted + len(steps) - 1 >= NEW  # The prompt takes two steps. Its first step yields no token.
    assert len(steps) <= NEW * 3 // 4
    before = engine.manager.metrics.cache_tokens
    engine.answers = [[*answer, 1, 2]]
    engine.serve([[*answer, 1]])
    assert engine.manager.metrics.cache_tokens - before == (len(answer) - 1) // PAGE * PAGE


def test_without_a_second_page_a_request_continues_without_guesses(model: Any) -> None:
    engine = Engine(model, 0.7, rows=3, copies=0)
    answers = engine.knows(PROMPTS)
    assert_equal(model, answers, engine.serve(PROMPTS))
    assert engine.without > 10
    assert engine.accepted  # A free row has a free state page.
    assert_nothing_held(engine.manager)
