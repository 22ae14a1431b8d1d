"""Prefill and decode with overlapped loops give the same tokens as plain loops, and hold no pages at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcache import InvalidRequestError
from scheduler_adapters.loop import ModelRunner
from scheduler_adapters.overlapped import OverlappedLoop, RunBatch, ThreadedRunner
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.server import build_loop
from tests.scheduler_adapters.server_config import server_config
from tests.scheduler_adapters.service.processes import NEW, Service, Side
from tests.scheduler_adapters.service.test_service import PROMPTS
from tests.scheduler_adapters.serving import own_tokens

pytestmark = pytest.mark.slow


class LatestRunner(ThreadedRunner):
    """Runs a launched step only when its tokens are asked for. This is the latest possible time."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.computed: dict[Any, int] = {}  # For each request, the number of tokens that are computed.

    def launch(self, batches: Sequence[RunBatch]) -> Any:
        return _Unrun(self, batches)


class _Unrun:
    def __init__(self, runner: LatestRunner, batches: Sequence[RunBatch]) -> None:
        self.runner, self.batches = runner, batches
        self.tokens: list[int] | None = None

    def result(self) -> list[int]:
        if self.tokens is None:
            self.tokens = [token for batch in self.batches for token in self.runner.run(*batch)]
            self.runner.computed |= {one.request_id: one.active_idx for batch, _ in self.batches for one in batch}
        return self.tokens


