"""A server is killed while the other server waits for it, and is then restarted. In one case the restarted source
serves another model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_serve.client import PROMPTS, ask, hang_up, stream
from tests.vllm_serve.server import LEASE, Pair, Server, Settings

AT = next(at for at, prompt in enumerate(PROMPTS) if len(prompt) == 257)
PROMPT = PROMPTS[AT]
Model = Callable[..., Path]
Expected = Callable[[Path], list[list[int]]]


def pair_of(servers: Any, target: Path) -> Pair:
    return servers.pair(Settings(target), Settings(target, block_size=64))


def restarted(server: Server) -> None:
    """Restarts a server at the same address, as a supervisor would."""
    server.start()
    server.wait()


def check_works(pair: Pair, tokens: list[int]) -> None:
    assert pair.ask(PROMPT).tokens == tokens
    for server in pair.both:
        server.wait_empty()


def test_prefill_dies_and_comes_back(servers: Any, model: Model, expected: Expected) -> None:
    target = model("llama")
    pair, tokens = pair_of(servers, target), expected(target)[AT]
    pair.forget()
    check_works(pair, tokens)
    pair.forget()
    params = pair.prefilled(PROMPT)
    pair.prefill.kill()
    start = time.monotonic()
    assert ask(pair.decode.url, PROMPT, kv_transfer_params=params).status == 500
    assert time.monotonic() - start < 15, "the failure must be known at once, or after the time limit of a handshake"
    assert ask(pair.decode.url, PROMPT).tokens == tokens, "decode goes on"
    pair.decode.wait_empty()
    restarted(pair.prefill)
    pair.decode.forget()
    assert ask(pair.decode.url, PROMPT, kv_transfer_params=params).status == 500, (
        "the lease is from before the restart, so the request must fail"
    )
    check_works(pair, tokens)


@pytest.mark.parametrize("phase", ["loading", pytest.param("decoding", marks=pytest.mark.long)])
def test_decode_dies_and_comes_back(servers: Any, model: Model, expected: Expected, phase: str) -> None:
    target = model("llama")
    pair, tokens = pair_of(servers, target), expected(target)[AT]
    check_works(pair, tokens)
    pair.forget()
    params = pair.prefilled(PROMPT)
    if phase == "loading":
        hang_up(pair.decode.url, PROMPT, 0.01, kv_transfer_params=params)
    else:
        next(stream(pair.decode.url, PROMPT, kv_transfer_params=params, max_tokens=1000))
    pair.decode.kill()
    start = time.monotonic()
    while ask(pair.prefill.url, PROMPTS[0], max_tokens=1).status == 200 and pair.prefill.usage:
        assert time.monotonic() - start < 3 * LEASE, "its blocks are given back when the lease is over"
        time.sleep(0.5)
    restarted(pair.decode)
    check_works(pair, tokens)


@pytest.mark.long
def test_a_source_of_another_model(servers: Any, model: Model, expected: Expected) -> None:
    """The weights of the two models differ, but their shapes are equal. The error says that the model names differ."""
    target, another = model("llama"), model("llama", 1)
    stranger, fails, recomputes = servers.get(
        Settings(another),
        Settings(target, block_size=64),
        replace(Settings(target), number=1, policy="recompute"),
    )
    tokens = expected(target)[AT]
    for decode in (fails, recomputes):
        decode.wait_empty()
        decode.forget()
        answer = ask(decode.url, PROMPT, kv_transfer_params=Pair(stranger, decode).prefilled(PROMPT))
        assert answer.status == (500 if decode is fails else 200)
        assert answer.tokens == ([] if decode is fails else tokens)
        assert f"model: {target}" in decode.text or str(another) in decode.text
        assert ask(decode.url, PROMPT).tokens == tokens, "by itself"
        decode.wait_empty()
    stranger.wait_empty()


@pytest.mark.long
def test_two_copies_of_a_model_under_one_name(servers: Any, model: Model, expected: Expected) -> None:
    """vLLM names a model by its folder. An operator with two copies of a model must therefore give both copies the same
    name.
    """
    target, copy = model("llama"), model("llama", 0).parent / "copy of llama"
    if not copy.exists():
        copy.symlink_to(target)
    extra = '{"kv_lease_duration": 20, "model_id": "llama"}'
    check_works(servers.pair(Settings(target, extra=extra), Settings(copy, extra=extra)), expected(target)[AT])
