"""Thousands of valid requests, sixteen at a time. None of them fails because of timing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_serve.client import PROMPTS, ask
from tests.vllm_serve.server import Pair, Proxy, Settings

AT_ONCE = 16


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Runs processes that only use processor time."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    ("requests", "spinning"), [(10_000, 0), (2_000, os.cpu_count() or 1)], ids=["quiet", "kept busy"]
)
def test_no_request_fails_for_its_timing(
    servers: Any,
    model: Callable[..., Path],
    expected: Callable[[Path], list[list[int]]],
    folder: Path,
    requests: int,
    spinning: int,
) -> None:
    """Each request has its own salt, so that prefill computes it and decode pulls it."""
    target = model("llama")
    tokens = expected(target)
    settings = Settings(target, extra="")  # the leases have the default duration
    # On this decode server, a request that cannot be loaded fails.
    pair: Pair = servers.pair(settings, replace(settings, number=1))
    assert [pair.ask(prompt).tokens for prompt in PROMPTS] == tokens
    before = pair.decode.metrics()
    proxy = Proxy(*pair.both, folder)

    def one(number: int) -> str:
        at = number * 7 % len(PROMPTS)
        answer = ask(proxy.url, PROMPTS[at], timeout=600, cache_salt=f"{spinning} {number}")
        return "" if answer.tokens == tokens[at] else f"request {number}, prompt {at}: {answer}"

    try:
        with busy(spinning), ThreadPoolExecutor(AT_ONCE) as pool:
            wrong = [text for text in pool.map(one, range(requests)) if text]
    finally:
        proxy.stop()
    assert not wrong, f"{len(wrong)} of {requests}: {wrong[:5]}"
    for server in pair.both:
        server.wait_empty()
    name = "vllm:prompt_tokens_by_source_total external_kv_transfer"
    assert pair.decode.metrics()[name] - before.get(name, 0) > 0.8 * requests * sum(map(len, PROMPTS)) / len(PROMPTS)
