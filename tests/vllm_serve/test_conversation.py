"""Conversations: what one server has cached, another finds. The proxy keeps nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.vllm_serve.client import Answer, ask
from tests.vllm_serve.server import LEASE, Proxy, Server, Settings

FOUND = "vllm:pagewire_peer_prefix_tokens_total"
LENT = "vllm:pagewire_lent_blocks_total"
TURNS = [[number % 256 for number in range(start, start + 300)] for start in (7, 1000, 77)]


def equal(model: Path, number: int, **more: Any) -> Settings:
    """Returns the settings of one of several equal servers, whose peers may be slow on a busy machine."""
    extra = json.dumps({"kv_lease_duration": LEASE, "ask_timeout": 2.0})
    return Settings(model, number=number, extra=extra, **more)


def turn(server: Server, prompt: list[int], sources: list[Any], **more: Any) -> Answer:
    """Sends a turn of a conversation, as a proxy does that has only the last answer."""
    answer = ask(server.url, prompt, kv_transfer_params={"kv_sources": sources}, **more)
    assert answer.status == 200, answer
    return answer


def talk(servers: list[Server], plain: Server, turns: list[list[int]], sources: list[Any]) -> list[int]:
    """Holds a conversation, each turn at the next server. Returns the tokens that each turn has found at its peer."""
    prompt, found = list[int](), list[int]()
    for number, words in enumerate(turns):
        prompt += words
        server = servers[number % len(servers)]
        before = server.metrics().get(FOUND, 0)
        answer = turn(server, prompt, sources)
        assert answer.tokens == ask(plain.url, prompt).tokens, number
        found.append(int(server.metrics().get(FOUND, 0) - before))
        sources = answer.params["kv_sources"]
        prompt += answer.tokens
    return found


@pytest.fixture
def three(servers: Any, model: Callable[..., Path]) -> list[Server]:
    """Two equal servers, and a plain one."""
    llama = model("llama")
    return servers.get(equal(llama, 0), equal(llama, 1), Settings(llama, connector=""))


def forget(*servers: Server) -> None:
    for server in servers:
        server.wait_empty()
        server.forget()


def test_each_turn_finds_what_the_other_server_has(three: list[Server]) -> None:
    *pair, plain = three
    forget(*pair)
    found = talk(pair, plain, TURNS, [])
    # the first turn has nowhere to look; each later one finds all full blocks of 32 tokens before it, beyond its own
    assert found == [0, 288, (624 // 32 - 9) * 32]
    for server in pair:
        server.wait_empty()
    assert sum(server.metrics()[LENT] for server in pair) == sum(found) / 32


@pytest.mark.parametrize("what", ["dead", "stale", "reset"])
def test_a_source_that_has_nothing_costs_computed_tokens(three: list[Server], what: str) -> None:
    *pair, plain = three
    forget(*pair)
    sources: list[Any] = [{"address": "tcp://127.0.0.1:9", "engines": ["gone"]}]
    if what != "dead":
        sources = turn(pair[1], [1, 2, 3] * 20, []).params["kv_sources"]
    if what == "reset":
        turn(pair[1], TURNS[0], [])
        forget(pair[1])
    answer = turn(pair[0], TURNS[0], sources, max_tokens=1)
    assert answer.tokens == ask(plain.url, TURNS[0], max_tokens=1).tokens
    for server in pair:
        server.wait_empty()


def test_evicted_blocks_make_the_answer_shorter(three: list[Server]) -> None:
    *pair, plain = three
    forget(*pair)
    sources = turn(pair[1], TURNS[0], []).params["kv_sources"]
    for number in range(9):  # 512 blocks hold 16,384 tokens
        ask(pair[1].url, [(number + at * at) % 256 for at in range(1900)], max_tokens=1)
    answer = turn(pair[0], TURNS[0], sources)
    assert answer.tokens == ask(plain.url, TURNS[0]).tokens
    for server in pair:
        server.wait_empty()


def test_another_model_lends_nothing(servers: Any, model: Callable[..., Path], three: list[Server]) -> None:
    pair, plain = three[:2], three[2]
    (other,) = servers.get(equal(model("llama", 1), 3))
    pair = servers.get(*(server.settings for server in pair))
    forget(pair[0], other)
    sources = turn(other, TURNS[0], []).params["kv_sources"]
    before = pair[0].metrics().get(FOUND, 0)
    answer = turn(pair[0], TURNS[0], sources)
    assert pair[0].metrics().get(FOUND, 0) == before
    assert answer.tokens == ask(plain.url, TURNS[0]).tokens
    assert json.dumps(answer.params)
    other.wait_empty()


def test_an_idle_server_that_may_lend_takes_no_time(three: list[Server]) -> None:
    *pair, plain = three
    talk(pair, plain, TURNS[:2], [])
    for server in pair:
        server.wait_empty()

    def seconds(server: Server) -> float:
        root = psutil.Process(server.process.pid)
        return sum(sum(one.cpu_times()[:2]) for one in [root, *root.children(recursive=True)])

    time.sleep(2)
    before, length = [seconds(server) for server in three], 20.0
    time.sleep(length)
    shares = [(seconds(server) - start) / length for server, start in zip(three, before, strict=True)]
    assert max(shares[:2]) <= shares[2] + 0.005, shares


def test_prefill_finds_what_decode_has_computed(servers: Any, model: Callable[..., Path], folder: Path) -> None:
    """It is the last test, because it may end servers of the other tests."""
    extra = {"kv_lease_duration": LEASE, "ask_timeout": 2.0}
    prefill, decode, plain = servers.get(
        Settings(model("llama"), role="kv_producer", extra=json.dumps(extra)),
        Settings(model("llama"), role="kv_consumer", extra=json.dumps(extra | {"lend": 0.25})),
        Settings(model("llama"), connector=""),
    )
    proxy = Proxy(prefill, decode, folder)
    try:
        answer = ask(proxy.url, TURNS[0], max_tokens=64, kv_transfer_params={"kv_sources": []})
        prompt = [*TURNS[0], *answer.tokens, *TURNS[1]]
        answer = ask(proxy.url, prompt, kv_transfer_params=answer.params)
    finally:
        proxy.stop()
    assert answer.tokens == ask(plain.url, prompt).tokens
    # decode has computed 363 tokens, without the answer's last one, and prefill lacks the blocks after its first 300
    assert prefill.metrics()[FOUND] == (363 // 32 - 300 // 32) * 32
    for server in (prefill, decode):
        server.wait_empty()
