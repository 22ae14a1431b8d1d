"""A real model over three tiers. The tokens are the model's own, whichever tiers the pages have passed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvcache import PagedKVCacheManager
from scheduler_adapters.hf.runner import HFRunner, kv_params_of, num_layers_of
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.loop import ServingLoop
from tests.scheduler_adapters.serving import assert_nothing_held, own_tokens, requests_of, serve, tokens_of

HEAD = "A page that has left the device comes back from the host, or from a file. "
PROMPTS = [ByteTokenizer().encode(text) for number in range(5) for text in [f"{number}: {HEAD * (1 + number % 2)}"]]
NEW, SIZE = 8, 8
HOST = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 0.02}


@pytest.fixture(scope="module")
def expected(make_model: Any) -> tuple[Any, list[list[int]]]:
    model = make_model("llama")
    return model, [own_tokens(model, prompt, NEW) for prompt in PROMPTS]


def pages_for_one() -> int:
    return -(-(max(map(len, PROMPTS)) + NEW) // SIZE)


def loop_with(model: Any, pages: int, tiers: dict[str, Any], **split: int) -> ServingLoop:
    params = dataclasses.replace(kv_params_of(model.config, page_size=SIZE, **split), **tiers)
    layers = num_layers_of(model.config)
    memory = pages * SIZE * params.bytes_per_token(layers) * params.data_parallel_degree
    manager = PagedKVCacheManager(
        params, 8, 4096, layers, ["cpu"] * params.n_devices, available_cache_memory=memory, enable_runtime_checks=True
    )
    return ServingLoop(manager, HFRunner(model), token_budget=64)


@pytest.mark.parametrize("split", [{}, {"n_devices": 2}, {"n_devices": 4, "data_parallel_degree": 2}])
def test_evicted_prompts_are_restored(expected: tuple[Any, list[list[int]]], split: dict[str, int]) -> None:
    model, tokens = expected
    loop = loop_with(model, pages_for_one() + 2, HOST, **split)
    for _ in range(3):
        requests = requests_of(PROMPTS, NEW)
        assert tokens_of(serve(loop, requests)) == tokens
    assert loop.manager.metrics.h2d_blocks_copied > 40
    loop.manager.check()
    assert_nothing_held(loop.manager)


def test_a_restarted_process_continues_from_files(expected: tuple[Any, list[list[int]]], tmp_path: Path) -> None:
    model, tokens = expected
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-2, "file_tier_key": "tiny llama, seed 7"}
    for start in range(3):
        loop = loop_with(model, 2 * pages_for_one(), HOST | files)
        assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == tokens
        loop.manager.check()
        loop.manager.close()
        metrics = loop.manager.metrics
        full = sum((len(prompt) - 1) // SIZE for prompt in PROMPTS)
        assert (metrics.file_blocks_read > 0.9 * full) == (start > 0)
        assert metrics.file_blocks_refused == 0
