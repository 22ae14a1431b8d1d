"""An overlapped loop gives the same tokens as a plain loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvcache import InvalidRequestError, RaggedKVCacheInputs
from kvcache.params import StateShape
from scheduler_adapters.base import RunTokens
from scheduler_adapters.hf.runner import HFRunner
from scheduler_adapters.loop import Output, Request
from scheduler_adapters.overlapped import OverlappedLoop, ThreadedRunner
from tests.kvcache.build import manager_of
from tests.scheduler_adapters.serving import (
    PROMPTS,
    assert_nothing_held,
    new_manager,
    own_tokens,
    requests_of,
    serve,
    tokens_of,
)

NEW = 16


class SlowModel:
    """A model that runs only after the loop has planned all steps that it can plan. The model therefore reads pages as
    late as possible.
    """

    def __init__(self, runner: Any) -> None:
        self.runner, self.eos_token_ids = runner, runner.eos_token_ids
        self.is_planned = threading.Semaphore(0)
        self.threads: set[str] = set()

    def run(self, batch: Sequence[RunTokens], inputs: Sequence[RaggedKVCacheInputs]) -> list[int]:
        assert self.is_planned.acquire(timeout=60)
        self.is_planned.release()
        self.threads.add(threading.current_thread().name)
        assert min(int(one.tokens.min()) for one in batch) >= 0, "a future token is run"
        return self.runner.run(batch, inputs)


class Loop(OverlappedLoop):
    """An overlapped loop that informs its model when the next step was planned. It counts the steps that were planned
    while the model ran.
    """

    ahead = 0

    def _wait(self, launched: Any) -> list[int]:
        self.ahead += self._next is not None
        self.runner.runner.is_planned.release()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        tokens = super()._wait(launched)
        self.runner.runner.is_planned.acquire()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        return tokens


@pytest.fixture
def new_loop(model: Any) -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def build(pages: int = 200, budget: int = 64, **manager: Any) -> Loop:
        made.append(
            Loop(new_manager(model, pages, **manager), ThreadedRunner(SlowModel(HFRunner(model))), token_budget=budget)
        )
        return made[-1]

    yield build
    for loop in made:
        loop.close()
        loop.runner.close()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("page_size", "budget", "params"),
    [
        (16, 64, {}),
        (128, 512, {}),
        (16, 7, {}),
        (8, 64, {"n_devices": 2}),
        (16, 64, {"n_devices": 4, "data_parallel_degree": 2}),
        (16, 64, {"enable_prefix_caching": False}),
    ],
)
def test_an_overlapped_slow_model_gives_the_same_tokens(
    new_loop: Callable[..., Loop], expected: list[list[int]], page_size: int, budget: int, params: dict[str, Any]
) -> None:
    loop = new_loop(page_size=page_size, budget=budget, **params)
    outputs = serve(loop, requests_of(PROMPTS, NEW))
    assert tokens_of(outputs) == expected
    assert loop.ahead >= NEW - 2
    assert loop.runner.runner.threads == {"model_0"}  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    assert_nothing_held(loop.manager)


@pytest.mark.parametrize("caching", [True, False])
def test_a_tiny_pool_preempts_between_steps_and_still_gives_equal_tokens(
    model: Any, new_loop: Callable[..., Loop], caching: bool
) -> None:
    prompts = [prompt[:20] for prompt in PROMPTS if len(prompt) > 20]
    loop = new_loop(pages=14, page_size=4, enable_prefix_caching=caching)
    assert tokens_of(serve(loop, requests_of(prompts, 24))) == [own_tokens(model, prompt, 24) for prompt in prompts]
    assert loop.preemptions > 0
    assert loop.ahead > 0
    assert_nothing_held(loop.manager)


def test_a_token_behind_the_end_of_a_request_is_dropped(
    new_loop: Callable[..., Loop], expected: list[list[int]]
) -> None:
    loop, end = new_loop(page_size=4), expected[0][5]
    loop.runner.eos_token_ids = frozenset({end})
    outputs = serve(loop, requests_of(PROMPTS, NEW))
    for whole, own in zip(outputs.values(), expected, strict=True):
        until = own.index(end) + 1 if end in own else len(own)
        assert [output.token for output in whole] == own[:until]
        assert whole[-1].finished == ("eos" if end in own else "length")
    assert_nothing_held(loop.manager)


def test_requests_come_and_are_aborted_while_the_model_runs(
    new_loop: Callable[..., Loop], expected: list[list[int]]
) -> None:
    loop, outputs = new_loop(page_size=4), dict[str, list[Output]]()
    requests = requests_of(PROMPTS, NEW)
    waiting = iter(requests)
    loop.add(next(waiting))
    for step in range(300):
        for output in loop.step():
            outputs.setdefault(output.request_id, []).append(output)
        if step % 3 == 0 and (request := next(waiting, None)) is not None:
            loop.add(request)
        if step == 8:
            assert loop.abort("r1")
        if not loop.has_work:
            break
    assert not loop.has_work
    for number in (0, 2, 3, 4):
        assert [output.token for output in outputs[f"r{number}"]] == expected[number]
    assert len(outputs.get("r1", [])) < NEW
    assert_nothing_held(loop.manager)


def test_a_late_token_of_an_aborted_request_does_not_go_to_the_next_request_of_its_name(
    new_loop: Callable[..., Loop], expected: list[list[int]]
) -> None:
    loop = new_loop(page_size=4)
    loop.add(Request("r", PROMPTS[0], NEW))
    loop.step()  # it runs
    assert loop.abort("r")
    loop.add(Request("r", PROMPTS[1], NEW))
    outputs: list[Output] = []
    while loop.has_work:
        outputs += loop.step()
    assert [output.token for output in outputs] == expected[1]
    assert_nothing_held(loop.manager)


def test_a_model_that_fails_ends_its_requests_and_the_loop_continues(
    new_loop: Callable[..., Loop], expected: list[list[int]]
) -> None:
    loop = new_loop(page_size=4)
    right, loop.runner.runner.runner = loop.runner.runner.runner, None  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    loop.add(Request("lost", PROMPTS[0], NEW))
    loop.step()
    with pytest.raises(AttributeError):
        loop.step()
    assert not loop.has_work
    assert_nothing_held(loop.manager)
    loop.runner.runner.runner = right  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    loop.runner.runner.is_planned.acquire()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected


def test_closing_waits_for_the_model_and_ends_its_step(new_loop: Callable[..., Loop]) -> None:
    loop = new_loop(page_size=4)
    loop.add(Request("r", PROMPTS[0], NEW))
    loop.step()
    assert len(loop.manager.steps_in_flight) == 1  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    loop.runner.runner.is_planned.release()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    loop.close()
    assert loop.manager.steps_in_flight == ()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    loop.manager.release("r")
    assert_nothing_held(loop.manager)


def test_recurrent_states_are_refused(model: Any) -> None:
    shape = StateShape(2, 2, 1, 1, 1, 2, torch.float32, torch.float32)
    manager = manager_of(60, page_size=4, params={"states": shape})
    with pytest.raises(InvalidRequestError, match="OverlappedLoop does not support recurrent states"):
        OverlappedLoop(manager, ThreadedRunner(HFRunner(model)))
