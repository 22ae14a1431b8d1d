"""Features of vLLM beside a hand-over: the answers are those of a plain server with the same feature."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_serve.client import PROMPTS, TOKENS, Answer, ask, ask_all
from tests.vllm_serve.proxy import FOR_A_READER
from tests.vllm_serve.server import Pair, Server, Settings

Model = Callable[..., Path]
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2})
LOADED = "vllm:prompt_tokens_by_source_total external_kv_transfer"
REPEATS = [number % 7 for number in range(300)]


def handed_over(pair: Pair, prompt: list[int], **more: Any) -> Answer:
    """Runs a request with all of its options on both servers."""
    first = ask(pair.prefill.url, prompt, **{**more, "max_tokens": 1, "kv_transfer_params": FOR_A_READER})
    assert first.status == 200, first
    return ask(pair.decode.url, prompt, kv_transfer_params=first.params, **more)


def compare(pair: Pair, plain: Server, prompt: list[int], **more: Any) -> tuple[Any, Any]:
    """Returns the first choice from the pair and from the plain server. The pair has loaded the prompt."""
    before = pair.decode.metrics().get(LOADED, 0)
    found, wanted = handed_over(pair, prompt, **more), ask(plain.url, prompt, **more)
    assert (found.status, wanted.status) == (200, 200), (found, wanted)
    assert pair.decode.metrics()[LOADED] - before == len(prompt)
    for server in pair.both:
        server.wait_empty()
        server.forget()
    return found.body["choices"][0], wanted.body["choices"][0]


@pytest.mark.long
def test_drafts_by_ngram_structured_output_and_logprobs(servers: Any, model: Model) -> None:
    settings = Settings(model("llama"), number=20)
    drafts = replace(settings, number=21, more=("--speculative-config", NGRAM))
    prefill, decode, plain = servers.get(settings, drafts, replace(settings, connector=""))
    pair = Pair(prefill, decode)
    for prompt in (REPEATS, *PROMPTS[7:11]):
        found, wanted = compare(pair, plain, prompt, max_tokens=60)
        assert found["token_ids"] == wanted["token_ids"]
    assert decode.metrics()["vllm:spec_decode_num_accepted_tokens_total"] > 0, "drafts were accepted"
    choices = {"choice": ["t5", "t9"]}
    found, wanted = compare(pair, plain, PROMPTS[8], structured_outputs=choices, ignore_eos=False)
    assert found["text"] == wanted["text"]
    assert found["text"].strip() in choices["choice"]
    found, wanted = compare(pair, plain, PROMPTS[9], logprobs=3)
    assert found["token_ids"] == wanted["token_ids"]
    for one, other in zip(found["logprobs"]["top_logprobs"], wanted["logprobs"]["top_logprobs"], strict=True):
        assert list(one) == list(other)
        assert max(abs(one[name] - other[name]) for name in one) < 1e-3
    found, wanted = compare(pair, plain, PROMPTS[9], cache_salt="a")
    assert found["token_ids"] == wanted["token_ids"]


@pytest.mark.long
def test_fp8_pages_and_a_decode_of_two_data_parallel_engines(servers: Any, model: Model) -> None:
    fp8 = ("--kv-cache-dtype", "fp8")
    settings = Settings(model("llama"), number=22, more=fp8)
    two = replace(settings, number=23, more=(*fp8, "--data-parallel-size", "2"))
    prefill, decode, plain = servers.get(settings, two, replace(settings, connector=""))
    pair = Pair(prefill, decode)
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 30]
    wanted = [ask(plain.url, prompt).tokens for prompt in prompts]
    params = [pair.prefilled(prompt) for prompt in prompts]
    found = [ask(decode.url, prompt, kv_transfer_params=one) for prompt, one in zip(prompts, params, strict=True)]
    assert [answer.tokens for answer in found] == wanted
    assert decode.metrics()[LOADED] > 0.8 * sum(map(len, prompts))
    assert all(len(answer.tokens) == TOKENS for answer in ask_all(decode.url, prompts, 8))
    for server in pair.both:
        server.wait_empty()
