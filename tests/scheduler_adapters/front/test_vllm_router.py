"""vLLM's router in front of two whole fleets sends a prompt to the fleet whose prefill process has its pages."""

import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kvcache.events.routed import ROUTER, Router
from tests.scheduler_adapters.front.served import COMMON, WITHIN_S, Served, complete

pytestmark = [pytest.mark.slow, pytest.mark.skipif(ROUTER is None, reason="needs vllm-router")]
PAGE, LENGTH = 16, 200


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[list[Served]]:
    pytest.importorskip("dynamo.llm")  # of `--placement dynamo`, with which prefill processes publish their events
    made: list[Served] = []
    try:
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            made.append(Served(tmp_path / name))
            apart = ("--address-file", str(made[-1].addresses), "--http-port", "0", "--placement", "dynamo")
            made[-1].start("all", "all", "--prefills", "1", "--decodes", "1", *apart, *COMMON)
        for served in made:
            served.until_there(1, 1)
        yield made
    finally:
        for served in made:
            served.close()


def router_of(fleets: list[Served], log: Path) -> Router:
    prefills = [next(one for one in served.get("/fleet").values() if one["kv_events"]) for served in fleets]
    events = {served.url: (one["kv_events"], one["kv_replay"]) for served, one in zip(fleets, prefills, strict=True)}
    return Router(events, log, model="pagewire", page_size=PAGE)


def test_prompts_go_to_the_fleet_that_has_them(fleets: list[Served], tmp_path: Path) -> None:
    with closing(router_of(fleets, tmp_path / "router.log")) as router:
        send(router, fleets)


def send(router: Router, fleets: list[Served]) -> None:
    rng = random.Random(0)
    router.begin()

    def at_one_of_them() -> list[int]:
        """A new prompt that one fleet has served."""
        prompt = [rng.randrange(200) for _ in range(LENGTH)]
        complete(rng.choice(fleets).client, prompt, 1)
        return prompt

    def found(prompt: list[int]) -> int:
        """Tokens of it that were cached where the router has sent it."""
        return router.complete([*prompt, 7])["usage"]["prompt_tokens_details"]["cached_tokens"]

    deadline, right = time.monotonic() + WITHIN_S, 0
    while right < 8:  # in a row: by then it follows both
        assert time.monotonic() < deadline, router.log.read_text()[-2000:]
        prompt = at_one_of_them()
        time.sleep(0.2)
        right = right + 1 if found(prompt) else 0
    prompts = [at_one_of_them() for _ in range(24)]
    time.sleep(1.0)
    assert [found(prompt) for prompt in prompts] == [LENGTH // PAGE * PAGE] * 24
    served = [sum(one["prompt_tokens"] for one in each.get("/fleet").values()) for each in fleets]
    assert min(served) > 0, "both"
