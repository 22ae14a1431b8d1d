"""Observation of the front: the metrics of all processes, and a span of each request in its client's trace."""

import asyncio
import re
import threading
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from scheduler_adapters.front.app import make_app
from scheduler_adapters.front.frontend import Frontend
from scheduler_adapters.front.openai import ServedModel
from scheduler_adapters.hf.tiny import VOCAB_SIZE, ByteTokenizer
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.server import DrainSignal, serve
from scheduler_adapters.service.sockets import bind_router, join_frontend
from tests.metrics_page import table
from tests.scheduler_adapters.service.test_fleet import CONFIGS
from tests.scrape import faults, parsed, value
from tests.spans import exported, parts_of
from transfer.spans import NAME

COUNT, AT_ONCE, NEW = 100, 4, 3
FAILED = "pagewire_front_unread_families_total"


class InThread:
    """A process of the service that runs as a thread, so that its spans reach the provider of the test's process."""

    def __init__(self, role: msg.Role, folder: Path) -> None:
        base = next(one for one in CONFIGS if one.role == role)
        self.config = msgspec.structs.replace(
            base,
            name=role,
            frontend=f"ipc://{folder}/front",
            listen=f"ipc://{folder}/prefill" if role == "prefill" else "",
            ready_s=0.1,
            metrics="127.0.0.1:0",
            trace=True,
        )
        self._told = DrainSignal()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        join_frontend(socket, self.config.frontend, self.config.name, None)
        serve(self.config, context, socket, self._told)
        context.destroy(linger=1000)

    def drain(self) -> None:
        self._told.drain = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@asynccontextmanager
async def fronted(folder: Path) -> AsyncIterator[tuple[Frontend, httpx.AsyncClient]]:
    """Yields a front, a process of each kind, and a client of the front's application."""
    context: zmq.Context[Any] = zmq.Context()
    router = bind_router(context, f"ipc://{folder}/front")
    frontend = Frontend(router)
    hearing = asyncio.create_task(frontend.run())
    processes: list[InThread] = []
    app = make_app(frontend, ServedModel("tiny", ByteTokenizer(), VOCAB_SIZE))
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
            # The processes start one after the other, because their weights come from torch's global seed.
            for role in ("prefill", "decode"):
                processes.append(InThread(role, folder))
                async with asyncio.timeout(90):
                    while role not in frontend.members:
                        frontend.changed.clear()
                        await frontend.changed.wait()
            yield frontend, client
    finally:
        for process in reversed(processes):  # decode first
            await asyncio.to_thread(process.drain)
        hearing.cancel()
        await asyncio.wait([hearing])
        context.destroy(linger=0)


def traceparent(number: int) -> str:
    return f"00-{number + 1:032x}-{number + 1:016x}-01"


def prompt_of(number: int) -> list[int]:
    own = [60 + (number * 7 + at * (number % 5 + 1)) % 150 for at in range(20 + number % 90)]
    return [*range(60, 80), *own]


async def ask(client: httpx.AsyncClient, number: int, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt_of(number), "max_tokens": NEW, "ignore_eos": True, **more}
    answer = await client.post("/v1/completions", json=body, headers={"traceparent": traceparent(number)})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ask_all(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    numbers = iter(range(COUNT))

    async def some() -> list[dict[str, Any]]:
        return [await ask(client, number) for number in numbers]

    return [one for found in await asyncio.gather(*(some() for _ in range(AT_ONCE))) for one in found]


def scrape(address: str) -> dict[Any, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return parsed(answer.read().decode())


@pytest.mark.slow
def test_a_hundred_requests_of_a_client_are_in_its_traces_and_in_the_metrics(tmp_path: Path) -> None:
    async def run() -> tuple[list[dict[str, Any]], str, dict[str, dict[Any, float]]]:
        async with fronted(tmp_path) as (_, client):
            answers = await ask_all(client)
            front, *others = (await client.get("/targets")).json()[0]["targets"]
            assert front == "front"
            of_processes = [await asyncio.to_thread(scrape, address) for address in others]
            text = (await client.get("/metrics")).text
        return answers, text, {role: found for found in of_processes for role in roles_in(found)}

    with exported() as spans:
        answers, text, processes = asyncio.run(run())
        check_spans(spans(), answers)
    assert list(faults(text)) == []
    documented = set(re.findall(r"^\| `(pagewire_front_\w+)` \|", table(), re.MULTILINE))
    assert set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)) == {*documented, FAILED}
    front, prompts = parsed(text), sum(len(prompt_of(number)) for number in range(COUNT))
    assert value(front, "pagewire_front_ended_requests_total", how="length") == COUNT
    assert value(front, "pagewire_front_ended_requests_total") == COUNT
    assert value(front, "pagewire_front_new_tokens_total") == COUNT * NEW
    assert value(front, "pagewire_front_prompt_tokens_total") == prompts
    assert value(front, "pagewire_front_first_token_seconds_count") == COUNT
    assert value(front, "pagewire_front_requests") == value(front, "pagewire_front_lost_attempts_total") == 0
    assert value(front, "pagewire_front_processes", state="serving") == 2
    cached = sum(one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers)
    assert value(front, "pagewire_front_prompt_tokens_total", source="cached") == cached > 0
    # A later chunk may find pages that another request has published meanwhile. The process counts these pages, but the
    # answer does not.
    assert value(processes["prefill"], "pagewire_prompt_tokens_total", source="cached") >= cached
    assert value(processes["prefill"], "pagewire_prompt_tokens_total") == prompts
    assert value(processes["decode"], "pagewire_pull_seconds_count") > 0


def roles_in(found: dict[Any, float]) -> set[str]:
    return {dict(labels)["role"] for _, labels in found if "role" in dict(labels)}


def check_spans(spans: Sequence[Any], answers: Sequence[dict[str, Any]]) -> None:
    """Checks that each request has one span in its client's trace, and that the parts of the span add up to it."""
    assert {span.name for span in spans} == {NAME}
    assert Counter(span.context.trace_id for span in spans) == Counter(range(1, COUNT + 1))
    asked = {one["id"] for one in answers}
    for span in spans:
        assert span.parent.span_id == span.context.trace_id, "the parent must be the one in the header"
        assert span.attributes["gen_ai.request.id"].partition(".")[0] in asked
        assert sum(parts_of(span).values()) == pytest.approx((span.end_time - span.start_time) * 1e-9, abs=2e-6)


@pytest.mark.slow
def test_requests_are_counted_by_their_end_and_invalid_headers_do_no_harm(tmp_path: Path) -> None:
    async def run() -> None:
        async with fronted(tmp_path) as (frontend, client):
            for header in ("", "nonsense", "0" * 4000):
                body = {"model": "tiny", "prompt": [70, 71], "max_tokens": 2, "ignore_eos": True}
                answer = await client.post("/v1/completions", json=body, headers={"traceparent": header})
                assert answer.status_code == 200
            submit = msg.Submit(request_id="left", prompt=tuple(prompt_of(1)), max_new_tokens=200, ignore_eos=True)
            news = frontend.generate(submit)
            assert (await anext(news)).tokens
            assert frontend.counts.open == 1
            await news.aclose()
            assert (frontend.counts.open, frontend.counts.ended["cancelled"]) == (0, 1)
            await frontend.drain(list(frontend.members))
            refused = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
            assert refused.status_code == 503
            assert frontend.counts.ended == {"length": 3, "cancelled": 1}, (
                "a request that was never accepted must not count as ended"
            )

    asyncio.run(run())