@pytest.fixture
def start(model: Any, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def make(
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        launch: Callable[..., Any] = LatestRunner,
        **options: Any,
    ) -> Service:
        sides = [Side(**{"overlap": launch, **(side or {})}) for side in (prefill, decode)]
        services.append(Service(model, tmp_path, *sides, **options))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.mark.each_value
@pytest.mark.parametrize("launch", [LatestRunner, ThreadedRunner])
@pytest.mark.parametrize(
    ("prefill", "decode", "chunkwise"),
    [
        ({"budget": 32}, {}, True),
        ({"budget": 48, "tp": 2, "page_size": 64, "pages": 25}, {"dp": 2}, True),
        ({"overlap": None}, {}, False),
        ({"budget": 32, "dp": 2}, {"overlap": None}, True),
    ],
)
def test_a_hand_over_between_loops_that_plan_ahead_gives_equal_tokens(
    start: Callable[..., Service],
    expected: list[list[int]],
    prefill: dict[str, Any],
    decode: dict[str, Any],
    chunkwise: bool,
    launch: Callable[..., Any],
) -> None:
    service = start(prefill, decode, launch, chunkwise=chunkwise)
    assert service.serve(PROMPTS) == expected
    assert service.serve(PROMPTS[::-1]) == expected[::-1]
    assert service.decode.stats().pages_reused > 0
    service.assert_nothing_held()


def test_only_pages_of_steps_that_have_ended_are_offered(
    start: Callable[..., Service], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start({"budget": 32})
    runner: Any = service.loops["p0"].runner
    send, offered = service.prefill._send, list[int]()

    def spy(reader: bytes, message: msg.ToDecode) -> None:
        if isinstance(message, msg.PagesOffer):
            (computed,) = runner.computed.values()
            assert message.table.num_tokens <= computed
            offered.append(message.table.num_tokens)
        send(reader, message)

    monkeypatch.setattr(service.prefill, "_send", spy)
    assert service.serve(PROMPTS[:1]) == expected[:1]
    assert len(offered) > 2
    assert offered[-1] == len(PROMPTS[0])
    service.assert_nothing_held()


@pytest.mark.few(2)
@pytest.mark.parametrize("launch", [LatestRunner, ThreadedRunner])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_small_pool_on_either_side_gives_equal_tokens(
    start: Callable[..., Service], model: Any, side: str, launch: Callable[..., Any]
) -> None:
    small: dict[str, Any] = {side: {"pages": 12, "budget": 32}}
    service = start(**small, launch=launch)
    prompts = [[7] * 60, [8] * 60, [9] * 30]
    assert service.serve(prompts, 60) == [own_tokens(model, prompt, 60) for prompt in prompts]
    assert (service.decode.stats().preemptions > 0) == (side == "decode")
    service.assert_nothing_held()


@pytest.mark.parametrize("launch", [LatestRunner, ThreadedRunner])
def test_aborts_at_any_time_change_no_other_tokens(
    start: Callable[..., Service], model: Any, launch: Callable[..., Any]
) -> None:
    service = start({"budget": 32}, {"rows": 8}, launch)
    prompts = [[number, *PROMPTS[0]] for number in range(8)]
    service.submit(prompts, 30)
    for number, phase in enumerate(("waiting", "asked", "pulling", "decoding")):
        name = f"r{2 * number}"
        request = service.decode._requests[name]
        service.until(lambda request=request, phase=phase: request.phase == phase, f"{name}: {phase}")
        service.decode.abort(name)
    service.until(lambda: len(service.ended) == 8, "all")
    for number, prompt in enumerate(prompts):
        theirs, end = own_tokens(model, prompt, 30), service.ended[f"r{number}"]
        tokens = service.tokens[f"r{number}"]
        assert tokens == (theirs if number % 2 else theirs[: len(tokens)])
        assert (end.finished == "cancelled") == (number % 2 == 0)
    service.assert_nothing_held()


def test_a_drain_waits_for_the_step_that_outlasts_the_last_request(start: Callable[..., Service]) -> None:
    service = start({"budget": 32})
    request = service.submit_one("r0", PROMPTS[0], 50)
    service.until(lambda: request.phase == "pulling", "a chunk")
    prefill, decode = service.prefill, service.decode
    (computing,) = prefill._requests.values()
    assert len(service.loops["p0"].manager.steps_in_flight) == 1
    prefill._end(computing, "says the test", silent=True)
    prefill.drain()
    service.until(lambda: not prefill.open_requests, "the end of its lease", poll=prefill._take_events)
    assert_step_is_awaited(prefill)
    decode.abort("r0")

    service.start_prefill("p1")
    decode.follow([f"ipc://{service.directory}/p1"])
    request = service.submit_one("r1", PROMPTS[1], 50)
    service.until(lambda: len(service.tokens["r1"]) > 3, "some tokens")
    decode.drain()
    decode.abort("r1")
    assert not decode.open_requests
    assert_step_is_awaited(decode)
    service.assert_nothing_held()


def assert_step_is_awaited(scheduler: Any) -> None:
    assert not scheduler.has_drained
    assert not scheduler.is_idle
    assert scheduler.counters().pages_held > 0, "the step may still write to these pages, so they must stay held"
    scheduler.poll()
    assert scheduler.has_drained
    assert scheduler.is_idle
    assert scheduler.stats().pages_held == 0


def test_closing_a_loop_ends_its_step(start: Callable[..., Service]) -> None:
    service = start()
    request = service.submit_one("r0", PROMPTS[0], 50)
    service.until(lambda: request.phase == "decoding", "decode")
    loop = service.loops["d0"]
    service.until(lambda: loop.manager.steps_in_flight, "a step")
    loop.close()
    assert loop.manager.steps_in_flight == ()
    service.decode.abort("r0")
    service.assert_nothing_held()


def test_a_process_plans_ahead_only_with_the_option() -> None:
    for overlap in (False, True):
        loop, _ = build_loop(server_config(overlap=overlap))
        assert isinstance(loop, OverlappedLoop) == overlap
        loop.close()
        loop.manager.close()


def test_recurrent_states_are_refused_by_name(make_model: Any, tmp_path: Path) -> None:
    make_model("bamba").save_pretrained(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"recurrent states.*serve without --overlap"):
        build_loop(server_config(model=str(tmp_path), overlap=True))


def test_prompts_that_are_computed_are_handed_over_once(start: Callable[..., Service], model: Any) -> None:
    service = start({"budget": 32, "count": 2}, {"count": 2})
    prompts = [[number, *PROMPTS[0]] for number in range(6)]
    assert service.serve(prompts) == [own_tokens(model, prompt, NEW) for prompt in prompts]
    assert sum(one.stats().prompt_tokens for one in service.prefills.values()) == sum(map(len, prompts))
    service.assert_nothing_held()
