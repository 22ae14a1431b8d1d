"""A draining process accepts no new request, and finishes all requests that it has."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_adapters.service import messages as msg
from tests.scheduler_adapters.service.processes import NEW, Service, Side
from tests.scheduler_adapters.serving import own_tokens

PROMPTS = [
    [number, *range(60, 140), *range(60, 220), *range(14, 254)] for number in range(4)
]  # The prompts have many chunks, so that each phase lasts long.


@pytest.fixture
def start(model: Any, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def make(prefills: int = 2) -> Service:
        services.append(Service(model, tmp_path, Side(count=prefills, budget=32), Side()))
        service = services[-1]
        service.until(lambda: all(one.welcome for one in service.decode.connections), "the connections")
        return service

    yield make
    for service in services:
        service.close()


def theirs(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [own_tokens(model, prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("phase", ["leasing", "offered", "held"])
def test_a_draining_prefill_process_finishes_its_prompts_and_gets_no_new_ones(
    start: Callable[..., Service], model: Any, phase: str
) -> None:
    service = start()
    service.submit(PROMPTS[:2])
    drained = service.prefills["p0"]
    service.until(lambda: any(one.phase == phase for one in drained._requests.values()), phase)
    drained.drain()
    before = drained.stats().prompt_tokens
    service.until(lambda: service.decode.connections[0].leaving, "the news of it")
    for number, prompt in enumerate(PROMPTS[2:]):
        service.submit_one(f"more{number}", prompt)
    service.until(lambda: len(service.ended) == 4, "all")
    names = ["r0", "r1", "more0", "more1"]
    assert [service.tokens[name] for name in names] == theirs(model, PROMPTS)
    assert drained.stats().prompt_tokens <= max(before, len(PROMPTS[0])), "no new prompt may run at a draining process"
    assert service.decode.counts["retries"] == 0
    service.assert_nothing_held()


def test_prompts_sent_to_a_process_that_begins_to_drain_go_to_another(
    start: Callable[..., Service], model: Any
) -> None:
    service = start()
    drained = service.prefills["p0"]
    for number, prompt in enumerate(PROMPTS):
        service.submit_one(f"r{number}", prompt)
    service.decode.poll()  # asks
    assert any(one.prefill.name == "p0" for one in service.decode._requests.values() if one.prefill)
    drained.draining = True  # The process drains, but decode does not know it yet.
    service.until(lambda: len(service.ended) == 4, "all")
    assert [service.tokens[f"r{number}"] for number in range(4)] == theirs(model, PROMPTS)
    assert drained.stats().prompt_tokens == 0
    assert service.decode.counts["retries"] > 0
    service.assert_nothing_held()


def test_if_all_processes_drain_requests_wait_for_one_that_joins(start: Callable[..., Service], model: Any) -> None:
    service = start(prefills=1)
    service.prefill.drain()
    service.until(lambda: service.decode.connections[0].leaving, "the news of it")
    request = service.submit_one("r0", PROMPTS[0])
    for _ in range(20):
        service.poll()
    assert request.phase == "waiting"
    service.start_prefill("p1")
    service.decode.follow([f"ipc://{service.directory}/p1"])
    assert [one.endpoint[-2:] for one in service.decode.connections] == ["p0", "p1"], (
        "the connections to both processes must remain"
    )
    service.until(lambda: "r0" in service.ended, "the request")
    assert service.tokens["r0"] == theirs(model, PROMPTS[:1])[0]
    service.stop_prefill("p0")
    service.until(lambda: service.decode.connections[0].welcome is None, "the loss")
    service.decode.follow([f"ipc://{service.directory}/p1"])
    assert [one.endpoint[-2:] for one in service.decode.connections] == ["p1"]
    service.assert_nothing_held()


def test_a_draining_decode_process_refuses_new_requests_and_finishes_its_own(
    start: Callable[..., Service], model: Any
) -> None:
    service = start()
    service.submit(PROMPTS[:2])
    service.poll()
    service.decode.drain()
    service.decode.submit(msg.Submit(request_id="late", prompt=(1, 2, 3), max_new_tokens=1, serial=7))
    service.until(lambda: len(service.ended) == 3, "all")
    late = service.ended["late"]
    assert (late.finished, late.elsewhere, late.serial) == ("error", True, 7)
    assert "decode process 'd0' is draining" in late.error
    assert [service.tokens[f"r{number}"] for number in range(2)] == theirs(model, PROMPTS[:2])
    service.assert_nothing_held()


def test_the_prefill_process_that_is_wanted_is_asked_first(start: Callable[..., Service]) -> None:
    service = start()
    for number, prompt in enumerate(PROMPTS):
        service.decode.submit(
            msg.Submit(request_id=f"r{number}", prompt=tuple(prompt), max_new_tokens=NEW, prefill="p1")
        )
    service.until(lambda: len(service.ended) == 4, "all")
    assert service.prefills["p0"].stats().prompt_tokens == 0
    assert service.prefills["p1"].stats().prompt_tokens == sum(map(len, PROMPTS))
    assert [one.cached_tokens for one in service.ended.values()] == [0, 0, 0, 0]
    service.decode.submit(msg.Submit(request_id="again", prompt=tuple(PROMPTS[-1]), max_new_tokens=NEW, prefill="none"))
    service.until(lambda: "again" in service.ended, "one whose process is not there")
    assert service.ended["again"].cached_tokens == 480
    service.assert_nothing_held()
