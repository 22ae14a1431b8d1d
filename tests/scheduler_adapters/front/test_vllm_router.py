"""vLLM's router in front of whole fleets, and in front of the processes of one fleet. It sends each prompt to the
process that has the prompt's pages.
"""

import random
import signal
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import openai
import pytest

from tests.kvcache.events.routed import ROUTER, Router
from tests.scheduler_adapters.front.served import COMMON, WITHIN_S, Served, complete

pytestmark = [pytest.mark.slow, pytest.mark.skipif(ROUTER is None, reason="needs vllm-router")]
PAGE, LENGTH = 16, 200


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[list[Served]]:
    # The fleets run with `--placement dynamo`, because only then do prefill processes publish their events.
    pytest.importorskip("dynamo.llm")
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
    # The router follows only the prefill processes. Decode processes publish events for other pages.
    prefills = [served.get("/fleet")["prefill-1"] for served in fleets]
    events = {served.url: (one["kv_events"], one["kv_replay"]) for served, one in zip(fleets, prefills, strict=True)}
    return Router(events, log, model="pagewire", page_size=PAGE)


@pytest.mark.ci
def test_prompts_go_to_the_fleet_that_has_them(fleets: list[Served], tmp_path: Path) -> None:
    with closing(router_of(fleets, tmp_path / "router.log")) as router:
        check_prompts_find_pages(router, fleets)


def until_it_follows(router: Router, compute: Callable[[], list[int]], found: Callable[[list[int]], int]) -> None:
    """Computes prompts until the router has found the pages of many prompts in a row. The router must then follow both
    sources.
    """
    deadline, right = time.monotonic() + WITHIN_S, 0
    while right < 8:
        assert time.monotonic() < deadline, router.log.read_text()[-2000:]
        prompt = compute()
        time.sleep(0.2)
        right = right + 1 if found(prompt) else 0


def check_prompts_find_pages(router: Router, fleets: list[Served]) -> None:
    rng = random.Random(0)
    router.begin()

    def at_one_of_them() -> list[int]:
        """Serves a new prompt at one of the fleets, and returns the prompt."""
        prompt = [rng.randrange(200) for _ in range(LENGTH)]
        complete(rng.choice(fleets).client, prompt, 1)
        return prompt

    def found(prompt: list[int]) -> int:
        """Returns how many tokens of a prompt were cached at the process that the router has chosen."""
        return router.complete([*prompt, 7])["usage"]["prompt_tokens_details"]["cached_tokens"]

    until_it_follows(router, at_one_of_them, found)
    prompts = [at_one_of_them() for _ in range(24)]
    until_it_follows(router, at_one_of_them, found)  # Events arrive in order, so the router knows these pages, too.
    assert [found(prompt) for prompt in prompts] == [LENGTH // PAGE * PAGE] * 24
    served = [sum(one["prompt_tokens"] for one in each.get("/fleet").values()) for each in fleets]
    assert min(served) > 0, "both"


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Served]:
    """Two prefill processes and two decode processes behind one front."""
    pytest.importorskip("dynamo.llm")  # as above
    served = Served(tmp_path)
    placed = ("--placement", "dynamo")
    try:
        served.start("front", "front", "--address-file", str(served.addresses), "--http-port", "0", *placed)
        for number in (1, 2):
            served.join("prefill", f"p{number}", *placed)
            served.join("decode", f"d{number}")
        served.until_there(2, 2)
        yield served
    finally:
        served.close()


@pytest.mark.ci
def test_the_router_chooses_the_prefill_process_and_the_decode_process(apart: Served, tmp_path: Path) -> None:
    members = apart.get("/fleet")
    at = {name: f"{apart.url}/processes/{name}" for name in members}
    events = {at[name]: (members[name]["kv_events"], None) for name in ("p1", "p2")}
    decodes = [at["d1"], at["d2"]]
    with closing(Router(events, tmp_path / "router.log", decodes=decodes, model="pagewire", page_size=PAGE)) as router:  # pyright: ignore[reportArgumentType]
        router.begin()
        check_follows_both(router, apart)
        check_loses_some(router, apart)


