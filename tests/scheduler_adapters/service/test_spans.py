"""Spans of the real service. Each request has one span. The parts of the span add up to it. The span is within the time
that the client has waited.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from tests.scheduler_adapters.service.processes import Service, Side
from tests.scheduler_adapters.service.test_fleet import CONFIGS
from tests.scheduler_adapters.service.test_prometheus import free_port
from tests.scrape import parsed, value
from tests.spans import exported, parts_of
from transfer.spans import NAME, PARTS

COUNT, AT_ONCE, NEW = 100, 4, 3


def traceparent(number: int) -> str:
    return f"00-{number + 1:032x}-{number + 1:016x}-01"


def serve_all(fleet: Fleet) -> dict[str, tuple[float, float]]:
    """Serves all requests. Returns the times at which the client has sent each request, and the times of its second
    token or its end. Decode computes the second token.
    """
    sent: dict[str, float] = {}
    heard: dict[str, float] = {}
    tokens: dict[str, int] = {}
    over: set[str] = set()
    while len(over) < COUNT:
        while len(sent) < COUNT and len(sent) - len(over) < AT_ONCE:
            number = len(sent)
            prompt = tuple(60 + (number * 7 + at * (number % 5 + 1)) % 150 for at in range(40 + number % 90))
            name = f"r{number}"
            sent[name] = time.time()
            fleet.send(
                "decode",
                msg.Submit(request_id=name, prompt=prompt, max_new_tokens=NEW, traceparent=traceparent(number)),
            )
        for message in fleet.receive(0.5):
            assert isinstance(message, msg.Tokens)
            assert not message.error
            name = message.request_id
            tokens[name] = tokens.get(name, 0) + len(message.tokens)
            if tokens[name] >= 2 or message.finished:
                heard.setdefault(name, time.time())
            if message.finished:
                over.add(name)
    return {name: (sent[name], heard[name]) for name in sent}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_fleets")
def test_spans_of_100_requests_sum_to_the_whole_and_lie_in_what_the_client_waited(tmp_path: Path) -> None:
    file, port = tmp_path / "spans.jsonl", free_port()
    configs = [msgspec.structs.replace(one, trace=True, token_budget=32) for one in CONFIGS]
    configs[1] = msgspec.structs.replace(configs[1], metrics=f"127.0.0.1:{port}")
    with Fleet(configs, program=(sys.executable, "-m", "tests.spans", str(file))) as fleet:
        waited = serve_all(fleet)
        stats = fleet.stats()["decode"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            found = parsed(answer.read().decode())
    spans = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(spans) == len(waited) == COUNT
    assert {span["name"] for span in spans} == {NAME}
    assert len({span["context"]["trace_id"] for span in spans}) == COUNT
    whole = reading = 0.0
    for span in spans:
        attributes = span["attributes"]
        name = attributes["gen_ai.request.id"]
        number = int(name[1:])
        assert span["context"]["trace_id"] == f"0x{number + 1:032x}"
        assert span["parent_id"] == f"0x{number + 1:016x}"
        assert (attributes["pagewire.prefill"], attributes["pagewire.decode"]) == ("prefill", "decode")
        parts = {part: attributes[f"pagewire.{part}_seconds"] for part in PARTS}
        start, end = (time_of(span[key]) for key in ("start_time", "end_time"))
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(end - start, abs=2e-6)
        sent, heard = waited[name]
        assert sent - 1e-3 <= start <= end <= heard + 1e-3, "all times are from the clock of one machine"
        if attributes["pagewire.tokens"] and parts["fence"]:
            reading += parts["room"] + parts["read"] + parts["fence"]
        whole += end - start
    pulled = value(found, "pagewire_pull_seconds_count")
    assert pulled == sum(span["attributes"]["pagewire.fence_seconds"] > 0 for span in spans) > COUNT // 2
    # The transfer thread counts the time from the offer to the fence as the time of a pull. It does not count the time
    # until the command reaches the thread.
    assert reading >= value(found, "pagewire_pull_seconds_sum") - 1e-3
    assert stats.pages_held == 0
    report = {part: sum(span["attributes"][f"pagewire.{part}_seconds"] for span in spans) for part in PARTS}
    print({part: round(total / COUNT * 1e3, 3) for part, total in report.items()}, "ms of", whole / COUNT * 1e3)  # noqa: T201


def time_of(text: str) -> float:
    """Converts ISO 8601 in UTC to seconds since the epoch."""
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


@pytest.fixture(scope="module")
def service(make_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(make_model("llama"), tmp_path_factory.mktemp("service"), Side(count=2), Side(count=1), trace=True)
    yield made
    made.close()


def test_each_attempt_has_a_span_and_one_that_fails_says_why(service: Service) -> None:
    service.until(lambda: all(one.welcome for one in service.decode.connections), "both prefill processes")
    with exported() as spans:
        request = service.submit_one("r", [*range(60, 160)], 20)
        service.until(lambda: request.phase == "asked", "a prefill process that takes it")
        service.decode._fail(request, "the first one is gone")
        service.until(lambda: "r" in service.ended, "the last token")
        service.submit_one("left", [*range(70, 170)], 20)
        service.decode.abort("left")
        service.assert_nothing_held()
    first, second, third = spans()
    assert first.status.description == "the first one is gone"
    assert first.end_time <= second.start_time + 1_000_000, (
        "both times are derived from the wall clock, so they may differ a little"
    )
    assert parts_of(first)["read"] == 0
    assert {first.attributes["pagewire.prefill"], second.attributes["pagewire.prefill"]} == {"p0", "p1"}
    assert second.status.is_unset
    assert min(parts_of(second)[part] for part in ("lease", "read", "fence", "commit")) > 0
    assert second.attributes["pagewire.attempt"] > first.attributes["pagewire.attempt"]
    assert second.attributes["pagewire.tokens"] == 100
    assert third.attributes["pagewire.phase"] == "over"


def test_without_spans_opentelemetry_is_not_imported_and_nothing_is_computed(service: Service) -> None:
    assert service.decode._trace
    request = service.submit_one("traced", [*range(60, 90)], 2)
    assert request.span is not None
    service.decode._trace = False
    request = service.submit_one("plain", [*range(60, 90)], 2)
    service.decode._trace = True
    assert request.span is None
    service.until(lambda: {"plain", "traced"} <= service.ended.keys(), "both")
    service.assert_nothing_held()
