"""A prefill process computes a prompt from its first token on and pulls its last pages, over a slow link that may be
cut.
"""

import random
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from benchmarks.both_ends import Link, measure
from benchmarks.prefix_hosts import HostedFleet
from benchmarks.prefix_peers import PAIR_CONFIG
from benchmarks.prefix_worker import COMPUTED, PULLED, SPLIT
from scheduler_adapters.service import messages as msg
from tests.scheduler_adapters.serving import own_tokens

pytestmark = pytest.mark.hosts
NEW, LENGTH = 4, 2048
_WITHIN_S = 60.0
# The link is now slower than the measured link. Until the server has measured the slower link, it asks for too many
# pages, and the computation overtakes the pull.
_PROMPTS = 10


class Both:
    """Two prefill processes and one decode process on three hosts. p1 pulls pages that p0 has computed."""

    def __init__(self, fleet: HostedFleet) -> None:
        self.fleet = fleet
        self._numbers = random.Random(0)

    def head(self, length: int = LENGTH) -> list[int]:
        return [self._numbers.randrange(256) for _ in range(length)]

    def submit(self, name: str, prefill: str, prompt: list[int]) -> None:
        self.fleet.send("d0", msg.Submit(request_id=name, prompt=tuple(prompt), max_new_tokens=NEW, prefill=prefill))

    def tokens(self, name: str) -> list[int]:
        """Returns the tokens of a submitted prompt."""
        found, deadline = list[int](), time.monotonic() + _WITHIN_S
        while time.monotonic() < deadline:
            for message in self.fleet.receive(0.05):
                if isinstance(message, msg.Tokens) and message.request_id == name:
                    assert not message.error
                    found += message.tokens
                    if message.finished:
                        return found
        pytest.fail(f"{name} was not served")

    def served(self, name: str, prefill: str, prompt: list[int]) -> list[int]:
        self.submit(name, prefill, prompt)
        return self.tokens(name)

    def p1(self) -> msg.Stats:
        return self.fleet.stats()["p1"]

    def assert_nothing_is_held(self) -> None:
        deadline = time.monotonic() + _WITHIN_S
        while any(one.pages_held or one.open_requests for one in self.fleet.stats().values()):
            assert time.monotonic() < deadline, self.fleet.stats()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    configs = [msgspec.structs.replace(PAIR_CONFIG, name=name) for name in ("p0", "p1")]
    configs.append(msgspec.structs.replace(PAIR_CONFIG, name="d0", role="decode"))
    with HostedFleet(configs, "100mbit") as fleet:
        made = Both(fleet)
        for number in range(2):  # p1 measures the speeds of the link and of the model.
            for length in (64, 256, 1024, LENGTH):
                for way in (PULLED, COMPUTED):
                    head = made.head(length)
                    made.served(f"first {way}{number} {length}", "p0", [*head, 1])
                    made.served(f"{way}{number} {length}", "p1", [*head, 2])
        made.assert_nothing_is_held()
        yield made


@pytest.mark.parametrize("rate", ["100mbit", "50mbit"])
def test_both_ends_meet_over_a_slow_link(both: Both, tiny_model: Any, rate: str) -> None:
    for host in both.fleet.hosts.values():
        host.shape(rate)
    for number in range(_PROMPTS):
        head = both.head()
        both.served(f"first {rate} {number}", "p0", [*head, 1])
        before = both.p1()
        assert both.served(f"{SPLIT}{rate} {number}", "p1", [*head, 2]) == own_tokens(tiny_model, [*head, 2], NEW)
        now = both.p1()
        both.assert_nothing_is_held()
        if now.prefixes.get("split", 0) > before.prefixes.get("split", 0):
            break
    else:
        pytest.fail(f"no pull of {_PROMPTS} prompts was quicker than computing: {now.prefixes}, {now.misjudged_s}")
    assert 0 < now.pages_pulled - before.pages_pulled < LENGTH // PAIR_CONFIG.page_size
    assert 0 < now.cached_tokens - before.cached_tokens < LENGTH


@pytest.mark.parametrize("seconds", [1, pytest.param(10, marks=pytest.mark.long)])
def test_a_link_that_is_cut_meanwhile_costs_no_token_and_no_page(both: Both, tiny_model: Any, seconds: int) -> None:
    source = both.fleet.hosts["p0"]
    source.shape("20mbit")
    head = both.head()
    both.served(f"first cut {seconds}", "p0", [*head, 1])
    both.assert_nothing_is_held()
    before = source.received()
    both.submit(f"{SPLIT}cut {seconds}", "p1", [*head, 2])
    deadline = time.monotonic() + _WITHIN_S
    while source.received() == before:  # the question
        assert time.monotonic() < deadline
    source.cut()
    time.sleep(seconds)
    source.restore()
    assert both.tokens(f"{SPLIT}cut {seconds}") == own_tokens(tiny_model, [*head, 2], NEW)
    both.assert_nothing_is_held()


def test_the_benchmark_of_both_ends_comes_to_its_end() -> None:
    (row,) = measure(1, 0, [Link("100mbit", False, 512)])
    assert row["n"] == 1
    assert row["split_ms_min"] > 0
