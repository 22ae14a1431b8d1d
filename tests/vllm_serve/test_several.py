"""Several samples of a prompt (`n`), and several prompts in one request.

vLLM makes several requests of such a request, but its answer has the `kv_transfer_params` of only one of them. The
servers are real. The lease lasts ten minutes, so no block is freed because it has expired.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_serve.client import PROMPTS, Answer, ask
from tests.vllm_serve.proxy import FOR_A_READER
from tests.vllm_serve.server import Pair, Settings
from tests.vllm_serve.test_requests import loaded

EXTRA = json.dumps({"kv_lease_duration": 600.0})


def all_tokens(answer: Answer) -> list[list[int]]:
    """Returns the tokens of each choice. The result is empty if the request failed."""
    return [choice["token_ids"] for choice in answer.body["choices"]] if answer.status == 200 else []


@pytest.fixture
def pair(servers: Any, model: Callable[..., Path]) -> Pair:
    """On this decode server, a request that cannot be loaded fails.

    A prompt of a single client takes one step. On a CPU, the engine of vLLM 0.32 ends if a prompt whose sampling has a
    seed takes several steps, because vLLM then turns back a generator that cannot be turned back.
    """
    settings = Settings(model("llama"), extra=EXTRA, number=9, chunk=8192)
    return servers.pair(settings, replace(settings, number=10))


def handed_over(pair: Pair, prompt: Any, **more: Any) -> Answer:
    """Runs a request as a proxy does: first at prefill, and then at decode with the params of prefill's answer."""
    first = ask(pair.prefill.url, prompt, **{**more, "max_tokens": 1, "kv_transfer_params": FOR_A_READER})
    assert first.status == 200, first
    return ask(pair.decode.url, prompt, kv_transfer_params=first.params, **more)


def new_prompt(numbers: random.Random, length: int = 300) -> list[int]:
    return [numbers.randrange(256) for _ in range(length)]


def test_every_sample_of_a_prompt_has_the_tokens_of_plain_vllm(pair: Pair) -> None:
    """Decode loads the prompt once. The other samples find it in decode's prefix cache."""
    numbers = random.Random("samples")
    asked = [{"n": n, "seed": 7, "temperature": 1.0} for n in (2, 4, 4, 8)]
    for more in asked:
        prompt, answers = new_prompt(numbers), list[Answer]()
        computed, moved = loaded(pair.decode, lambda: answers.append(handed_over(pair, prompt, **more)))  # noqa: B023
        assert (answers[0].status, moved) == (200, len(prompt)), answers[0]
        assert computed <= more["n"] * pair.decode.settings.block_size
        pair.forget()
        assert all_tokens(answers[0]) == all_tokens(ask(pair.decode.url, prompt, **more))
        assert len({tuple(tokens) for tokens in all_tokens(answers[0])}) > 1, "the samples differ"
        pair.forget()


def test_several_prompts_in_one_request_are_all_answered(pair: Pair) -> None:
    """The answer of prefill names the first prompt. Decode computes the others."""
    for first, second in ((8, 9), (7, 10), (5, 6)):
        prompts, answers = [PROMPTS[first], PROMPTS[second]], list[Answer]()
        _, moved = loaded(pair.decode, lambda: answers.append(handed_over(pair, prompts)))  # noqa: B023
        assert (answers[0].status, moved) == (200, len(prompts[0])), answers[0]
        pair.forget()
        assert all_tokens(answers[0]) == all_tokens(ask(pair.decode.url, prompts))
        pair.forget()
    answer = handed_over(pair, [PROMPTS[8], PROMPTS[9]], n=3, seed=5, temperature=1.0)
    assert len(all_tokens(answer)) == 6, answer
    pair.forget()


def test_samples_and_prompts_of_many_clients_at_once(pair: Pair) -> None:
    numbers = random.Random("many")
    asked: list[tuple[Sequence[Any], dict[str, Any]]] = [
        (new_prompt(numbers, numbers.randrange(20, 600)), {"n": numbers.randrange(1, 6), "temperature": 1.0})
        for _ in range(24)
    ]
    asked += [([new_prompt(numbers), new_prompt(numbers, 50)], {}) for _ in range(8)]
    numbers.shuffle(asked)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: handed_over(pair, one[0], **one[1]), asked))
    assert [answer.status for answer in answers] == [200] * len(asked)
    pair.forget()


def test_what_prefills_answer_does_not_name_is_freed_at_once(pair: Pair) -> None:
    numbers, held = random.Random("freed"), 0.0
    for prompt, more in (
        (new_prompt(numbers), {"n": 4, "seed": 1, "temperature": 1.0}),
        ([new_prompt(numbers), new_prompt(numbers)], {}),
    ):
        first = ask(pair.prefill.url, prompt, **{**more, "max_tokens": 1, "kv_transfer_params": FOR_A_READER})
        assert ask(pair.prefill.url, PROMPTS[0], max_tokens=1).status == 200
        blocks = pair.prefill.usage * (16_384 // pair.prefill.settings.block_size)
        assert 0 < blocks <= 11, "one copy of the prompt is held"
        held += blocks
        assert ask(pair.decode.url, prompt, kv_transfer_params=first.params, **more).status == 200
        pair.forget()
    assert held > 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_malformed_request_counts_and_is_logged_once(pair: Pair, n: int) -> None:
    """If such a request fails, vLLM also tells its connector that it was rejected, under another id."""
    prompt = new_prompt(random.Random(f"malformed {n}"))
    before, read = pair.decode.metrics(), len(pair.decode.text)
    params = pair.prefilled(prompt) | {"remote_num_tokens": 0}
    answer = ask(pair.decode.url, prompt, kv_transfer_params=params, n=n, seed=1, temperature=1.0)
    assert answer.status == 500
    for _ in range(3):
        ask(pair.decode.url, PROMPTS[0], max_tokens=1)
    pair.prefill.wait_empty()
    after = pair.decode.metrics()
    for name in ("vllm:pagewire_failed_pulls_total", "vllm:pagewire_malformed_params_total"):
        assert after[name] - before.get(name, 0) == 1, name
    told = [line for line in pair.decode.text[read:].splitlines() if "remote_num_tokens" in line]
    assert len(told) == 1, told