def check_follows_both(router: Router, apart: Served) -> None:
    rng, urls = random.Random(1), {name: f"{apart.url}/processes/{name}/v1" for name in ("p1", "p2", "d1", "d2")}

    def at_one_of_them() -> list[int]:
        """Computes a new prompt at one of the prefill processes, and returns the prompt. The test makes the two calls
        of a router.
        """
        prompt, name = [rng.randrange(200) for _ in range(LENGTH)], rng.choice(["p1", "p2"])
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        asked = apart.client.with_options(base_url=urls[name]).completions.create(
            model="pagewire", prompt=prompt, max_tokens=1, extra_body={"kv_transfer_params": params}
        )
        carried = {"kv_transfer_params": asked.model_dump()["kv_transfer_params"]}
        at_decode = apart.client.with_options(base_url=urls[rng.choice(["d1", "d2"])])
        at_decode.completions.create(model="pagewire", prompt=prompt, max_tokens=1, extra_body=carried)
        return prompt

    def found(prompt: list[int]) -> int:
        """Returns how many tokens of a prompt were cached at the chosen prefill process. The process itself counts
        them, because the router passes on only the figures of its first answer.
        """
        before = cached()
        router.complete([*prompt, 7])
        return cached() - before

    def cached() -> int:
        stats = apart.get("/fleet")
        return sum(stats[name]["cached_tokens"] for name in ("p1", "p2"))

    until_it_follows(router, at_one_of_them, found)
    prompts = [at_one_of_them() for _ in range(12)]
    until_it_follows(router, at_one_of_them, found)  # Events arrive in order, so the router knows these pages, too.
    assert [found(prompt) for prompt in prompts] == [LENGTH // PAGE * PAGE] * 12
    for text in (*prompts[:4], "A text goes the same way."):
        assert router.complete(text, 12)["choices"][0]["text"] == complete(apart.client, text, 12).choices[0].text
    stats = apart.get("/fleet")
    assert min(stats[name]["prompt_tokens"] for name in ("p1", "p2")) > 0, "both computed"
    assert min(stats[name]["pages_pulled"] for name in ("d1", "d2")) > 0, "both decoded"


def check_loses_some(router: Router, apart: Served) -> None:
    """Checks that a request to a dying process continues at another process, or fails with the name of the lost
    process.
    """
    rng = random.Random(2)
    prompts = [[rng.randrange(200) for _ in range(LENGTH)] for _ in range(12)]
    theirs = [complete(apart.client, prompt, 100).choices[0].text for prompt in prompts]

    def told(prompt: list[int]) -> str:
        try:
            return router.complete(prompt, 100)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            return f"{error.code}: {error.read().decode()}"

    for gone in ("d1", "p1"):
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(told, prompt) for prompt in prompts]
            apart.until(lambda: any(one.done() for one in asked), "some of it")  # noqa: B023 - called at once
            apart.signal(gone, signal.SIGKILL)
            results = [one.result() for one in asked]
        wrong = [one for one, want in zip(results, theirs, strict=True) if one != want]
        # The router notices the end of d1 a minute later, by its own health check.
        assert all("'d1' is unknown" in one or f"{gone!r} is unknown" in one for one in wrong), wrong
        assert len(wrong) < len(prompts)
    apart.until_nothing_is_held()
    with pytest.raises(openai.InternalServerError, match="'p1' is unknown; the processes are: d2, p2"):
        complete(apart.client.with_options(base_url=f"{apart.url}/processes/p1/v1"), [1, 2], 1)
    with pytest.raises(openai.BadRequestError, match="'p2' is a prefill process"):
        complete(apart.client.with_options(base_url=f"{apart.url}/processes/p2/v1"), [1, 2], 1)
