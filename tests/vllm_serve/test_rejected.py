"""If decode's API answers 400 or the client gives up, prefill's blocks are freed at once.

The servers are real. The lease lasts ten minutes, so no block is freed because it has expired. A rejected request whose
blocks are not freed would hold half of the pool.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_serve.client import ask, hang_up
from tests.vllm_serve.server import Pair, Settings

BLOCKS, SIZE = 100, 32
LENGTH = 1400
"""The number of tokens of a prompt. Two such prompts fill 88 of the 99 blocks."""


@pytest.fixture
def pair(servers: Any, model: Callable[..., Path]) -> Pair:
    settings = Settings(
        model("llama"), block_size=SIZE, blocks=BLOCKS, extra=json.dumps({"kv_lease_duration": 600.0}), number=9
    )
    return servers.pair(settings, replace(settings, number=10))


@pytest.fixture
def prompt() -> Callable[[], list[int]]:
    """Returns `prompt()`, which makes a new prompt each time. None of its blocks is cached."""
    numbers = random.Random(5)
    return lambda: [numbers.randrange(256) for _ in range(LENGTH)]


REJECTED: dict[str, tuple[int, Callable[[list[int]], dict[str, Any]]]] = {
    "max_tokens too large": (400, lambda prompt: {"prompt": prompt, "max_tokens": 10**6}),
    "max_tokens negative": (400, lambda prompt: {"prompt": prompt, "max_tokens": -1}),
    "context too long": (400, lambda prompt: {"prompt": prompt * 2}),
    "a token that is none": (400, lambda prompt: {"prompt": [*prompt, 10**6]}),
    "no token": (400, lambda _: {"prompt": []}),
    "logprobs too many": (400, lambda prompt: {"prompt": prompt, "logprobs": 5000}),
    "a grammar that is none": (400, lambda prompt: {"prompt": prompt, "structured_outputs": {"grammar": "((("}}),
    "another model": (404, lambda prompt: {"prompt": prompt, "model": "another"}),
    "another prompt": (500, lambda prompt: {"prompt": prompt[::-1]}),
}


@pytest.mark.parametrize(("status", "body"), REJECTED.values(), ids=REJECTED)
def test_two_rejected_requests_leave_the_pool_to_an_honest_one(
    pair: Pair, prompt: Callable[[], list[int]], status: int, body: Callable[[list[int]], dict[str, Any]]
) -> None:
    for _ in range(2):
        theirs = prompt()
        params = pair.prefilled(theirs)
        assert ask(pair.decode.url, kv_transfer_params=params, **body(theirs)).status == status
    assert pair.ask(prompt()).status == 200
    pair.prefill.wait_empty()


@pytest.mark.parametrize("after", [0.0, 0.01, 0.05, 0.2])
def test_two_clients_that_hang_up_leave_the_pool_to_an_honest_one(
    pair: Pair, prompt: Callable[[], list[int]], after: float
) -> None:
    for _ in range(2):
        theirs = prompt()
        hang_up(pair.decode.url, theirs, after, kv_transfer_params=pair.prefilled(theirs), max_tokens=400)
    assert pair.ask(prompt()).status == 200
    pair.prefill.wait_empty()
