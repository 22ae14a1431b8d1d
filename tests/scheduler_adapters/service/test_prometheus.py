"""A scrape of a process has every documented metric, agrees with the process's counters, and follows the rules of
Prometheus.
"""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.prometheus import collectors, serve_metrics
from scheduler_adapters.service.requests import DECODE_MOVES, PREFILL_MOVES
from tests.metrics_page import table
from tests.scheduler_adapters.service.processes import Service
from tests.scheduler_adapters.service.test_fleet import CONFIGS, PROMPT
from tests.scrape import Scrape, faults, parsed, scraped, text_of, value


@pytest.fixture(scope="module")
def service(make_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(make_model("llama"), tmp_path_factory.mktemp("service"))
    yield made
    made.close()


def observed(service: Service, name: str) -> list[Any]:
    scheduler = service.decodes.get(name) or service.prefills[name]
    return collectors(scheduler, service.loops[name].manager, service.exchanges[name])


def test_a_scrape_has_the_documented_metrics_and_agrees_with_the_counters(service: Service) -> None:
    service.serve([[*range(60, 160)]])
    before = value(scraped(*observed(service, "p0")), "pagewire_ended_leases_total", how="read")
    service.serve([[*range(60, 160)], [*range(60, 120)], [*range(60, 150)]])
    service.assert_nothing_held()
    documented = set(re.findall(r"^\| `(pagewire_(?!front_)\w+)` \|", table(), re.MULTILINE))
    for name in ("p0", "d0"):
        text, made = text_of(*observed(service, name)), observed(service, name)
        # A family whose name ends in `_created` is not a family of pagewire. Each package has one family that counts
        # figures which could not be read.
        found = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
        assert found - {one.families[-1].name for one in made} == documented
        assert list(faults(text)) == []
        assert all(value(parsed(text), one.families[-1].name) == 0 for one in made)
    decode, prefill = (scraped(*observed(service, name)) for name in ("d0", "p0"))
    stats = service.decode.stats()
    assert value(decode, "pagewire_pulled_pages_total") == stats.pages_pulled > 0
    assert value(decode, "pagewire_reused_pages_total") == stats.pages_reused > 0
    assert value(decode, "pagewire_pull_bytes_sum") == stats.bytes_pulled
    assert value(decode, "pagewire_pull_busy_seconds_total") == stats.pull_seconds
    assert value(prefill, "pagewire_ended_leases_total", how="read") == before + 3
    stats = service.prefill.stats()
    assert value(prefill, "pagewire_prompt_tokens_total") == stats.prompt_tokens >= 250
    assert value(prefill, "pagewire_prompt_tokens_total", source="cached") == stats.cached_tokens


def phases(found: Scrape) -> dict[str, float]:
    return {dict(labels)["phase"]: figure for (name, labels), figure in found.items() if name == "pagewire_requests"}


def test_requests_are_counted_by_phase(service: Service) -> None:
    assert set(phases(scraped(*observed(service, "p0")))) == PREFILL_MOVES.keys() - {"over"}
    before = phases(scraped(*observed(service, "d0")))
    assert before == dict.fromkeys(DECODE_MOVES.keys() - {"over"}, 0)
    for number in range(7):  # Only four requests get a row. Three requests wait.
        service.submit_one(f"n{number}", [*range(70 + number, 100 + number)], 200)
    assert phases(scraped(*observed(service, "d0")))["waiting"] == 7
    service.until(lambda: phases(scraped(*observed(service, "d0")))["decoding"] == 4, "four that decode")
    found = scraped(*observed(service, "d0"))
    assert value(found, "pagewire_running_requests") == 4
    assert sum(phases(found).values()) == 7
    for number in range(7):
        service.decode.abort(f"n{number}")
    service.assert_nothing_held()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.usefixtures("forked_fleets")
def test_each_process_answers_scrapes_at_its_own_port() -> None:
    ports = {config.role: free_port() for config in CONFIGS}
    configs = [msgspec.structs.replace(one, metrics=f"127.0.0.1:{ports[one.role]}") for one in CONFIGS]
    with Fleet(configs) as fleet:
        fleet.send("decode", msg.Submit(request_id="r", prompt=PROMPT, max_new_tokens=8))
        while not any(isinstance(one, msg.Tokens) and one.finished for one in fleet.receive(0.1)):
            pass
        stats = fleet.stats()
        texts = {}
        for role, port in ports.items():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                texts[role] = parsed(answer.read().decode())
    assert value(texts["decode"], "pagewire_pulled_pages_total", server="decode", role="decode") == 5
    assert value(texts["decode"], "pagewire_pull_bytes_sum") == stats["decode"].bytes_pulled
    assert value(texts["prefill"], "pagewire_prompt_tokens_total", server="prefill") == len(PROMPT)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "192.0.2.1:1"])
def test_an_invalid_address_is_named_in_the_error(address: str) -> None:
    with pytest.raises(ServiceError, match=f"metrics cannot be served at '{address}'"), serve_metrics(address, []):
        pass


def test_prometheus_is_not_imported_if_it_is_off() -> None:
    import subprocess
    import sys

    code = (
        "import sys, kvcache, transfer, scheduler_adapters.service.server, scheduler_adapters.service.decode;"
        "print([m for m in ('prometheus_client', 'opentelemetry') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "[]"
