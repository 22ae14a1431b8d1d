"""One pair of servers, with blocks of 32 and of 64 tokens: streams, cached prefixes, clients that disconnect, and
params that differ from prefill's. After each test no block is held, and the next answer is right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm_serve.client import PROMPTS, TOKENS, Answer, ask, hang_up, stream
from tests.vllm_serve.proxy import FOR_A_READER
from tests.vllm_serve.server import LEASE, Pair, Proxy, Settings

LONG = next(at for at, prompt in enumerate(PROMPTS) if len(prompt) == 1500)
MEDIUM = next(at for at, prompt in enumerate(PROMPTS) if len(prompt) == 257)
SMALL = next(at for at, prompt in enumerate(PROMPTS) if len(prompt) == 100)
LATER = next(at for at, prompt in enumerate(PROMPTS) if len(prompt) == 512)


class Engines(NamedTuple):
    """Running servers, and the expected answers."""

    pair: Pair  # On this decode server, a request that cannot be loaded fails.
    # The same prefill server with another decode server. This decode server computes a request that cannot be loaded.
    other: Pair
    proxy: Proxy
    expected: list[list[int]]


@pytest.fixture
def engines(servers: Any, model: Callable[..., Path], expected: Callable[[Path], list[list[int]]]) -> Engines:
    target = model("llama")
    tokens, settings = expected(target), Settings(target)
    prefill, fails, recomputes = servers.get(
        settings, replace(settings, block_size=64), replace(settings, number=1, policy="recompute")
    )
    pair = Pair(prefill, fails)
    return Engines(pair, Pair(prefill, recomputes), servers.proxy(pair), tokens)


@pytest.fixture(autouse=True)
def _well_afterwards(engines: Engines) -> Iterator[None]:
    for pair in (engines.pair, engines.other):
        pair.forget()
    yield
    for pair in (engines.pair, engines.other):
        assert pair.ask(PROMPTS[MEDIUM]).tokens == engines.expected[MEDIUM]
        for server in pair.both:
            server.wait_empty()
            assert server.alive


def loaded(server: Any, run: Callable[[], object]) -> tuple[float, float]:
    """Returns how many prompt tokens the server has computed and how many it has loaded during a call. The server
    itself counts them.
    """
    names = [f"vllm:prompt_tokens_by_source_total {name}" for name in ("local_compute", "external_kv_transfer")]
    before = server.metrics()
    run()
    after = server.metrics()
    computed, moved = (after[name] - before.get(name, 0) for name in names)
    return computed, moved


def wait_counted(server: Any, name: str, wanted: float) -> dict[str, float]:
    """Waits until a counter of the server has this value. Workers report to the server only in a later step."""
    for _ in range(50):
        found: dict[str, float] = server.metrics()
        if found.get(name, 0) >= wanted:
            break
        ask(server.url, PROMPTS[0], max_tokens=1)
    assert found.get(name, 0) == wanted
    return found


def test_a_stream_has_the_same_tokens_part_by_part(engines: Engines) -> None:
    """vLLM decides how many parts a stream has: on a busy machine it sends several tokens together."""
    for at in (MEDIUM, LONG):
        parts = list(stream(engines.proxy.url, PROMPTS[at]))
        assert [token for part in parts for token in part] == engines.expected[at]


def test_a_prefix_that_is_here_is_not_loaded(engines: Engines) -> None:
    pair, (short, long) = engines.pair, (len(PROMPTS) - 2, len(PROMPTS) - 1)  # The prompts share 256 and 300 tokens.

    def run(at: int) -> None:
        assert pair.ask(PROMPTS[at]).tokens == engines.expected[at]

    # vLLM counts the last token of a prompt as loaded, although it computes it again
    assert loaded(pair.decode, lambda: run(short)) == (0, len(PROMPTS[short]))
    computed, moved = loaded(pair.prefill, lambda: run(long))
    assert (computed, moved) == (len(PROMPTS[long]) - 256, 0), "prefill has 256 tokens cached"
    pair.decode.wait_empty()
    pair.prefill.forget()
    computed, moved = loaded(pair.decode, lambda: run(long))
    assert computed + moved <= 64, "decode has all but what its last block lacks"
    pair.forget()
    run(short)
    pair.prefill.wait_empty()
    pair.prefill.forget()
    computed, moved = loaded(pair.decode, lambda: run(long))
    assert (computed, moved) == (0, len(PROMPTS[long]) - 256), "decode has 256 tokens cached, prefill nothing"


def test_boards_for_vllms_own_connector_show_what_ours_has_moved(engines: Engines) -> None:
    pair = engines.pair
    before = pair.decode.metrics()
    for _ in range(3):
        assert pair.ask(PROMPTS[LONG]).tokens == engines.expected[LONG]
        pair.forget()
    pulls = f"vllm:{next(iter(AS_THEIRS))}_count"
    after = wait_counted(pair.decode, pulls, before.get(pulls, 0) + 3)
    for theirs, ours in AS_THEIRS.items():
        count, total = (f"vllm:{theirs}_{of}" for of in ("count", "sum"))
        assert after[count] - before.get(count, 0) == 3
        assert after[total] > before.get(total, 0)
        assert after[total] == after[f"vllm:pagewire_{ours}_sum"]
    assert after["vllm:nixl_num_failed_transfers_total"] == after["vllm:pagewire_failed_pulls_total"]


AS_THEIRS = {
    "nixl_xfer_time_seconds": "pull_seconds",
    "nixl_post_time_seconds": "post_seconds",
    "nixl_bytes_transferred": "pull_bytes",
    "nixl_num_descriptors": "pull_runs",
}


@pytest.mark.parametrize("after", [0.0, 0.02, 0.1, 0.3])
def test_a_client_disconnects_at_prefill(engines: Engines, after: float) -> None:
    hang_up(engines.pair.prefill.url, PROMPTS[LONG], after, max_tokens=1, kv_transfer_params=FOR_A_READER)
    time.sleep(0.5)
    assert engines.pair.ask(PROMPTS[LONG]).tokens == engines.expected[LONG]


def test_pages_that_no_reader_fetches(engines: Engines) -> None:
    start, expired = time.monotonic(), engines.pair.prefill.metrics()["vllm:nixl_num_kv_expired_reqs_total"]
    params = engines.pair.prefilled(PROMPTS[LONG])
    assert ask(engines.pair.prefill.url, PROMPTS[0], max_tokens=1).status == 200
    assert engines.pair.prefill.usage > 0, "the blocks must be held for a reader"
    while engines.pair.prefill.usage:
        assert time.monotonic() < start + 3 * LEASE
        time.sleep(0.5)
        ask(engines.pair.prefill.url, PROMPTS[0], max_tokens=1)
    wait_counted(engines.pair.prefill, "vllm:nixl_num_kv_expired_reqs_total", expired + 1)
    late = ask(engines.pair.decode.url, PROMPTS[LONG], kv_transfer_params=params)
    assert late.status == 500
    late = ask(engines.other.decode.url, PROMPTS[LONG], kv_transfer_params=params)
    assert late.tokens == engines.expected[LONG]


@pytest.mark.parametrize("after", [0.0, 0.01, 0.03, 0.06, 0.12, 0.3])
def test_a_client_disconnects_at_decode(engines: Engines, after: float) -> None:
    params = engines.pair.prefilled(PROMPTS[LONG])
    hang_up(engines.pair.decode.url, PROMPTS[LONG], after, max_tokens=400, kv_transfer_params=params)
    assert engines.pair.ask(PROMPTS[LONG]).tokens == engines.expected[LONG]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_client_disconnects_during_a_stream(engines: Engines, parts: int) -> None:
    answers = stream(engines.proxy.url, PROMPTS[LATER], max_tokens=1000)
    found = [token for _ in range(parts) for token in next(answers)]
    answers.close()
    assert found[:TOKENS] == engines.expected[LATER][: len(found)], (
        "on a busy machine a part of the stream may have several tokens"
    )


def test_every_second_of_many_clients_disconnects(engines: Engines) -> None:
    """Sixteen clients send requests at once. Every second client disconnects at some time."""
    wanted = [at for at in range(len(PROMPTS)) if at % 2]

    def leave(at: int) -> None:
        hang_up(engines.proxy.url, PROMPTS[at], 0.02 * at, max_tokens=200)

    leaving = [threading.Thread(target=leave, args=(at,)) for at in range(len(PROMPTS)) if at % 2 == 0]
    for thread in leaving:
        thread.start()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda at: ask(engines.proxy.url, PROMPTS[at]), wanted))
    for thread in leaving:
        thread.join()
    assert [answer.tokens for answer in answers] == [engines.expected[at] for at in wanted]


STRANGE: tuple[Any, ...] = (
    None,
    "",
    "x" * 5000,
    -1,
    0,
    1,
    2**31,
    10**30,
    1.5,
    True,
    [],
    [[]],
    [[-1]],
    [[2**40]],
    {},
    {"a": 1},
)
_OF_KINDS: dict[str, tuple[Any, ...]] = {
    "remote_host": ("127.0.0.2", "no.such.host.invalid", "localhost:1/../", "*"),
    "remote_port": (1, 65535),
    "remote_engine_id": ("another",),
    "remote_num_tokens": (31, 32, 33, 64, 99, 101),
    "lease_id": ("0x1", "1"),
}


def hostile(params: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Returns params in which one key was changed, removed or added. Also returns values that are no params at all."""
    for key in params:
        yield f"no {key}", {name: value for name, value in params.items() if name != key}
        for value in (*STRANGE, *_OF_KINDS.get(key, ())):
            yield f"{key}: {value!r:.60}", params | {key: value}
    yield "both ways", params | {"do_remote_decode": True}
    yield "one more", params | {"surprise": [1]}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_params_with_one_changed_key(engines: Engines, policy: str) -> None:
    """The test changes one key of the params at a time, each time with a new lease. The result must be right tokens or
    an error.
    """
    pair = engines.pair if policy == "fail" else engines.other
    prompt, tokens = PROMPTS[SMALL], engines.expected[SMALL]
    names = [name for name, _ in hostile(pair.prefilled(prompt))]

    def try_one(number: int) -> str:
        salt, name = f"{policy} {number}", names[number]  # The salt is new, so the request finds no cached blocks.
        params = dict(hostile(pair.prefilled(prompt, cache_salt=salt)))[name]
        answer = ask(pair.decode.url, prompt, kv_transfer_params=params, cache_salt=salt)
        return "" if _is_fine(answer, tokens) else f"{name}: {answer}"

    with ThreadPoolExecutor(8) as pool:
        wrong = [text for text in pool.map(try_one, range(len(names))) if text]
    assert not wrong, f"{len(wrong)} of {len(names)}: {wrong[:5]}"


def _is_fine(answer: Answer, tokens: list[int]) -> bool:
    return answer.tokens == tokens if answer.status == 200 else 400 <= answer.status <= 500


def test_params_of_another_prompt(engines: Engines) -> None:
    """The params belong to other tokens. The request fails, or decode computes its prompt. No wrong block stays
    cached.
    """
    theirs, prompt = PROMPTS[LATER], PROMPTS[MEDIUM]
    answer = ask(engines.pair.decode.url, prompt, kv_transfer_params=engines.pair.prefilled(theirs))
    assert _is_fine(answer, engines.expected[MEDIUM]), answer
    again = ask(engines.other.decode.url, prompt, kv_transfer_params=engines.other.prefilled(theirs))
    assert again.tokens == engines.expected[MEDIUM]
