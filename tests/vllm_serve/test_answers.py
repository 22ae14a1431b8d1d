"""The benchmark that counts right and wrong answers sees each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_answers import BATCH, Rig, burst, by_result, prompts_of, used_again
from tests.vllm_serve.client import ask
from tests.vllm_serve.server import Settings

Model = Callable[..., Path]


@pytest.mark.long
def test_right_wrong_and_failed_answers_are_told_apart(servers: Any, model: Model) -> None:
    target = model("llama")
    pair = servers.get(Settings(target, number=30), Settings(target, number=31))
    (plain,) = servers.get(Settings(target, connector="", prefix_cache=False))
    prompts = prompts_of(6 * BATCH)
    rig = Rig(pair, prompts, [ask(plain.url, prompt).tokens for prompt in prompts], random.Random(1))
    burst(rig, count=BATCH)
    assert by_result(rig.counts) == {"right": BATCH, "wrong": 0, "failed": 0}
    used_again(rig, "reused")
    assert rig.counts["reused", "failed"] == BATCH
    rig.counts.clear()
    rig.wanted = [[*tokens[:-1], 7] for tokens in rig.wanted]
    burst(rig, count=BATCH)
    assert by_result(rig.counts) == {"right": 0, "wrong": BATCH, "failed": 0}
