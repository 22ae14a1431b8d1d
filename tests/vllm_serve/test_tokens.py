"""Prefill runs on one server, and decode runs on another server. For every model and every pair of shapes, the tokens
equal the tokens of plain vLLM.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_serve.client import PROMPTS, Answer, ask, ask_all
from tests.vllm_serve.server import THEIRS, Pair, Proxy, Settings

Model = Callable[..., Path]
Expected = Callable[[Path], list[list[int]]]
LONGEST = max(range(len(PROMPTS)), key=lambda at: len(PROMPTS[at]))

_SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # With the policy "recompute", the counters show that nothing was recomputed.
    "32 to 32": ({}, {"number": 1, "policy": "recompute"}),
    "32 to 64": ({}, {"block_size": 64}),
    "64 to 32": ({"block_size": 64}, {}),
    "64 to 96": ({"block_size": 64}, {"block_size": 96}),
    "chunks": ({"chunk": 96}, {"chunk": 96, "number": 1}),
    "TP 1 to 2": ({}, {"tp": 2}),
    "TP 2 to 1": ({"tp": 2}, {}),
    "TP 1 to 2, 32 to 64": ({}, {"tp": 2, "block_size": 64}),
}
_DEPENDS_ON_ITS_BATCH = {"deepseek"}
"""Models whose tokens from plain vLLM 0.32 on a CPU depend on the batch, and on whether the last token is computed
after the others, as at decode. They are compared with vLLM's own connector instead."""
_WITHOUT_PREFIX_CACHE = {"granite"}
"""Models that run without a prefix cache. With one, plain vLLM 0.32 on a CPU ends in its Mamba 2 layer if a prompt has
more than a chunk."""
_OFTEN = ("32 to 32", "32 to 64", "64 to 32")


def _cells() -> list[Any]:
    """Returns the pairs that always run, and the pairs that only the nightly run starts, because a start takes long."""
    found = [pytest.param("llama", shape, marks=[] if shape in _OFTEN else pytest.mark.long) for shape in _SHAPES]
    found += [pytest.param("gemma3", shape, marks=[] if shape == "32 to 64" else pytest.mark.long) for shape in _OFTEN]
    for name in ("qwen3", "mistral", "granite"):
        found += [pytest.param(name, shape, marks=pytest.mark.long) for shape in _OFTEN]
    found += [pytest.param("granite", shape, marks=pytest.mark.long) for shape in ("TP 1 to 2", "TP 2 to 1")]
    # With deepseek's connector these shapes take minutes.
    found.append(pytest.param("deepseek", "32 to 32", marks=pytest.mark.long))
    return found


def _of_their_connector(servers: Any, decode: Settings) -> list[list[int]]:
    theirs = replace(decode, connector=json.dumps(THEIRS), extra="", policy="")
    pair: Pair = servers.pair(replace(theirs, number=theirs.number + 1), theirs)
    return [pair.ask(prompt).tokens for prompt in PROMPTS]


def differences(answers: list[Answer], expected: list[list[int]]) -> list[str]:
    return [
        f"prompt {at} of {len(PROMPTS[at])} tokens: {answer.status} {answer.tokens or answer.body}, not {tokens}"
        for at, (answer, tokens) in enumerate(zip(answers, expected, strict=True))
        if answer.tokens != tokens
    ]


@pytest.mark.parametrize(("name", "shape"), _cells())
def test_tokens_are_those_of_plain_vllm(
    servers: Any, model: Model, expected: Expected, folder: Path, name: str, shape: str
) -> None:
    target = model(name)
    settings = Settings(target, prefix_cache=name not in _WITHOUT_PREFIX_CACHE)
    prefill, decode = (replace(settings, **changes) for changes in _SHAPES[shape])
    tokens = _of_their_connector(servers, decode) if name in _DEPENDS_ON_ITS_BATCH else expected(target)
    pair: Pair = servers.pair(prefill, decode)
    pair.forget()
    # Tests that cause refusals share this pair, so only the new lines of the log count.
    logged = [len(server.text) for server in pair.both]
    before = pair.decode.metrics()
    alone = [pair.ask(prompt) for prompt in PROMPTS]
    assert not differences(alone, tokens)
    assert_transferred(before, pair.decode.metrics())
    pair.forget()
    proxy = Proxy(*pair.both, folder)
    try:
        together = ask_all(proxy.url, PROMPTS, 16)
    finally:
        proxy.stop()
    if name in _DEPENDS_ON_ITS_BATCH:
        assert all(answer.status == 200 for answer in together)
    else:
        assert not differences(together, tokens)
    for server, start in zip(pair.both, logged, strict=True):
        server.wait_empty()
        assert "Traceback" not in server.text[start:]


def assert_transferred(before: dict[str, float], after: dict[str, float]) -> None:
    """Checks with vLLM's own counters that decode has computed almost none of the prompts' tokens."""
    computed, loaded = (
        after[name] - before.get(name, 0)
        for name in (
            "vllm:prompt_tokens_by_source_total local_compute",
            "vllm:prompt_tokens_by_source_total external_kv_transfer",
        )
    )
    assert loaded > 0.8 * sum(map(len, PROMPTS))
    assert computed <= 2 * len(PROMPTS), "decode may compute one token of each prompt, or two with a window or a state"


@pytest.mark.parametrize("name", ["gemma3", pytest.param("mistral", marks=pytest.mark.long)])
def test_loaded_blocks_serve_as_a_prefix_for_others_only_if_they_are_complete(
    servers: Any, model: Model, name: str
) -> None:
    """Prefill frees the blocks that lie before a window.

    A block of decode may be larger, so the window's first block may lack some tokens at decode. The last prompts begin
    with 256 tokens that decode has. Among decode's blocks of these tokens, the window's first block is the block of
    tokens 192 to 255.
    """
    settings = Settings(model(name))
    pair: Pair = servers.pair(*(replace(settings, **changes) for changes in _SHAPES["32 to 64"]))
    pair.forget()
    numbers, wrong = random.Random(3), list[str]()
    for at in range(3):
        shared = [numbers.randrange(256) for _ in range(256)]
        pair.ask([*shared, *(numbers.randrange(256) for _ in range(48))])
        prompt = [*shared, numbers.randrange(256)]
        tokens = ask(pair.decode.url, prompt).tokens
        plain = ask(pair.prefill.url, prompt, cache_salt=f"nobody else's {at}").tokens
        wrong += [f"{at}: {tokens}, not {plain}"] if tokens != plain or not plain else []
    assert not wrong
